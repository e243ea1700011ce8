"""`burnish doctor --count`: calls of torch, counted on a narrow model, are those of the whole one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.models.tiny import tiny_config
from support.nightly import by_day
from support.ranks.processes import run_ranks
from support.runs.training_files import burnish, make_files

from burnish.check.call_counter import CallCounter, count_microbatch, count_token, narrow_model
from burnish.config.schema import EngineConfig
from burnish.distributed.layout import Layout

CPU = torch.device("cpu")
LAYERS = 5


def test_a_call_counts_once_and_a_view_never() -> None:
    left = torch.ones(2, 3, requires_grad=True)
    right = torch.ones(3, 4, requires_grad=True)
    with CallCounter("cpu") as counter:
        torch.mm(left, right).view(-1)[2:].unsqueeze(0).sum().backward()
    assert counter.counts.forward == {"aten::mm": 1, "aten::sum": 1, "aten::ones_like": 1}
    assert counter.counts.backward["aten::mm"] == 2


def test_copies_and_reads_are_of_the_device_alone() -> None:
    with CallCounter("meta") as counter:
        there = torch.ones(4).to("meta")
        there.add_(1)
        torch.ones(4).add_(1)
    counts = counter.counts
    assert (counts.copies, counts.reads) == (1, 0)
    assert counts.forward == {"aten::add_.Tensor": 1}


def counted(layers: int, layout: Layout, *, whole: bool = False) -> tuple[float, ...]:
    engine = EngineConfig(precision="fp32")
    config = tiny_config("qwen3", num_hidden_layers=layers, hidden_size=128, vocab_size=64)
    model = config if whole else narrow_model(config, engine)
    assert model.num_hidden_layers == layers
    counts = count_microbatch(model, engine, lora=None, layout=layout, device=CPU, is_group=True)
    token = count_token(model, engine, CPU)
    return counts.forward.total(), counts.backward.total(), counts.collectives.total(), token.calls


def on_rank(layout: Layout) -> list[tuple[float, ...]]:
    two, three, all_layers = (counted(n, layout) for n in (2, 3, LAYERS))
    return [two, three, all_layers, counted(LAYERS, layout, whole=True)]


@pytest.mark.parametrize("world", by_day((1, 2), (2,)))
def test_a_narrow_model_makes_the_calls_of_the_whole_one(world: int) -> None:
    for two, three, narrow, whole in run_ranks(on_rank, world):
        assert narrow == whole
        linear = [b + (LAYERS - 3) * (b - a) for a, b in zip(two, three, strict=True)]
        assert list(narrow) == linear
        assert min(narrow[:2]) > 20 * LAYERS
        assert narrow[2] == 0 if world == 1 else narrow[2] >= 3 * LAYERS


def test_the_command_counts_and_plans(tmp_path: Path) -> None:
    root = make_files(tmp_path)
    code, output = burnish(root, "doctor", "--count", "rl.yaml", "steps=1", "--json")
    assert code == 0, output
    found = json.JSONDecoder().raw_decode(output)[0]
    assert min(found["microbatch"]["forward"]["aten::mm"], *found["token"]) > 0
    assert {"memory", "time"} <= found["planned"].keys()
    code, output = burnish(root, "doctor", "--count", "missing.yaml")
    assert code == 5
    assert "Traceback" not in output


@pytest.mark.nightly
def test_the_command_counts_on_processes_that_it_starts(tmp_path: Path) -> None:
    argv = ["doctor", "--count", "sft.yaml", "--processes", "2"]
    code, output = burnish(make_files(tmp_path), *argv)
    assert code == 0, output
    assert "_reduce_scatter_base_" in output

"""Compiled layers: how often something is compiled, that it computes the same, and what is said without a compiler. At every layout: `make contract`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import cut, loss, make_examples, require_alike, train, train_by_hand
from support.models.engines import make_engine
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from burnish.distributed.layout import Layout
from burnish.engines.torch.compilation import compile_layers
from burnish.engines.torch.parallelize import decoder_layers
from burnish.errors import UsageError
from burnish.models.meta_init import build_on_meta

LENGTHS = ((3,), (40, 2), (8, 8, 8, 8), (17, 1, 30))
PIECES = 4
"""Of a layer: up to its attention, and what follows, each of them once in the layer and once in its attention."""


def trained_rank(
    layout: Layout, path: Path
) -> tuple[dict[str, Any], list[int], list[tuple[float, float]]]:
    """What training gave, graphs that there were after it and after each batch to come, and these batches' losses with and without compilation."""
    mine, plain = (make_engine(layout, path, compile=compiled) for compiled in (True, False))
    found, _ = (train(engine, make_examples(VOCAB), 2) for engine in (mine, plain))
    graphs, losses = [counters["stats"]["unique_graphs"]], []
    for number, lengths in enumerate(LENGTHS):
        batch = cut(make_examples(VOCAB, lengths, number), layout, 2)
        passes = [each.forward_backward(batch, loss) for each in (mine, plain)]
        losses.append(tuple(stats.values_by_name()["loss"] for stats in passes))
        graphs.append(counters["stats"]["unique_graphs"])
    return found, graphs, losses


@pytest.mark.nightly
def test_layers_are_compiled_once_for_all_lengths_and_train_like_a_plain_model(
    tmp_path: Path,
) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    ((found, graphs, losses),) = run_ranks(trained_rank, 1, path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    wanted = train_by_hand(model, make_examples(VOCAB))
    require_alike([found], wanted, ("gradients", "weights"), "compiled")
    assert 0 < graphs[1] <= 3 * PIECES, "once more for lengths in general, and without gradients"
    assert set(graphs[1:]) == {graphs[1]}, "lengths make it compile again"
    for mine, plain in losses:
        assert mine == pytest.approx(plain, rel=1e-5)


def test_no_compiler_is_an_error_that_says_so() -> None:
    model = build_on_meta(tiny_config())
    with (
        torch._inductor.config.patch("cpp.cxx", ("no-such-compiler",)),
        pytest.raises(UsageError, match=r"engine\.compile") as refused,
    ):
        compile_layers(model, decoder_layers(model))
    assert "engine.compile=false" in str(refused.value)


def routed_rank(layout: Layout, path: Path) -> bool:
    """Whether experts are recorded by layers that were compiled without being asked for any."""
    engine = make_engine(layout, path, compile=True)
    batch = cut(make_examples(VOCAB), layout, 2)
    engine.forward(batch)
    return all(each.experts is not None for each in engine.forward(batch, experts=True))


@pytest.mark.nightly
def test_routers_are_heard_after_a_pass_without(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32)
    assert run_ranks(routed_rank, 1, path) == [True]

"""Two ranks, each with a device of its own: what NCCL does between them. On CPUs gloo does it, which proves the tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contracts.engine import assert_relative, make_examples, train, train_by_hand
from support.models.engines import make_engine
from support.models.tiny import VOCAB, save_tiny, tiny_model
from support.ranks.processes import torchrun_environ
from torch import Tensor
from transformers import AutoConfig

from burnish.distributed.device import pick_device
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.errors import BurnishError
from burnish.rollout.builtin.forward import InferenceModel

KINDS = [
    pytest.param("cpu", marks=pytest.mark.nightly),
    pytest.param(
        "cuda",
        marks=(
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
    ),
]
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("qwen3", {}),
    "kept whole": ("qwen3", {"reshard_after_forward": False, "reduce_each_microbatch": False}),
    "hsdp": ("qwen3", {"replicas": 2}),
    "tensor": ("qwen3", {"tensor_parallel": 2, "activation_checkpointing": "selective"}),
    "sequence": ("qwen3_moe", {"sequence_parallel": 2}),
    "experts": ("qwen3_moe", {"expert_parallel": 2, "activation_checkpointing": "full"}),
    "offload": ("qwen3", {"activation_offload": True, "optimizer_offload": True}),
    "megatron tensor": ("qwen3", {"kind": "megatron", "tensor_parallel": 2}),
    "megatron pipeline": ("qwen3", {"kind": "megatron", "pipeline_parallel": 2}),
    "megatron virtual": (
        "qwen3",
        {"kind": "megatron", "pipeline_parallel": 2, "virtual_stages": 2},
    ),
    "megatron experts": ("qwen3_moe", {"kind": "megatron", "expert_parallel": 2}),
}


def on_two(kind: str, fn: Callable[..., Any], *args: Any) -> list[Future[Any]]:
    """`fn(layout, device, *args)` on two ranks, in new interpreters: a fork might have no use of CUDA."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    environs = [torchrun_environ(rank, 2, store.port) for rank in range(2)]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        ranks = [pool.submit(_in_group, each, kind, fn, *args) for each in environs]
        wait(ranks, 200)
    return ranks


def _in_group(environ: Mapping[str, str], kind: str, fn: Callable[..., Any], *args: Any) -> Any:
    os.environ.update(environ)
    device = pick_device(int(environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    with process_group(device, 60.0) as layout:
        return fn(layout, device, *args)


def trained(
    layout: Layout, device: torch.device, paths: Mapping[str, Path], names: Sequence[str]
) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """By layout, what training gave, and the weights that every rank's generator then has."""
    given = []
    for family, settings in map(LAYOUTS.__getitem__, names):
        engine = make_engine(layout, paths[family], device=device, **settings)
        found = train(engine, make_examples(VOCAB), 2)
        config = AutoConfig.from_pretrained(paths[family])
        generator = InferenceModel(config, device=device, dtype=torch.float32)
        generator.load(engine.published(), engine.layout)
        engine.close()
        told = {name: found[name] for name in ("losses", "norms", "logprobs")}
        given.append((told, {each.spec.name: each.tensor.cpu() for each in generator.shards()}))
    return given


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_megatron", [False, True], ids=["torch", "megatron"])
def test_layouts_train_like_one_plain_model_and_publish_alike(
    tmp_path: Path, kind: str, of_megatron: bool
) -> None:
    names = [name for name in LAYOUTS if name.startswith("megatron") == of_megatron]
    paths, oracles = {}, {}
    for family in ("qwen3", "qwen3_moe"):
        paths[family] = save_tiny(tmp_path / family, family, torch.float32, num_hidden_layers=4)
        plain = tiny_model(family, num_hidden_layers=4)
        oracles[family] = train_by_hand(plain, make_examples(VOCAB))
    ranks = [rank.result() for rank in on_two(kind, trained, paths, names)]
    for name, (one, first), (other, second) in zip(names, *ranks, strict=True):
        wanted = oracles[LAYOUTS[name][0]]
        for found in (one, other):
            assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5), name
            assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-4), name
            for number, said in found["logprobs"].items():
                for mine, theirs in zip(said, wanted["logprobs"][number], strict=True):
                    assert_relative(mine, theirs, 1e-4, f"{name}: example {number}")
        assert first.keys() == second.keys()
        assert all(torch.equal(first[each], second[each]) for each in first), name


def fails(layout: Layout, device: torch.device) -> None:
    ones = torch.ones(1 << 20, device=device)
    for number in range(10**9):
        if number == 50 and layout.rank == 1:
            raise KeyError("no such column")
        dist.all_reduce(ones.fill_(1.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_fails_shows_its_error_and_ends_the_other(kind: str) -> None:
    other, failed = on_two(kind, fails)
    with pytest.raises(KeyError, match="no such column"):
        failed.result()
    with pytest.raises((BurnishError, BrokenProcessPool)):  # it may hang in NCCL, and is ended
        other.result()

"""Settings of speed change no bit of three steps and of published weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from contracts.engine import LR, assert_relative, cut, loss, make_examples, whole
from support.models.engines import OPTIM, make_engine
from support.models.tiny import VOCAB, save_tiny
from support.ranks.processes import run_ranks
from torch import Tensor

from burnish.boxes.box import Box
from burnish.boxes.shards import Shard
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.engines.megatron import distributed_optimizer

Case = tuple[str, dict[str, Any], dict[str, Any]]
"""Kind of model, settings of the engine, and further ones that change nothing."""
OVERLAP = {"megatron": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
OFF = {"overlap_grad_reduce": False, "overlap_param_gather": False}
EXPERTS: dict[str, Any] = {"expert_parallel": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel": 2}
VIRTUAL: dict[str, Any] = {"pipeline_parallel": 2, "virtual_stages": 2}
TENSOR: dict[str, Any] = {"tensor_parallel": 2, "activation_checkpointing": "full"}
BALANCED: dict[str, Any] = {"router_aux_loss": 0.1}


def selective(*modules: str) -> dict[str, Any]:
    return {
        "activation_checkpointing": "selective",
        "megatron": {"recompute_modules": list(modules)},
    }


def divided(layout: str) -> dict[str, Any]:
    return {"megatron": {"pipeline_model_parallel_layout": layout}}


ALL = selective("core_attn", "mlp", "moe", "shared_experts")
ONE: list[Case] = [("shared", BALANCED, ALL)]
TWO: list[Case] = [("dense", {}, OVERLAP), ("mixture", EXPERTS, OVERLAP)]
OVERLAPPED: list[Case] = [
    ("dense", {}, {"megatron": {"overlap_grad_reduce": False, "overlap_param_gather": True}}),
    ("dense", {"sequence_parallel": 2}, OVERLAP),
    ("dense", VIRTUAL, OVERLAP),
    ("mixture", TENSOR, OVERLAP),
]
FOUR: list[Case] = [
    ("mixture", EXPERTS, OVERLAP),
    ("tied", VIRTUAL, OVERLAP),
    ("tied", TENSOR, OVERLAP),
]
DIVIDED: list[Case] = [
    ("tied", PIPELINE, divided("Et|tttL")),
    ("dense", PIPELINE, divided("Et*4|L")),
    ("mixture", VIRTUAL, divided("E|tt|t|tL")),
    # Micro-batches take turns, and each router needs the instructions of its own again.
    ("mixture", {**VIRTUAL, **BALANCED}, selective("moe")),
    ("shared", {**PIPELINE, **BALANCED}, ALL),
    ("shared", {"tensor_parallel": 2, **BALANCED}, ALL),
]
Piece = tuple[str, Box, Tensor, tuple[int, ...]]
SMALL = partial(distributed_optimizer.DistributedDataParallelConfig, bucket_size=3000)
"""So that tiny models have several buckets."""


def steps_of(
    layout: Layout,
    path: Path,
    settings: Mapping[str, Any],
    passes: int,
) -> list[Piece]:
    """This rank's pieces of what three steps leave, each of so many backward passes, and of what is published between them."""
    # Nothing is clipped: other ranges of ranks have another sum of squares, in the last bit.
    told = {"max_grad_norm": 1e6, "megatron": OFF, **settings}
    engine = make_engine(layout, path, OPTIM, kind="megatron", **told)
    batch = cut(make_examples(VOCAB), engine.layout, 2)
    pieces = []
    for step in range(3):
        for _ in range(passes):
            engine.forward_backward(batch, loss)
        with engine.offloaded():
            pass
        engine.optim_step(LR)
        if step == 0:
            pieces += [piece_of(shard, "published") for shard in engine.published().changing]
        if step == 1:
            for number, output in enumerate(engine.forward(batch)):
                box = Box((0,), tuple(output.logprobs.shape))
                name = f"log-probs of {engine.layout.data_rank}, {number}"
                pieces.append((name, box, output.logprobs.clone(), box.sizes))
    for part in (Part.WEIGHTS, Part.TRAINING):
        pieces += [piece_of(shard) for shard in engine.shards(part)]
    engine.close()
    return pieces


def piece_of(shard: Shard, prefix: str = "") -> Piece:
    return prefix + shard.spec.name, shard.box, shard.tensor.clone(), shard.spec.shape


def train_rank(
    layout: Layout, cases: Sequence[tuple[Path, dict[str, Any], dict[str, Any]]], passes: int
) -> list[list[list[Piece]]]:
    """Of each case without its further settings and with them."""
    with patch.object(distributed_optimizer, "DistributedDataParallelConfig", SMALL):
        return [
            [steps_of(layout, path, told, passes) for told in (settings, settings | more)]
            for path, settings, more in cases
        ]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    told: dict[str, tuple[str, dict[str, Any]]] = {
        "dense": ("qwen2", {"tie_word_embeddings": False, "num_hidden_layers": 4}),
        "tied": ("qwen3", {"num_hidden_layers": 4}),
        "mixture": ("qwen3_moe", {"num_hidden_layers": 4}),
        "shared": ("qwen2_moe", {"num_hidden_layers": 4}),
    }
    return {
        name: save_tiny(root / name, family, torch.float32, **changes)
        for name, (family, changes) in told.items()
    }


def check(paths: Mapping[str, Path], cases: Sequence[Case], world: int, passes: int = 1) -> None:
    """The ranges of ranks differ with the buckets, so whole tensors are compared.

    Gradients of a second pass are added to the sum of the first, and four summands are added in another order in other buckets.
    A shared expert that is computed again adds its gradient later. Such steps are the same up to rounding, which squares have twice.
    """
    told = [(paths[kind], settings, more) for kind, settings, more in cases]
    ranks = run_ranks(train_rank, world, told, passes)
    for number, case in enumerate(cases):
        plain, fast = (together([rank[number][how] for rank in ranks]) for how in (0, 1))
        assert plain.keys() == fast.keys()
        for name, tensor in plain.items():
            if passes == 1 and world < 4 and case[0] != "shared":
                assert torch.equal(fast[name], tensor), (case, name)
            else:
                tolerance = 2e-5 if name.startswith("exp_avg_sq/") else 1e-5
                assert_relative(fast[name], tensor, tolerance, f"{case} {name}")


def together(ranks: Sequence[list[Piece]]) -> dict[str, Tensor]:
    shapes = {name: shape for pieces in ranks for name, _, _, shape in pieces}
    return whole([[piece[:3] for piece in pieces] for pieces in ranks], shapes)


def test_a_process_gets_the_same_bits(paths: dict[str, Path]) -> None:
    check(paths, ONE, 1)


def test_two_processes_get_the_same_bits(paths: dict[str, Path]) -> None:
    check(paths, TWO, 2)


@pytest.mark.nightly
def test_every_layout_takes_the_same_steps(paths: dict[str, Path]) -> None:
    check(paths, [*OVERLAPPED, *DIVIDED], 2)
    check(paths, FOUR, 4)


@pytest.mark.nightly
def test_a_step_of_two_passes_adds_up_both(paths: dict[str, Path]) -> None:
    check(paths, TWO, 2, passes=2)

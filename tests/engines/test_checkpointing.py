from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import assert_relative, cut, loss, make_examples, train
from support.models.engines import make_engine
from support.models.tiny import VOCAB, save_tiny
from support.ranks.processes import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from burnish.distributed.layout import Layout

CPU = torch.device("cpu")
KINDS = ("none", "full", "selective")


def train_rank(layout: Layout, paths: Mapping[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """By family, what training leaves with each kind of checkpointing."""
    return {
        family: [
            train(make_engine(layout, path, activation_checkpointing=kind), make_examples(VOCAB), 3)
            for kind in KINDS
        ]
        for family, path in paths.items()
    }


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_computing_again_changes_nothing(tmp_path: Path, world: int) -> None:
    families = ("qwen3", "gemma3_text", "qwen3_moe")
    paths = {family: save_tiny(tmp_path / family, family, torch.float32) for family in families}
    for rank in run_ranks(train_rank, world, paths):
        for family, (wanted, *others) in rank.items():
            for found in others:
                assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6), family
                for ours, theirs in zip(found["weights"], wanted["weights"], strict=True):
                    assert_relative(ours[2], theirs[2], 1e-6, f"{family} {ours[0]}")


class CountProducts(TorchDispatchMode):
    """How many matrix products, attentions and activations were computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.found[name] = self.found.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def counted(
    layout: Layout, path: Path, precision: str = "fp32"
) -> dict[str, tuple[dict[str, int], int]]:
    """By kind of checkpointing: how often each operator ran, and the bytes that were kept."""
    return {kind: count(layout, path, kind, precision) for kind in KINDS}


def count(layout: Layout, path: Path, kind: str, precision: str) -> tuple[dict[str, int], int]:
    engine = make_engine(layout, path, activation_checkpointing=kind, precision=precision)
    batch = cut(make_examples(VOCAB), layout, 6)
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    with CountProducts() as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        engine.forward_backward(batch, loss)
    return counter.found, kept


@pytest.mark.parametrize(
    ("precision", "attention"),
    [("fp32", "_scaled_dot_product_flash_attention_for_cpu"), ("bf16", "causal_attention")],
)
def test_what_is_computed_twice(tmp_path: Path, precision: str, attention: str) -> None:
    """In full all of a layer but its last product, whose result the backward pass does not need; in selective the activation."""
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    layers = AutoConfig.from_pretrained(path).num_hidden_layers
    (ranks,) = run_ranks(counted, 1, path, precision)
    found = {kind: counts for kind, (counts, _) in ranks.items()}
    calls = found["none"][attention]
    assert found["selective"][attention] == calls
    assert found["full"][attention] == 2 * calls
    assert found["selective"]["mm"] == found["none"]["mm"]
    assert found["full"]["mm"] == found["none"]["mm"] + 6 * layers
    for kind in ("full", "selective"):
        assert found[kind]["silu"] == 2 * found["none"]["silu"] == 2 * layers
    assert ranks["full"][1] < ranks["none"][1] / 2


def test_products_of_experts_are_kept_in_selective(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "mixtral", torch.float32)
    (found,) = run_ranks(counted, 1, path)
    products = {kind: counts["_grouped_mm"] for kind, (counts, _) in found.items()}
    assert products["selective"] == products["none"] < products["full"]

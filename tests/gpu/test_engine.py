"""The engine's contract on one device: plain transformers' numbers, and nothing lost by parking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from contracts.engine import (
    STEPS,
    assert_relative,
    make_examples,
    train,
    train_by_hand,
    whole,
)
from support.models.engines import make_engine
from support.models.tiny import MIXTURES, VOCAB, save_tiny, tiny_model
from support.ranks.devices import DEVICES
from torch import Tensor

from burnish.boxes.shards import Shard
from burnish.distributed.layout import Layout
from burnish.engines.base import Part

FAMILIES = ["llama", "qwen3", "mixtral", "qwen3_moe", "gemma3_text"]


def one_vector(tensors: dict[str, Tensor], prefix: str) -> Tensor:
    return torch.cat([tensors[n].flatten() for n in sorted(tensors) if n.startswith(prefix)])


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_trains_like_one_plain_model(
    tmp_path: Path, alone: Layout, device: torch.device, family: str
) -> None:
    path = save_tiny(tmp_path / family, family, torch.float32)
    wanted = train_by_hand(tiny_model(family), make_examples(VOCAB))
    found = train(
        make_engine(alone, path, device=device, precision="fp32"), make_examples(VOCAB), 2
    )
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-4)
    for number, outputs in wanted["logprobs"].items():
        for mine, theirs in zip(found["logprobs"][number], outputs, strict=True):
            assert_relative(mine, theirs, 1e-4, f"example {number}")
    if family in MIXTURES:  # its experts are fused in the oracle's parameters
        return
    for kind in ("weights", "slots"):
        tensors = whole([found[kind]], found["shapes"])
        for prefix in {name.partition("/")[0] if "/" in name else "" for name in tensors}:
            mine, theirs = one_vector(tensors, prefix), one_vector(wanted[kind], prefix)
            assert_relative(mine, theirs, 1e-4, f"{kind} {prefix}")


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_compute_keeps_fp32_state_and_stays_close(
    tmp_path: Path, alone: Layout, device: torch.device, family: str
) -> None:
    path = save_tiny(tmp_path / family, family, torch.float32)
    wanted = train_by_hand(tiny_model(family), make_examples(VOCAB))["losses"]
    engine = make_engine(alone, path, device=device, precision="bf16")
    losses = train(engine, make_examples(VOCAB), 3)["losses"]
    assert losses == pytest.approx(wanted, rel=3e-2)
    assert losses != pytest.approx(wanted, rel=1e-6), "this was not computed in bf16"
    assert {s.tensor.dtype for part in Part for s in engine.shards(part)} == {torch.float32}
    assert {s.tensor.device for part in Part for s in engine.shards(part)} == {device}


@pytest.mark.parametrize("device", DEVICES[1:], indirect=True)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_compiled_layers_train_alike(tmp_path: Path, alone: Layout, device: torch.device) -> None:
    path = save_tiny(tmp_path / "qwen3", "qwen3", torch.float32)
    for precision, tolerance in (("fp32", 1e-5), ("bf16", 3e-2)):
        plain, compiled = (
            train(
                make_engine(alone, path, device=device, precision=precision, compile=each),
                make_examples(VOCAB),
                3,
            )["losses"]
            for each in (False, True)
        )
        assert compiled == pytest.approx(plain, rel=tolerance)


def copies(shards: Sequence[Shard]) -> list[Tensor]:
    return [shard.tensor.detach().to("cpu", copy=True) for shard in shards]


def allocated(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def test_parking_changes_nothing_and_frees_an_accelerators_memory(
    tmp_path: Path, alone: Layout, device: torch.device
) -> None:
    path = save_tiny(tmp_path / "qwen3", "qwen3", torch.float32)
    engines = [make_engine(alone, path, device=device, precision="bf16") for _ in range(2)]
    parked, other = engines
    losses = [train(engine, make_examples(VOCAB), 3)["losses"] for engine in engines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    before = {part: copies(list(parked.shards(part))) for part in Part}
    held = sum(tensor.nbytes for tensors in before.values() for tensor in tensors)
    outside = allocated(device) if device.type == "cuda" else 0
    with parked.offloaded():
        if device.type == "cuda":
            assert outside - allocated(device) >= held
    for part in Part:
        for copy, shard in zip(before[part], parked.shards(part), strict=True):
            assert torch.equal(copy, shard.tensor.cpu()), f"{part} {shard.spec.name}"
    again = [train(engine, make_examples(VOCAB), 3)["losses"] for engine in engines]
    assert again[0] == pytest.approx(again[1], rel=1e-3)
    assert parked.steps == other.steps == 2 * STEPS


def test_parking_restores_also_where_the_block_raises(
    tmp_path: Path, alone: Layout, device: torch.device
) -> None:
    path = save_tiny(tmp_path / "qwen3", "qwen3", torch.float32)
    engine = make_engine(alone, path, device=device, precision="fp32")
    before = copies(list(engine.shards(Part.WEIGHTS)))
    with pytest.raises(InterruptedError), engine.offloaded():
        raise InterruptedError
    for copy, shard in zip(before, engine.shards(Part.WEIGHTS), strict=True):
        assert torch.equal(copy, shard.tensor.cpu())

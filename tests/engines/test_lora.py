"""An engine that trains an adapter computes what PEFT on plain transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import (
    assert_relative,
    cut,
    examples_that_begin_alike,
    loss,
    make_examples,
    train_by_hand,
)
from safetensors.torch import load_file
from support.models.adapted_training import (
    off_rank,
    on_ranks,
    published_rank,
    require_trained_as_peft,
    together,
    train_rank,
)
from support.models.adapters import EXPERTS, LORA, plain_adapted
from support.models.engines import make_engine
from support.models.tiny import VOCAB, save_tiny
from torch import Tensor

from burnish.config.schema import LoraConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.models.lora.dropout import TokenDropout, token_keys
from burnish.records.seeds import derive_seed

CASES = [  # beside the kind `adapter` of test_layouts.py, which meets all of two processes
    ("qwen3", LORA, 1, 6, {"activation_checkpointing": "full"}),
    ("llama", LORA, 1, 3, {}),
    pytest.param(
        *("qwen2", LoraConfig(rank=3, alpha=5.0), 4, 3, {"tensor_parallel": 2}),
        marks=pytest.mark.nightly,
    ),
    pytest.param("gemma3_text", LORA, 2, 3, {"tensor_parallel": 2}, marks=pytest.mark.nightly),
    pytest.param(
        *("mistral", LoraConfig(rank=1, alpha=2.0), 2, 3, {"replicas": 2}),
        marks=pytest.mark.nightly,
    ),
    ("qwen2", LoraConfig(rank=3, alpha=5.0, rslora=True), 1, 2, {}),
    pytest.param(
        "qwen2", LoraConfig(rank=3, alpha=5.0, dora=True), 1, 2, {}, marks=pytest.mark.nightly
    ),
    pytest.param(
        *("llama", LoraConfig(rank=3, alpha=5.0, dora=True), 2, 3),
        {"activation_checkpointing": "full"},
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        "gemma3_text",
        LoraConfig(rank=2, alpha=3.0, targets=["down_proj", "k_proj"]),
        2,
        1,
        {"activation_checkpointing": "selective"},
        marks=pytest.mark.nightly,
    ),
    ("qwen3_moe", LoraConfig(rank=2, alpha=3.0, targets=["q_proj", "o_proj"]), 1, 3, {}),
    pytest.param(
        "qwen3_moe",
        LoraConfig(rank=3, alpha=5.0, targets=["q_proj", *EXPERTS]),
        2,
        3,
        {"activation_checkpointing": "full"},
        marks=pytest.mark.nightly,
    ),
    (
        "mixtral",
        LoraConfig(rank=8, alpha=5.0, rslora=True, targets=EXPERTS),
        2,
        3,
        {"tensor_parallel": 2, "activation_checkpointing": "selective"},
    ),
]


@pytest.mark.parametrize(("family", "lora", "world", "per_micro", "changes"), CASES)
def test_it_trains_as_peft_on_plain_transformers_does(
    tmp_path: Path,
    family: str,
    lora: LoraConfig,
    world: int,
    per_micro: int,
    changes: dict[str, Any],
) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    require_trained_as_peft(path, lora, world, per_micro, changes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "world", "changes"),
    [
        ("qwen2", 1, {"activation_checkpointing": "full"}),
        ("llama", 2, {"reshard_after_forward": True}),
    ],
)
def test_it_trains_on_a_base_in_four_bits_as_peft_on_bitsandbytes_layers_does(
    tmp_path: Path, family: str, world: int, changes: dict[str, Any]
) -> None:
    """Layers with 96 inputs stay as they are, for transformers by their names."""
    lora = LoraConfig(rank=3, alpha=5.0, quantize_base="nf4")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    path = save_tiny(tmp_path / "m", family, torch.float32, **sizes)
    require_trained_as_peft(path, lora, world, 3, changes, plain=["down_proj", "lm_head"])


class DropAlone(torch.nn.Module):
    """In place of PEFT's dropout: what Burnish drops of a sequence that is alone."""

    def __init__(self, inner: TokenDropout, passes: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.passes = inner, passes

    def forward(self, rows: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return rows
        ids, number = self.passes["ids"], self.passes["count"] // 5
        keys = token_keys(ids, [len(ids)], derive_seed(11, "dropout", number))
        self.inner.tokens = torch.from_numpy(keys).int()
        return self.inner(rows)


def plain_with_dropout(path: Path, lora: LoraConfig) -> Any:
    """PEFT's model, whose layers drop what follows from the tokens of a sequence and the step."""
    model = plain_adapted(path, lora)
    passes: dict[str, Any] = {"count": -1, "ids": None}

    def begin(_: Any, __: Any, options: dict[str, Any]) -> None:
        passes["count"] += 1
        passes["ids"] = options["input_ids"][0].numpy()

    model.register_forward_pre_hook(begin, with_kwargs=True)
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            plain = name.removeprefix("base_model.model.")
            inner = TokenDropout(lora.dropout, plain, layer.in_features)
            assert isinstance(layer.lora_dropout["default"], torch.nn.Dropout)
            assert layer.lora_dropout["default"].p == lora.dropout
            layer.lora_dropout["default"] = DropAlone(inner, passes)
    return model


@pytest.mark.parametrize(
    ("family", "world", "per_micro", "changes"),
    [
        ("qwen3", 1, 6, {"activation_checkpointing": "full"}),
        ("llama", 2, 3, {"tensor_parallel": 2}),
        pytest.param("qwen2", 2, 2, {"sequence_parallel": 2}, marks=pytest.mark.nightly),
        pytest.param(
            *("gemma3_text", 2, 1, {"activation_checkpointing": "selective"}),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_it_drops_the_same_at_every_layout(
    tmp_path: Path, family: str, world: int, per_micro: int, changes: dict[str, Any]
) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    lora = LoraConfig(rank=3, alpha=5.0, dropout=0.3)
    examples = examples_that_begin_alike(VOCAB)
    wanted = train_by_hand(plain_with_dropout(path, lora), examples)
    without = train_by_hand(plain_adapted(path, lora), examples)
    assert abs(wanted["losses"][0] - without["losses"][0]) > 1e-4
    ranks = on_ranks(train_rank, world, path, lora, per_micro, changes)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=2e-6)
        assert rank["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    merged = {k: v for rank in ranks for k, v in rank["logprobs"].items()}
    for number, (logprobs, _) in wanted["logprobs"].items():
        assert_relative(merged[number][0], logprobs, 2e-5, f"log-probs of example {number}")


def test_only_the_adapter_has_gradients_and_state(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        (counted,) = on_ranks(count_bytes, 1, path, precision)
        adapter = counted["weights"]
        assert counted["slots"] == 2 * adapter
        assert counted["gradients"] == adapter
        assert counted["frozen"] == dtype.itemsize * counted["frozen_elements"]
        assert counted["parameters"] == adapter + counted["frozen"]
        assert adapter < counted["frozen"]


def count_bytes(layout: Layout, path: Path, precision: str) -> dict[str, int]:
    engine = make_engine(layout, path, lora=LORA, precision=precision)
    engine.forward_backward(cut(make_examples(VOCAB), engine.layout, 2), loss)
    model = engine._scorer.model
    held = [p.to_local() for p in model.parameters()]
    return {
        "weights": sum(s.tensor.nbytes for s in engine.shards(Part.WEIGHTS)),
        "slots": sum(s.tensor.nbytes for s in engine.shards(Part.TRAINING)),
        "frozen": sum(s.tensor.nbytes for s in engine.shards(Part.FROZEN)),
        "frozen_elements": sum(s.tensor.numel() for s in engine.shards(Part.FROZEN)),
        "gradients": sum(
            p.grad.to_local().nbytes for p in model.parameters() if p.grad is not None
        ),
        "parameters": sum(tensor.nbytes for tensor in held),
    }


@pytest.mark.parametrize(
    ("family", "lora", "world"),
    [("qwen3", LORA, 1), ("qwen3_moe", LoraConfig(rank=4, alpha=6.0, targets=EXPERTS), 2)],
)
def test_off_it_is_the_model_it_was_made_for(
    tmp_path: Path, family: str, lora: LoraConfig, world: int
) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    for rank in on_ranks(off_rank, world, path, lora):
        assert rank["same"]
        assert rank["differ"]
        assert rank["norm"] > 0


@pytest.mark.parametrize(
    ("world", "tensor"), [(1, 1), (3, 1), pytest.param(4, 2, marks=pytest.mark.nightly)]
)
def test_what_is_published_is_pefts_merged_model(tmp_path: Path, world: int, tensor: int) -> None:
    path = save_tiny(tmp_path / "m", "qwen2", torch.float32)
    merged = plain_adapted(path).merge_and_unload()
    state = {n: t for n, t in merged.state_dict().items() if n != "lm_head.weight"}  # tied
    ranks = on_ranks(published_rank, world, path, LORA, None, {"tensor_parallel": tensor})
    found = together(ranks, "pieces")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert_relative(found[name], tensor, 2e-7, name)


@pytest.mark.parametrize(
    ("family", "world", "tensor"),
    [pytest.param("qwen3_moe", 3, 1, marks=pytest.mark.nightly), ("mixtral", 4, 2)],
)
def test_published_experts_are_pefts_merged_ones(
    tmp_path: Path, family: str, world: int, tensor: int
) -> None:
    lora = LoraConfig(rank=3, alpha=5.0, targets=["v_proj", *EXPERTS])
    path = save_tiny(tmp_path / "m", family, torch.float32)
    merged = plain_adapted(path, lora).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    state = load_file(tmp_path / "merged/model.safetensors")
    ranks = on_ranks(published_rank, world, path, lora, None, {"tensor_parallel": tensor})
    found = together(ranks, "pieces")
    assert found.keys() == state.keys()
    for name, weight in state.items():
        assert_relative(found[name], weight, 2e-7, name)


def test_in_bf16_it_is_rounded_once(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "qwen2", torch.bfloat16)
    merged = plain_adapted(path).merge_and_unload().state_dict()
    (rank,) = on_ranks(published_rank, 1, path, LORA, None, {"precision": "bf16"})
    assert rank["dtypes"] == {torch.bfloat16}
    found = together([rank], "pieces")
    for name, tensor in found.items():
        step = merged[name].abs() * 2**-8  # half a bf16 step at most
        assert bool(((tensor - merged[name]).abs() <= step * 1.01).all()), name

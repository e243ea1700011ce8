"""Multi-token prediction: a model and its layer train as plain torch trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contracts.engine import (
    LR,
    STEPS,
    cut,
    examples_that_begin_alike,
    loss,
    make_examples,
    require_alike,
    train,
)
from support.models.engines import CPU, OPTIM, engine_config
from support.models.mtp import FORMS, load, save_with_layer, train_by_hand
from support.models.tiny import VOCAB
from support.models.transformer_engine import use_stand_ins
from support.ranks.processes import run_ranks
from transformers import AutoConfig

from burnish.distributed.layout import Layout
from burnish.engines import factory as making
from burnish.engines.base import Engine, Part
from burnish.models.loading import SafetensorsSource, composite_of
from burnish.models.mtp_names import trained_layer
from burnish.models.packing import PrefixTree
from burnish.records import Example

SEEDS = {"deepseek_v3": 1}
"""Of random weights. Of others AdamW makes whole steps of gradients that are nearly 0, of which rounding decides."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor_parallel": 2, "layers": "transformer_engine"},
    "tensor without sequence parallelism": {
        "tensor_parallel": 2,
        "megatron_sequence_parallel": False,
    },
    "sequence": {"sequence_parallel": 2, "activation_checkpointing": "full"},
    "experts": {"expert_parallel": 2, "activation_checkpointing": "selective"},
}


def make_trained(layout: Layout, path: Path, **settings: Any) -> Engine:
    hf_config = AutoConfig.from_pretrained(path)
    names, _ = trained_layer(composite_of(str(path), hf_config), hf_config, layout)
    config = engine_config(kind="megatron", **settings)
    engine = making.make_engine(hf_config, config, OPTIM, layout=layout, device=CPU, mtp=names)
    engine.load(SafetensorsSource(path), Part.WEIGHTS)
    return engine


def train_rank(
    layout: Layout,
    cases: Sequence[tuple[Path, Mapping[str, Any]]],
    examples: Sequence[Example],
    per_micro: int,
) -> list[dict[str, Any]]:
    use_stand_ins()
    found = []
    for path, settings in cases:
        engine = make_trained(layout, path, **settings)
        own = train(engine, examples, per_micro)
        engine.close()
        engine = make_trained(layout, path, **settings)
        batch = cut(examples, engine.layout, per_micro)
        own["mtp_losses"] = []
        for _ in range(STEPS):
            stats = engine.forward_backward(batch, loss).values_by_name()
            own["mtp_losses"].append(stats["mtp_loss"])
            engine.optim_step(LR)
        engine.close()
        found.append(own)
    return found


def check(
    root: Path,
    family: str,
    settings: Sequence[Mapping[str, Any]],
    world: int,
    examples: Sequence[Example] | None = None,
    per_micro: int = 2,
) -> None:
    examples = examples or make_examples(VOCAB)
    path = save_with_layer(root / family, family, seed=SEEDS.get(family, 0))
    told = [(path, each) for each in settings]
    ranks = run_ranks(train_rank, world, told, examples, per_micro, timeout=300)
    wanted = train_by_hand(load(path, family), examples)
    for number, each in enumerate(settings):
        found = [rank[number] for rank in ranks]
        for rank in found:
            assert rank["mtp_losses"] == pytest.approx(wanted["mtp_losses"], rel=1e-5)
        # Of Gated DeltaNet's gates, and of sums over four processes, rounding shows in what AdamW makes of the gradients.
        is_rough = family in ("qwen3_next", "qwen3_5_text") or world > 2
        parts = ("gradients",) if is_rough else ("gradients", "slots", "weights")
        require_alike(found, wanted, parts, f"{family} with {each}")


@pytest.mark.nightly
def test_sequences_that_begin_alike_are_computed_apart(tmp_path: Path) -> None:
    examples = examples_that_begin_alike(VOCAB)
    packed = np.concatenate([each.token_ids for each in examples])
    tree = PrefixTree.of(packed, [len(each.token_ids) for each in examples])
    assert len(tree.computed) < len(packed), "without a layer they share rows"
    check(tmp_path, "glm4_moe", [{}], 1, examples, per_micro=len(examples))


@pytest.mark.nightly
@pytest.mark.parametrize("family", FORMS)
def test_a_layer_trains_like_plain_torch(family: str, tmp_path: Path) -> None:
    recomputed = {"activation_checkpointing": "full"}
    check(tmp_path, family, [{}, recomputed, {"layers": "transformer_engine"}], 1)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FORMS)
def test_a_layer_trains_so_on_two_processes(family: str, tmp_path: Path) -> None:
    is_dense = family == "qwen3_5_text"
    left_out = "experts" if is_dense else "tensor without sequence parallelism"
    check(tmp_path, family, [each for name, each in LAYOUTS.items() if name != left_out], 2)


@pytest.mark.nightly
def test_a_layer_trains_so_on_four_processes(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "sequence_parallel": 2},
        {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1},
    ]
    check(tmp_path, "glm4_moe", layouts, 4)

"""What an engine that trains an adapter owes: the numbers of PEFT on plain transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import (
    LR,
    assert_relative,
    cut,
    examples_that_begin_alike,
    loss,
    make_examples,
    train,
    train_by_hand,
    whole,
)
from torch import Tensor

from burnish.config.schema import LoraConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from support.models.adapters import LORA, plain_adapted, saved_name
from support.models.engines import CPU, make_engine, make_frozen
from support.models.tiny import VOCAB
from support.ranks.processes import run_ranks


def on_ranks(fn: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """What `run_ranks` does; one rank is this process."""
    if world > 1:
        return run_ranks(fn, world, *args)
    with process_group(CPU, 60) as layout:
        return [fn(layout, *args)]


def train_rank(
    layout: Layout, path: Path, lora: LoraConfig, per_micro: int, changes: dict[str, Any]
) -> dict[str, Any]:
    engine = make_engine(layout, path, lora=lora, **changes)
    found = train(engine, examples_that_begin_alike(VOCAB), per_micro, seed=11)
    engine.close()
    return found


def together(ranks: Sequence[Mapping[str, Any]], key: str) -> dict[str, Tensor]:
    shapes = {name: shape for rank in ranks for name, shape in rank["shapes"].items()}
    return whole([rank[key] for rank in ranks], shapes)


def require_trained_as_peft(
    path: Path,
    lora: LoraConfig,
    world: int,
    per_micro: int,
    changes: dict[str, Any],
    plain: Sequence[str] = (),
) -> None:
    ranks = on_ranks(train_rank, world, path, lora, per_micro, changes)
    require_like_peft(ranks, trained_by_peft(path, lora, plain), str(changes))


def trained_by_peft(path: Path, lora: LoraConfig, plain: Sequence[str] = ()) -> dict[str, Any]:
    """What comes of the same steps by PEFT."""
    return train_by_hand(plain_adapted(path, lora, plain), examples_that_begin_alike(VOCAB))


def require_like_peft(
    ranks: Sequence[Mapping[str, Any]], wanted: Mapping[str, Any], what: str
) -> None:
    """Losses, norms, log-probs, gradients, weights and moments of `train_rank` are those of `trained_by_peft`.

    AdamW divides each gradient by its own size. So a weight whose gradient is smaller than what fp32 decides moves as rounding says, and
    is left out: a head of Gated DeltaNet that forgets at once has gates of this kind. There, transformers in fp32 is as far from fp64 as
    the engines are.
    """
    for rank in ranks:
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=2e-6), what
        assert rank["norms"] == pytest.approx(wanted["norms"], rel=1e-5), what
    merged = {k: v for rank in ranks for k, v in rank["logprobs"].items()}
    for number, (logprobs, entropy) in wanted["logprobs"].items():
        assert_relative(merged[number][0], logprobs, 2e-5, f"{what}: log-probs of example {number}")
        assert_relative(merged[number][1], entropy, 2e-5, f"{what}: entropy of example {number}")
    found = together(ranks, "weights") | together(ranks, "slots")
    expected = {saved_name(n): t for n, t in (wanted["weights"] | wanted["slots"]).items()}
    trained = {name for name in found if "lora_" in name}
    assert trained == expected.keys(), what
    decided = {
        saved_name(name): (gradient.abs() >= 1e-5 * gradient.norm()) | (gradient == 0)
        for name, gradient in wanted["gradients"].items()
    }
    for kind in ("base_model", "exp_avg/", "exp_avg_sq/"):
        mine, theirs = (
            torch.cat(
                [
                    held[n][decided.get(n, ...)].flatten()
                    for n in sorted(trained)
                    if n.startswith(kind)
                ]
            )
            for held in (found, expected)
        )
        assert_relative(mine, theirs, 2e-5, f"{what}: {kind}")
    gradients = together(ranks, "gradients")
    for name, gradient in wanted["gradients"].items():
        assert_relative(gradients[saved_name(name)], gradient, 1e-5, f"{what}: gradient of {name}")


def off_rank(layout: Layout, path: Path, lora: LoraConfig, **settings: Any) -> dict[str, Any]:
    """Log-probs without the adapter before the first step, which must not keep it from learning."""
    engine = make_engine(layout, path, lora=lora, **settings)
    batch = cut(make_examples(VOCAB), engine.layout, 2)
    before = engine.forward(batch, adapter=False)
    engine.forward_backward(batch, loss)
    norm = engine.optim_step(LR).values_by_name()["grad_norm"]
    plain = make_frozen(layout, path, engine, **settings)
    with_it, without = engine.forward(batch), engine.forward(batch, adapter=False)
    return {
        "norm": norm,
        "same": all(
            torch.equal(a.logprobs, b.logprobs) and torch.equal(b.logprobs, c.logprobs)
            for a, b, c in zip(before, without, plain.forward(batch), strict=True)
        ),
        "differ": not torch.equal(with_it[0].logprobs, without[0].logprobs),
    }


def published_rank(
    layout: Layout,
    path: Path,
    lora: LoraConfig = LORA,
    optim: OptimConfig | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a generator gets, and that a part of a piece is the same as that part of the whole piece."""
    engine = make_engine(layout, path, optim, lora=lora, **(settings or {}))
    shards = list(engine.published().changing)
    pieces = [(s.spec.name, s.box, s.part(s.box).clone()) for s in shards]
    for shard in shards:
        if shard.tensor.ndim == 2 and min(shard.box.sizes) > 2:
            inner = tuple(o + 1 for o in shard.box.offsets), tuple(s - 2 for s in shard.box.sizes)
            box = replace(shard.box, offsets=inner[0], sizes=inner[1])
            # A product of fewer rows may add in another order: the matrix library decides.
            rounding = 1e-6 if shard.tensor.dtype == torch.float32 else 1e-2
            part, same = shard.part(box), shard.part(shard.box)[1:-1, 1:-1]
            torch.testing.assert_close(part, same, rtol=rounding, atol=rounding / 10)
    return {
        "pieces": pieces,
        "shapes": {s.spec.name: s.spec.shape for s in shards},
        "dtypes": {s.tensor.dtype for s in shards},
    }

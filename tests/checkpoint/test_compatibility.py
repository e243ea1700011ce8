"""A step is of the model and optimizer that go on from it, or is refused with a table before anything is filled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints.states import bits, make_state, save_once, shards_of
from support.ranks.processes import run_ranks

from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.steps import newest
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, IncompatibleError, MissingError


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    save_once(root)
    return root


@pytest.fixture(scope="module")
def told(root):
    """By number of processes and change, what each rank is told."""
    several = run_ranks(refusals, 2, str(root))
    return {
        1: [refusals(Layout(), str(root))],
        2: several,
    }


def refusals(layout, root):
    return {change: refusal(layout, root, change) for change in CHANGES}


def refusal(layout, root, change):
    """What is said to a rank whose weights or slots are changed, by what the change is called."""
    weights, slots = make_state(0)
    CHANGES[change](weights, slots)
    source = CheckpointSource(newest(Path(root)), layout)
    wanted = [shards_of(tensors, layout) for tensors in (weights, slots)]
    before = [bits(shard.tensor).clone() for shards in wanted for shard in shards]
    try:
        source.require(*wanted)
    except BurnishError as error:
        after = [bits(shard.tensor) for shards in wanted for shard in shards]
        assert all(map(torch.equal, before, after))
        return type(error), str(error)
    return None


def vocabulary(weights, slots):
    for tensors, name in ((weights, ""), (slots, "exp_avg/"), (slots, "exp_avg_sq/")):
        tensors[f"{name}embed.weight"] = torch.zeros(41, 16)


def hidden(weights, slots):
    for name in ("embed.weight", "layers.0.norm.weight", "layers.0.up.weight"):
        shape = list(weights[name].shape)
        weights[name] = torch.zeros(*shape[:-1], 24)


def untied(weights, slots):
    weights["lm_head.weight"] = torch.zeros(37, 16)


def tied(weights, slots):
    del weights["layers.0.up.weight"]


def narrower(weights, slots):
    weights["embed.weight"] = weights["embed.weight"].bfloat16()


def other_slots(weights, slots):
    slots["momentum/embed.weight"] = slots["exp_avg/embed.weight"]


def one_slot(weights, slots):
    slots["exp_avg/other"] = torch.zeros(3)


CHANGES = {
    "nothing": lambda weights, slots: None,
    "vocabulary": vocabulary,
    "hidden size": hidden,
    "an output layer of its own": untied,
    "a tied output layer": tied,
    "a narrower dtype": narrower,
    "another optimizer": other_slots,
    "a slot more": one_slot,
}


@pytest.mark.parametrize(
    ("change", "kind", "lines"),
    [
        ("nothing", None, []),
        ("vocabulary", IncompatibleError, ["embed.weight  float32 [37, 16]  float32 [41, 16]"]),
        ("hidden size", IncompatibleError, [
            "embed.weight          float32 [37, 16]  float32 [37, 24]",
            "layers.0.norm.weight  float32 [16]      float32 [24]",
        ]),
        ("an output layer of its own", MissingError, ["lm_head.weight  -     float32 [37, 16]"]),
        ("a tied output layer", IncompatibleError, ["layers.0.up.weight  float32 [24, 16]  -"]),
        ("a narrower dtype", IncompatibleError, ["embed.weight  float32 [37, 16]  bfloat16 [37, 16]"]),
        ("another optimizer", MissingError, ["momentum", "checkpoint.fresh_optimizer"]),
        ("a slot more", MissingError, ["exp_avg/other  -     float32 [3]"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("world", [1, 2])
def test_what_does_not_fit_is_shown_on_every_rank(told, world, change, kind, lines):
    found = [rank[change] for rank in told[world]]
    assert len(set(found)) == 1
    if kind is None:
        assert found[0] is None
        return
    assert found[0][0] is kind
    for line in lines:
        assert line in found[0][1]


def test_a_long_table_is_cut(tmp_path):
    weights = {f"layer{number:02}": torch.zeros(2) for number in range(30)}
    save_once(tmp_path, weights=shards_of(weights, Layout()), training=[])
    source = CheckpointSource(newest(tmp_path), Layout())
    with pytest.raises(IncompatibleError) as caught:
        source.require(shards_of({name: torch.zeros(3) for name in weights}, Layout()), [])
    assert "layer11" in str(caught.value)
    assert "layer12" not in str(caught.value)


def test_weights_in_bf16_alone_are_no_fp32_weights(tmp_path):
    """A silent change of dtype would go on from other numbers than the run had."""
    weights = {"w": torch.ones(2, dtype=torch.bfloat16)}
    save_once(tmp_path, weights=shards_of(weights, Layout()), training=[])
    source = CheckpointSource(newest(tmp_path), Layout())
    assert not source.holds_training
    with pytest.raises(IncompatibleError, match=r"w +bfloat16 \[2\]  float32 \[2\]"):
        source.require(shards_of({"w": torch.ones(2)}, Layout()), [])
    source.require(shards_of(weights, Layout()), [])


def test_a_step_without_optimizer_state(tmp_path, root):
    weights, slots = (shards_of(tensors, Layout()) for tensors in make_state(0))
    save_once(tmp_path, weights=weights, training=[])
    source = CheckpointSource(newest(tmp_path), Layout())
    assert not source.holds_training
    with pytest.raises(MissingError, match=r"(?s)exp_avg.*exp_avg_sq"):
        source.require(weights, slots)
    source.require(weights, [])
    assert CheckpointSource(newest(root), Layout()).holds_training

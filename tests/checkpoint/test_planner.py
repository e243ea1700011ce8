"""A save is planned once for the same tensors in the same hands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints.random_layouts import piece
from support.checkpoints.states import contents_of, make_state
from support.ranks.processes import run_ranks

from burnish.boxes.box import Box, whole
from burnish.boxes.pieces import PieceTable
from burnish.checkpoint import write_plan as planning
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.save import Saver
from burnish.checkpoint.write_plan import Outline
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.files.storage import LocalStorage


def pieces(*names, dtype=torch.float32):
    return PieceTable.of(piece(f"model/{name}", (4, 2), whole((4, 2)), dtype) for name in names)


def planner(layout=None):
    return Saver(Path("unused"), layout or Layout(), LocalStorage())


def test_the_same_pieces_have_the_same_plan():
    found = planner()
    assert found.digest(pieces("a")) == ""
    plan = found.plan(pieces("a"), [""], [""])
    assert found.digest(pieces("a")) == plan.share.digest
    assert found.plan(pieces("a"), [""], [plan.share.digest]) is plan


@pytest.mark.parametrize("other", [pieces("b"), pieces("a", "b"), pieces("a", dtype=torch.int32)])
def test_other_pieces_have_another(other):
    found = planner()
    plan = found.plan(pieces("a"), [""], [""])
    assert found.digest(other) == ""
    another = found.plan(other, [""], [""])
    assert another.share.digest != plan.share.digest
    assert found.digest(pieces("a")) == ""


def test_a_rank_that_has_forgotten_has_all_plan_again():
    found = planner()
    plan = found.plan(pieces("a"), [""], [""])
    again = found.plan(pieces("a"), [""], [plan.share.digest, ""])
    assert again is not plan
    assert again.share.digest == plan.share.digest


@pytest.mark.parametrize("most", [1, 2, 512])
def test_sections_have_every_block_once_and_all_ranks_write_equally_many(most):
    shape, world = (4100, 1000), 4
    have = [
        PieceTable.of(
            piece(f"exp_avg/{name}", shape, Box((1025 * rank, 0), (1025, 1000)), torch.float32)
            for name in "abc"
        )
        for rank in range(world)
    ]
    outline = Outline.of([table.tensors for table in have], [""])
    sections, count = outline.sections(world, most), len(outline.blocks.file)
    assert len({(each.turn, each.turns) for each in sections}) == {1: 1, 2: 1, 512: 4}[most]
    blocks: list[list[int]] = [[] for _ in range(world)]
    for section in sections:
        assert outline.tensors_in(section) <= {"exp_avg/a", "exp_avg/b", "exp_avg/c"}
        for rank, share in enumerate(outline.shares(have, section, world, range(world))):
            size = outline.block_bytes
            for span in (span for group in share.spans for span in group):
                blocks[rank] += range(span.start // size, -(-span.stop // size))
    assert sorted(number for numbers in blocks for number in numbers) == list(range(count))
    assert max(map(len, blocks)) <= -(-count // world)


def count_plans(layout, root):
    """How often ranks told each other their pieces over five saves, of which two are of other tensors."""
    told = 0

    def gather(*args):
        nonlocal told
        told += 1
        return original(*args)

    original, planning.gather_pieces = planning.gather_pieces, gather
    weights, slots = make_state(1)
    fewer = {name: tensor for name, tensor in weights.items() if name != "scale"}
    try:
        with Checkpoints(Path(root), layout, retention=Retention(9)) as checkpoints:
            for step, each in enumerate((weights, weights, fewer, fewer, weights)):
                training = {n: t for n, t in slots.items() if n.partition("/")[2] in each}
                checkpoints.save(step, contents_of(each, training, layout))
    finally:
        planning.gather_pieces = original
    return told


@pytest.mark.parametrize("world", [1, 2])
def test_pieces_are_told_when_they_change_only(tmp_path, world):
    assert run_ranks(count_plans, world, str(tmp_path)) == [3] * world


def test_ranks_that_planned_differently_are_stopped():
    run_ranks(plan_differently, 2)


def plan_differently(layout):
    found = planner(layout)
    half = piece("model/w", (4, 2), Box((2 * layout.rank, 0), (2, 2)), torch.float32)
    roles = ["", "model"] if layout.rank else [""]  # "model" is a role on one rank only
    with pytest.raises(BurnishError):
        found.plan(PieceTable.of([half]), roles, ["", ""])

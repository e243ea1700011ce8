"""What goes in comes out, bit for bit, whatever number of ranks writes and reads."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.checkpoints.states import (
    BIG_SHAPES,
    FaultyStorage,
    bits,
    contents_of,
    fill_and_compare,
    make_state,
    save_once,
    shards_of,
)
from support.faults.bit_flips import flip
from support.ranks.processes import run_ranks

from burnish.boxes.box import Box, whole
from burnish.boxes.pieces import PieceTable
from burnish.boxes.shards import Shard, TensorSpec
from burnish.boxes.tensor_reader import TORCH_DTYPES
from burnish.checkpoint import write_plan as planning
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.steps import newest, open_step, verify
from burnish.checkpoint.write_plan import MAIN, WritePlan
from burnish.distributed.layout import Layout
from burnish.distributed.meeting import in_groups
from burnish.errors import BurnishError, CorruptError, IncompatibleError, MissingError
from burnish.files.safetensors import read_header
from burnish.files.storage import LocalStorage


def save_on_ranks(layout, root):
    weights, slots = make_state(3, BIG_SHAPES)
    with Checkpoints(Path(root), layout) as checkpoints:
        checkpoints.save(1, contents_of(weights, slots, layout))


def save_in_sections(layout, root):
    """Blocks of every rank's own number, and what a rank lacks is told to all."""
    planning._PLANNERS = 2
    layout = in_groups(layout, timedelta(seconds=60), mesh=1, most=2)
    save_on_ranks(layout, root)
    weights, _ = make_state(3, BIG_SHAPES)
    pieces = PieceTable.of(
        (shard.spec._replace(name=f"model/{shard.spec.name}"), shard.box)
        for shard in shards_of(weights, layout)
    )
    plan = WritePlan.together(pieces, [MAIN], layout)
    at_once = WritePlan.together(pieces, [MAIN], replace(layout, groups=()))
    parts = (number for moves in plan.share.moves for number in moves.own)
    assert all(move.want in plan.share.places for move in parts)
    some = replace(
        pieces, tensors=(*pieces.tensors[:-1], pieces.tensors[-1]._replace(name="model/x"))
    )
    with pytest.raises(MissingError):
        WritePlan.together(some if layout.rank == 3 else pieces, [MAIN], layout)
    written = [
        sum(
            -(-(span.stop - span.start) // each.outline.block_bytes)
            for group in each.share.spans
            for span in group
        )
        for each in (plan, at_once)
    ]
    return plan.share.digest.count(" "), written


def load_on_ranks(layout, root, dim):
    source = CheckpointSource(newest(Path(root)), layout)
    fill_and_compare(source, *make_state(3, BIG_SHAPES), layout, dim)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same state, written by 1, 2 and 4 ranks."""
    roots = {world: tmp_path_factory.mktemp(f"world{world}") for world in (1, 2, 4)}
    for world, root in roots.items():
        run_ranks(save_on_ranks, world, str(root))
    return roots


@pytest.mark.parametrize(("writers", "readers", "dim"), [(1, 4, 0), (2, 1, 0), (4, 2, 1)])
def test_saved_by_some_and_loaded_by_others(saved, writers, readers, dim):
    run_ranks(load_on_ranks, readers, str(saved[writers]), dim)


def test_sections_that_ranks_plan_for_each_other_have_the_same_files(saved, tmp_path):
    told = run_ranks(save_in_sections, 4, str(tmp_path))
    assert newest(tmp_path).manifest.files == newest(saved[4]).manifest.files
    assert list(verify(newest(tmp_path).path)) == []
    assert [sections for sections, _ in told] == [1] * 4
    for way in range(2):
        written = [blocks[way] for _, blocks in told]
        assert sum(written) > 50
        assert max(written) - min(written) <= 4


def test_the_files_are_the_same_whoever_writes_them(saved):
    steps = [newest(root) for root in saved.values()]
    assert [step.manifest.world for step in steps] == [1, 2, 4]
    assert steps[0].manifest.files == steps[1].manifest.files == steps[2].manifest.files
    assert [list(verify(step.path)) for step in steps] == [[], [], []]
    assert len(steps[0].manifest.files["training/exp_avg.safetensors"].blocks) > 50


def save_in_large_blocks(layout, root):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("burnish.checkpoint.write_plan.block_bytes_for", lambda sizes: 8 << 20)
        save_on_ranks(layout, root)


def test_blocks_may_be_larger(tmp_path):
    """As those of a step of many terabytes are."""
    run_ranks(save_in_large_blocks, 2, str(tmp_path))
    step = newest(tmp_path)
    record = step.manifest.files["training/exp_avg.safetensors"]
    assert (record.block_bytes, len(record.blocks)) == (8 << 20, 2)
    assert list(verify(step.path)) == []
    run_ranks(load_on_ranks, 2, str(tmp_path), 1)


@pytest.mark.parametrize("limit", ["MANIFEST_LIMIT", "MAX_FILES"])
def test_a_manifest_that_could_not_be_read_again_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, limit
):
    monkeypatch.setattr(f"burnish.checkpoint.save.{limit}", 1)
    storage = FaultyStorage()
    with pytest.raises(BurnishError, match="step 1") as caught:
        save_once(tmp_path, storage=storage)
    assert caught.value.do
    assert not [each for each in storage.operations if each.startswith("create")]


@pytest.mark.parametrize("value", [1.0, 3e38, torch.nan, torch.inf])
def test_only_numbers_that_can_be_infinite_are_looked_at(tmp_path, value):
    """A model may hold integers and bytes beside its weights, and weights of several dtypes."""
    tensors = {
        "counts": torch.arange(3),
        "flags": torch.ones(2, dtype=torch.float8_e4m3fn),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "w": torch.tensor([value, value]),  # finite numbers, too, may have an infinite sum
    }
    path = save_once(tmp_path, weights=shards_of(tensors, Layout()), check_finite=True)
    assert open_step(path, LocalStorage()).healthy == math.isfinite(value)


def save_with_an_infinity(layout, root):
    """In a row of each rank in turn, then in none."""
    for number in range(layout.world + 1):
        weight = torch.ones(3 * layout.world, 5)
        weight[3 * number :][:1] = torch.inf
        with Checkpoints(Path(root) / str(number), layout) as checkpoints:
            weights = shards_of({"w": weight}, layout)
            checkpoints.save(1, contents_of({}, {}, layout, weights=weights, check_finite=True))


def test_an_infinity_on_any_rank_makes_the_step_unhealthy(tmp_path):
    run_ranks(save_with_an_infinity, 3, str(tmp_path))
    paths = [tmp_path / str(number) / "step-00000001" for number in range(4)]
    found = [open_step(path, LocalStorage()).healthy for path in paths]
    assert found == [False, False, False, True]


def test_what_lies_where(tmp_path):
    path = save_once(tmp_path, 12)
    assert path.name == "step-00000012"
    files = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    assert files == [
        "COMMIT",
        "manifest.json",
        "model/chat_templates/default.jinja",
        "model/config.json",
        "model/model.safetensors",
        "state.json",
        "training/exp_avg.safetensors",
        "training/exp_avg_sq.safetensors",
        "training/residual.safetensors",
    ]
    assert json.loads((path / "state.json").read_text()) == {"step": 1, "cursor": 5}
    kinds = {
        name: {e.dtype for e in read_header(path / name).entries.values()}
        for name in files
        if name.endswith("tensors")
    }
    assert kinds == {
        "model/model.safetensors": {"BF16"},
        "training/residual.safetensors": {"I16"},
        "training/exp_avg.safetensors": {"F32"},
        "training/exp_avg_sq.safetensors": {"F32"},
    }
    assert newest(tmp_path).state == {"step": 1, "cursor": 5}


def test_every_dtype_of_training_comes_back(tmp_path):
    tensors = {
        f"slot_{number}/w": (torch.arange(40).reshape(5, 8) % 2).to(dtype)
        for number, dtype in enumerate(
            [
                torch.bool,
                torch.uint8,
                torch.int64,
                torch.float16,
                torch.bfloat16,
                torch.float64,
                torch.float8_e4m3fn,
            ]
        )
    }
    save_once(tmp_path, training=shards_of(tensors, Layout()))
    again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    CheckpointSource(newest(tmp_path), Layout()).fill(shards_of(again, Layout()))
    for name, tensor in tensors.items():
        assert torch.equal(bits(again[name]), bits(tensor))


def test_weights_that_are_bf16_have_no_residual(tmp_path):
    weights = {"w": torch.randn(6, 4).bfloat16()}
    path = save_once(tmp_path, weights=shards_of(weights, Layout()), training=[])
    assert not (path / "training").exists()
    for dtype in (torch.bfloat16, torch.float32):
        again = {"w": torch.zeros(6, 4, dtype=dtype)}
        CheckpointSource(newest(tmp_path), Layout()).fill(shards_of(again, Layout()))
        assert torch.equal(again["w"], weights["w"].to(dtype))


def test_views_are_read_and_written(tmp_path):
    """Shards are views of the engine's memory: not contiguous, part of a parameter."""
    parameter = torch.nn.Parameter(torch.randn(10, 6))
    spec = TensorSpec("w", (10, 3), torch.float32)
    shards = [Shard(spec, whole((10, 3)), parameter[:, ::2])]
    save_once(tmp_path, weights=shards, training=[])
    expected = parameter.detach().clone()
    with torch.no_grad():
        parameter[:, ::2] = 0
    CheckpointSource(newest(tmp_path), Layout()).fill(shards)
    assert torch.equal(parameter.detach(), expected)


def one_shard(name, shape):
    return [Shard(TensorSpec(name, shape, torch.float32), whole(shape), torch.zeros(shape))]


def test_what_the_step_lacks_is_named(tmp_path):
    save_once(tmp_path)
    source = CheckpointSource(newest(tmp_path), Layout())
    with pytest.raises(MissingError, match="lm_head"):
        source.fill(one_shard("lm_head", (3,)))
    with pytest.raises(MissingError, match="exp_avg/other"):
        source.fill(one_shard("exp_avg/other", (3,)))
    with pytest.raises(MissingError, match=r"momentum/embed\.weight"):
        source.fill(one_shard("momentum/embed.weight", (37, 16)))


@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
def test_every_dtype_comes_back(tmp_path, name):
    raw = torch.arange(3 * 16 * 5, dtype=torch.uint8).view(3, -1) % 2  # what a bool may hold
    tensors = {
        "w": raw.view(TORCH_DTYPES[name]),
        "scalar": raw.view(-1)[:16].view(TORCH_DTYPES[name])[0],
    }
    weights = shards_of(tensors, Layout())
    save_once(tmp_path, weights=weights, training=[], split=False)
    empty = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    CheckpointSource(newest(tmp_path), Layout()).fill(shards_of(empty, Layout()))
    for key, tensor in tensors.items():
        assert torch.equal(empty[key].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_another_shape_is_named(tmp_path):
    save_once(tmp_path)
    source = CheckpointSource(newest(tmp_path), Layout())
    with pytest.raises(IncompatibleError, match=r"(?s)embed\.weight.*\[37.*16.*\[38.*16"):
        source.fill(one_shard("embed.weight", (38, 16)))


def test_what_no_rank_has_is_not_saved(tmp_path):
    spec = TensorSpec("w", (4, 4), torch.float32)
    half = [Shard(spec, Box((0, 0), (2, 4)), torch.zeros(2, 4))]
    with pytest.raises(MissingError, match="model/w"):
        save_once(tmp_path, weights=half, training=[])
    assert newest(tmp_path) is None


@pytest.mark.parametrize("name", ["w", "residual/w", "model/w", "/w", "exp_avg/", "../w", "a b/w"])
def test_slots_have_names_of_their_own(tmp_path, name):
    with pytest.raises(ValueError, match="slot"):
        save_once(tmp_path, training=one_shard(name, (3,)))


def test_the_same_name_twice_with_another_shape(tmp_path):
    with pytest.raises(BurnishError):
        save_once(tmp_path, weights=one_shard("w", (3,)) + one_shard("w", (4,)), training=[])


def test_state_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_once(tmp_path, state={"loss": float("nan")})
    with pytest.raises(BurnishError):
        save_once(tmp_path, state={"text": "x" * (17 << 20)})
    assert newest(tmp_path) is None


def fail_on_one_rank(layout, root):
    weights, slots = make_state(1)
    with Checkpoints(Path(root), layout) as checkpoints:
        checkpoints.save(1, contents_of(weights, slots, layout))
        slots = {f"{name} {layout.rank}" if layout.rank else name: t for name, t in slots.items()}
        bad = (
            contents_of(weights, slots, layout)
            if layout.rank == 0
            else contents_of(weights, {}, layout, training=one_shard("nonsense", (1,)))
        )
        try:
            checkpoints.save(2, bad)
        except (BurnishError, ValueError) as error:
            return str(error)
    return None


def test_every_rank_learns_of_an_error(tmp_path):
    messages = run_ranks(fail_on_one_rank, 2, str(tmp_path))
    assert all("'nonsense'" in message for message in messages)
    assert newest(tmp_path).step == 1


def different_steps(layout, root):
    weights, slots = make_state(1)
    with (
        Checkpoints(Path(root), layout) as checkpoints,
        pytest.raises(BurnishError),
    ):
        checkpoints.save(layout.rank, contents_of(weights, slots, layout))


def test_ranks_at_different_steps_are_stopped(tmp_path):
    run_ranks(different_steps, 2, str(tmp_path))


def load_damaged(layout, root):
    try:
        load_on_ranks(layout, root, 0)
    except CorruptError as error:
        return str(error)
    return None


def test_every_rank_learns_of_damage(tmp_path):
    run_ranks(save_on_ranks, 1, str(tmp_path))
    path = tmp_path / "step-00000001" / "training" / "exp_avg_sq.safetensors"
    flip(path, -4_500_000)
    messages = run_ranks(load_damaged, 2, str(tmp_path))
    assert all("exp_avg_sq.safetensors" in m and "head.weight" in m for m in messages)

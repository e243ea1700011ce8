"""Every kind of damage to the newest step: set aside with its name, the older step resumed, on all ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.checkpoints.states import (
    BIG_SHAPES,
    contents_of,
    fill_and_compare,
    make_state,
    save_once,
)
from support.faults.bit_flips import flip
from support.ranks.processes import RankFailed, run_ranks

from burnish.checkpoint.manager import Checkpoints
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, CorruptError
from burnish.files.storage import LocalStorage

FILES = [
    "COMMIT",
    "manifest.json",
    "state.json",
    "model/config.json",
    "model/model.safetensors",
    "training/residual.safetensors",
    "training/exp_avg.safetensors",
]


def flip_the_middle(path):
    flip(path, path.stat().st_size // 2)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path):
    path.write_bytes(b"")


def link(path):
    shutil.move(path, path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def make_directory(path):
    path.unlink()
    path.mkdir()


def swap(path):
    """The same file of the older step: a good file in the wrong place."""
    shutil.copy(str(path).replace("step-00000002", "step-00000001"), path)


DAMAGES = [flip_the_middle, truncate, lengthen, empty, link, make_directory, Path.unlink, swap]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        save_once(root, step, seed=step, state={"step": step})
    return root


def resume(root, seed):
    with Checkpoints(root, Layout()) as checkpoints:
        return checkpoints.resume(
            lambda step, source: fill_and_compare(source, *make_state(seed), Layout())
        )


# config.json is read by transformers: resuming checks its size, `ckpt verify` its content.
UNSEEN = {(flip_the_middle, "model/config.json"), (swap, "model/config.json")}
CASES = [(d, name) for d in DAMAGES for name in FILES if (d, name) not in UNSEEN]


@pytest.mark.parametrize(("damage", "name"), CASES, ids=[f"{d.__name__} {n}" for d, n in CASES])
def test_any_damage_to_any_file(tmp_path, two_steps, damage, name):
    root = tmp_path / "checkpoints"
    shutil.copytree(two_steps, root)
    damage(root / "step-00000002" / name)
    resumed = resume(root, seed=1)
    assert resumed.step.step == 1
    [reason] = resumed.skipped
    assert Path(name).name in reason
    if damage is flip_the_middle and name.startswith("training"):
        assert "head.weight" in reason or "scale" in reason or "layers" in reason
    assert (root / "quarantine" / "step-00000002").is_dir()
    assert not (root / "step-00000002").exists()


def test_a_file_in_the_place_of_a_step(tmp_path, two_steps):
    root = tmp_path / "checkpoints"
    shutil.copytree(two_steps, root)
    (root / "step-00000003").write_text("")
    assert resume(root, seed=2).step.step == 2
    assert (root / "quarantine" / "step-00000003").is_file()


def test_damage_that_resuming_does_not_read_is_told(tmp_path, two_steps, caplog):
    root = tmp_path / "checkpoints"
    shutil.copytree(two_steps, root)
    flip_the_middle(root / "step-00000002/model/config.json")
    assert resume(root, seed=2).step.step == 2
    [told] = [each for each in caplog.records if "config.json" in each.getMessage()]
    assert told.levelname == "WARNING"


def test_several_damaged_steps_are_skipped_newest_first(tmp_path):
    for step in (1, 2, 3):
        save_once(tmp_path, step, seed=step)
    flip(tmp_path / "step-00000003" / "training" / "exp_avg.safetensors")
    truncate(tmp_path / "step-00000002" / "model" / "model.safetensors")
    resumed = resume(tmp_path, seed=1)
    assert resumed.step.step == 1
    assert ["exp_avg" in reason for reason in resumed.skipped] == [True, False]


def test_a_name_that_is_taken_in_quarantine(tmp_path):
    save_once(tmp_path, 1, seed=1)
    for _ in range(2):
        flip(save_once(tmp_path, 2, seed=2) / "training" / "exp_avg.safetensors")
        assert resume(tmp_path, seed=1).step.step == 1
    names = sorted(path.name for path in (tmp_path / "quarantine").iterdir())
    assert names == ["step-00000002", "step-00000002.2"]


def save_big(layout, root):
    with Checkpoints(Path(root), layout) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, contents_of(*make_state(step, BIG_SHAPES), layout))


def resume_big(layout, root):
    def load(step, source):
        fill_and_compare(source, *make_state(step.step, BIG_SHAPES), layout)

    with Checkpoints(Path(root), layout) as checkpoints:
        try:
            resumed = checkpoints.resume(load)
        except CorruptError as error:
            return error.exit_code
    return resumed.step.step, resumed.skipped


def test_what_one_rank_finds_all_ranks_act_upon(tmp_path):
    run_ranks(save_big, 2, str(tmp_path))
    newest = tmp_path / "step-00000002" / "training" / "exp_avg.safetensors"
    flip(newest, -1000)
    (first, why), (second, why_there) = run_ranks(resume_big, 2, str(tmp_path))
    assert first == second == 1
    for reason in (*why, *why_there):
        assert "exp_avg.safetensors" in reason
        assert "head.weight" in reason or "scale" in reason or "layers" in reason
    empty(tmp_path / "step-00000001" / "COMMIT")
    assert run_ranks(resume_big, 2, str(tmp_path)) == [3, 3]
    assert run_ranks(resume_big, 2, str(tmp_path)) == [3, 3]  # never from the beginning


def resume_elsewhere(layout, root):
    storage = Blind() if layout.rank == 1 else LocalStorage()
    with Checkpoints(Path(root), layout, storage=storage) as checkpoints:
        checkpoints.resume(lambda step, source: None)


class Blind(LocalStorage):
    """The disk of a machine that does not share the directory."""

    def kind(self, path):
        return None


def test_a_step_that_one_rank_does_not_see_is_not_damaged(tmp_path):
    save_once(tmp_path, 1)
    with pytest.raises(RankFailed, match="step-00000001"):
        run_ranks(resume_elsewhere, 2, str(tmp_path))
    assert (tmp_path / "step-00000001").is_dir()
    assert resume_step(tmp_path) == 1


def resume_step(root):
    with Checkpoints(root, Layout()) as checkpoints:
        return checkpoints.resume(lambda step, source: None).step.step


def test_a_disk_that_cannot_be_read_now_condemns_no_step(tmp_path):
    class Unreadable(LocalStorage):
        def open(self, path, *, write=False):
            raise OSError(5, "Input/output error", str(path))

    save_once(tmp_path, 1)
    with Checkpoints(tmp_path, Layout(), storage=Unreadable()) as checkpoints:
        with pytest.raises(BurnishError) as caught:
            checkpoints.resume(lambda step, source: None)
        assert caught.value.exit_code == 1
    assert resume_step(tmp_path) == 1

"""Models that a run begins from and that lie in a step: every byte of theirs is looked at, and none of the rest."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints.states import save_once
from support.faults.bit_flips import flip
from support.ranks.processes import RankFailed, run_ranks

from burnish.distributed.layout import Layout
from burnish.errors import CorruptError
from burnish.runs.verify_inputs import Intact
from burnish.tracking.progress import Progress


def check(layout: Layout, place: str | None) -> None:
    Intact(layout, Progress(False)).require(place)


def test_a_damaged_model_is_named_with_its_tensors(tmp_path: Path) -> None:
    path = save_once(tmp_path, 1)
    flip(path / "training/exp_avg.safetensors")  # which a model to begin from does not need
    check(Layout(), str(path / "model"))
    flip(path / "model/model.safetensors")
    with pytest.raises(CorruptError, match=r"model/model\.safetensors") as caught:
        check(Layout(), str(path / "model"))
    assert caught.value.do


def test_what_one_rank_finds_all_ranks_hear(tmp_path: Path) -> None:
    path = save_once(tmp_path, 1)
    flip(path / "model/model.safetensors")
    with pytest.raises(RankFailed, match=r"model/model\.safetensors"):
        run_ranks(check, 2, str(path / "model"))


def check_on_a_machine_each(layout: Layout, place: str) -> None:
    """Each rank on a machine of its own, with a copy of its own."""
    check(replace(layout, local_rank=0, local_world=1), place.format(layout.rank))


def test_each_machine_reads_all_of_its_copy(tmp_path: Path) -> None:
    shutil.copytree(save_once(tmp_path / "0", 1), tmp_path / "1/step-00000001")
    place = str(tmp_path / "{}/step-00000001/model")
    run_ranks(check_on_a_machine_each, 2, place)
    for name in ("config.json", "model.safetensors"):
        file = Path(place.format(1), name)
        flip(file)
        with pytest.raises(RankFailed, match=f"model/{name}") as caught:
            run_ranks(check_on_a_machine_each, 2, place)
        assert caught.value.failures.keys() == {0, 1}
        flip(file)


@pytest.mark.parametrize("other", ["no step", "another step"])
def test_machines_with_different_models_are_refused_on_all(tmp_path: Path, other: str) -> None:
    path = save_once(tmp_path / "0", 1)
    if other == "no step":
        shutil.copytree(path / "model", tmp_path / "1/step-00000001/model")
    else:
        save_once(tmp_path / "1", 1, seed=1)
    place = str(tmp_path / "{}/step-00000001/model")
    with pytest.raises(RankFailed, match="step-00000001/model") as caught:
        run_ranks(check_on_a_machine_each, 2, place)
    assert caught.value.failures.keys() == {0, 1}


@pytest.mark.parametrize("link", ["best", "weights"])
def test_a_link_is_followed(tmp_path: Path, link: str) -> None:
    path = save_once(tmp_path, 1)
    flip(path / "model/model.safetensors")
    (tmp_path / "best").symlink_to(path.name)
    (tmp_path / "weights").symlink_to(path / "model")
    place = tmp_path / link
    with pytest.raises(CorruptError, match=r"model/model\.safetensors"):
        check(Layout(), str(place / "model" if link == "best" else place))


def test_an_unhealthy_step_is_refused(tmp_path: Path) -> None:
    path = save_once(tmp_path, 1, healthy=False)
    with pytest.raises(CorruptError, match="step-00000001"):
        check(Layout(), str(path / "model"))


def test_a_copy_without_the_rest_or_with_more_passes(tmp_path: Path) -> None:
    path = save_once(tmp_path, 1)
    shutil.rmtree(path / "training")
    (path / "state.json").unlink()
    (path / "model/.nfs0001").write_text("not committed")
    (path / "model/.cache").symlink_to(tmp_path)
    check(Layout(), str(path / "model"))


def test_a_file_of_the_model_that_is_not_there_or_not_as_long_is_named(tmp_path: Path) -> None:
    path = save_once(tmp_path, 1)
    config = path / "model/config.json"
    with config.open("a") as file:
        file.write(" ")
    with pytest.raises(CorruptError, match=r"model/config\.json"):
        check(Layout(), str(path / "model"))
    config.unlink()
    with pytest.raises(CorruptError, match=r"model/config\.json"):
        check(Layout(), str(path / "model"))
    config.symlink_to(path / "manifest.json")
    with pytest.raises(CorruptError, match=r"model/config\.json"):
        check(Layout(), str(path / "model"))


def test_no_model_is_not_the_directory_that_the_run_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_once(tmp_path, 1)
    flip(path / "model/model.safetensors")
    monkeypatch.chdir(path / "model")
    check(Layout(), None)
    with pytest.raises(CorruptError):
        check(Layout(), ".")


def test_any_other_place_passes(tmp_path: Path) -> None:
    path = save_once(tmp_path, 1)
    flip(path / "model/model.safetensors")
    (path / "model").rename(tmp_path / "model")
    for place in (None, str(tmp_path / "model"), str(path), str(tmp_path)):
        check(Layout(), place)

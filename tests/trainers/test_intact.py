"""Models that a run begins from and that lie in a step: every byte of theirs is looked at, and none of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints_for_tests import save_once
from distributed import RankFailed, run_ranks

from burnish.errors import CorruptError
from burnish.parallel.layout import Layout
from burnish.tracking.progress import Progress
from burnish.trainers.intact import require_intact


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def check(layout: Layout, place: str | None) -> None:
    require_intact(place, layout, Progress(False))


def test_a_damaged_model_is_named_with_its_tensors(tmp_path: Path) -> None:
    path = save_once(tmp_path, 1)
    flip(path / "training/exp_avg.safetensors")  # which a model to begin from does not need
    check(Layout(), str(path / "model"))
    flip(path / "model/model.safetensors")
    with pytest.raises(CorruptError, match=r"model/model\.safetensors is damaged") as caught:
        check(Layout(), str(path / "model"))
    assert "they hold" in str(caught.value)
    assert caught.value.do


def test_what_one_rank_finds_all_ranks_hear(tmp_path: Path) -> None:
    path = save_once(tmp_path, 1)
    flip(path / "model/model.safetensors")
    with pytest.raises(RankFailed, match=r"model/model\.safetensors is damaged"):
        run_ranks(check, 2, str(path / "model"))


def test_any_other_place_passes(tmp_path: Path) -> None:
    path = save_once(tmp_path, 1)
    flip(path / "model/model.safetensors")
    (path / "model").rename(tmp_path / "model")
    for place in (None, str(tmp_path / "model"), str(path), str(tmp_path)):
        check(Layout(), place)

"""A folder stands for the files that `datasets` takes from it, here and behind a URL."""

from __future__ import annotations

import itertools
import json
import logging
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pytest

import burnish
from burnish.config.schema import RunConfig
from burnish.data.entries import entry_files
from burnish.data.sources import load_rows
from burnish.data.splits import folder_files
from burnish.data.streaming import open_rows
from burnish.errors import BurnishError, MissingError, UsageError
from burnish.files.remote import Remote
from burnish.methods.table import METHODS
from burnish.runs.preflight import require_inputs

CARD = """---
configs:
- config_name: easy
  default: true
  data_files:
  - split: train
    path: parts/a*.jsonl
  - split: test
    path: parts/b*.jsonl
- config_name: hard
  data_files: parts/c.jsonl
---
# Sums
"""
LAYOUTS = [
    ["train.jsonl", "test.jsonl"],
    ["train/a.jsonl", "test/b.jsonl", "notes.jsonl"],
    ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl"],
    ["data/odd-00000-of-00001.jsonl", "data/train-00000-of-00001.jsonl"],
    ["sums_test_1.csv", "sums_train_1.csv", "sums_dev_1.csv"],
    ["my-train.jsonl", "my-eval.jsonl"],
    ["training.jsonl", "testing.jsonl", "valid.jsonl"],
    ["en/train/a.jsonl", "en/val/b.jsonl", "de/train/c.jsonl"],
    ["evaluation.jsonl", "train-1.jsonl", "train-2.jsonl", "extra.jsonl"],
    ["b.jsonl", "a.jsonl", "latest.jsonl", "deep/c.jsonl", ".hidden.jsonl", "__old/a.jsonl"],
    ["train.jsonl", "config.json", "LICENSE"],
    ["test.jsonl"],
]  # fmt: skip
number = itertools.count()


def fill(folder: Path, names: list[str]) -> Path:
    """Each file has one row, with its own name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {".csv": f"x\n{name}\n", ".jsonl": json.dumps({"x": name}) + "\n"}
        path.write_text(row.get(path.suffix, "{}"))
    return folder


def saved(folder: Path, values: list[Any], **how: Any) -> Path:
    datasets.Dataset.from_list([{"x": value} for value in values]).save_to_disk(folder, **how)
    return folder


def read(path: Path | str, setting: str = "data.train") -> list[Any] | None:
    """The column x; None where a split is missing."""
    try:
        rows = load_rows([str(path)], setting)
    except MissingError:
        return None
    return rows.column("x")


def remote_copy(folder: Path) -> Remote:
    remote = Remote(f"memory://folder {next(number)}")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            remote.put_file(path.relative_to(folder).as_posix(), path)
    return remote


@pytest.mark.parametrize("names", LAYOUTS, ids=lambda names: names[0])
def test_a_folder_has_the_splits_of_datasets(tmp_path: Path, names: list[str]) -> None:
    """Also behind a URL, and streamed; a folder without names of splits serves both settings."""
    folder = fill(tmp_path / "rows", names)
    loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "oracle"))
    train = list(loaded["train"]["x"]) if "train" in loaded else None
    held_out = next((list(loaded[n]["x"]) for n in ("validation", "test") if n in loaded), None)
    if "latest.jsonl" in names:  # no name of a split
        held_out = train
    remote = remote_copy(folder)
    for setting, wanted in (("data.train", train), ("data.validation", held_out)):
        assert read(folder, setting) == wanted
        if wanted is None:
            with pytest.raises(MissingError):
                folder_files(str(remote.url), setting)
            continue
        far = folder_files(str(remote.url), setting).selected.files
        here = entry_files(str(folder), setting).files
        assert [file.name for file in far] == [p.relative_to(folder).as_posix() for p in here]
        if all(path.suffix == ".jsonl" for path in here):
            rows = open_rows([str(folder)], setting, 1 << 20, seed=0, shuffle=False)
            assert [rows[i]["x"] for i in range(len(rows.window(0)))] == wanted


def test_what_is_left_out_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = fill(tmp_path / "rows", ["train.jsonl", "test.jsonl", "extra.jsonl"])
    assert read(folder) == ["train.jsonl"]
    (line,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "test.jsonl" in line.message
    assert "extra.jsonl" in line.message
    assert folder_files(str(remote_copy(folder).url), "data.train").notice


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["train.jsonl", "test.jsonl"], "*.jsonl"),
        (["a/x_eval.jsonl", "a/y.jsonl"], "**/*.jsonl"),
        (["A.jsonl", "TEST.jsonl"], ""),
        (["train/a.jsonl", "train/val/b.jsonl"], ""),
    ],
)
def test_held_out_names_among_the_files_to_train_on_are_named(
    tmp_path: Path, names: list[str], pattern: str
) -> None:
    """A pattern says what it says, and `datasets` tells upper from lower case."""
    folder = fill(tmp_path / "rows", names)
    files, notice = entry_files(str(folder / pattern), "data.train")
    assert len(files) == 2
    assert any(name in notice for name in names)
    assert not entry_files(str(folder / pattern), "data.validation").notice or not pattern


def test_a_file_that_is_named_itself_is_read(tmp_path: Path, caplog: Any) -> None:
    folder = fill(tmp_path / "rows", ["train.jsonl", "test.jsonl"])
    assert read(folder / "test.jsonl") == ["test.jsonl"]
    assert read(f"{folder}:test") == ["test.jsonl"]
    assert folder_files(f"{remote_copy(folder).url}:test", "data.train").selected.files[0].name == "test.jsonl"  # fmt: skip
    assert not caplog.records


def test_a_card_of_a_clone_names_subsets_and_splits(tmp_path: Path) -> None:
    folder = fill(tmp_path / "rows", ["parts/a1.jsonl", "parts/a2.jsonl", "parts/b.jsonl", "parts/c.jsonl"])  # fmt: skip
    (folder / "README.md").write_text(CARD)
    for name, split in (("easy", "train"), ("easy", "test"), ("hard", "train")):
        wanted = datasets.load_dataset(
            str(folder), name, split=split, cache_dir=str(tmp_path / "oracle")
        )
        assert read(f"{folder}:{name}/{split}") == list(wanted["x"])
    assert read(folder) == ["parts/a1.jsonl", "parts/a2.jsonl"]
    assert read(folder, "data.validation") == ["parts/b.jsonl"]
    assert read(f"{folder}:hard") == ["parts/c.jsonl"]
    assert read(f"{folder}:test") == ["parts/b.jsonl"]
    assert read(f"{folder}:other/test") is None
    (folder / "README.md").write_text(CARD.replace("parts/b*.jsonl", "../b.jsonl"))
    with pytest.raises(MissingError):
        entry_files(str(folder), "data.train")


def test_kinds_of_file_may_differ_between_splits_but_not_in_one(tmp_path: Path) -> None:
    folder = fill(tmp_path / "rows", ["train.jsonl", "test.csv"])
    assert read(folder) == ["train.jsonl"]
    assert read(folder, "data.validation") == ["test.csv"]
    fill(folder, ["train-2.csv"])
    with pytest.raises(UsageError):
        read(folder)


def test_a_missing_split_is_refused_before_the_run(tmp_path: Path) -> None:
    folder = fill(tmp_path / "rows", ["test.jsonl"])
    config = RunConfig.model_validate({"data": {"train": [str(folder)]}})
    with pytest.raises(BurnishError, match=r"rows:test"):
        require_inputs(config, METHODS["sft"])


def test_a_saved_dataset_is_read_exactly(tmp_path: Path) -> None:
    """As it was saved last, although more files lie there."""
    folder = saved(tmp_path / "saved", [[1, 2], [], [3]], num_shards=3)
    assert read(folder) == read(folder, "data.validation") == [[1, 2], [], [3]]
    saved(folder, [[9], [8]], num_shards=2)
    wanted = datasets.load_from_disk(folder)
    rows = load_rows([str(folder)])
    assert rows.span(0, len(rows)) == wanted.to_list() == [{"x": [9]}, {"x": [8]}]
    digest = rows.digest
    assert load_rows([str(folder)]).digest == digest
    saved(folder, [[9], [7]], num_shards=2)
    assert load_rows([str(folder)]).digest != digest


def test_saved_types_stay_and_a_shuffled_selection_too(tmp_path: Path) -> None:
    names = datasets.Features(
        {"x": datasets.ClassLabel(names=["no", "yes"]), "y": datasets.Value("date32")}
    )
    days = [date(2026, 1, day) for day in (1, 2, 3)]
    rows = datasets.Dataset.from_dict({"x": [0, 1, 1], "y": days}, features=names)
    rows.select([2, 0]).with_format("numpy").save_to_disk(tmp_path / "saved")
    found = load_rows([str(tmp_path / "saved")])
    assert found.span(0, 2) == [{"x": 1, "y": days[2]}, {"x": 0, "y": days[0]}]
    assert found.table.features == names


def test_a_saved_dict_has_its_splits(tmp_path: Path) -> None:
    """Whatever they are called; and one that was saved split by split."""
    parts = {
        name: datasets.Dataset.from_list([{"x": name}])
        for name in ("train", "test", "train_extra", "odd")
    }
    folder = tmp_path / "saved"
    datasets.DatasetDict(parts).save_to_disk(folder)
    remote = remote_copy(folder)
    for setting, split in (("data.train", "train"), ("data.validation", "test")):
        assert read(folder, setting) == [split]
        names = [file.name for file in folder_files(str(remote.url), setting).selected.files]
        assert names == [f"{split}/data-00000-of-00001.arrow"]
    assert read(f"{folder}:odd") == read(folder / "odd") == ["odd"]
    assert read(f"{folder}:none") is None
    datasets.DatasetDict({"odd": parts["odd"]}).save_to_disk(tmp_path / "other")
    assert read(tmp_path / "other") is None
    for split in ("train", "test"):
        parts[split].save_to_disk(tmp_path / "by hand" / split)
    assert read(tmp_path / "by hand") == ["train"]
    assert read(tmp_path / "by hand", "data.validation") == ["test"]


def test_an_incomplete_saved_dataset_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", [1, 2], num_shards=2)
    remote = remote_copy(folder)
    remote.remove("data-00001-of-00002.arrow")
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UsageError, match=r"data-00001-of-00002\.arrow"):
        read(folder)
    with pytest.raises(UsageError, match=r"data-00001-of-00002\.arrow"):
        folder_files(str(remote.url), "data.train")
    (folder / "state.json").write_text("{")
    with pytest.raises(UsageError, match=r"state\.json"):
        read(folder)


def test_arrow_files_cannot_be_streamed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", [1, 2])
    with pytest.raises(UsageError, match=r"data\.streaming"):
        open_rows([str(folder)], "data.train", 1 << 20, seed=0, shuffle=False)


def test_linked_folders_are_followed_and_circles_end(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere", ["a.jsonl"])
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train").symlink_to(tmp_path / "elsewhere")
    (folder / "again").symlink_to(folder)
    assert [path.name for path in entry_files(str(folder), "data.train").files] == ["a.jsonl"]


def test_compressed_files_are_named(tmp_path: Path) -> None:
    for names in (["a.jsonl", "b.jsonl.gz"], ["train.jsonl", "train-2.csv.zst"]):
        folder = fill(tmp_path / names[0], names)
        files, notice = entry_files(str(folder), "data.train")
        assert [path.name for path in files] == names[:1]
        assert names[1] in notice
    with pytest.raises(UsageError, match="compressed"):
        entry_files(str(fill(tmp_path / "packed", ["train.jsonl.gz"])), "data.train")


def test_data_sets_of_python_are_kept_by_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they came about; so that the next start goes on with the same data."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    parts = {
        name: datasets.Dataset.from_list([{"x": f"{name} {i}"} for i in range(3)])
        for name in ("train", "test")
    }
    both = datasets.DatasetDict(parts)
    config = burnish.load_config({"data": {"train": parts["train"]}}, data={"validation": both})
    assert read(config.data.train[0]) == list(parts["train"]["x"])
    assert read(config.data.validation[0], "data.validation") == list(parts["test"]["x"])
    shuffled = parts["train"].select([2, 1, 0])
    again = burnish.load_config({}, **{"data.train": [shuffled.select([2, 1, 0]), shuffled]})
    assert again.data.train[0] == config.data.train[0] != again.data.train[1]
    assert len(list((tmp_path / "cache/datasets").iterdir())) == 3


def test_data_sets_that_cannot_be_kept_are_refused() -> None:
    rows = datasets.Dataset.from_list([{"x": 1}])
    with pytest.raises(UsageError, match=r"data\.train.*IterableDataset"):
        burnish.load_config({}, data={"train": rows.to_iterable_dataset()})
    with pytest.raises(MissingError, match="odd"):
        burnish.load_config({}, data={"train": datasets.DatasetDict({"odd": rows})})

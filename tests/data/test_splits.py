"""Which files of a data set on the hub are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.services.hub import HubServer, hub_variables, running_hub

from burnish.data.splits import split_files
from burnish.errors import MissingError, UsageError
from burnish.files.hub import HubPlace
from burnish.files.hub_files import HubFiles

CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# Sums
"""
REPOSITORIES = {
    "datasets/me/card": {
        "README.md": CARD,
        "main/train-0.parquet": b"1",
        "main/train-1.parquet": b"22",
        "main/test-0.parquet": b"333",
        "socratic/train-0.parquet": b"4444",
    },
    "datasets/me/plain": {"train.jsonl": b"{}\n", "dev.jsonl": b"{}\n\n", "LICENSE": b""},
    "datasets/me/table": {"train.txt": b"a\n1\n"},
    "datasets/me/nothing": {"README.md": b"# Empty"},
    "models/me/model": {"config.json": b"{}", "rows/a.jsonl": b"{}"},
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    home = str(tmp_path_factory.mktemp("home"))
    with (
        running_hub(REPOSITORIES) as server,
        hub_variables(HF_ENDPOINT=server.url, HF_HOME=home, HF_HUB_OFFLINE="0"),
    ):
        yield server


def files(text: str, setting: str = "data.train") -> dict[str, int]:
    place = HubPlace.of(text, "dataset")
    assert place is not None
    return split_files(HubFiles.of(place), setting)


@pytest.mark.parametrize(
    ("text", "setting", "wanted"),
    [
        ("me/card", "data.train", {"main/train-0.parquet": 1, "main/train-1.parquet": 2}),
        ("me/card", "data.validation", {"main/test-0.parquet": 3}),
        ("me/card:socratic", "data.train", {"socratic/train-0.parquet": 4}),
        ("me/card:main/test", "data.train", {"main/test-0.parquet": 3}),
        ("me/card:test", "data.train", {"main/test-0.parquet": 3}),
        ("me/card@main:socratic/train", "data.train", {"socratic/train-0.parquet": 4}),
        ("me/plain", "data.train", {"train.jsonl": 3}),
        ("me/plain", "data.validation", {"dev.jsonl": 4}),
        ("hf://datasets/me/card", "data.validation", {"main/test-0.parquet": 3}),
        ("hf://datasets/me/card/socratic", "data.train", {"socratic/train-0.parquet": 4}),
        ("hf://datasets/me/card/*/test-*", "data.train", {"main/test-0.parquet": 3}),
        ("hf://datasets/me/plain/dev.jsonl", "data.train", {"dev.jsonl": 4}),
        ("hf://me/model/rows", "data.train", {"rows/a.jsonl": 2}),
    ],
)
def test_a_place_stands_for_files(
    hub: HubServer, text: str, setting: str, wanted: dict[str, int]
) -> None:
    assert files(text, setting) == wanted


@pytest.mark.parametrize(
    ("text", "setting", "kind", "named"),
    [
        ("me/card:socratic", "data.validation", MissingError, "socratic/train"),
        ("me/card:other/train", "data.train", MissingError, "main, socratic"),
        ("me/card:dev", "data.train", MissingError, "train, test"),
        ("me/plain:test", "data.train", MissingError, "train, validation"),
        ("me/nothing", "data.train", MissingError, "me/nothing"),
        ("me/table", "data.train", UsageError, "train.txt"),
        ("hf://datasets/me/card/none/*.parquet", "data.train", MissingError, "main/train-0"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(
    hub: HubServer, text: str, setting: str, kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named):
        files(text, setting)


def test_without_a_network_the_cache_knows_the_splits(hub: HubServer, tmp_path: Path) -> None:
    wanted = files("me/card:socratic")
    with hub_variables(HF_HUB_OFFLINE="1"):
        assert files("me/card:socratic") == wanted

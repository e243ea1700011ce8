from __future__ import annotations

import glob
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.services.s3 import S3Server

from burnish.errors import MissingError
from burnish.files.remote import Remote
from burnish.files.remote_copy import select

number = itertools.count()
TREE = (
    "a.jsonl", "b.jsonl", "c.txt", ".hidden.jsonl", "[x].jsonl", "deep/a.jsonl", "deep/er/b.jsonl",
    "deep/.not/c.jsonl", "deepest/a.jsonl",
)  # fmt: skip


def is_data(name: str) -> bool:
    return name.endswith(".jsonl") and not name.startswith(".")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for name in TREE:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def found(url: str) -> list[str]:
    selection = select(Remote(url), is_data)
    root = selection.remote.url.path
    return sorted(f"/{root}/{file.name}" for file in selection.files)


def test_a_file_is_itself(tree: Path) -> None:
    assert found(f"file://{tree}/c.txt") == [f"{tree}/c.txt"]
    assert found(f"file://{tree}/[x].jsonl") == [f"{tree}/[x].jsonl"]


@pytest.mark.parametrize("end", ["", "/", "//"])
def test_a_directory_is_what_is_wanted_directly_in_it(tree: Path, end: str) -> None:
    names = ["[x].jsonl", "a.jsonl", "b.jsonl"]
    assert found(f"file://{tree}{end}") == [f"{tree}/{name}" for name in names]


PARTS = st.sampled_from(["*", "**", "d*", "?.jsonl", "*.jsonl", "[ab].*", "deep", "er", ".*"])


@given(pattern=st.lists(PARTS, min_size=1, max_size=4).map("/".join))
def test_patterns_find_what_they_find_on_this_machine(tree: Path, pattern: str) -> None:
    expected = sorted(
        name for name in glob.glob(f"{tree}/{pattern}", recursive=True) if Path(name).is_file()
    )
    if glob.has_magic(pattern):
        try:
            assert found(f"file://{tree}/{pattern}") == sorted(set(expected))
        except MissingError:
            assert expected == []


def test_patterns_on_an_object_store(s3_server: S3Server) -> None:
    bucket = s3_server.make_bucket(f"select-{next(number)}")
    remote = Remote(bucket)
    for name in TREE:
        remote.put(name, b"")
    names = [file.name for file in select(Remote(f"{bucket}/deep/**/*.jsonl"), is_data).files]
    assert names == ["a.jsonl", "er/b.jsonl"]
    names = [file.name for file in select(Remote(f"{bucket}/?.jsonl"), is_data).files]
    assert names == ["a.jsonl", "b.jsonl"]
    names = [file.name for file in select(Remote(f"{bucket}/deep/"), is_data).files]
    assert names == ["a.jsonl"]


@pytest.mark.parametrize("path", ["none", "d*/none*"])
def test_nothing_that_matches_is_an_error(tree: Path, path: str) -> None:
    with pytest.raises(MissingError):
        select(Remote(f"file://{tree}/{path}"), is_data)


def test_a_directory_without_data_says_what_it_has(tree: Path) -> None:
    with pytest.raises(MissingError) as caught:
        select(Remote(f"file://{tree}"), lambda name: False)
    assert "c.txt" in str(caught.value.have)

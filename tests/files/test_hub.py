from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, running_hub

from burnish.errors import CorruptError, MissingError, UsageError
from burnish.files.cache import copied, select
from burnish.files.remote import Remote, RetryPolicy

MODEL = {
    "config.json": b"{}",
    "model.safetensors": os.urandom((9 << 20) + 5),
    "nested/a file.txt": b"nested",
}
DATA = {"data/train-0.jsonl": b"{}\n", "data/train-1.jsonl": b"{}\n{}\n", "README.md": b"#"}
QUICK = RetryPolicy(tries=4, seconds=30, first_pause=0.02, longest_pause=0.1)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    repositories = {"models/me/tiny": dict(MODEL), "datasets/me/sums": dict(DATA)}
    repositories["models/me/gated"] = dict(MODEL)
    with running_hub(repositories, gated="models/me/gated") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
        yield server


@pytest.mark.parametrize("revision", ["", "@main"])
def test_a_model_is_listed_and_copied(hub: HubServer, revision: str) -> None:
    remote = Remote(f"hf://me/tiny{revision}", QUICK)
    assert [(file.name, file.size) for file in remote.files()] == [
        (name, len(data)) for name, data in sorted(MODEL.items())
    ]
    assert remote.names() == ["config.json", "model.safetensors", "nested"]
    assert remote.stat("nested") is remote.stat("none") is remote.stat() is None
    assert remote.stat("config.json") == remote.files()[0]
    folder = copied(select(remote, lambda name: True, deep=True))
    for name, data in MODEL.items():
        assert (folder / name).read_bytes() == data


def test_ranges_are_read_and_nothing_beside_them(hub: HubServer) -> None:
    remote, content = Remote("hf://me/tiny", QUICK), MODEL["model.safetensors"]
    for offset, size in ((0, 1), (5 << 20, 1000), (len(content) - 7, 7)):
        hub.asked.clear()
        buffer = bytearray(size)
        remote.read_into("model.safetensors", buffer, offset)
        assert buffer == content[offset : offset + size]
        ranges = [each for path, each in hub.asked if "resolve" in path and each]
        assert ranges == [f"bytes={offset}-{offset + size - 1}"]
    for offset in (len(content) - 1, len(content) + 5):
        with pytest.raises(CorruptError):
            remote.read_into("model.safetensors", bytearray(10), offset)


def test_a_pattern_selects_files_of_a_data_set(hub: HubServer) -> None:
    selected = select(Remote("hf://datasets/me/sums/data/*.jsonl", QUICK), lambda name: True)
    assert [file.name for file in selected.files] == ["train-0.jsonl", "train-1.jsonl"]
    assert (copied(selected) / "train-1.jsonl").read_bytes() == DATA["data/train-1.jsonl"]
    only = select(Remote("hf://datasets/me/sums/data/train-0.jsonl", QUICK), lambda name: True)
    assert [file.name for file in only.files] == ["train-0.jsonl"]


def test_another_content_is_another_version(hub: HubServer) -> None:
    remote = Remote("hf://me/tiny", QUICK)
    before = remote.stat("config.json")
    hub.repositories["models/me/tiny"]["config.json"] = b"[]"
    assert before.version not in ("", remote.stat("config.json").version)


def test_a_service_that_fails_for_a_moment_is_asked_again(hub: HubServer) -> None:
    hub.failures = 2
    assert Remote("hf://me/tiny", QUICK).read("config.json", 10) == b"{}"


@pytest.mark.parametrize("url", ["hf://me/tiny@other", "hf://me/tiny/none.json"])
def test_what_is_not_there_is_missing(hub: HubServer, url: str) -> None:
    with pytest.raises(MissingError):
        select(Remote(url, QUICK), lambda name: True)
    assert Remote(url).stat("config.json") is None


def test_what_may_not_be_read_names_the_variable_to_set(hub: HubServer) -> None:
    patient = RetryPolicy(first_pause=300)
    for call in (
        lambda: Remote("hf://me/gated", patient).read("config.json", 10),
        lambda: Remote("hf://me/private", patient).stat("config.json"),
        lambda: Remote("hf://me/private", patient).names(),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert "HF_TOKEN" in (caught.value.do or "")


def test_it_is_only_read(hub: HubServer, tmp_path: Path) -> None:
    remote = Remote("hf://me/tiny", QUICK)
    for change in (
        lambda: remote.put("file", b""),
        lambda: remote.put_file("file", tmp_path),
        lambda: remote.remove("config.json"),
        lambda: remote.remove_below("nested"),
        lambda: remote.connect(write=True),
    ):
        with pytest.raises(UsageError):
            change()
    assert len(hub.asked) == 0

"""Places of the Hugging Face Hub, against a service on loopback and a cache of the test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.services.hub import TOKEN, HubServer, hub_variables, running_hub

from burnish.errors import BurnishError, CorruptError, MissingError, UsageError
from burnish.files import hub as hubs
from burnish.files import hub_files
from burnish.files.hub import HubPlace
from burnish.files.hub_files import HubFiles
from burnish.files.remote import RetryPolicy

MODEL = {
    "config.json": b"{}",
    "model.safetensors": os.urandom((1 << 20) + 5),
    "pytorch_model.bin": b"a pickle",
    "nested/a [file].txt": b"nested",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setattr(hub_files, "_POLICY", RetryPolicy(tries=3, first_pause=0.01, silence=1e6))
    repositories = {"models/me/tiny": dict(MODEL), "models/me/other": dict(MODEL)}
    with (
        running_hub(repositories) as server,
        hub_variables(HF_ENDPOINT=server.url, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0"),
    ):
        yield server


def place(text: str, kind: hubs.Kind = "model") -> HubPlace:
    found = HubPlace.of(text, kind)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "kind", "wanted"),
    [
        ("Qwen/Qwen3-0.6B", "model", HubPlace("model", "Qwen/Qwen3-0.6B")),
        ("a/b@main", "model", HubPlace("model", "a/b", "main")),
        ("a/b@refs/pr/1", "model", HubPlace("model", "a/b", "refs/pr/1")),
        ("openai/gsm8k", "dataset", HubPlace("dataset", "openai/gsm8k")),
        ("a/b:main/train", "dataset", HubPlace("dataset", "a/b", "", "main/train")),
        ("a/b@v1:test", "dataset", HubPlace("dataset", "a/b", "v1", "test")),
        ("hf://a/b", "model", HubPlace("model", "a/b", is_url=True)),
        ("hf://a/b@v1/c/d", "model", HubPlace("model", "a/b", "v1", "", "c/d", is_url=True)),
        (
            "hf://datasets/a/b@refs/convert/parquet/x/*.parquet",
            "dataset",
            HubPlace("dataset", "a/b", "refs/convert/parquet", "", "x/*.parquet", is_url=True),
        ),
        ("gpt2", "model", HubPlace("model", "gpt2")),
        ("imdb:plain_text/train", "dataset", HubPlace("dataset", "imdb", "", "plain_text/train")),
        ("train.jsonl", "dataset", None),
        ("mo.del", "model", None),
        (".", "model", None),
        ("", "model", None),
        ("./a/b", "model", None),
        ("/a/b", "model", None),
        ("~/b", "model", None),
        ("a/b/c", "model", None),
        ("a/b:main", "model", None),
        ("a/train.jsonl", "dataset", None),
        ("a/*.jsonl", "dataset", None),
        ("s3://a/b", "model", None),
        ("memory://a/b", "dataset", None),
    ],
)
def test_what_is_an_id(text: str, kind: hubs.Kind, wanted: HubPlace | None) -> None:
    found = HubPlace.of(text, kind)
    assert found == wanted
    assert found is None or HubPlace.of(str(found), kind) == found


@pytest.mark.parametrize("text", ["hf://", "hf://a", "hf://datasets/a/b", "hf://token@a/b"])
def test_a_url_that_names_no_model_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        HubPlace.of(text, "model")


def test_what_exists_here_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me/tiny").mkdir(parents=True)
    assert HubPlace.of("me/tiny", "model") is None
    assert HubPlace.of("me/other", "model") is not None


def test_files_come_once_and_then_from_the_cache(hub: HubServer) -> None:
    pinned = HubFiles.of(place("me/tiny"))
    assert pinned.place.commit == hub.commit("models/me/tiny")
    assert pinned.files() == {name: len(data) for name, data in MODEL.items()}
    assert pinned.names() == ["config.json", "model.safetensors", "pytorch_model.bin"]
    wanted = ["config.json", "model.safetensors", "nested/a [file].txt"]
    root = pinned.fetch(wanted)
    assert {name: (root / name).read_bytes() for name in wanted} == {n: MODEL[n] for n in wanted}
    assert not (root / "pytorch_model.bin").exists()
    hub.asked.clear()
    assert HubFiles.of(place("me/tiny")) == pinned
    assert pinned.fetch(wanted) == root
    assert HubFiles.of(place("hf://me/tiny/nested")).file("a [file].txt").read_bytes() == b"nested"
    assert hub.asked == []


def test_a_range_of_a_file_that_the_cache_has_in_part_is_refused(hub: HubServer) -> None:
    pinned = HubFiles.of(place("me/tiny"))
    file = pinned.fetch(["model.safetensors"]) / "model.safetensors"
    got = memoryview(bytearray(90))
    pinned.read_into(file.name, got, 5)
    assert got == MODEL[file.name][5:95]
    os.truncate(file, 50)
    with pytest.raises(CorruptError):
        pinned.read_into(file.name, got, 5)


def test_the_oldest_ids_have_no_owner(hub: HubServer) -> None:
    hub.moved["models/gpt2"] = "models/me/tiny"
    pinned = HubFiles.of(place("gpt2"))
    assert pinned.place == HubPlace("model", "gpt2", str(hub.commit("models/me/tiny")))
    assert pinned.file("model.safetensors").read_bytes() == MODEL["model.safetensors"]
    hub.asked.clear()
    assert HubFiles.of(place("gpt2")).file("config.json").read_bytes() == b"{}"
    assert hub.asked == []


def test_a_revision_that_moves_leaves_a_commit_as_it_is(hub: HubServer) -> None:
    first = HubFiles.of(place("me/tiny"))
    hub.repositories["models/me/tiny"] = MODEL | {"config.json": b"[]"}
    hub.branches["models/me/tiny", "refs/pr/1"] = {"config.json": b"[1]"}
    assert first.file("config.json").read_bytes() == b"{}"
    assert HubFiles.of(place("me/tiny@refs/pr/1")).file("config.json").read_bytes() == b"[1]"
    assert (
        HubFiles.of(place("me/tiny")).file("config.json").read_bytes() == b"{}"
    )  # as the cache knows it
    later = HubFiles.of(place(f"me/tiny@{hub.commit('models/me/tiny')}"))
    assert later.file("config.json").read_bytes() == b"[]"


def test_without_a_network_the_cache_serves(hub: HubServer) -> None:
    root = HubFiles.of(place("me/tiny")).fetch(["config.json", "model.safetensors"])
    hub.asked.clear()
    with hub_variables(HF_HUB_OFFLINE="1"):
        assert HubFiles.of(place("me/tiny")).fetch(["config.json", "model.safetensors"]) == root
        for absent in ("me/tiny@v2", "me/other"):
            with pytest.raises(MissingError, match="HF_HUB_OFFLINE"):
                HubFiles.of(place(absent))
        with pytest.raises(MissingError, match="HF_HUB_OFFLINE"):
            HubFiles.of(place("me/tiny")).fetch(["pytorch_model.bin"])
    assert hub.asked == []


def test_a_cache_that_has_no_list_of_files_serves(hub: HubServer, tmp_path: Path) -> None:
    """What downloads single files leaves such a cache."""
    repository = tmp_path / "hub" / "models--me--single"
    root = repository / "snapshots" / ("1" * 40)
    for path, text in ((repository / "refs" / "main", root.name), (root / "config.json", "{}")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    with hub_variables(HF_HUB_OFFLINE="1"):
        assert HubFiles.of(place("me/single")).fetch(["config.json"]) == root


def test_a_service_that_is_away_leaves_the_cache(hub: HubServer) -> None:
    root = HubFiles.of(place("me/tiny")).fetch(["config.json"])
    with hub_variables(HF_ENDPOINT="http://127.0.0.1:9"):
        assert HubFiles.of(place("me/tiny")).fetch(["config.json"]) == root
        with pytest.raises(MissingError, match=r"127\.0\.0\.1:9"):
            HubFiles.of(place("me/other"))


def test_what_may_pass_is_tried_again(hub: HubServer) -> None:
    hub.failures = 2
    pinned = HubFiles.of(place("me/tiny"))
    hub.cuts = 1
    root = pinned.fetch(["model.safetensors"])
    assert (root / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    hub.failures = 1000
    with pytest.raises(BurnishError):
        HubFiles.of(place("me/other"))


@pytest.mark.parametrize(
    "content", [b"short", MODEL["model.safetensors"][::-1]], ids=["short", "other"]
)
def test_a_file_with_another_content_is_refused_and_not_kept(
    hub: HubServer, content: bytes
) -> None:
    pinned = HubFiles.of(place("me/tiny"))
    hub.wrong["model.safetensors"] = content
    with pytest.raises(BurnishError):
        pinned.fetch(["model.safetensors"])
    hub.wrong.clear()
    root = pinned.fetch(["model.safetensors"])
    assert (root / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


def test_a_small_file_with_another_content_is_refused(hub: HubServer) -> None:
    hub.wrong["nested/a [file].txt"] = b"desten"
    with pytest.raises(CorruptError):
        HubFiles.of(place("hf://me/tiny/nested")).file("a [file].txt")


@pytest.mark.parametrize(
    ("text", "kind", "named"),
    [
        ("me/nobody", MissingError, "me/nobody"),
        ("me/tiny@v9", MissingError, "v9"),
        ("me/secret", MissingError, "HF_TOKEN"),
        ("me/gated", UsageError, "terms"),
    ],
)
def test_a_refusal_says_what_to_do(
    hub: HubServer, text: str, kind: type[BurnishError], named: str
) -> None:
    hub.repositories |= {"models/me/secret": dict(MODEL), "models/me/gated": dict(MODEL)}
    hub.private, hub.gated = "models/me/secret", "models/me/gated"
    with pytest.raises(kind, match=named):
        HubFiles.of(place(text)).file("config.json")


def test_a_token_opens_what_is_private(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.private = "models/me/tiny"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert HubFiles.of(place("me/tiny")).file("config.json").read_bytes() == b"{}"

"""COMMIT and manifest: what is read is what was written, and nothing else is."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.checkpoint.manifest import (
    BLOCK_BYTES,
    Commit,
    FileRecord,
    Manifest,
    parse_commit,
    parse_manifest,
    record_of,
    sha256,
)
from burnish.errors import CorruptError, IncompatibleError
from burnish.files.strict_json import encode_json


def sealed(manifest):
    data = manifest.encode()
    commit = Commit("0.1", manifest.uuid, manifest.step, sha256(data), manifest.total_bytes, True)
    return data, commit


FILES = {"model/model.safetensors": record_of(b"x" * 5000), "state.json": record_of(b"{}")}
MANIFEST = Manifest("ab12", 7, 2, FILES)


def test_round_trip():
    data, commit = sealed(MANIFEST)
    assert parse_commit(commit.encode(), "COMMIT") == commit
    assert parse_manifest(data, commit, "manifest") == MANIFEST


@given(st.data())
def test_every_flipped_bit_of_either_is_found(data):
    manifest, commit = sealed(MANIFEST)
    encoded = bytearray(commit.encode())
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptError, match="COMMIT"):
        parse_commit(bytes(encoded), "COMMIT")
    changed = bytearray(manifest)
    bit = data.draw(st.integers(0, 8 * len(changed) - 1))
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptError, match="not the one that was committed"):
        parse_manifest(bytes(changed), commit, "manifest")


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises(CorruptError):
        parse_commit(noise, "COMMIT")


def forged(change):
    """A manifest changed by `change`, with a COMMIT that fits it."""
    value = json.loads(MANIFEST.encode())
    change(value)
    data = encode_json(value)
    return data, Commit("0.1", "ab12", 7, sha256(data), MANIFEST.total_bytes, True)


def rename(path):
    def change(value):
        value["files"] = {path: value["files"]["state.json"]}

    return change


@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/passwd", "a/../b", "a//b", "./a", "a/", "", "a\\b", "a\0b", "..", "."],
)
def test_paths_that_leave_the_step_are_refused(path):
    data, commit = forged(rename(path))
    with pytest.raises(CorruptError, match="path outside"):
        parse_manifest(data, commit, "manifest")


def set_field(name, field, new):
    return lambda value: value["files"][name].update({field: new})


@pytest.mark.parametrize(
    "change",
    [
        set_field("state.json", "size", -1),
        set_field("state.json", "size", True),
        set_field("state.json", "size", 1 << 70),
        set_field("state.json", "block_bytes", 0),
        set_field("state.json", "block_bytes", 1 << 40),
        set_field("state.json", "blocks", []),
        set_field("state.json", "blocks", ["zz" * 16]),
        set_field("state.json", "blocks", [5]),
        set_field("state.json", "more", 1),
        lambda value: value["files"].update({"state.json": 5}),
        lambda value: value.update(files=[]),
        lambda value: value.update(step=-7),
        lambda value: value.update(step="7"),
        lambda value: value.update(world=None),
        lambda value: value.update(extra=1),
        lambda value: value.pop("uuid"),
        lambda value: value.update(step=8),
        lambda value: value.update(uuid="other"),
        lambda value: value.update(deep=json.loads("[" * 800 + "]" * 800)),
    ],
)
def test_wrong_fields_are_refused(change):
    data, commit = forged(change)
    with pytest.raises(CorruptError):
        parse_manifest(data, commit, "manifest")


def test_numbers_that_become_infinite_are_refused():
    data = MANIFEST.encode().replace(b'"step": 7', b'"step": 1e999')
    commit = Commit("0.1", "ab12", 7, sha256(data), MANIFEST.total_bytes, True)
    with pytest.raises(CorruptError, match="not valid JSON"):
        parse_manifest(data, commit, "manifest")


def test_nesting_that_can_just_be_read_is_refused():
    for depth in range(300, 1100, 20):
        data = b"[" * depth + b"]" * depth
        with pytest.raises(CorruptError):
            parse_commit(b'{"step": ' + data + b"}", "COMMIT")


@pytest.mark.parametrize("format_", [2, 1.0, True, None, "1"])
def test_another_format_is_incompatible(format_):
    data, commit = forged(lambda value: value.update(format=format_))
    with pytest.raises(IncompatibleError, match=f"format {format_}") as caught:
        parse_manifest(data, commit, "manifest")
    assert caught.value.exit_code == 4


def test_records_have_a_hash_per_block():
    record = record_of(bytes(BLOCK_BYTES + 1))
    assert isinstance(record, FileRecord)
    assert len(record.blocks) == 2
    assert record_of(b"").blocks == ()

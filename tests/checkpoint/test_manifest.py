"""COMMIT and manifest: what is read is what was written, and nothing else is."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import by_day

from burnish.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST_LIMIT,
    MAX_BLOCK_BYTES,
    Commit,
    FileRecord,
    Manifest,
    block_hash,
    block_hashes,
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


@given(st.lists(st.binary(max_size=20)), st.integers(1, 30))
def test_blocks_have_their_hashes_however_their_bytes_lie(pieces, size):
    whole = b"".join(pieces)
    blocks = [whole[start : start + size] for start in range(0, len(whole), size)]
    assert list(block_hashes(map(memoryview, pieces), size)) == list(map(block_hash, blocks))


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
    with pytest.raises(CorruptError):
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
    with pytest.raises(CorruptError):
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
    with pytest.raises(CorruptError):
        parse_manifest(data, commit, "manifest")


def test_nesting_that_can_just_be_read_is_refused():
    for depth in range(300, 1100, 20):
        data = b"[" * depth + b"]" * depth
        with pytest.raises(CorruptError):
            parse_commit(b'{"step": ' + data + b"}", "COMMIT")


@pytest.mark.parametrize("format_", [2, 1.0, True, None, "1"])
def test_another_format_is_incompatible(format_):
    data, commit = forged(lambda value: value.update(format=format_))
    with pytest.raises(IncompatibleError, match=f"format {json.dumps(format_)}") as caught:
        parse_manifest(data, commit, "manifest")
    assert caught.value.exit_code == 4


def sized(sizes, block_bytes=BLOCK_BYTES):
    """A manifest of files of these sizes, whose blocks have no hashes yet."""
    files = {f"model/{n}.safetensors": FileRecord(s, block_bytes, ()) for n, s in enumerate(sizes)}
    return Manifest("ab12", 7, 2, files)


@given(st.lists(st.integers(0, 50_000), max_size=5))
def test_the_length_is_known_before_the_hashes(sizes):
    bare = sized(sizes, 4096)
    files = {
        path: replace(record, blocks=("0" * 32,) * -(-record.size // 4096))
        for path, record in bare.files.items()
    }
    whole = replace(bare, files=files)
    assert bare.encoded_bytes() == whole.encoded_bytes() == len(whole.encode())


def test_the_largest_models_fit():
    """Two trillion weights of 12 bytes each (bf16, residual, two moments), and as large a critic."""
    files = 48 * 10**12 // (4 << 30)
    assert sized([4 << 30] * files, MAX_BLOCK_BYTES).encoded_bytes() < MANIFEST_LIMIT
    assert sized([4 << 30] * 2 * files, MAX_BLOCK_BYTES).encoded_bytes() > MANIFEST_LIMIT


def almost(parts):
    """A manifest of so many records that ends as none does."""
    tail = b'\n },\n "format": 1,\n "step": 7,\n "uuid": "ab12",\n "world": two\n}\n'
    return b'{\n "files": {' + b",".join(parts) + tail


def described(name, blocks):
    hashes = b",".join([b'\n    "' + b"0" * 32 + b'"'] * blocks)
    lines = b"[" + hashes + b"\n   ]" if blocks else b"[]"
    size = b"%d" % (blocks * 4096)
    return (
        b'\n  "' + name + b'": {\n   "block_bytes": 4096,\n   "blocks": ' + lines
        + b',\n   "size": ' + size + b"\n  }"
    )  # fmt: skip


LARGE = {
    "one long list": lambda: almost([described(b"x", MANIFEST_LIMIT // 40 - 10)]),
    "a long name": lambda: almost([described(b"\\u0061" * (MANIFEST_LIMIT // 6 - 50), 0)]),
    "brackets": lambda: b"[" * MANIFEST_LIMIT,
    "empty lists": lambda: b"[" + b"[]," * (MANIFEST_LIMIT // 3 - 1) + b"1]",
}


@pytest.mark.parametrize("kind", by_day(LARGE, ["a long name", "brackets"]))
def test_a_forged_manifest_of_any_kind_takes_little_memory(kind):
    data = LARGE[kind]()
    assert len(data) <= MANIFEST_LIMIT
    commit = Commit("0.1", "ab12", 7, sha256(data), 0, True)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError) as caught:
            parse_manifest(data, commit, "manifest")
        assert tracemalloc.get_traced_memory()[1] + len(data) < 256 << 20
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 2_000


def test_more_files_than_any_step_has_are_refused(monkeypatch):
    data, commit = sealed(MANIFEST)
    assert parse_manifest(data, commit, "manifest") == MANIFEST
    monkeypatch.setattr("burnish.checkpoint.manifest.MAX_FILES", 1)
    with pytest.raises(CorruptError):
        parse_manifest(data, commit, "manifest")


def test_a_file_twice_or_out_of_order_is_refused():
    for names in (b"aa", b"ba"):
        data = almost(described(b"%c" % name, 0) for name in names).replace(b"two", b"2")
        commit = Commit("0.1", "ab12", 7, sha256(data), 0, True)
        with pytest.raises(CorruptError):
            parse_manifest(data, commit, "manifest")


def test_records_have_a_hash_per_block():
    record = record_of(bytes(BLOCK_BYTES + 1))
    assert isinstance(record, FileRecord)
    assert len(record.blocks) == 2
    assert record_of(b"").blocks == ()

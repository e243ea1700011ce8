import json
import os
import struct
import tracemalloc
from pathlib import Path, PurePath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from burnish.errors import CorruptError, IncompatibleError, MissingError, UsageError
from burnish.files import safetensors
from burnish.files.safetensors import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    build_header,
    code_files,
    header_size,
    parse_header,
    read_header,
)

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path, table, data=b"\0" * 8, length=None):
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_reads_what_the_reference_library_writes(tmp_path):
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 4), dtype=np.float16),
    }
    path = tmp_path / "m.safetensors"
    save_file(arrays, path, metadata={"format": "pt"})
    header = read_header(path)
    raw = path.read_bytes()
    assert set(header.entries) == set(arrays)
    for name, array in arrays.items():
        entry = header.entries[name]
        assert entry.shape == array.shape
        assert raw[entry.begin : entry.end] == array.tobytes()


names = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
tensors = st.dictionaries(
    names,
    st.tuples(
        st.sampled_from([name for name, bits in DTYPE_BITS.items() if bits >= 8]),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=5,
)


@given(tensors, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_a_built_header_reads_back(tmp_path_factory, table, metadata):
    head, entries = build_header([(n, d, s) for n, (d, s) in table.items()], metadata)
    assert len(head) % 8 == 0
    path = tmp_path_factory.mktemp("built") / "x.safetensors"
    size = max([entry.end for entry in entries.values()], default=len(head))
    path.write_bytes(head + b"\1" * (size - len(head)))
    header = read_header(path)
    assert header.entries == entries
    assert json.loads(head[8:]).get("__metadata__", {}) == metadata
    assert header.size == len(head)


def test_the_reference_library_reads_a_built_header(tmp_path):
    values = np.arange(3, dtype=np.float32)
    head, _ = build_header([("x", "F32", (3,)), ("n", "BOOL", ())], {"format": "pt"})
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + values.tobytes() + b"\1")
    loaded = load_file(path)
    assert (loaded["x"] == values).all()
    assert loaded["n"].item() is True


def test_duplicate_names_are_not_built():
    with pytest.raises(ValueError, match="'x'"):
        build_header([("x", "F32", ()), ("x", "F32", ())], {})


def test_half_bytes_are_not_built():
    assert build_header([("x", "F4", (2,))], {})[1]["x"].shape == (2,)
    with pytest.raises(ValueError, match="F4"):
        build_header([("x", "F4", (3,))], {})


def test_absent_file(tmp_path):
    with pytest.raises(MissingError):
        read_header(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    ("table", "data", "message"),
    [
        ({"x": ONE}, b"\0" * 7, "bytes"),
        ({"x": ONE}, b"\0" * 9, "bytes"),
        ({"x": ONE, "y": {**ONE, "data_offsets": [4, 12]}}, b"\0" * 12, " y "),
        ({"x": ONE, "y": {**ONE, "data_offsets": [12, 20]}}, b"\0" * 20, " y "),
        ({"x": {**ONE, "data_offsets": [4, 12]}}, b"\0" * 12, " x "),
        ({"x": {**ONE, "dtype": "F64"}}, b"\0" * 8, "have: 8 bytes"),
        ({"x": {**ONE, "dtype": "Q8"}}, b"\0" * 8, "dtype"),
        ({"x": {**ONE, "dtype": 3}}, b"\0" * 8, "dtype"),
        ({"x": {**ONE, "shape": [3]}}, b"\0" * 8, "have: 8 bytes"),
        ({"x": {**ONE, "shape": [-2]}}, b"\0" * 8, "shape"),
        ({"x": {**ONE, "shape": [1 << 62, 4]}}, b"\0" * 8, "shape"),
        ({"x": {**ONE, "shape": [1] * 17}}, b"\0" * 8, "shape"),
        ({"x": {**ONE, "shape": [1 << 62] * 100_000}}, b"\0" * 8, "shape"),
        ({"x": {**ONE, "shape": [True, 2]}}, b"\0" * 8, "shape"),
        ({"x": {**ONE, "shape": 2}}, b"\0" * 8, "shape"),
        ({"x": {**ONE, "data_offsets": [8, 0]}}, b"\0" * 8, "offsets"),
        ({"x": {**ONE, "data_offsets": [0.0, 8]}}, b"\0" * 8, "offsets"),
        ({"x": {**ONE, "data_offsets": [0]}}, b"\0" * 8, "offsets"),
        ({"x": {**ONE, "more": 1}}, b"\0" * 8, " x "),
        ({"x": [1]}, b"\0" * 8, " x "),
        ({"x": ONE, "__metadata__": {"a": 1}}, b"\0" * 8, "metadata"),
        (b'{"x": %s, "x": %s}' % ((json.dumps(ONE).encode(),) * 2), b"\0" * 8, "'x'"),
        ({"x": ONE, "__metadata__": []}, b"\0" * 8, "metadata"),
        (b'{"__metadata__": {"a": "", "a": ""}}', b"", "'a'"),
        (b'{"x": {"dtype": "F32", "dtype": "F32"}}', b"", "'dtype'"),
        (b'{"x": {"dtype": "F32", "\\u0064type": "F32"}}', b"", "'dtype'"),
        ({"x": {**ONE, "dtype": "a:b"}}, b"\0" * 8, "dtype"),
        (b'{"x": {"shape": "}"}}', b"", " x "),
        (b'{"x": {"shape": %s}}' % (b"[" * 2000), b"", "JSON"),
        (b"[]", b"", "header"),
        (b"{,}", b"", "JSON"),
        (b"{", b"", "JSON"),
        (b'{"x": %s,}' % json.dumps(ONE).encode(), b"\0" * 8, "JSON"),
        (b'{"x": %s' % json.dumps(ONE).encode(), b"\0" * 8, "JSON"),
        (b'{"x": %s} {}' % json.dumps(ONE).encode(), b"\0" * 8, "JSON"),
        (b'{"\xff": 1}', b"", "JSON"),
        ({"\ud800": ONE}, b"\0" * 8, "name"),
        (b"[" * 100_000, b"", "JSON"),
    ],
)
def test_bad_files_are_named(tmp_path, table, data, message):
    path = write(tmp_path / "bad.safetensors", table, data)
    with pytest.raises(CorruptError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\1\0\0", struct.pack("<Q", 1 << 40) + b"{}"])
def test_a_header_longer_than_the_file(tmp_path, content):
    path = tmp_path / "short.safetensors"
    path.write_bytes(content)
    with pytest.raises(CorruptError):
        read_header(path)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 988097824\n"
    (tmp_path / "x.safetensors").write_text(text)
    with pytest.raises(CorruptError, match="git lfs pull"):
        read_header(tmp_path / "x.safetensors")


def test_a_huge_header_is_not_read(tmp_path):
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)
    with pytest.raises(CorruptError):
        read_header(path)


MIB = 1 << 20


def filled(unit, start=b"", size=MAX_HEADER_BYTES):
    return start + unit * ((size - len(start)) // len(unit))


HOSTILE = {
    "lists": lambda: filled(b"[],"),
    "objects": lambda: filled(b"{},", b'{"a":['),
    "numbers": lambda: filled(b"1.5,", b'{"a":{"shape":['),
    "depth": lambda: filled(b'{"a":'),
    "entry": lambda: filled(b'"a":{"a":[]},', b"{"),
    "metadata": lambda: b'{"__metadata__":{%s}}' % b",".join(b'"%05x":""' % i for i in range(MIB)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_takes_as_much_memory_as_an_honest_one(kind):
    text = HOSTILE[kind]()
    data = struct.pack("<Q", len(text)) + text
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            parse_header(PurePath("hostile"), data, 1 << 50)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(text)
    finally:
        tracemalloc.stop()


def test_a_header_with_more_than_is_read_is_not_built(monkeypatch):
    tensors = [(f"{number:0200}", "U8", (0,)) for number in range(100)]
    header, _ = build_header(tensors, {})
    for limit in ("MAX_TENSORS", "MAX_HEADER_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(safetensors, limit, 99)
            with pytest.raises(CorruptError):
                parse_header(
                    PurePath("x"), header[: header_size(PurePath("x"), header, 1 << 20)], 0
                )
            with pytest.raises(IncompatibleError):
                build_header(tensors, {})


def test_blanks_are_read_over():
    """Many tensors, and blanks wherever JSON allows them."""
    head, entries = build_header([(f"{n:06x}", "U8", ()) for n in range(500)], {"format": "pt"})
    table = json.loads(head[8:])
    text = json.dumps(table, indent="\t").encode()
    parsed = parse_header(PurePath("x"), struct.pack("<Q", len(text)) + text, len(text) + 8 + 500)
    assert {name: entry.shape for name, entry in parsed.entries.items()} == dict.fromkeys(
        entries, ()
    )


@pytest.mark.parametrize("how", ["outside", "a FIFO", "nowhere"])
def test_code_is_a_file_of_the_model(tmp_path: Path, how: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "modeling.py").write_text("x = 1")
    (model / "same.py").symlink_to("modeling.py")
    assert [path.name for path in code_files(model)] == ["modeling.py", "same.py"]
    (tmp_path / "secret").write_text("hunter2")
    if how == "a FIFO":
        os.mkfifo(model / "z.py")
    else:
        (model / "z.py").symlink_to(tmp_path / "secret" if how == "outside" else "absent")
    with pytest.raises(UsageError, match=r"z\.py"):
        code_files(model)

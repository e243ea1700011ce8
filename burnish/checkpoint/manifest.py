"""What a committed step says of itself: the manifest of its files and the COMMIT that seals it.

Both are canonical JSON, and COMMIT carries its own digest and the manifest's, so that any changed
byte of either is found. No torch here: verifying a checkpoint needs none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

import xxhash

from burnish.errors import CorruptError, IncompatibleError
from burnish.files.storage import Bytes
from burnish.files.strict_json import clipped, encode_json, parse_json, shortened

FORMAT = 1
"""The format that this code reads and writes."""
BLOCK_BYTES = 4 << 20
"""Files are cut into blocks of this size, each with one hash."""
MAX_BLOCK_BYTES = 64 << 20
"""Larger blocks are refused, so that a reader's memory is bounded."""
COMMIT, MANIFEST, STATE = "COMMIT", "manifest.json", "state.json"
"""Names in a step's directory."""
COMMIT_LIMIT, MANIFEST_LIMIT, STATE_LIMIT = 64 << 10, 256 << 20, 16 << 20
"""Most bytes that the three may have."""

_HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a step."""

    size: int
    """Bytes."""
    block_bytes: int
    """Size of its blocks; the last one is shorter."""
    blocks: tuple[str, ...]
    """xxh3_128 of each block, in order, as 32 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files of a step but the manifest and COMMIT themselves."""

    uuid: str
    """Names this writing of this step."""
    step: int
    """Steps of training that it holds."""
    world: int
    """Processes that wrote it."""
    files: Mapping[str, FileRecord]
    """By path below the step's directory, with forward slashes."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(record.size for record in self.files.values())

    def encode(self) -> bytes:
        """As it is written."""
        return encode_json({"format": FORMAT, **asdict(self)})


@dataclass(frozen=True, slots=True)
class Commit:
    """The seal: with it, the step is whole."""

    version: str
    """Of the Burnish that wrote it."""
    uuid: str
    """The manifest's."""
    step: int
    """The manifest's."""
    manifest_sha256: str
    """Of the manifest's bytes."""
    total_bytes: int
    """Of all files in the manifest."""
    healthy: bool
    """Whether losses and weights were finite. An unhealthy step is not resumed from and displaces no other."""

    def encode(self) -> bytes:
        """As it is written, with a digest of itself."""
        fields = {"format": FORMAT, **asdict(self)}
        return encode_json({**fields, "sha256": sha256(encode_json(fields))})


def block_hash(data: Bytes) -> str:
    """xxh3_128 of a block: fast, and finds any accidental change (it is no protection against forgery)."""
    return xxhash.xxh3_128_hexdigest(data)


def sha256(data: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def record_of(data: bytes, block_bytes: int = BLOCK_BYTES) -> FileRecord:
    """The record of a small file that is in memory whole."""
    view = memoryview(data)
    starts = range(0, len(data), block_bytes)
    hashes = tuple(block_hash(view[start : start + block_bytes]) for start in starts)
    return FileRecord(len(data), block_bytes, hashes)


def parse_commit(data: bytes, what: str) -> Commit:
    """Read COMMIT. Raises `CorruptError` for any changed byte, `IncompatibleError` for another format."""
    value = _sealed(data, what)
    digest = value.pop("sha256", None)
    if digest != sha256(encode_json(value)):
        raise CorruptError(f"{what} does not have the digest that it names")
    _check_format(value.pop("format", None), what)
    _check_types(value, Commit, what)
    return Commit(**value)


def parse_manifest(data: bytes, commit: Commit, what: str) -> Manifest:
    """Read the manifest that `commit` seals. Raises `CorruptError` where it is not that one or not sound."""
    if sha256(data) != commit.manifest_sha256:
        raise CorruptError(
            f"{what} is not the one that was committed",
            have=f"sha256 {sha256(data)}",
            want=f"sha256 {commit.manifest_sha256}",
        )
    value = _sealed(data, what)
    _check_format(value.pop("format", None), what)
    files = value.pop("files", None)
    _check_types({**value, "files": {}}, Manifest, what)
    if not isinstance(files, dict):
        raise CorruptError(f"{what} lists no files", have=type(files).__name__)
    records = {path: _file_record(path, record, what) for path, record in files.items()}
    manifest = Manifest(**value, files=records)
    told = (manifest.uuid, manifest.step, manifest.total_bytes)
    if told != (commit.uuid, commit.step, commit.total_bytes):
        raise CorruptError(f"{what} and COMMIT tell different things", have=shortened(told))
    return manifest


def _sealed(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object that is written exactly as we write it."""
    value = parse_json(data, what)
    if not isinstance(value, dict):
        raise CorruptError(f"{what} is not a JSON object", have=type(value).__name__)
    try:
        ours = encode_json(value) == data
    except RecursionError:  # nested as deeply as can just be read
        ours = False
    if not ours:
        raise CorruptError(f"{what} is not written the way Burnish writes it")
    return value


def _check_format(found: Any, what: str) -> None:
    if type(found) is not int or found != FORMAT:
        raise IncompatibleError(
            f"{what} is of a format that this version does not read",
            have=f"format {clipped(str(found))}",
            want=f"format {FORMAT}",
            do="use the version of Burnish that wrote it, or a later one",
        )


def _check_types(value: dict[str, Any], kind: type[Commit] | type[Manifest], what: str) -> None:
    names = {"str": str, "int": int, "bool": bool}
    wanted = {name: names.get(text, dict) for name, text in kind.__annotations__.items()}
    for name in wanted.keys() | value.keys():
        if name not in wanted or type(value.get(name)) is not wanted[name]:
            raise CorruptError(
                f"{what} has a wrong field {clipped(name)}",
                have=shortened(value.get(name)),
                want=wanted[name].__name__ if name in wanted else "no such field",
            )
    if value["step"] < 0:
        raise CorruptError(f"{what} has a wrong field step", have=value["step"], want="0 or more")


def _file_record(path: str, value: Any, what: str) -> FileRecord:
    parts = PurePosixPath(path).parts
    safe = path == "/".join(parts) and not path.startswith("/") and ".." not in parts
    if not safe or "\\" in path or "\0" in path or not path:
        raise CorruptError(f"{what} names a path outside the step", have=shortened(path))
    if not _is_record(value):
        raise CorruptError(f"{what} describes {clipped(path)} wrongly", have=shortened(value))
    return FileRecord(value["size"], value["block_bytes"], tuple(value["blocks"]))


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"size", "block_bytes", "blocks"}:
        return False
    size, block, hashes = value["size"], value["block_bytes"], value["blocks"]
    if type(size) is not int or type(block) is not int or not isinstance(hashes, list):
        return False
    if size < 0 or not 4096 <= block <= MAX_BLOCK_BYTES or block % 8:
        return False
    return len(hashes) == -(-size // block) and all(
        isinstance(text, str) and _HASH.fullmatch(text) for text in hashes
    )

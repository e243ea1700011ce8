"""The manifest of a step's files, and the COMMIT that seals it. No torch here.

COMMIT has digests of both, so any changed byte is found. Parsing stops at the first unexpected byte: a hostile manifest cannot
fill memory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import xxhash

from burnish.errors import CorruptError, IncompatibleError
from burnish.files.storage import Bytes
from burnish.files.strict_json import clipped, encode_json, parse_json, shortened

FORMAT = 1
"""The format that this code reads and writes."""
MIN_BLOCK_BYTES = 64 << 10
BLOCK_BYTES = 4 << 20
MAX_BLOCK_BYTES = 64 << 20
"""Smallest, usual and largest size of the blocks that files are cut into. A reader refuses only larger ones."""
COMMIT = "COMMIT"
MANIFEST = "manifest.json"
STATE = "state.json"
"""Names in a step's directory."""
AHEAD = "ahead/"
"""Directory of the batches that are drawn and not yet trained on."""
IMPORTED = "imported"
"""Key of state.json in a step of imported weights: their origin."""
ADAPTER_STATE = "adapter"
"""Key of state.json that describes the adapter which a run trains (`burnish.models.lora.adapter.adapter_record`)."""
COMMIT_LIMIT = 64 << 10
MANIFEST_LIMIT = 32 << 20
STATE_LIMIT = 1 << 20
"""Most bytes of COMMIT, manifest.json and state.json."""
MAX_FILES = 1 << 16
"""Most files of a step."""
ANOTHER_STEP = "use another step, or a copy of this one, and check the disk"
"""Advice for a step whose bytes are not those that were written."""

# Hexadecimal digits of a block's hash.
_HASH = 32
# Bytes per block in the manifest: a line with its hash, indented and quoted.
_LINE = 40
_NUMBER = rb"(0|[1-9][0-9]{0,18})"
_TEXT = rb'("(?:[ !#-\[\]-~]|\\.){,4096}+")'
_HEAD = re.compile(rb'\{\n "files": \{')
_FILE = re.compile(
    rb"\n  " + _TEXT + rb': \{\n   "block_bytes": ' + _NUMBER + rb',\n   "blocks": \[(?:\]|'
    rb'((?:\n    "[0-9a-f]{32}",)*+\n    "[0-9a-f]{32}")\n   \]),\n   "size": ' + _NUMBER + rb"\n  \}(,?)"
)  # fmt: skip
_TAIL = re.compile(
    rb'\n \},\n "format": ' + _NUMBER + rb',\n "step": ' + _NUMBER
    + rb',\n "uuid": ' + _TEXT + rb',\n "world": ' + _NUMBER + rb"\n\}\n"
)  # fmt: skip
_FORMAT = re.compile(rb'\n "format": ([^\n]{,200}?),?\n')


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a step."""

    size: int
    block_bytes: int
    """Size of its blocks; the last one is shorter."""
    blocks: tuple[str, ...]
    """xxh3_128 of each block, in order, as 32 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files of a step except manifest and COMMIT."""

    uuid: str
    """Identifies this save of this step."""
    step: int
    """Number of training steps done."""
    world: int
    """Number of processes that wrote the step."""
    files: Mapping[str, FileRecord]
    """By path below the step's directory, with forward slashes."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def encode(self) -> bytes:
        """Return the file's bytes."""
        files = {
            path: {"size": record.size, "block_bytes": record.block_bytes, "blocks": record.blocks}
            for path, record in self.files.items()
        }
        fields = {"uuid": self.uuid, "step": self.step, "world": self.world, "files": files}
        return encode_json({"format": FORMAT, **fields})

    def encoded_bytes(self) -> int:
        """Return the length of `encode()` with all hashes."""
        bare = {path: replace(record, blocks=()) for path, record in self.files.items()}
        counts = (-(-record.size // record.block_bytes) for record in self.files.values())
        return len(replace(self, files=bare).encode()) + sum(_LINE * n + 3 for n in counts if n)


@dataclass(frozen=True, slots=True)
class Commit:
    """The seal of a whole step."""

    version: str
    uuid: str
    step: int
    manifest_sha256: str
    total_bytes: int
    """Bytes of all files in the manifest."""
    healthy: bool
    """Whether losses and weights were finite. An unhealthy step is not resumed from and displaces no other."""

    def encode(self) -> bytes:
        """Return the file's bytes, with a digest of itself."""
        fields = {"format": FORMAT, **asdict(self)}
        return encode_json({**fields, "sha256": sha256(encode_json(fields))})


def block_hash(data: Bytes) -> str:
    """Return a block's xxh3_128, which finds accidents but not forgery."""
    return xxhash.xxh3_128_hexdigest(data)


def block_hashes(pieces: Iterable[memoryview], block_bytes: int) -> Iterator[str]:
    """Yield the hashes of the joined `pieces`' blocks."""
    digest = xxhash.xxh3_128()
    bytes_left = block_bytes
    for piece in pieces:
        while len(piece) >= bytes_left:
            digest.update(piece[:bytes_left])
            yield digest.hexdigest()
            piece = piece[bytes_left:]
            digest = xxhash.xxh3_128()
            bytes_left = block_bytes
        digest.update(piece)
        bytes_left -= len(piece)
    if bytes_left < block_bytes:
        yield digest.hexdigest()


def sha256(data: bytes) -> str:
    """Return the hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


def record_of(data: bytes, block_bytes: int = BLOCK_BYTES) -> FileRecord:
    """Return a small file's record."""
    hashes = tuple(block_hashes([memoryview(data)], block_bytes))
    return FileRecord(len(data), block_bytes, hashes)


def parse_commit(data: bytes, what: str) -> Commit:
    """Read COMMIT. Raises `CorruptError` for any changed byte, `IncompatibleError` for another format."""
    value = parse_json(data, what)
    try:
        is_ours = isinstance(value, dict) and encode_json(value) == data
    except RecursionError:  # nested too deeply to encode, though just not too deeply to parse
        is_ours = False
    if not is_ours:
        raise _unexpected(data, 0, what)
    digest = value.pop("sha256", None)
    if digest != sha256(encode_json(value)):
        raise CorruptError(f"{what} does not match the digest that it states", do=ANOTHER_STEP)
    format_number = value.pop("format", None)
    if type(format_number) is not int or format_number != FORMAT:
        raise _other_format(what, str(format_number))
    _check_types(value, what)
    return Commit(**value)


def parse_manifest(data: bytes, commit: Commit, what: str) -> Manifest:
    """Read the manifest that `commit` seals. Raises as `parse_commit`, and for another manifest."""
    if sha256(data) != commit.manifest_sha256:
        raise CorruptError(
            f"{what} is not the one that was committed",
            have=f"sha256 {sha256(data)}",
            want=f"sha256 {commit.manifest_sha256}",
            do=ANOTHER_STEP,
        )
    named_format = _FORMAT.search(data)
    if named_format and named_format[1] != b"%d" % FORMAT:
        raise _other_format(what, named_format[1].decode(errors="replace"))
    files, end = _read_files(data, what)
    tail = _TAIL.fullmatch(data, end)
    if tail is None:
        raise _unexpected(data, end, what)
    _, step, uuid, world = tail.groups()
    manifest = Manifest(_text(uuid, end, what), int(step), int(world), files)
    own = (manifest.uuid, manifest.step, manifest.total_bytes)
    if own != (commit.uuid, commit.step, commit.total_bytes):
        raise CorruptError(
            f"{what} and COMMIT disagree",
            have=shortened(own),
            want=shortened((commit.uuid, commit.step, commit.total_bytes)),
            do=ANOTHER_STEP,
        )
    return manifest


def _read_files(data: bytes, what: str) -> tuple[dict[str, FileRecord], int]:
    head = _HEAD.match(data)
    if head is None:
        raise _unexpected(data, 0, what)
    files: dict[str, FileRecord] = {}
    at = head.end()
    last = ""
    has_next = True
    while has_next:
        match = _FILE.match(data, at)
        if match is None:
            raise _unexpected(data, at, what)
        quoted, block_bytes, lines, size, comma = match.groups(b"")
        path = _text(quoted, at, what)
        _check_path(path, what)
        if path <= last or len(files) == MAX_FILES:
            want = f"a path after {shortened(last)}, and {MAX_FILES} at most"
            raise _unexpected(data, at, what, want)
        record = FileRecord(int(size), int(block_bytes), _hashes(lines))
        count = -(-record.size // max(record.block_bytes, 1))
        is_size = 4096 <= record.block_bytes <= MAX_BLOCK_BYTES and record.block_bytes % 8 == 0
        if not is_size or len(record.blocks) != count:
            raise CorruptError(
                f"{what} describes {clipped(path)} wrongly",
                have=f"{record.size} bytes in {len(record.blocks)} blocks of {record.block_bytes}",
                want=f"a hash for each block, and blocks of 4096 to {MAX_BLOCK_BYTES} bytes",
                do=ANOTHER_STEP,
            )
        files[path] = record
        at = match.end()
        last = path
        has_next = bool(comma)
    return files, at


def _hashes(lines: bytes) -> tuple[str, ...]:
    text = lines.decode()
    first = len('\n    "')
    return tuple(text[at : at + _HASH] for at in range(first, len(text), _LINE))


def _unexpected(data: bytes, at: int, what: str, want: str | None = None) -> CorruptError:
    return CorruptError(
        f"{what} is not written the way Burnish writes it",
        have=f"{shortened(data[at : at + 100])} at byte {at}",
        want=want,
        do=ANOTHER_STEP,
    )


def _text(quoted: bytes, at: int, what: str) -> str:
    with suppress(ValueError):
        text: str = json.loads(quoted)
        if json.dumps(text).encode() == quoted:
            return text
    raise _unexpected(quoted, 0, what, f"a string as Burnish writes it, at or after byte {at}")


def _check_path(path: str, what: str) -> None:
    if {"", ".", ".."} & set(path.split("/")) or "\\" in path or "\0" in path:
        raise CorruptError(
            f"{what} names a path outside the step",
            have=shortened(path),
            want="a path below the step, with forward slashes",
            do="do not use this step: somebody has changed it",
        )


def _other_format(what: str, format_text: str) -> IncompatibleError:
    return IncompatibleError(
        f"{what} is of a format that this version does not read",
        have=f"format {clipped(format_text)}",
        want=f"format {FORMAT}",
        do="use the version of Burnish that wrote it, or a later one",
    )


def _check_types(fields: dict[str, Any], what: str) -> None:
    kinds = {"str": str, "int": int, "bool": bool}
    field_types = {name: kinds[text] for name, text in Commit.__annotations__.items()}
    for name in sorted(field_types.keys() | fields.keys()):
        value = fields.get(name)
        kind = field_types.get(name)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise CorruptError(
                f"{what} has a wrong field {clipped(name)}",
                have=shortened(value),
                want=f"{kind.__name__}, 0 or more if a number" if kind else "no such field",
                do=ANOTHER_STEP,
            )

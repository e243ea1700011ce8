"""Hostile COMMITs, manifests, states and safetensors headers: each is refused in plain words, or is sound.

A mutation knows what it changes: it takes a sound file apart, puts something nasty in one place (a
key twice, a number that is none, a shape beyond 2^63, a thousand brackets), and, mostly, signs the
result again, so that more than its digest has to be looked at. Large files, up to what may be read at
all, are sound but for one place, mostly near their end, so that all before it is looked at.
"""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from burnish.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST_LIMIT,
    STATE_LIMIT,
    Commit,
    FileRecord,
    Manifest,
    parse_commit,
    parse_manifest,
    record_of,
    sha256,
)
from burnish.checkpoint.steps import CommittedStep
from burnish.errors import CorruptError, IncompatibleError, MissingError
from burnish.files.safetensors import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    build_header,
    parse_header,
    read_header,
)
from burnish.files.strict_json import encode_json, parse_json
from burnish.runs.trainer_state import TrainerState, read_state

REFUSALS = (CorruptError, IncompatibleError, MissingError)
MOST_LETTERS = 2_000
"""Letters of a message: a hostile file must not fill the screen."""

_FILES = {
    "model/config.json": record_of(b"{}"),
    "model/model.safetensors": record_of(b"x" * 9000, 4096),
    "training/exp_avg.safetensors": record_of(b"y" * 100),
    "state.json": record_of(b'{"step": 7}'),
}
_MANIFEST = Manifest("ab12", 7, 2, _FILES)
_COMMIT = Commit("0.1", "ab12", 7, sha256(_MANIFEST.encode()), _MANIFEST.total_bytes, healthy=True)
_TENSORS = [
    ("a", "F32", (2, 3)),
    ("b", "BF16", (5,)),
    ("empty", "I64", (0, 4)),
    ("one", "BOOL", ()),
]


def nasty(rng: random.Random) -> Any:
    """A value where another was."""
    return rng.choice(_NASTY)(rng)


_NASTY: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice([None, True, False, [], {}, "", 0, 0.0, -0.0]),
    lambda rng: rng.choice([-1, 1 << 31, 1 << 53, (1 << 63) - 1, 1 << 63, 1 << 64, 10**4000]),
    lambda rng: rng.choice([1.5, 1e308, 5e-324, -1e-300]),
    lambda rng: rng.randrange(-10, 10_000),
    lambda rng: rng.choice(["../x", "/etc/passwd", "a/../b", "\0", "\ud800", "é", "a" * 5000, "7"]),
    lambda rng: rng.choice(
        ["F32", "BF16", "Q8", "__metadata__", "model/config.json", "state.json"]
    ),
    lambda rng: [nasty(rng) for _ in range(rng.randrange(4))],
    lambda rng: {str(nasty(rng))[:50]: nasty(rng) for _ in range(rng.randrange(3))},
    lambda rng: [[0]] * rng.randrange(3000),
    lambda rng: [1 << 62] * rng.randrange(200),
]

# What no JSON writer writes.
_RAW = [
    "NaN",
    "-Infinity",
    "1e999",
    "-1e99999",
    "1" * 5000,
    "01",
    "1.",
    "'x'",
    "tru",
    '"\\ud800"',
    "[" * 2000 + "]" * 2000,
]


def mutated(rng: random.Random, value: Any) -> Any:
    """The value with one thing in it changed, at any depth."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        changed = dict(value)
        kind = rng.random()
        if kind < 0.1:
            del changed[key]
        elif kind < 0.2:
            changed[rng.choice([str(nasty(rng))[:5000], key + "x"])] = changed.pop(key)
        elif kind < 0.25:
            changed[str(nasty(rng))[:50]] = nasty(rng)
        else:
            changed[key] = mutated(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        changed = list(value)
        if rng.random() < 0.3:
            changed.insert(place, nasty(rng))
        elif rng.random() < 0.3:
            del changed[place]
        else:
            changed[place] = mutated(rng, value[place])
        return changed
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-8, -1, 1, 8, 1 << 40])
    return nasty(rng)


def written(rng: random.Random, value: Any) -> bytes:
    """As our writer would write it, as another would, or as none would."""
    kind = rng.random()
    if kind < 0.6:
        return encode_json(value)
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=rng.random() < 0.5)
    if kind < 0.75:  # something that is no value in the place of one
        numbers = [place for place, letter in enumerate(text) if letter in "0123456789"]
        if numbers:
            place = rng.choice(numbers)
            text = text[:place] + rng.choice(_RAW) + text[place + 1 :]
    elif kind < 0.85 and text.startswith("{") and len(text) > 2:  # a key twice
        text = "{" + text[1:-1] + "," + text[1:-1] + "}"
    data = text.encode("utf-8", "surrogatepass")
    return damaged(rng, data) if kind > 0.9 else data


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut off, put in or swapped, without looking at what they mean."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        place = rng.randrange(len(found) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            del found[place : place + rng.choice([1, 4, 100])]
        elif kind == 1:
            found[place:place] = rng.randbytes(rng.choice([1, 4, 100]))
        elif kind == 2 and place < len(found):
            found[place] ^= 1 << rng.randrange(8)
        else:
            del found[place:]
    return bytes(found)


def _resealed(rng: random.Random, value: Any) -> Any:
    """A COMMIT's object with the digest that belongs to it, mostly."""
    if isinstance(value, dict) and rng.random() < 0.8:
        rest = {name: each for name, each in value.items() if name != "sha256"}
        return {**rest, "sha256": sha256(encode_json(rest))}
    return value


Take = Callable[[], None]
"""Reads an input that was made for it."""


def commit(rng: random.Random, scratch: Path) -> Take:
    """A COMMIT, mostly with a digest that fits."""
    data = written(rng, _resealed(rng, mutated(rng, json.loads(_COMMIT.encode()))))

    def take() -> None:
        found = parse_commit(data, "COMMIT")
        assert parse_commit(found.encode(), "COMMIT") == found

    return take


def manifest(rng: random.Random, scratch: Path) -> Take:
    """A manifest, mostly with a COMMIT that fits."""
    value = mutated(rng, json.loads(_MANIFEST.encode()))
    total = _MANIFEST.total_bytes
    files = value.get("files") if isinstance(value, dict) else None
    if isinstance(files, dict):
        sizes = [each.get("size") for each in files.values() if isinstance(each, dict)]
        total = sum(size for size in sizes if type(size) is int)
    return _taken_with_a_commit(rng, written(rng, value), total)


def _taken_with_a_commit(rng: random.Random, data: bytes, total: int) -> Take:
    digest = sha256(data) if rng.random() < 0.95 else "0" * 64
    seal = Commit("0.1", "ab12", 7, digest, total, healthy=True)

    def take() -> None:
        assert parse_manifest(data, seal, "manifest.json").encode() == data

    return take


def state(rng: random.Random, scratch: Path) -> Take:
    """What a trainer finds in state.json, its digest fitting."""
    data = written(rng, mutated(rng, STATE))

    def take() -> None:
        found = parse_json(data, "state.json")
        if not isinstance(found, dict):
            return  # refused where the step is opened
        step = CommittedStep(scratch / "step-00000007", _COMMIT, _MANIFEST, found)
        assert isinstance(read_state(step), TrainerState)

    return take


def header(rng: random.Random, scratch: Path) -> Take:
    """A safetensors file, mostly with a length that fits its header."""
    head, entries = build_header(_TENSORS, {"format": "pt"})
    text = written(rng, mutated(rng, json.loads(head[8:])))
    length = len(text)
    if rng.random() < 0.1:
        length = rng.choice([0, 1, length - 1, length + 1, 1 << 20, 1 << 31, (1 << 64) - 1])
    size = max(entry.end for entry in entries.values()) - len(head)
    data = struct.pack("<Q", max(0, length)) + text + bytes(max(0, size + rng.choice([0, 0, 0, 1])))
    path = scratch / "x.safetensors"
    path.write_bytes(damaged(rng, data) if rng.random() < 0.05 else data)

    def take() -> None:
        found = read_header(path)
        held = sum(e.end - e.begin for e in found.entries.values())
        assert held == path.stat().st_size - found.size

    return take


def _one_place(rng: random.Random, data: bytes) -> bytes:
    """The same but for something near its end, or anywhere."""
    place = rng.randrange(len(data) - rng.choice([100, len(data)]), len(data))
    put = rng.choice([b"", b"0", b",", b"}", b"[", b'"', b":", b" ", b"\0", b"\xff", b"\\"])
    return data[:place] + put + data[place + rng.randrange(3) :]


def large_header(rng: random.Random, scratch: Path) -> Take:
    """Tensors of one byte each, as many as may be, with names and shapes as long as there is room for."""
    dims = rng.choice([0, 1, 2, 16])
    width = rng.choice([6, 40, 200])
    each = width + 2 * dims + 60
    count = min(MAX_TENSORS, MAX_HEADER_BYTES // each) + rng.choice([-1, 0, 1])
    shape, gap = b",".join([b"1"] * dims), rng.choice([b"", b" "])
    members = b",".join(
        b'"%0*d":%s{"dtype":"U8","shape":[%s],"data_offsets":[%d,%d]}'
        % (width, number, gap, shape, number, number + 1)
        for number in range(count)
    )
    text = b"{%s}" % members
    text = _one_place(rng, text) if rng.random() < 0.8 else text
    data = struct.pack("<Q", len(text)) + text

    def take() -> None:
        found = parse_header(PurePath("x.safetensors"), data, len(data) + count)
        assert len(found.entries) == count

    return take


def large_manifest(rng: random.Random, scratch: Path) -> Take:
    """One file of many blocks, or many files of one."""
    most = MANIFEST_LIMIT // rng.choice([40, 60])
    files = rng.choice([1, 1000])
    record = FileRecord(most // files * BLOCK_BYTES, BLOCK_BYTES, ("0" * 32,) * (most // files))
    found = Manifest("ab12", 7, 2, {f"model/{number:05}": record for number in range(files)})
    data = found.encode()
    data = _one_place(rng, data) if rng.random() < 0.8 else data
    return _taken_with_a_commit(rng, data, found.total_bytes)


def large_state(rng: random.Random, scratch: Path) -> Take:
    """A state.json as long as may be, full of one thing."""
    unit = rng.choice(
        [b"[]", b"{}", b"0", b'""', b"1.5", b'{"a":0}', b"[[[]]]", b"123456789012345678901"]
    )
    data = b'{"measured":[%s]}' % b",".join([unit] * ((STATE_LIMIT - 20) // (len(unit) + 1)))
    data = _one_place(rng, data) if rng.random() < 0.5 else data

    def take() -> None:
        step = CommittedStep(
            scratch / "step-00000007", _COMMIT, _MANIFEST, parse_json(data, "state")
        )
        assert isinstance(read_state(step), TrainerState)

    return take


STATE = {
    "step": 7,
    "cursor": 56,
    "tokens": 1000,
    "optimizer_steps": 7,
    "skipped_in_a_row": 0,
    "measured": {"val/loss": 1.5},
    "unlogged": {"train/loss": 1.25, "lr": "nan"},
    "unvalidated": False,
}
TARGETS: dict[str, Callable[[random.Random, Path], Take]] = {
    "COMMIT": commit,
    "manifest": manifest,
    "state": state,
    "safetensors header": header,
    "large safetensors header": large_header,
    "large manifest": large_manifest,
    "large state": large_state,
}
"""Makers of inputs, by what they make."""
LARGE = [name for name in TARGETS if name.startswith("large")]
"""Of which a few are enough, and a thousand take as long as a million of the others."""


@dataclass(frozen=True)
class Reading:
    """How one input was taken."""

    wrong: str
    """What is wrong with that; "" when it was refused as it should be, or is sound."""
    seconds: float
    """Of the processor's time, without the making of the input."""


def reading(target: str, rng: random.Random, scratch: Path) -> Reading:
    """Make an input and have it read."""
    take, wrong = TARGETS[target](rng, scratch), ""
    begun = time.process_time()
    try:
        take()
    except REFUSALS as error:
        wrong = "" if len(str(error)) < MOST_LETTERS else f"{len(str(error))} letters of refusal"
    except Exception as error:  # anything else is what is looked for
        wrong = f"{type(error).__name__}: {error}"[:300]
    return Reading(wrong, time.process_time() - begun)

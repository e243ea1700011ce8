"""Hostile COMMITs, manifests, states and safetensors headers: each is refused in plain words, or is sound.

A mutation knows what it changes: it takes a sound file apart, puts something nasty in one place (a
key twice, a number that is none, a shape beyond 2^63, a thousand brackets), and, mostly, signs the
result again, so that more than its digest has to be looked at.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish.checkpoint.committed import Committed
from burnish.checkpoint.manifest import (
    Commit,
    Manifest,
    parse_commit,
    parse_manifest,
    record_of,
    sha256,
)
from burnish.errors import CorruptError, IncompatibleError, MissingError
from burnish.files.safetensors import build_header, read_header
from burnish.files.strict_json import encode_json, parse_json
from burnish.trainers.position import Position, position_of

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
# What no JSON writer writes.


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


def try_commit(rng: random.Random, scratch: Path) -> None:
    """A COMMIT, mostly with a digest that fits."""
    value = _resealed(rng, mutated(rng, json.loads(_COMMIT.encode())))
    found = parse_commit(written(rng, value), "COMMIT")
    assert parse_commit(found.encode(), "COMMIT") == found


def try_manifest(rng: random.Random, scratch: Path) -> None:
    """A manifest, mostly with a COMMIT that fits."""
    value = mutated(rng, json.loads(_MANIFEST.encode()))
    data = written(rng, value)
    total = _MANIFEST.total_bytes
    files = value.get("files") if isinstance(value, dict) else None
    if isinstance(files, dict):
        sizes = [each.get("size") for each in files.values() if isinstance(each, dict)]
        total = sum(size for size in sizes if type(size) is int)
    digest = sha256(data) if rng.random() < 0.95 else "0" * 64
    commit = Commit("0.1", "ab12", 7, digest, total, healthy=True)
    found = parse_manifest(data, commit, "manifest.json")
    assert found.encode() == data


def try_state(rng: random.Random, scratch: Path) -> None:
    """What a trainer finds in state.json, its digest fitting."""
    state = parse_json(written(rng, mutated(rng, STATE)), "state.json")
    if not isinstance(state, dict):
        return  # refused where the step is opened
    found = position_of(Committed(scratch / "step-00000007", _COMMIT, _MANIFEST, state))
    assert isinstance(found, Position)


def try_header(rng: random.Random, scratch: Path) -> None:
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
    header = read_header(path)
    assert (
        sum(e.end - e.begin for e in header.entries.values()) == path.stat().st_size - header.size
    )


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
TARGETS = {
    "COMMIT": try_commit,
    "manifest": try_manifest,
    "state": try_state,
    "safetensors header": try_header,
}


def complaint(target: str, rng: random.Random, scratch: Path) -> str:
    """What is wrong with how one input was taken; "" when it was refused as it should be, or is sound."""
    try:
        TARGETS[target](rng, scratch)
    except REFUSALS as error:
        return "" if len(str(error)) < MOST_LETTERS else f"{len(str(error))} letters of refusal"
    except Exception as error:  # anything else is what is looked for
        return f"{type(error).__name__}: {error}"[:300]
    return ""

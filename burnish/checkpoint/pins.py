"""Pins: steps that retention never removes, each with the reason for it, in `checkpoints/pins.json`.

`{"format": 1, "pins": {"100": "best on the held-out set"}}`, whole or absent after a crash. People
and runs change it at the same time, so whoever changes it, or removes steps by it, does so inside
`holding_pins`: nobody removes a step between another's look at it and its pin. A file that cannot
be read pins everything: readers get an error, and nothing may be removed until it is mended. No
torch here.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from burnish.errors import CorruptError
from burnish.files.durable import read_whole, write_durably
from burnish.files.storage import Source, Storage
from burnish.files.strict_json import encode_json, parse_json

PINS = "pins.json"
"""Its name below `checkpoints/`."""
PINS_LIMIT = 1 << 20
"""Most bytes that it may have."""

_FORMAT = 1
_LOCK = ".pins.lock"
_STEP = re.compile(r"0|[1-9][0-9]{0,17}")


def read_pins(root: PurePath, storage: Source) -> dict[int, str]:
    """Why each pinned step below `root` is pinned, oldest first; {} where nothing ever was.

    Raises `CorruptError` for a file that is not one of these: then every step counts as pinned.
    """
    path = root / PINS
    try:
        data = read_whole(storage, path, PINS_LIMIT)
    except FileNotFoundError:
        return {}
    except (ValueError, EOFError, OSError) as error:
        raise _damaged(path, error) from error
    try:
        value = parse_json(data, str(path))
    except CorruptError as error:
        raise _damaged(path, error.have) from error
    if not isinstance(value, dict) or value.keys() != {"format", "pins"}:
        raise _damaged(path, "no object of format and pins")
    if value["format"] != _FORMAT:
        raise _damaged(path, f"format {value['format']!r}")
    pins = value["pins"]
    if not isinstance(pins, dict):
        raise _damaged(path, "pins that are not reasons by step")
    for step, reason in pins.items():
        if not _STEP.fullmatch(step) or not isinstance(reason, str):
            raise _damaged(path, f"{step!r}: {reason!r}")
    return dict(sorted((int(step), reason) for step, reason in pins.items()))


@contextmanager
def holding_pins(root: Path, storage: Storage) -> Iterator[dict[int, str]]:
    """The pins, with everybody else kept from changing them, or from removing steps by them, in the block.

    Changes that the block makes to the dictionary are on disk when it ends without an error. Waits
    for the other holder, who has them for moments only; the system lets go for one who dies.
    Raises as `read_pins` does.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(root / _LOCK, flags, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        pins = read_pins(root, storage)
        before = dict(pins)
        yield pins
        if pins != before:
            by_step = {str(step): reason for step, reason in pins.items()}
            write_durably(storage, root / PINS, encode_json({"format": _FORMAT, "pins": by_step}))
    finally:
        os.close(descriptor)


def _damaged(path: PurePath, have: object) -> CorruptError:
    return CorruptError(
        f"{path} is damaged, so every step counts as pinned",
        have=have,
        want=f'{{"format": {_FORMAT}, "pins": {{"STEP": "REASON"}}}}',
        do="mend it, or remove it and pin again what has to stay",
    )

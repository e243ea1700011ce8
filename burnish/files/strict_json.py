"""JSON read with suspicion: without duplicate keys, NaN, numbers that become infinite, or surprises of depth.

For files that something depends on (manifests, states), where Python's reader would silently take
the last of two keys, a NaN, or an infinity for 1e999.
"""

from __future__ import annotations

import json
import math
from typing import Any

from burnish.errors import CorruptError


def parse_json(data: bytes, what: str) -> Any:
    """The value in `data`. Raises `CorruptError` naming `what` for anything but plain JSON in UTF-8."""
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what} is not valid JSON", have=error) from error


def encode_json(value: object) -> bytes:
    """Canonical JSON (sorted keys, UTF-8, a newline at the end). Raises `ValueError` for NaN and infinities."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def shortened(value: object, limit: int = 200) -> str:
    """What was read, as a message shows it: a hostile file must not fill the screen."""
    return clipped(repr(value), limit)


def clipped(text: str, limit: int = 200) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("the same key twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:40]} is too large a number")
    return value

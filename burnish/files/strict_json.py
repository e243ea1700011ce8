"""JSON without duplicate keys, NaN, infinities, or deep nesting. Python's reader silently takes the last of two keys."""

from __future__ import annotations

import json
import math
from reprlib import Repr
from typing import Any

from burnish.errors import CorruptError

_DO = "get the file again from where it came, or from a copy"


def parse_json(data: bytes, what: str) -> Any:
    """Parse JSON in UTF-8. Raises `CorruptError` naming `what`."""
    try:
        return _DECODER.decode(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what} is not valid JSON", have=error, do=_DO) from error


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `CorruptError` for any other value too."""
    value = parse_json(data, what)
    if not isinstance(value, dict):
        raise CorruptError(f"{what} is not a JSON object", have=type(value).__name__, do=_DO)
    return value


def encode_json(value: object) -> bytes:
    """Return canonical JSON (sorted keys, UTF-8, final newline). Raises `ValueError` for NaN and infinities."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def shortened(value: object, limit: int = 200) -> str:
    """Return a value's text, shortened for a message, quickly even for hostile values."""
    return clipped(repr(value) if isinstance(value, str) else _SHOWN.repr(value), limit)


def clipped(text: str, limit: int = 200) -> str:
    """Return the beginning of a text."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises `ValueError` for a duplicate key."""
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in parsed if keys.count(key) > 1)
        raise ValueError(f"the key {shortened(twice)} stands twice in one object")
    return parsed


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:40]} is too large a number")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=no_duplicates, parse_constant=_no_constant, parse_float=_finite
)


_SHOWN = Repr()
_SHOWN.maxlist = 40
_SHOWN.maxdict = 40
_SHOWN.maxstring = 200
_SHOWN.maxother = 200
_SHOWN.maxlong = 200

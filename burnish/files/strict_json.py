"""Strict JSON: without duplicate keys, NaN, infinities, or deep nesting.

For files that something depends on. Python's reader silently takes the last of two keys, and a few bytes of hostile JSON may need
fifty times as much memory, so large objects are read member by member.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from reprlib import Repr
from typing import Any

from burnish.errors import CorruptError


def parse_json(data: bytes, what: str) -> Any:
    """The value in `data`. Raises `CorruptError` naming `what` for anything but plain JSON in UTF-8."""
    try:
        return _DECODER.decode(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"{what} is not valid JSON",
            have=error,
            do="get the file again from where it came, or from a copy",
        ) from error


def each_member(text: str, at: int, take: Callable[[str, int], int]) -> int:
    """Walk over the object at character `at`; return where it and the blanks after it end.

    `take` gets each name and the start of its value, and returns the value's end. Raises `ValueError` if it is no object.
    """
    _, at = _mark(text, at, "{")
    if text[at : at + 1] == "}":
        return _mark(text, at, "}")[1]
    mark = ","
    while mark == ",":
        plain = _PLAIN_NAME.match(text, at)
        if plain is not None:
            name, at = plain[1], plain.end()
        else:
            name, at = text_at(text, at)
            _, at = _mark(text, at, ":")
        mark, at = _mark(text, take(name, at), ",}")
    return at


def text_at(text: str, at: int) -> tuple[str, int]:
    """Return the string at a character, and where it ends. Raises `ValueError` for anything else."""
    if text[at : at + 1] != '"':
        raise ValueError(f"no string at character {at}")
    found: tuple[str, int] = _DECODER.raw_decode(text, at)
    return found


def flat_at(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Return the object at a character, and where it ends. Raises `ValueError` if it is long, nested, or has a key twice."""
    end = text.find("}", at, at + _LONGEST_FLAT) + 1
    if not end or text[at] != "{" or text.find("{", at + 1, end) >= 0:
        raise ValueError(f"no object of a few numbers and words at character {at}")
    found, size = _QUICK_DECODER.raw_decode(text[at:end])
    # A pair has a colon. Counting these is quicker than a call for each object, which gets its pairs.
    if size != end - at or text.count(":", at, end) != len(found):
        raise ValueError(f"the same key twice, or a colon too many, at character {at}")
    return found, end


def encode_json(value: object) -> bytes:
    """Canonical JSON (sorted keys, UTF-8, a newline at the end). Raises `ValueError` for NaN and infinities."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def shortened(value: object, limit: int = 200) -> str:
    """Return a value's text cut to a message's length, quickly for hostile values too."""
    return clipped(repr(value) if isinstance(value, str) else _SHOWN.repr(value), limit)


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


def _mark(text: str, at: int, wanted: str) -> tuple[str, int]:
    """Return the next character, which must be one of these, and the position after it and its blanks."""
    found = _PUNCTUATION.match(text, at)
    if found is None or found[1] not in wanted:
        raise ValueError(f"none of {wanted} at character {at}")
    return found[1], found.end()


_PUNCTUATION = re.compile(r"[ \t\n\r]*([{},:])[ \t\n\r]*")
_PLAIN_NAME = re.compile(r'"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*')
_LONGEST_FLAT = 4096
# Characters.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite
)
_QUICK_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def _few() -> Repr:
    few = Repr()
    few.maxlist = few.maxdict = 40
    few.maxstring = few.maxother = few.maxlong = 200
    return few


_SHOWN = _few()

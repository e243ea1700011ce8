"""Spans of OpenTelemetry, as files of traces and OTLP have them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple
from urllib.parse import unquote

Attributes = dict[str, Any]
"""A span's attributes by name."""


class TraceSpan(NamedTuple):
    """A span of OpenTelemetry."""

    name: str
    begin: float
    """In seconds since 1970."""
    end: float
    attributes: Attributes
    error: str | None = None
    parent: int = 0
    """The place of its parent in the trace; the root has none."""


Trace = tuple[bytes, Sequence[TraceSpan]]
"""A trace's id, and its spans, the first of which is the root."""


def nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds."""
    return round(seconds * 1e9)


def span_id(name: object) -> bytes:
    """Return the id of a span that is named by its trace and number."""
    return blake2b(repr(name).encode(), digest_size=8).digest()


def pairs_of(text: str | None) -> dict[str, str]:
    """Return the pairs of a variable of OpenTelemetry, such as a=1,b=2."""
    pairs = (each.partition("=") for each in (text or "").split(",") if "=" in each)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}

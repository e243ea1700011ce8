"""Read a rank's log as entries: a line that a run wrote, with the lines that belong to it, such as a traceback."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

Level = Literal["debug", "info", "warning", "error", "critical"]
PIECE_BYTES = 4 << 20
"""The most that is read of a log at once, and the most of an entry and of an answer."""

_LEVELS = get_args(Level)
_FIRST_BYTES = 1 << 18
# Entries at the end of a log among which an error's is looked for.
_AT_END = 50
# Most seconds of a search.
_SECONDS = 1.0
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) (\w+) rank \d+ step (\d+|-) (\S+) ([^\s:]+): (.*)")  # fmt: skip
# Lines that go on: indented ones, and those of the stacks that Python writes when it crashes.
_GOES_ON = re.compile(rb"\s|$|Current thread|Thread 0x|Extension modules")
_INDENT = re.compile("^    ", re.M)
_CRASH = re.compile(r"Fatal Python error|burnish: ")


class LogEntry(NamedTuple):
    """A line of a log; None or "" for what it does not say."""

    time: str
    """Local time, or with its zone."""
    level: str
    """A `Level`; "" for the line of another program."""
    step: int | None
    phase: str
    logger: str
    text: str
    more: str = ""
    """Further lines."""


def is_wanted(entry: LogEntry, *, level: Level, needle: str) -> bool:
    """Return whether an entry has at least a level, and contains a text without regard to case."""
    if _rank_of(entry.level) < _LEVELS.index(level):
        return False
    line = f"{entry.time} {entry.level} step {entry.step} {entry.phase} {entry.logger}: {entry.text}\n{entry.more}"
    return not needle or needle in line.casefold()


def _rank_of(level: str) -> int:
    return _LEVELS.index(level if level in _LEVELS else "info")


def error_at_end(log: bytes) -> LogEntry | None:
    """Return the entry with the traceback or the stacks that a log ends with, if there is one."""
    entries, _ = last_entries(log, len(log), _AT_END, lambda _: True)
    failure = None
    for entry in reversed(entries):
        if entry.level in ("debug", "info"):  # an earlier start has failed
            break
        if entry.level == "critical" and entry.more:
            failure = entry
            if "Traceback" in entry.more:
                break
    return failure


def last_entries(
    log: bytes, end: int, most: int, is_wanted: Callable[[LogEntry], bool]
) -> tuple[list[LogEntry], int | None]:
    """Return up to `most` wanted entries before an offset, in order, and the offset where the others end; None if there are none.

    Takes about a second at most, so it may find fewer.
    """
    deadline = time.monotonic() + _SECONDS
    entries: list[LogEntry] = []  # the newest first
    size = _FIRST_BYTES
    room = PIECE_BYTES
    while end > 0 and room > 0 and len(entries) < most and time.monotonic() < deadline:
        begin = max(0, end - size)
        starts, lines = _starts(log[begin:end], begin)
        if not starts and size < PIECE_BYTES:
            size *= 4
            continue
        size = PIECE_BYTES
        starts = starts or [(begin, 0)]
        stop = len(lines)
        for start, number in reversed(starts):
            data = b"".join(lines[number:stop])
            entry = _parsed(data)
            end = start
            stop = number
            if is_wanted(entry):
                entries.append(entry)
                room -= len(data)
                if len(entries) == most or room <= 0:
                    break
    return entries[::-1], end or None


def _starts(piece: bytes, begin: int) -> tuple[list[tuple[int, int]], list[bytes]]:
    """Return the offset and line of each entry that begins in a piece of a log from `begin` on, and the piece's lines."""
    lines = piece.splitlines(keepends=True)
    starts = []
    offset = begin
    for number, line in enumerate(lines):
        # The first line may have begun in an earlier piece.
        if (number > 0 or begin == 0) and (offset == 0 or not _GOES_ON.match(line)):
            starts.append((offset, number))
        offset += len(line)
    return starts, lines


def _parsed(data: bytes) -> LogEntry:
    first, _, rest = data.decode("utf-8", "replace").partition("\n")
    more = _INDENT.sub("", rest.rstrip())
    if match := _LINE.fullmatch(first.rstrip("\r")):
        when, level, step, phase, logger, text = match.groups()
        number = int(step) if step.isdecimal() else None
        return LogEntry(when, level.lower(), number, phase.strip("-"), logger, text, more)
    if first.startswith("{") and (entry := _of_json(first)):
        return entry
    level = "critical" if _CRASH.match(first) else ""
    return LogEntry("", level, None, "", "", first.rstrip("\r"), more)


def _of_json(line: str) -> LogEntry | None:
    try:
        row: Any = json.loads(line)
        text, _, more = str(row["message"]).partition("\n")
        step = row["step"] if isinstance(row["step"], int) else None
        parts = [part for part in (more, str(row.get("error") or "").rstrip()) if part]
        words = [str(row[name] or "") for name in ("time", "level", "phase", "logger")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    when, level, phase, logger = words
    return LogEntry(when, level.lower(), step, phase, logger, text, "\n".join(parts))

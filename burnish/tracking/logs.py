"""Keep a log per rank, `logs/rank-N.log`, of Burnish and libraries; each line names rank, step and phase. It is rotated at 10 MB."""

from __future__ import annotations

import faulthandler
import io
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

from burnish.errors import StoppedError
from burnish.files.storage import open_regular
from burnish.redaction import printable, redacted
from burnish.tracking.spans import Spans

_BYTES = 10_000_000
_FILES = 4
_LAST_LINES = 8
_LAST_BYTES = 1 << 14
# first words of faulthandler's stacks; lines kept
_CRASH = "Fatal Python error"
_CRASH_LINES = 12

log = logging.getLogger("burnish")
# This logger's handler is the process's latest log, for errors that are reported after the run.
_ended = logging.getLogger("burnish.ended")


class RankLog(RotatingFileHandler):
    """Write records to one rank's file, made with the first. Failed writes lose records, with one warning."""

    def __init__(self, path: Path, rank: int, spans: Spans, form: Literal["text", "json"]) -> None:
        super().__init__(
            path,
            maxBytes=_BYTES,
            backupCount=_FILES,
            encoding="utf-8",
            errors="backslashreplace",
            delay=True,
        )
        self.addFilter(lambda record: record.levelno >= logging.INFO or _is_ours(record))
        self._rank = rank
        self._form = form
        self.spans = spans
        self._is_lost = False
        self._catches_faults = not faulthandler.is_enabled()
        self.last: Sequence[str] = ()  # lines before the error that ended the run

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line; further lines of its message are indented."""
        text = redacted(record.getMessage())
        stack = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
        stack = redacted(stack)
        level = record.levelname.lower()
        step = self.spans.step
        phase = self.spans.current
        if self._form == "json":
            when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
            place = {"rank": self._rank, "step": step, "phase": phase, "logger": record.name}
            error = {"error": stack} if stack else {}
            return json.dumps({"time": when, "level": level, **place, "message": text, **error})
        when = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        shown = "-" if step is None else step
        where = f"rank {self._rank} step {shown} {phase or '-'} {record.name}"
        message = printable(f"{text}\n{stack}").rstrip().replace("\n", "\n    ")
        return f"{when} {level} {where}: {message}"

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn once that the file cannot be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_lost:
            self._is_lost = True
            log.warning("%s: %s. Training goes on without this log", self.baseFilename, error)

    def _open(self) -> io.TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        stream = super()._open()
        if self._catches_faults:  # again after a rotation
            faulthandler.enable(stream)
        return stream

    def say(self, level: int, text: str, error: BaseException | None = None) -> None:
        """Write a line of Burnish, with an error's traceback."""
        stack = None if error is None else (type(error), error, error.__traceback__)
        self.handle(log.makeRecord(log.name, level, __file__, 0, text, (), stack))

    def close(self) -> None:
        """Close the file."""
        if self._catches_faults and self.stream is not None:
            faulthandler.disable()
        with suppress(OSError):  # the disk is full
            super().close()


@contextmanager
def rank_log(path: Path, rank: int, spans: Spans, form: Literal["text", "json"]) -> Iterator[None]:
    """Log to `path` inside the block. Existing handlers get no more than before."""
    handler = RankLog(path, rank, spans, form)
    _ended.handlers = [handler]
    root = logging.getLogger()
    level = log.level
    shown = log.getEffectiveLevel()
    # Libraries with handlers of their own, such as transformers, pass nothing to the root.
    named = [each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    loggers = [root, *(logger for logger in named if not logger.propagate)]

    def was_shown(record: logging.LogRecord) -> bool:
        return record.levelno >= shown or not _is_ours(record)

    def begins(path: str) -> AbstractContextManager[None]:
        if "/" not in path:
            log.debug("begins")
        return nullcontext()

    with ExitStack() as undo:
        undo.callback(handler.close)
        if not root.handlers and logging.lastResort is not None:
            # Python uses `lastResort` only if there is no handler.
            root.addHandler(logging.lastResort)
            undo.callback(root.removeHandler, logging.lastResort)
        for other in (*root.handlers, *log.handlers):
            other.addFilter(was_shown)
            undo.callback(other.removeFilter, was_shown)
        for logger in loggers:
            logger.addHandler(handler)
            undo.callback(logger.removeHandler, handler)
        log.setLevel(logging.DEBUG)
        undo.callback(log.setLevel, level)
        before = warnings.showwarning
        logging.captureWarnings(True)
        if warnings.showwarning is not before:
            undo.callback(logging.captureWarnings, False)
        spans.around.append(begins)
        undo.callback(spans.around.remove, begins)
        try:
            yield
        except BaseException as error:
            handler.last = tail(Path(handler.baseFilename))
            if isinstance(error, StoppedError):
                handler.say(logging.INFO, str(error))
            else:
                handler.say(logging.CRITICAL, "the run ends with an error", error)
            raise


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == log.name


def _latest() -> RankLog | None:
    return next((each for each in _ended.handlers if isinstance(each, RankLog)), None)


def spans() -> Spans | None:
    """Return the spans of this process's run; None before its log is opened."""
    return None if (handler := _latest()) is None else handler.spans


def add(text: str, level: int = logging.CRITICAL) -> None:
    """Write a line to this process's log, even if that is closed: an error, or what the console shows otherwise."""
    if (handler := _latest()) is not None:
        is_open = handler.stream is not None
        handler.say(level, text)
        if not is_open:
            handler.close()


def last_lines(rank: int | None = None) -> Sequence[str]:
    """Return the last lines of this process's log before its error, or of another rank's log on this machine."""
    if (handler := _latest()) is None:
        return ()
    path = Path(handler.baseFilename)
    return handler.last if rank is None else tail(path.with_name(f"rank-{rank}.log"))


def descriptor() -> int | None:
    """Return the descriptor of this process's log, if it is open."""
    handler = _latest()
    return None if handler is None or handler.stream is None else handler.stream.fileno()


def rotated(name: str) -> str:
    """Return the name of a log's file after one more rotation."""
    base, _, number = name.rpartition(".")
    return f"{base}.{int(number) + 1}" if number.isdecimal() else f"{name}.1"


def tail(path: Path) -> Sequence[str]:
    """Return a file's last lines, from where Python crashed if it did; nothing for an unreadable file."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, io.SEEK_END) - _LAST_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ()
    crashes = [number for number, line in enumerate(lines) if line.startswith(_CRASH)]
    if crashes:
        return lines[max(0, crashes[-1] - _LAST_LINES) :][: _LAST_LINES + _CRASH_LINES]
    return lines[-_LAST_LINES:]

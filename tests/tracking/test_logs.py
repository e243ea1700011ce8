"""A rank's log: its lines, what is in it, a disk that is full, a crash."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.errors import StoppedError
from burnish.tracking import logs
from burnish.tracking.logs import last_lines, rank_log, tail
from burnish.tracking.spans import Spans

log = logging.getLogger("burnish")
LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (\w+) rank 3 step (\S+) (\S+) (\S+): (.*)"
)


@pytest.fixture(autouse=True)
def _nothing_but_warnings_is_shown() -> Iterator[None]:
    """Whatever another test has left: pytest's workers cannot send some of what is logged here."""
    before = log.level
    log.setLevel(logging.WARNING)
    yield
    log.setLevel(before)


@pytest.fixture
def spans() -> Spans:
    return Spans()


def parts(path: Path) -> list[tuple[str, ...]]:
    """Level, step, phase, logger and message of each line that begins a record."""
    found = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
    return [match.groups() for match in found if match]


def test_lines_have_rank_step_and_phase(tmp_path: Path, spans: Spans) -> None:
    path = tmp_path / "logs" / "rank-3.log"
    with rank_log(path, 3, spans, "text"):
        log.info("setup")
        spans.step = 12
        with spans("rollout"), spans("generate"):
            log.warning("slow: %d", 5)
    with rank_log(path, 3, spans, "text"):
        log.info("again")
    assert parts(path) == [
        ("info", "-", "-", "burnish", "setup"),
        ("debug", "12", "rollout", "burnish", "begins"),
        ("warning", "12", "rollout", "burnish", "slow: 5"),
        ("info", "12", "-", "burnish", "again"),
    ]


def test_json_lines_hold_hostile_texts_and_tracebacks(tmp_path: Path, spans: Spans) -> None:
    path, text = tmp_path / "rank-0.log", 'a\n{"rank": 9}\x1b[2J\ud800</script>'
    spans.step = 2

    def fails() -> None:
        with rank_log(path, 0, spans, "json"), spans("update"):
            log.info("%s", text)
            print(1 / 0)

    with pytest.raises(ZeroDivisionError):
        fails()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["message"] for row in rows][:2] == ["begins", text]
    assert {(row["rank"], row["step"], row["phase"]) for row in rows} == {(0, 2, "update")}
    assert rows[-1]["error"].rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_message_cannot_pretend_to_be_a_line(tmp_path: Path, spans: Spans) -> None:
    path = tmp_path / "rank-3.log"
    with rank_log(path, 3, spans, "text"):
        log.info("first")
        forged = path.read_text().rstrip()
        log.info("second\n%s\r\x1b[1A%s", forged, "\ud800\u202e")
    assert len(parts(path)) == 2
    assert "\x1b" not in path.read_text()
    assert "\r" not in path.read_text()


def test_libraries_are_heard_with_and_without_handlers_of_their_own(
    tmp_path: Path, spans: Spans
) -> None:
    quiet = logging.getLogger("some_library")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    with rank_log(tmp_path / "rank-3.log", 3, spans, "text"):
        quiet.warning("of a library")
        quiet.setLevel(logging.DEBUG)
        quiet.debug("too much")
        logging.getLogger("another.one").warning("of another")
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            logging.captureWarnings(True)  # pytest has put its own in place
            warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
    said = (tmp_path / "rank-3.log").read_text()
    assert "some_library: of a library" in said
    assert "too much" not in said
    assert "another.one: of another" in said
    assert "DeprecationWarning: deprecated" in said
    assert not any(isinstance(each, logs.RankLog) for each in quiet.handlers)


def test_other_handlers_get_what_they_got_before(tmp_path: Path, spans: Spans) -> None:
    seen: list[str] = []

    class Console(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    console, root, level = Console(), logging.getLogger(), log.level
    root.addHandler(console)
    try:
        log.setLevel(logging.ERROR)
        with rank_log(tmp_path / "rank-3.log", 3, spans, "text"):
            log.info("for the file")
            log.error("for both")
            assert log.isEnabledFor(logging.DEBUG)
        log.info("for nobody")
    finally:
        root.removeHandler(console)
        log.setLevel(level)
    assert seen == ["for both"]
    messages = [each[-1] for each in parts(tmp_path / "rank-3.log")]
    assert messages == ["for the file", "for both"]


def test_a_stop_is_no_crash(tmp_path: Path, spans: Spans) -> None:
    path = tmp_path / "rank-3.log"
    with pytest.raises(StoppedError), rank_log(path, 3, spans, "text"):
        raise StoppedError("SIGTERM: saved", signal_number=15)
    assert parts(path) == [("info", "-", "-", "burnish", "SIGTERM: saved")]
    assert "Traceback" not in path.read_text()


def test_the_last_lines_are_those_before_the_error(tmp_path: Path, spans: Spans) -> None:
    path = tmp_path / "rank-1.log"

    def fails() -> None:
        with rank_log(path, 1, spans, "text"):
            for number in range(20):
                log.info("line %d", number)
            raise KeyError("no such column")

    with pytest.raises(KeyError):
        fails()
    assert [line.rpartition(" ")[2] for line in last_lines()] == [str(n) for n in range(12, 20)]
    assert last_lines(1)[-1].strip() == "KeyError: 'no such column'"
    assert last_lines(7) == ()


def test_a_full_disk_costs_one_warning(
    tmp_path: Path, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rank-0.log"
    path.symlink_to("/dev/full")
    with rank_log(path, 0, spans, "text"):
        for _ in range(5):
            log.info("x" * 10_000)
    assert [each.levelname for each in caplog.records].count("WARNING") == 1


def test_a_file_that_is_large_is_put_aside(
    tmp_path: Path, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_BYTES", 1000)
    with rank_log(tmp_path / "rank-0.log", 0, spans, "text"):
        for number in range(200):
            log.info("line %d", number)
    files = sorted(tmp_path.iterdir())
    assert [each.name for each in files] == [
        "rank-0.log",
        *(f"rank-0.log.{n}" for n in range(1, 5)),
    ]
    assert all(each.stat().st_size <= 1000 for each in files)
    assert "line 199\n" in files[0].read_text()


CRASH = """
import ctypes, sys
from pathlib import Path
from burnish.tracking import logs
from burnish.tracking.spans import Spans

logs._BYTES = 1000
with logs.rank_log(Path("rank-0.log"), 0, Spans(), "text"):
    for number in range(50):
        logs.log.info("line %d", number)
    ctypes.string_at(0)
"""


def test_the_stack_of_a_crash_is_in_the_file(tmp_path: Path) -> None:
    """Also after the file was put aside."""
    repository = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", CRASH], cwd=tmp_path, env={"PYTHONPATH": repository}, check=False
    )
    assert done.returncode < 0
    shown = tail(tmp_path / "rank-0.log")
    assert "line 49" in "".join(shown)
    assert any("string_at" in line for line in shown)

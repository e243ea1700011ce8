import io
import os
import subprocess
import sys

import pytest

from burnish.tracking.console import ConsoleTracker
from burnish.tracking.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


def test_disabled_shows_nothing_anywhere(terminal: Terminal) -> None:
    with Progress(False, stream=terminal).phase("rollout", 4) as bar:
        bar.advance(4)
    assert terminal.getvalue() == ""


def test_a_terminal_shows_a_bar_and_removes_it(terminal: Terminal) -> None:
    progress = Progress(True, stream=terminal)
    for name in ("rollout", "update"):
        with progress.phase(name, 64) as bar:
            bar.advance(16)
    shown = terminal.getvalue()
    assert "rollout" in shown
    assert "update" in shown
    assert "0/64" in shown
    after_the_last_bar = shown.rpartition("0:00:00")[2]
    assert "\x1b[2K" in after_the_last_bar  # line erased
    assert "\x1b[?25h" in after_the_last_bar  # cursor shown again
    assert "\n" not in after_the_last_bar


def test_a_bar_moves(terminal: Terminal) -> None:
    with Progress(True, stream=terminal).phase("rollout", 64) as bar:
        bar.advance(16)
    assert "16/64" in terminal.getvalue()


def test_phases_nest_and_end_with_an_error(terminal: Terminal) -> None:
    progress = Progress(True, stream=terminal)

    def fail() -> None:
        with progress.phase("setup", None), progress.phase("weights", 3) as bar:
            bar.advance()
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    with progress.phase("rollout", 2):
        pass
    assert "weights" in terminal.getvalue()
    assert "rollout" in terminal.getvalue()


def test_elsewhere_only_long_phases_say_a_plain_line() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(True, stream=stream, clock=clock)
    for _ in range(2):
        with progress.phase("rollout", 64) as bar:
            for _ in range(64):
                clock.now += 1.0
                bar.advance()
    with progress.phase("update", 4) as bar:
        bar.advance(4)
    said = [line.split()[-1] for line in stream.getvalue().splitlines()]
    assert said == ["2s", "32s", "62s", "30s", "60s"]  # sooner where it is the first of its name


def test_a_line_without_a_total() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(True, stream=stream, clock=clock).phase("[read]") as bar:
        clock.now = 31.0
        bar.advance(5)
    assert stream.getvalue() == "[read] 5 after 31s\n"


GOES_ON = """
import sys
from burnish.tracking.console import ConsoleTracker
from burnish.tracking.console import ConsoleTracker
from burnish.tracking.progress import Progress
console, progress = ConsoleTracker(), Progress(True)
with progress.phase("update", 1) as bar:
    sys.stdin.read()
    console.log(1, {"train/loss": 1.0})
    bar.advance()
"""


def test_a_run_outlives_its_terminal() -> None:
    ours, terminal = os.openpty()
    command = [sys.executable, "-c", GOES_ON]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=terminal, stderr=terminal) as run:
        os.close(terminal)
        os.read(ours, 1)  # the bar is drawn
        os.close(ours)
        run.stdin.close()
        assert run.wait() == 0


@pytest.mark.parametrize("redirected", [">&- 2>&-", "| head -c 0"])
def test_a_run_outlives_readers_of_its_output(redirected: str) -> None:
    command = f'set -o pipefail; sleep 0.5 | "$0" -c "$1" {redirected}'
    subprocess.run(["bash", "-c", command, sys.executable, GOES_ON], check=True)


def test_a_notebook_gets_lines_and_no_displays(monkeypatch, capsys) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *_: pytest.fail("displayed"))
    ConsoleTracker().log(1, {"train/loss": 1.0})
    assert capsys.readouterr().out.split() == ["step", "1", "loss", "1.000"]

"""What a signal does to the process that it reaches, and to those beside it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.ranks.fork_server import with_given_path
from support.ranks.processes import run_ranks
from support.runs.training_files import make_files

from burnish.distributed.environment import AFTER_SAVE
from burnish.distributed.layout import Layout
from burnish.runs.signals import StopRequested, catch_signals


@pytest.fixture(autouse=True)
def as_started_in_a_terminal() -> Iterator[None]:
    """The tests themselves may run under nohup or in the background, which ignore signals."""
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("silent", [False, True])
def test_the_first_signal_is_answered_where_that_is_wanted(
    silent: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with catch_signals(Layout(rank=1, world=2) if silent else None) as stopper:
        stopper.check()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(StopRequested, match="SIGINT"):
            stopper.check()
    said = capfd.readouterr().err
    assert said.startswith("SIGINT: ") != silent
    assert ("stops at once" in said) != silent


def test_a_terminal_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def hung_up(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", hung_up)
    with catch_signals() as stopper:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopper.received == signal.SIGTERM


def test_what_comes_again_with_a_closed_terminal_ends_nothing() -> None:
    with catch_signals() as stopper:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), number)
    assert stopper.received == signal.SIGHUP


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_is_ignored_at_the_start_stays_so_and_is_named_once(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """As nohup and a script's background jobs have it. Programs that are started inherit it."""
    caplog.set_level(logging.INFO)
    signal.signal(number, signal.SIG_IGN)
    asked = f"import signal; print(signal.getsignal({int(number)}) is signal.SIG_IGN)"
    with catch_signals(Layout(rank=1, world=2)), catch_signals() as stopper:
        os.kill(os.getpid(), number)
        found = subprocess.run([sys.executable, "-c", asked], stdout=subprocess.PIPE, check=True)
        assert stopper.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.received == signal.SIGTERM
    assert found.stdout == b"True\n"
    assert [number.name in each.message for each in caplog.records] == [True]
    assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), ("--processes", "2")])
def test_a_run_under_nohup_goes_on_whenever_the_terminal_closes(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    root = make_files(tmp_path)
    command = ["nohup", sys.executable, "-m", "burnish", "sft", "sft.yaml", *more]
    path = with_given_path(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    output = root / "output.txt"
    with output.open("w") as log:
        run = subprocess.Popen(
            command, cwd=root, env=environ, stdout=log, stderr=log, start_new_session=True
        )
    while run.poll() is None:
        if output.stat().st_size:  # nohup has begun
            os.killpg(run.pid, signal.SIGHUP)
        time.sleep(0.05)
    assert run.returncode == 0, output.read_text()
    assert output.read_text().count("SIGHUP") == 1


def test_a_thread_beside_the_main_one_catches_no_signals() -> None:
    def inside() -> int | None:
        with catch_signals() as stopper:
            return stopper.received

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(inside).result() is None


def stopped_by(layout: Layout) -> tuple[bool, int, int]:
    """Whether a flag of one rank is known, and by which signals a run ends at a save, and between steps."""
    with catch_signals(layout) as stopper:
        found: list[int] = [stopper.check_all(layout.rank == 1)]
        for number, check in (
            (AFTER_SAVE, stopper.check_saved),
            (signal.SIGINT, stopper.check_all),
        ):
            assert not stopper.check_all()
            if layout.rank == 1:
                os.kill(os.getpid(), number)
            try:
                check()
            except StopRequested as request:
                found.append(request.signal_number)
    return tuple(found)


def test_every_rank_hears_the_flag_and_the_signal_of_one() -> None:
    assert run_ranks(stopped_by, 2) == [(True, AFTER_SAVE, signal.SIGINT)] * 2

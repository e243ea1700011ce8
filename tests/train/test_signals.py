"""What a signal does to the process that it reaches, and to those beside it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from ranks import run_ranks

from burnish.distributed.environment import AFTER_SAVE
from burnish.distributed.layout import Layout
from burnish.train.signals import StopRequested, catch_signals


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


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with catch_signals() as stopper:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stopper.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


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

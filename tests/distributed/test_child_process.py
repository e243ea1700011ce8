"""A process beside a training process: what it says, and what can go wrong with that."""

from __future__ import annotations

import os
import signal
from multiprocessing import Pipe
from tempfile import TemporaryFile

import pytest

from burnish.distributed.child_process import Companion
from burnish.errors import BurnishError, MissingError

SPEAKER = """
import time
from multiprocessing.connection import Connection

from burnish.distributed.child_process import accompany

time.sleep(0.5)  # as long as imports take

def serve(pipe, parent):
    accompany(parent)
    with Connection(pipe) as connection:
        connection.send_bytes(b"no pickle")
        connection.send_bytes(b"cno_such_module\\nanything\\n.")
        connection.send("understood")
        connection.recv()
"""


@pytest.fixture
def companion(tmp_path, monkeypatch):
    (tmp_path / "speaker_for_tests.py").write_text(SPEAKER)
    monkeypatch.syspath_prepend(tmp_path)
    companion = Companion("speaker_for_tests", "the speaker")
    yield companion
    companion.kill()


def test_what_cannot_be_unpickled_is_an_error_and_the_next_answer_is_read(companion):
    for reason in ("UnpicklingError", "no_such_module"):
        answer = companion.answer(60.0)
        assert isinstance(answer, BurnishError)
        assert reason in str(answer)
    assert companion.answer(60.0) == "understood"
    assert companion.answer(0.0) is None
    assert companion.send("enough")
    assert "exit status 0" in str(companion.answer(60.0))


def test_its_end_shows_the_last_lines_of_its_log(tmp_path, monkeypatch):
    text = "import os\ndef serve(*_): print(os.environ['SAID'], flush=True); os._exit(7)\n"
    (tmp_path / "dies_for_tests.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with TemporaryFile("w+") as log:
        dying = Companion("dies_for_tests", "it", log=log, environ={"SAID": "no room left"})
        assert dying.answer(60.0).have == "exit status 7\nno room left\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_whole_run_does_not_end_it_however_early(companion, number):
    os.kill(companion._process.pid, number)
    assert isinstance(companion.answer(60.0), BurnishError)
    os.kill(companion._process.pid, number)
    companion.answer(60.0)
    assert companion.answer(60.0) == "understood"


def test_the_run_itself_hears_signals_after_starting_it(companion):
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


class Stubborn(Exception):
    """Like botocore's: made of two things, pickled as one; and it holds what cannot be pickled at all."""

    def __init__(self, code, operation):
        super().__init__(f"{code} when calling {operation}")
        self.lock = (each for each in ())


def test_an_error_crosses_whatever_a_library_raised():
    error = MissingError("no bucket", have=Stubborn(404, "GetObject"), want=7, do="make it")
    ours, theirs = Pipe()
    with ours, theirs:
        ours.send(error)
        again = theirs.recv()
    assert type(again) is MissingError
    assert str(again) == str(error)
    assert (again.have, again.do) == ("404 when calling GetObject", "make it")

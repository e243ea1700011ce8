from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys

import pytest

from burnish.errors import BurnishError
from burnish.files.lease import holding_lease

HOLD = """
import sys
import time
from pathlib import Path
from burnish.files.lease import holding_lease
with holding_lease(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_holds_it_until_it_dies(tmp_path):
    path = tmp_path / "checkpoints" / ".lease"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BurnishError) as caught, holding_lease(path):
            pass
        assert f"process {holder.pid} " in caught.value.have
        holder.kill()
    with holding_lease(path):
        assert str(os.getpid()) in path.read_text()


FORK = """
import os
import sys
import time
from pathlib import Path
from burnish.files.lease import holding_lease
with holding_lease(Path(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_holder_that_was_killed_and_not_waited_for_is_dead(tmp_path):
    """What worked for it has the lock for a moment more."""
    path = tmp_path / ".lease"
    command = [sys.executable, "-c", FORK, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        with holding_lease(path):
            assert str(os.getpid()) in path.read_text()


def test_who_looks_at_it_for_a_moment_stops_nobody(tmp_path, monkeypatch):
    path = tmp_path / ".lease"
    path.touch()
    with path.open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr("burnish.files.lease.time.sleep", lambda seconds: looking.close())
        with holding_lease(path):
            assert str(os.getpid()) in path.read_text()


def test_it_can_be_taken_again_after_it_was_given_back(tmp_path):
    path = tmp_path / ".lease"
    for _ in range(2):
        with holding_lease(path), pytest.raises(BurnishError), holding_lease(path):
            pass


def test_every_holder_has_a_greater_number(tmp_path):
    path = tmp_path / ".lease"
    numbers = []
    for _ in range(3):
        with holding_lease(path) as lease:
            lease.check()
            numbers.append(lease.number)
    path.write_text("")  # lost in a power failure
    with holding_lease(path) as lease:
        numbers.append(lease.number)
    path.write_text(json.dumps({"token": numbers[-1] + 10**15}))  # by a clock that was ahead
    with holding_lease(path) as lease:
        numbers.append(lease.number)
    assert numbers == sorted(set(numbers))


def test_it_names_the_job_of_a_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with holding_lease(tmp_path / ".lease"):
        assert json.loads((tmp_path / ".lease").read_text())["slurm_job"] == "4711"
    monkeypatch.delenv("SLURM_JOB_ID")
    with holding_lease(tmp_path / ".lease"):
        assert "slurm_job" not in (tmp_path / ".lease").read_text()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"token": "7"}', '{"token": 7}', None])
def test_who_was_superseded_is_told(tmp_path, text):
    path = tmp_path / ".lease"
    with holding_lease(path) as lease:
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(BurnishError) as caught:
            lease.check()
        assert str(lease.number) in caught.value.want


HAND_ON = """
import subprocess, sys
from pathlib import Path
from burnish.files.lease import holding_lease
with holding_lease(Path(sys.argv[1])) as lease:
    helper = subprocess.Popen(["sleep", sys.argv[2]], pass_fds=(lease.descriptor,))
    print("held", flush=True)
    sys.stdin.read()
"""


def test_after_a_death_the_dead_ones_helper_is_waited_for(tmp_path):
    path = tmp_path / ".lease"

    def die(helper_seconds):
        command = [sys.executable, "-c", HAND_ON, str(path), helper_seconds]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with holder:
            assert holder.stdout.readline() == b"held\n"
            holder.kill()

    die("0.5")
    with holding_lease(path):
        pass
    die("60")
    with pytest.raises(BurnishError), holding_lease(path, 0.2):
        pass

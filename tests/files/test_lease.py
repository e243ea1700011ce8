from __future__ import annotations

import os
import subprocess
import sys

import pytest

from burnish.errors import BurnishError
from burnish.files.lease import Lease

HOLD = """
import sys
from pathlib import Path
from burnish.files.lease import Lease
with Lease(Path(sys.argv[1])):
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
        with pytest.raises(BurnishError, match="another run is using") as caught, Lease(path):
            pass
        assert f'"pid": {holder.pid}' in caught.value.have
        holder.kill()
    with Lease(path):
        assert str(os.getpid()) in path.read_text()


def test_it_can_be_taken_again_after_it_was_given_back(tmp_path):
    lease = Lease(tmp_path / ".lease")
    for _ in range(2):
        with lease, pytest.raises(BurnishError), Lease(tmp_path / ".lease"):
            pass

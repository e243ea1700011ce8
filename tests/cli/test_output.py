"""What commands do when nobody reads on."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_reader_who_has_seen_enough_ends_the_command_without_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "from burnish.cli.output import print_text; print_text('x'); raise ValueError('went on')"
    with os.fdopen(writing, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (ended.returncode, ended.stderr) == (1, "")

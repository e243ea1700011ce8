"""What commands do when nobody reads on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.faults.bit_flips import make_step

from burnish.errors import CorruptError


def test_a_reader_who_has_seen_enough_ends_the_command_without_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "from burnish.cli.output import print_text; print_text('x'); raise ValueError('went on')"
    with os.fdopen(writing, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert (ended.returncode, ended.stderr) == (1, "")


def test_a_name_that_is_no_text_is_printed(tmp_path: Path) -> None:
    step = make_step(tmp_path / "checkpoints")
    (step / os.fsdecode(b"\xff")).touch()
    ended = subprocess.run(
        [sys.executable, "-m", "burnish", "ckpt", "verify", str(step), "--json"],
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
    )
    assert ended.returncode == CorruptError.exit_code
    [problem] = json.loads(ended.stdout)["steps"][0]["problems"]
    assert "\udcff" in problem["problem"]
    assert b"Traceback" not in ended.stderr

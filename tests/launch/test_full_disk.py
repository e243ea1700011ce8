"""A disk that is really full under a supervised run: what is said, that it ends, and that nothing is lost."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints.states import committed
from support.runs.training_files import done, outcome

from burnish.errors import UsageError

pytestmark = pytest.mark.nightly
ARGV = ["rl", "rl.yaml", "steps=12", "checkpoint.save_every=1", "checkpoint.reserve_gb=0"]
QUIET = ["evaluation.every=0", "evaluation.before=false", "checkpoint.keep_last=100"]

SCRIPT = """
mount -t tmpfs -o size=$SIZE none runs || exit 77
(until [ -e runs/$RUN/checkpoints/step-00000002 ]; do sleep 0.02; done; $FILL) > /dev/null 2>&1 &
"$@" > $RUN.txt 2>&1
echo $? > $RUN.code
cp -a runs/$RUN $RUN.full
rm -f runs/filler
mount -o remount,size=200m runs
"$@" > $RUN.again.txt 2>&1 || exit 1
cp -a runs/$RUN $RUN.whole
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs user namespaces")
@pytest.mark.parametrize(
    ("run", "size", "fill"),
    [("grown", "1500k", "true"), ("filled", "20m", "dd if=/dev/zero of=runs/filler bs=4k")],
)
def test_a_full_disk_ends_a_run_by_name_and_costs_no_step(
    work: Path, run: str, size: str, fill: str
) -> None:
    (work / "runs").mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "burnish", *ARGV, *QUIET, f"name={run}", "--processes", "2"]
    root = str(Path(__file__).parents[2])
    environ = {"RUN": run, "SIZE": size, "FILL": fill, "PYTHONPATH": root}
    done_there = subprocess.run(
        ["unshare", "-rm", "sh", "-c", SCRIPT, "sh", *argv], cwd=work, env={**os.environ, **environ}
    )
    if done_there.returncode == 77 or not (work / f"{run}.code").exists():
        pytest.skip("this system lets nobody mount a file system of their own")
    said = (work / f"{run}.txt").read_text()
    assert int((work / f"{run}.code").read_text()) == UsageError.exit_code, said
    assert f"runs/{run}" in said
    assert said.count("starting the run again") <= 3, said
    assert "During handling" not in said, said
    assert "OSError:" not in said.rpartition("starting the run again")[2], said
    assert done_there.returncode == 0, (work / f"{run}.again.txt").read_text()
    kept = [each.step for each in committed(work / f"{run}.full" / "checkpoints")]
    assert kept[:2] == [1, 2]
    again = re.findall(r"INFO steps (\d+) to", (work / f"{run}.again.txt").read_text())
    assert again == [str(kept[-1] + 1)]
    wanted = done(work, *ARGV, *QUIET, f"name={run}.calm", world=2)
    assert outcome(work / f"{run}.whole") == outcome(wanted)
    if run == "grown":  # the log is written for as long as there is room for a line
        log = (work / f"{run}.full" / "logs" / "rank-0.log").read_text()
        assert re.search(rf"critical rank 0 step {kept[-1] + 1} save burnish: .*ends with", log)
        assert "in _require_room" in log

"""A whole run that stands still."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs.training_files import burnish, make_files, ranks

from burnish.tracking.trackers import read_metrics

HANGS = """
import os
import time

called = []

def check(completions, **columns):
    called.append(completions)
    if os.environ["RANK"] == "1" and len(called) > 2 and not os.path.exists("hung"):
        open("hung", "w").close()
        time.sleep(600)  # here
    return [1.0] * len(completions)
"""

ARGV = [
    *("rl", "rl.yaml", "reward.functions=[{function: hangs.py:check}]", "steps=4"),
    *("distributed.stall_seconds=2", "reward.timeout_seconds=600", "checkpoint.save_every=1"),
    *("data.validation=[]", "evaluation.every=0"),
]


@pytest.mark.nightly
def test_a_hung_reward_is_named_with_its_line(tmp_path: Path) -> None:
    root = make_files(tmp_path)
    (root / "hangs.py").write_text(HANGS)
    line = next(n for n, text in enumerate(HANGS.splitlines(), 1) if "# here" in text)
    commands = ranks(root, ARGV, 2)
    codes = [command.wait() for command in commands]
    said = "\n".join(command.output for command in commands)
    assert codes == [1, 1], said
    assert said.count("burnish: nothing has moved on any rank") == 1
    assert f"rank 1 has been in the reward hangs.py:check (hangs.py line {line} in check)" in said
    assert "rank 0 has been waiting in all_gather called by burnish.methods.parts.rollouts" in said
    assert "rollout for" in said
    (first,) = read_metrics(root / "runs/run/metrics.jsonl")
    assert first["perf/slowest_rank/score"] in (0, 1)
    assert first["perf/slowest_share/generate"] >= 1


@pytest.mark.nightly
def test_a_run_that_hung_once_is_started_again_and_ends_well(tmp_path: Path) -> None:
    root = make_files(tmp_path)
    (root / "hangs.py").write_text(HANGS)
    code, said = burnish(root, *ARGV, "--processes", "2")
    assert code == 0, said
    assert said.count("burnish: nothing has moved on any rank") == 1
    assert "resuming step 1" in said

"""A whole run that stands still."""

from __future__ import annotations

from pathlib import Path

from training_files import make_files, ranks

HANGS = """
import os
import time

called = []

def check(completions, **columns):
    called.append(completions)
    if os.environ["RANK"] == "1" and len(called) > 2:
        time.sleep(600)  # here
    return [1.0] * len(completions)
"""


def test_a_hung_reward_is_named_with_its_line(tmp_path: Path) -> None:
    root = make_files(tmp_path)
    (root / "hangs.py").write_text(HANGS)
    line = next(n for n, text in enumerate(HANGS.splitlines(), 1) if "# here" in text)
    argv = [
        *("rl", "rl.yaml", "reward.functions=[{function: hangs.py:check}]", "steps=4"),
        *("distributed.stall_seconds=2", "reward.timeout_seconds=600"),
        *("data.validation=[]", "evaluation.every=0"),
    ]
    commands = ranks(root, argv, 2)
    codes = [command.wait() for command in commands]
    said = "\n".join(command.output for command in commands)
    assert codes == [1, 1], said
    assert said.count("burnish: nothing has moved on any rank") == 1
    assert f"rank 1 is in the reward hangs.py:check (hangs.py line {line} in check)" in said
    assert "rank 0 waits in all_gather called by burnish.train.collect" in said
    assert "rollout since" in said

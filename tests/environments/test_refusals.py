"""What a person gets wrong about environments is said before the run, in a sentence, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models.tool_templates import HERMES
from support.nightly import by_day
from support.runs.training_files import burnish

BROKEN = Path(__file__).with_name("broken.py")
RL = ["rl", "rl.yaml", "name=refused", "reward.functions=[]", "data.string_prompts=user"]
UNMEASURED = ["data.validation=[]", "evaluation.every=0"]
CALLING = "model.chat_template=calling.jinja"


def named(name: str, *settings: str) -> tuple[str, ...]:
    return (f"rollout.environment.function={BROKEN}:{name}", *settings)


CASES = {
    "no file": ["rollout.environment.function=missing.py:Game"],
    "no module": ["rollout.environment.function=missing_module:Game"],
    "no class": named("Lookin"),
    "does not import": ["rollout.environment.function=syntax.py:Game"],
    "exits when imported": ["rollout.environment.function=exits.py:Game"],
    "no environment": ["rollout.environment.function=builtins:dict"],
    "arguments": named("Looking", CALLING, "rollout.environment.kwargs={size: 3}"),
    "template without tools": named("Looking"),
    "one tool": named("OneTool", CALLING),
    "tools of one name": named("SameTools", CALLING),
    "one turn and tools": named("Looking", CALLING, "rollout.environment.max_turns=1"),
    "no call and tools": named("Looking", CALLING, "rollout.environment.max_calls=0"),
    "raises in begin": named("Raising"),
    "raises when made": named("Unmade"),
    "begins with no message": named("Mute"),
    "ends its process": named("Dying"),
    "rows without prompts": named("Rowless", "data.train=[]", *UNMEASURED),
    "a file without prompts": named("Looking", CALLING, "data.train=bare.jsonl", *UNMEASURED),
    "no rows": named("Looking", CALLING, "data.train=[]", *UNMEASURED),
    "no room": named("Looking", CALLING, "rollout.max_response_length=64"),
}
MISSING = {"rows without prompts", "a file without prompts"}
"""Something that the settings name is not there."""


@pytest.mark.parametrize("what", by_day(CASES, {"raises in begin"}))
def test_what_is_wrong_is_said_before_the_run(work, what):
    (work / "syntax.py").write_text("class Game(:\n")
    (work / "exits.py").write_text("raise SystemExit(1)\n")
    (work / "calling.jinja").write_text(HERMES)
    (work / "bare.jsonl").write_text(json.dumps({"level": 3}) + "\n")
    code, output = burnish(work, *RL, *CASES[what], "--dry-run")
    assert code == (5 if what in MISSING else 2), output
    assert "Traceback" not in output
    assert not (work / "runs" / "refused").exists()

"""For runs whose completions come from other processes: their settings, and `burnish serve` beside a run."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.runs.training_files import RL, Command, rollouts

QUICK = {**RL, "steps": 4, "evaluation": {"every": 2}}
STILL: dict[str, Any] = {
    "optim": {"lr": 1e-30},
    "data": {**RL["data"], "validation": []},
    "evaluation": {},
    "checkpoint": {"save_every": 1},
    "algorithm": {"mismatch_cap": 2.0},
}
"""A run that learns nothing, so that all weights draw the same tokens."""
IN_FLIGHT: dict[str, Any] = {
    "ahead": 3,
    "place": "child",
    "in_flight": True,
    "slots": 1,
    "max_response_length": 20,
}
"""Drawing takes so much longer than training that a save is always in its middle."""


def written(work: Path, name: str, settings: dict[str, Any], **rollout: Any) -> str:
    """Write a configuration; return its path."""
    file = work / f"{name}.yaml"
    given = {**QUICK, **settings, "name": name}
    file.write_text(json.dumps({**given, "rollout": {**given["rollout"], **rollout}}))
    return str(file)


def drawn(run: Path, steps: int) -> list[list[tuple[Any, ...]]]:
    """What was drawn for each step, in the order of prompts and samples."""
    names = ("prompt_index", "sample", "completion", "stop_reason", "length")
    return [
        sorted(tuple(row[name] for name in names) for row in rollouts(run, step))
        for step in range(1, steps + 1)
    ]


def state_of(pid: int) -> list[str]:
    """The state of a process, and its parent; nothing if it is gone."""
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[:2]
    return ["Z", "0"]


def beside(rank: Command) -> list[int]:
    """The processes that generate beside a rank."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_one = b"burnish.methods.parts.serve" in (each / "cmdline").read_bytes()
            if is_one and state_of(int(each.name))[1] == str(rank.pid):
                found.append(int(each.name))
    return found


class Servers:
    """Processes of `burnish serve` for one run."""

    def __init__(
        self, work: Path, config: str, count: int, environ: Mapping[str, str] | None = None
    ) -> None:
        argv = ["serve", config, "--port", "0"]
        self.commands = [Command(work, argv, environ) for _ in range(count)]

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exception: object) -> None:
        for command in self.commands:
            command.send(signal.SIGTERM)
            command.wait()

"""Runs of real processes that stop in one phase after the other, to be killed there."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from support.ranks.fork_server import with_given_path

PHASES = ("setup", "rollout", "reward", "update", "save", "publish")
_PATIENCE_SECONDS = 400


class PausedRank:
    """A rank that waits in each phase of a run in turn, in a start of its own that has made a step first."""

    def __init__(self, work: Path, name: str, rank: int) -> None:
        self.rank, self._directory = rank, work / f"paused-{name}"
        self._directory.mkdir()
        places = {
            "setup": ("burnish.methods.parts.online_training:make_collector", 1),
            "rollout": ("burnish.rollout.builtin.decoding:Decoding._step", 6),
            "reward": ("burnish.rewards.signature:call", 3),
            "update": ("burnish.methods.parts.online_training:policy_stats", 2),
            "save": ("burnish.checkpoint.save:BlockWriter.write", 2),
            # The setup publishes too.
            "publish": ("burnish.rollout.builtin.forward:InferenceModel.load", 3),
        }
        if rank == 0:
            places["save"] = ("burnish.checkpoint.save:Saver._commit", 2)
        plan = [(rank, *places[phase]) for phase in PHASES]
        (self._directory / "plan.json").write_text(json.dumps(plan))
        self.environ = {"BURNISH_TESTS_PAUSES": str(self._directory)}

    def phases(self, require_running: Callable[[], None]) -> Iterator[str]:
        """Yield the phases in which the rank waits."""
        for number, phase in enumerate(PHASES):
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while not (self._directory / str(number)).exists():
                require_running()
                assert time.monotonic() < deadline, phase
                time.sleep(0.05)
            yield phase


def paused_path() -> str:
    """What PYTHONPATH has to hold."""
    tests = Path(__file__).parents[2]
    return with_given_path(tests.parent, Path(__file__).with_name("paused"))


def running_ranks(name: str) -> dict[int, int]:
    """The processes of a run's ranks, by rank."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (each / "cmdline").read_bytes().split(b"\0")
            environ = (each / "environ").read_bytes()
            rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", environ)
            if rank and b"burnish" in words and f"name={name}".encode() in words:
                found[int(rank[1])] = int(each.name)
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

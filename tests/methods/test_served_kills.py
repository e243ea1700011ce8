"""Trainers, the processes beside them and servers are killed at any moment: the run ends by name or goes on, and comes to the same bits."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints.states import committed
from support.ranks.fork_server import ANEW
from support.runs.served import IN_FLIGHT, QUICK, STILL, beside, drawn, state_of, written
from support.runs.training_files import At, Command, burnish, done, metrics, outcome, ranks, weights

# How long a rank waits for one that is killed before they meet: no launcher ends it here.
STEPS, MEET_SECONDS = 6, 120
SLOW = """\
import time

def letters(completions, **columns):
    time.sleep(0.2)
    return [sum(c.islower() for c in text) / 4 for text in completions]
"""
"""A reward that is waited for while the step before is trained on."""
CRITIC = {"algorithm": {"advantage": "gae"}, "critic": {"warmup_steps": 2}}
DYNAMIC = {"algorithm": {"dynamic_sampling": {"enabled": True}}}
BOTH = {**CRITIC, "algorithm": {**CRITIC["algorithm"], **DYNAMIC["algorithm"]}}
REMAX = {"algorithm": {"advantage": "remax", "mismatch_cap": 2.0}}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "child": (1, {}, {"place": "child", "ahead": 1}),
    "children": (2, BOTH, {"place": "child", "ahead": 2}),
    "server": (1, CRITIC, {"place": "servers", "servers": 1, "ahead": 2}),
    "servers": (2, DYNAMIC, {"place": "servers", "servers": 2, "ahead": 1}),
    "flight": (1, STILL, IN_FLIGHT),
    "flights": (2, {**STILL, **REMAX}, IN_FLIGHT),
    "flight_servers": (2, STILL, {**IN_FLIGHT, "place": "servers", "servers": 2}),
}
"""Processes, settings, and who generates."""


def until(fine: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not fine():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@dataclass
class Campaign:
    """A run of which something is killed again and again. One that comes to its end begins anew under another name."""

    work: Path
    case: str
    name: str
    attempt: int = 0
    servers: list[Command] = field(default_factory=list)
    killed: int = 0
    """Servers, by SIGKILL."""
    children_killed: int = 0

    @property
    def run(self) -> Path:
        return self.work / "runs" / f"{self.name}_{self.case}_{self.attempt}"

    @property
    def step(self) -> int:
        """The newest committed step."""
        steps = self.run / "checkpoints"
        return max((each.step for each in committed(steps)), default=0) if steps.exists() else 0

    def start(self, at: At | None = None) -> list[Command]:
        """Start as many servers as are missing, and the ranks."""
        return ranks(self.work, ["rl", self.serve()], CASES[self.case][0], at)

    def serve(self) -> str:
        """Start as many servers as are missing; return the configuration."""
        _, settings, rollout = CASES[self.case]
        settings = {
            **QUICK,
            "steps": STEPS,
            "reward": {"functions": [{"function": "slow.py:letters"}], "workers": 1},
            **settings,
            "checkpoint": {"save_every": 1, "keep_last": 2},
            "distributed": {"timeout_seconds": MEET_SECONDS},
        }
        config = written(self.work, self.run.name, settings, timeout_seconds=30, **rollout)
        self.servers = [each for each in self.servers if each.is_running()]
        while len(self.servers) < rollout.get("servers", 0):
            self.servers.append(Command(self.work, ["serve", config, "--port", "0"]))
        return config

    def done(self) -> dict[str, Any]:
        """Run it to its end, and return what it comes to."""
        for each in (started := self.start()):
            assert each.wait() == 0, "\n".join(each.output for each in started)
        found = self.comes_to()
        self.anew()
        return found

    def comes_to(self) -> dict[str, Any]:
        """What has to be the same as in peace: all; in flight, where time decides which weights draw, what does not hang on them."""
        rollout = CASES[self.case][2]
        if not rollout.get("in_flight"):
            return outcome(self.run)
        rows = [row for row in metrics(self.run) if row["step"]]
        assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
        assert max(row["rollout/staleness/max"] for row in rows) <= rollout["ahead"]
        models = {n: t.tolist() for n, t in weights(self.run).items() if n.startswith("model/")}
        return {"drawn": drawn(self.run, STEPS), **models}

    def await_step(self, step: int, first: Command) -> None:
        """Wait until a step is committed, or the run has ended."""
        until(lambda: self.step >= step or not first.is_running())

    def anew(self) -> None:
        for each in self.servers:
            each.send(signal.SIGTERM)
            assert each.wait() in (0, -signal.SIGTERM), each.output  # perhaps while it starts
        notes = self.run / "servers"
        left = len(list(notes.iterdir())) if notes.exists() else 0
        assert left <= self.killed
        self.servers, self.killed, self.attempt = [], 0, self.attempt + 1

    def kill(
        self,
        wanted: dict[str, Any],
        victim: str,
        number: int,
        moment: Callable[[Command], None],
        at: At | None = None,
    ) -> None:
        """Start the run, kill one of it when `moment` returns, and look at what is left.

        Where `at` says when, a rank kills itself.
        """
        started = self.start(at)
        moment(started[0])
        children = [pid for each in started for pid in beside(each)]
        if victim == "trainer":
            for each in started if number == signal.SIGTERM else started[-1:]:
                each.send(number)
        elif victim == "server":
            lost = self.servers.pop()
            lost.send(number)
            assert lost.wait() in (0, -number), lost.output
            self.killed += number == signal.SIGKILL
            self.serve()
        elif victim == "child" and children:
            os.kill(children[-1], number)
            self.children_killed += 1
        codes = [each.wait() for each in started]
        said = "\n".join(each.output for each in started)
        until(lambda: all(state_of(pid)[0] == "Z" for pid in children))
        if victim in ("trainer", "itself"):
            assert set(codes) <= {0, 1, -number, 128 + number}, said
        else:
            assert set(codes) in ({0}, {1}), said
            assert "Traceback" not in said
        if set(codes) == {0}:
            assert self.comes_to() == wanted, said
            self.anew()


def campaign(work: Path, case: str, name: str) -> tuple[Campaign, dict[str, Any]]:
    """A campaign, and what its run comes to in peace."""
    (work / "slow.py").write_text(SLOW)
    made = Campaign(work, case, name)
    return made, made.done()


def kinds(case: str) -> list[tuple[str, int]]:
    """Who is killed, and by which signal."""
    other = "child" if CASES[case][2]["place"] == "child" else "server"
    signals = (signal.SIGKILL, signal.SIGTERM)
    return [(victim, number) for victim in ("trainer", other) for number in signals]


@pytest.fixture(autouse=True)
def _companions_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Companions start as those of users do, so that the system names the process that started each."""
    monkeypatch.setenv(ANEW, "1")


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", CASES)
def test_killed_at_every_steps_save(work: Path, case: str) -> None:
    made, wanted = campaign(work, case, "saves")
    for victim, number in kinds(case):
        for step in range(1, STEPS):
            if victim == "trainer":
                at = At("burnish.runs.step_saver:StepSaver._committed", 1, number)
                made.kill(wanted, "itself", number, lambda first: None, at)
            else:
                made.kill(wanted, victim, number, partial(made.await_step, step))
        assert made.done() == wanted
    assert made.children_killed or ("child", signal.SIGKILL) not in kinds(case)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", CASES)
def test_killed_at_random_moments(work: Path, case: str) -> None:
    made, wanted = campaign(work, case, "moments")
    moments = random.Random(case)

    def while_starting(first: Command) -> None:
        time.sleep(moments.uniform(0, 6))

    def while_training(first: Command) -> None:
        first.reached(0)
        time.sleep(moments.uniform(0, 1.5))

    for number in range(20):
        moment = while_starting if number % 5 == 4 else while_training
        made.kill(wanted, *kinds(case)[number % 4], moment)
    assert made.done() == wanted
    assert made.children_killed or ("child", signal.SIGKILL) not in kinds(case)


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["child", "inside"])
def test_a_signal_in_an_update_saves_what_the_next_step_needs(work: Path, place: str) -> None:
    (work / "slow.py").write_text(SLOW)
    settings = {
        "steps": 4,
        "evaluation": {"every": 0},
        "reward": {"functions": [{"function": "slow.py:letters"}], "workers": 1},
    }
    found = []
    for name in ("update_in_peace", "update_stopped"):
        config = written(work, f"{name}_{place}", settings, place=place, ahead=1)
        if name == "update_stopped":
            at = At("burnish.methods.parts.online_training:policy_stats", 2, signal.SIGTERM)
            code, said = burnish(work, "rl", config, at=at)
            assert code == 128 + signal.SIGTERM, said
        code, said = burnish(work, "rl", config)
        assert code == 0, said
        found.append(outcome(work / "runs" / f"{name}_{place}"))
    assert found[0] == found[1]


@pytest.mark.nightly
def test_a_batch_may_take_longer_than_a_collective(work: Path) -> None:
    (work / "slower.py").write_text(SLOW.replace("0.2", "9"))
    settings = {
        "steps": 1,
        "reward": {"functions": [{"function": "slower.py:letters"}], "workers": 1},
        "distributed": {"timeout_seconds": 6},
    }
    config = written(work, "patient", settings, place="child")
    done(work, "rl", config, "name=patient", world=2)

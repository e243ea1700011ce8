"""Training runs of which ranks, generating processes or reward processes are killed again and again, and what they come to."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from burnish.checkpoint.steps import verify
from support.checkpoints.states import committed
from support.ranks.fork_server import ANEW
from support.runs.served import beside
from support.runs.training_files import Command, done, outcome, ranks

AHEAD = [
    *("rl", "rl.yaml", "rollout.ahead=2", "algorithm.mismatch_cap=2", "algorithm.advantage=gae"),
    "algorithm.dynamic_sampling.enabled=true",
]
"""A run that draws ahead, with a critic."""
KINDS = {
    "sft": ["sft", "sft.yaml"],
    "rl": ["rl", "rl.yaml"],
    "ahead": AHEAD,
    "pipeline": ["sft", "sft.yaml", "engine.kind=megatron", "engine.pipeline_parallel=2"],
}
QUIET = ["data.validation=[]", "evaluation.every=0"]
GENERATING = [
    *("rl", "rl.yaml", "rollout.place=child", "rollout.ahead=1", "algorithm.mismatch_cap=2"),
    *QUIET,
]
"""A run that generates in a process beside each rank."""
CALLED = """\
import os, time

HERE = os.path.dirname(os.path.abspath(__file__))

def letters(completions, **columns):
    with open(os.path.join(HERE, "called"), "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.1)
    return [sum(c.islower() for c in text) / 4 for text in completions]
"""
"""A reward that writes which process calls it."""
JUDGED = ["reward.functions=[{function: 'called.py:letters'}]", *QUIET]
REWARD_RUNS = [("rl", 1), ("rl", 2), ("ahead", 2)]
"""Runs of which reward processes are killed."""
_MOST_IN_A_ROW, _SPARED = 3, 8
"""So many calls in a row lose their process, and then so many none: the next loss could be that of a completion alone."""
RUNS = [("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2), ("ahead", 2), ("pipeline", 2)]
"""Kinds, and on how many processes."""
SAVING = ["checkpoint.save_every=1", "checkpoint.background=true"]


def killed(
    work: Path,
    kind: str,
    world: int,
    kills: int,
    name: str,
    tell: Callable[[], None] = lambda: None,
) -> Path:
    """The directory of a run that saves in the background, after so many kills of a random rank at random moments, finished.

    Every fourth kill comes while the run starts and resumes, and takes all ranks along, for they may
    not have met yet; the others come while it trains and saves.
    A run that has come to its end in between begins anew under another name. `tell` is called
    after every kill.
    """
    moments = random.Random(f"{kind} {world}")
    attempt, argv = 0, [*KINDS[kind], f"name={name}", *SAVING]
    for number in range(kills):
        started = ranks(work, argv, world)
        if number % 4 == 3:
            victims = started
            time.sleep(moments.uniform(0, 1.5))
        else:
            victims = [started[moments.randrange(world)]]
            started[0].reached(0)
            time.sleep(moments.uniform(0, 0.4))
        for victim in victims:
            victim.send(signal.SIGKILL)
        codes = [each.wait() for each in started]
        for victim, code in zip(started, codes, strict=True):
            assert victim not in victims or code in (-signal.SIGKILL, 0), victim.output
        if codes == [0] * world:
            attempt += 1
            argv = [*KINDS[kind], f"name={name}_{attempt}", *SAVING]
        tell()
    run = done(work, *argv, world=world)
    assert not any(list(verify(step.path)) for step in committed(run / "checkpoints"))
    return run


def judges_killed(
    work: Path,
    kind: str,
    world: int,
    kills: int,
    tell: Callable[[], None] = lambda: None,
) -> int:
    """Kill processes while they compute rewards, in as many runs as it takes; count the runs that come to another end.

    Each run goes on to its end by itself, because its calls are made again. `tell` is called after every kill.
    """
    calls, moments, made = work / "called", random.Random(f"{kind} {world} rewards"), 0
    (work / "called.py").write_text(CALLED)
    argv, wrong, attempt = [*KINDS[kind], *JUDGED], 0, 0
    peace = outcome(done(work, *argv, f"name=judged_{kind}_{world}", world=world))
    while made < kills:
        attempt += 1
        name = f"judged_{kind}_{world}_{attempt}"
        calls.write_text("")
        started = ranks(work, [*argv, f"name={name}"], world)
        for number in _lost(calls, started, moments, kills - made):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
                made += 1
                tell()
        for each in started:
            assert each.wait() == 0, each.output
        wrong += outcome(work / "runs" / name) != peace
    return wrong


def _lost(calls: Path, started: list[Command], moments: random.Random, most: int) -> Any:
    """Yield processes in the middle of a call, at most so many, as long as all ranks run."""
    seen = in_a_row = lost = 0
    spare = len(started) + moments.randrange(_SPARED)  # each rank first tries one completion
    while lost < most and all(each.is_running() for each in started):
        called = calls.read_text().split("\n")[:-1]
        if len(called) == seen:
            time.sleep(0.01)
            continue
        seen += 1
        if spare:
            spare -= 1
            continue
        time.sleep(moments.uniform(0, 0.09))
        yield int(called[seen - 1])
        lost, in_a_row = lost + 1, in_a_row + 1
        if in_a_row == _MOST_IN_A_ROW or moments.random() < 0.4:
            in_a_row, spare = 0, _SPARED


def generators_killed(
    work: Path, world: int, kills: int, tell: Callable[[], None] = lambda: None
) -> int:
    """Kill generating processes beside ranks at random moments; count the runs that come to another end.

    Such a run ends by name, and the same command goes on. `tell` is called after every kill.
    """
    moments = random.Random(f"generators {world}")
    made = wrong = attempt = tried = 0
    anew = {ANEW: "1"}  # so that the system names the process that started each
    argv = [*GENERATING, *SAVING]
    peace = outcome(done(work, *argv, f"name=made_{world}", world=world, environ=anew))
    while made < kills:
        attempt += 1
        named = [*argv, f"name=made_{world}_{attempt}"]
        codes = [1]
        while made < kills and codes != [0] * world:
            started = ranks(work, named, world, environ=anew)
            tried += 1
            if tried % 4:  # else it may not have begun to generate
                started[0].reached(0)
            time.sleep(moments.uniform(0, 1.5))
            victims = [pid for each in started for pid in beside(each)]
            if victims:
                with suppress(ProcessLookupError):
                    os.kill(moments.choice(victims), signal.SIGKILL)
                    made += 1
                    tell()
            codes = [each.wait() for each in started]
            said = "\n".join(each.output for each in started)
            assert set(codes) in ({0}, {1}), said
            assert "Traceback" not in said
        wrong += outcome(done(work, *named, world=world, environ=anew)) != peace
    return wrong

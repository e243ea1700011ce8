"""Training runs that are killed again and again, and what they come to."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from checkpoints_for_tests import committed
from training_files import done, ranks

from burnish.checkpoint.steps import verify

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

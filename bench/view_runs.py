"""Make runs for `burnish view`: the files that a run writes, without training."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from burnish.records import Completion, Prompt, Rollout
from burnish.records.rollout_table import RolloutTable
from burnish.tracking.rollouts import write_rollouts
from burnish.tracking.rundir import RunDirectory
from burnish.tracking.trackers import json_line, json_numbers

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "</textarea></script><!--",
    "javascript:alert(1)",
    "\u202eright to left\u202c",
    "\x00\x1b[31mred\x07",
    "\ud800 half a character",
    "👩‍👩‍👧‍👦" * 50,
    "a" * 100_000,
    "\u0301" * 2_000,
    "{{constructor.constructor('alert(1)')()}}",
    "line\u2028separator\u2029",
    "\\u003cscript\\u003e \\n \\\\",
    "=HYPERLINK(0)",
    "",
)
"""Completions that a page must show as they are."""


def make_run(
    directory: Path,
    *,
    steps: int,
    prompts: int = 0,
    samples: int = 8,
    tokens: int = 500,
    every: int = 1,
) -> Path:
    """Write a run of `steps`, each `every` steps with the rollouts of `prompts`."""
    run = _begun(directory, steps)
    with run.metrics.open("w") as file:
        for step in range(1, steps + 1):
            file.write(json_line({"step": step, **json_numbers(_values(step))}))
    rng = np.random.default_rng(0)
    words = [
        f"{''.join(map(chr, rng.integers(97, 123, length)))} "
        for length in rng.integers(1, 9, 2000)
    ]
    for step in range(every, steps + 1, every) if prompts else ():
        made = list(_rollouts(rng, words, step, prompts, samples, tokens))
        write_rollouts(
            run.rollouts,
            step,
            RolloutTable.of([[each] for each in made]),
            [each.reward - 0.5 for each in made],
            lambda ids: [words[each] for each in ids],
            {
                "advantages": {
                    n: np.full(len(each.completion.token_ids), 0.5, np.float32)
                    for n, each in enumerate(made)
                }
            },
        )
    return directory


def make_hostile_run(directory: Path) -> Path:
    """Write a run whose texts try to act as HTML, scripts or formulas."""
    run = _begun(directory, 1)
    run.metrics.write_text(json_line({"step": 1, "reward/mean": 0.5, HOSTILE[0]: 1.0}))
    rewards = (math.nan, math.inf, -math.inf, *range(len(HOSTILE) - 3))
    made = [
        _rollout(i, 0, text, float(reward), np.arange(4), HOSTILE[i % 5])
        for i, (text, reward) in enumerate(zip(HOSTILE, rewards, strict=True))
    ]
    write_rollouts(
        run.rollouts,
        1,
        RolloutTable.of([[each] for each in made]),
        [0.0] * len(made),
        lambda ids: list(HOSTILE[: len(ids)]),
    )
    return directory


def _begun(directory: Path, steps: int) -> RunDirectory:
    run = RunDirectory(directory)
    run.checkpoints.mkdir(parents=True)
    run.config.write_text(f"name: {directory.name}\nsteps: {steps}\nmodel:\n  path: made\n")
    run.write_environment({"trainer": "rl", "started": "2026-11-25T12:00:00+00:00"})
    run.write_status(steps, "finished")
    return run


def _values(step: int) -> dict[str, float]:
    noise = random.Random(step)
    learned = 1 - math.exp(-step / 500)
    named = {
        "reward/mean": learned,
        "response_length/mean": 200 + 300 * learned,
        "actor/entropy": 2 - learned,
    }
    named |= {f"actor/number_{n}": noise.gauss(n, 1) for n in range(25)}
    named |= {
        f"timing_s/{name}": noise.random()
        for name in ("rollout", "rollout/generate", "update", "step")
    }
    named |= {f"perf/number_{n}": noise.random() for n in range(8)}
    return named | ({"val/reward": learned} if step % 50 == 0 else {})


def _rollouts(
    rng: np.random.Generator, words: list[str], step: int, prompts: int, samples: int, tokens: int
) -> Iterator[Rollout]:
    for prompt in range(prompts):
        for sample in range(samples):
            ids = rng.integers(0, len(words), max(1, int(rng.normal(tokens, tokens / 10))))
            text = "".join(words[i] for i in ids)
            reward = float(rng.random() < 1 - math.exp(-step / 500)) + 0.1 * float(rng.random())
            yield _rollout(
                (step * prompts + prompt) % 4000, sample, text, reward, ids, f"source-{prompt % 5}"
            )


def _rollout(
    index: int, sample: int, text: str, reward: float, ids: np.ndarray, source: str
) -> Rollout:
    numbers = np.linspace(-3, 0, len(ids), dtype=np.float32)
    return Rollout(
        prompt=Prompt(index, np.arange(3), f"Question {index}: {source}?", None, index, source, {}),
        sample=sample,
        completion=Completion(ids, numbers, numbers, "stop", weights_version=index),
        text=text,
        reward=reward,
        reward_parts={"correct": reward},
        reward_error=None,
    )


def main(directory: Path) -> None:
    """Make a few runs."""
    make_run(directory / "long", steps=3000)
    make_run(directory / "small", steps=60, prompts=16, every=2, tokens=80)
    make_hostile_run(directory / "hostile")
    print(json.dumps(sorted(path.name for path in directory.iterdir())))


if __name__ == "__main__":
    import sys

    main(Path(sys.argv[1]))

"""Equal learning: reward curves on the demo's task, three seeds of ours beside three of TRL's.

    python -m bench.learning [--json] [--steps N] [--seeds 0 1 2] [--threads N]

Needs the model of the demo's first stage (`make demo`). `burnish rl` runs the second stage's configuration,
`examples/demo/rl.yaml`, with a constant learning rate and one update per step, for `--steps` steps. TRL's GRPOTrainer
runs the same hyperparameters. Both compute in fp32, so that
differences in rounding do not hide differences between the algorithms. Curves are mean rewards per step,
smoothed by a moving average of `WINDOW` steps. There are two figures:

- The share of steps at which the mean of our seeds lies in TRL's band. The band goes from TRL's lowest to its highest seed, widened
  on either side by two standard errors of one smoothed reward, which sampling alone causes. The mean of other seeds of TRL itself
  would lie between the lowest and the highest of three in 0.63 of all cases; that is the goal.
- The share of steps at which a t-test of the seeds finds no difference at a level of 5 %. The goal is 0.95.

All curves are written to runs/bench/learning.csv. This takes long, so `make bench` leaves it out.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bench.machine import Result, command_line, report
from bench.peers import ROOT, Peer
from burnish.config.load import read_config
from burnish.config.schema import RunConfig
from burnish.tracking.trackers import read_metrics

CONFIG = "examples/demo/rl.yaml"
OUTPUT = ROOT / "runs" / "bench" / "learning.csv"
WINDOW = 10
ALIKE = 0.95
"""Share of steps at which a t-test at 5 % finds no difference between equal trainers."""
_DRAWS = 200_000
STEPS = 100
"""Default number of steps. By then most sampled answers are right."""

Curve = npt.NDArray[np.float64]
"""Mean reward of each step, shape [steps]."""


def ours(seed: int, steps: int, directory: Path) -> Curve:
    """Run `burnish rl`. Return its curve."""
    name = f"seed{seed}"
    overrides = [
        f"name={name}",
        f"output_dir={directory}",
        f"seed={seed}",
        f"steps={steps}",
        "optim.schedule=constant",
        "batch.minibatches=1",
        "engine.precision=fp32",
        "data.validation=[]",
        "evaluation.every=0",
        "checkpoint.save_every=0",
        "tracking.report=false",
        "tracking.trackers=[]",
    ]
    command = [sys.executable, "-m", "burnish", "rl", CONFIG, *overrides]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    rows = read_metrics(directory / name / "metrics.jsonl")
    return np.array([row["reward/mean"] for row in rows if "reward/mean" in row])


def theirs(config: RunConfig, seed: int, steps: int, directory: Path, threads: int) -> Curve:
    """Run TRL's trainer. Return its curve."""
    settings = {
        "model": config.model.path,
        "train": config.data.train[0],
        "prompts": config.batch.prompts,
        "samples": config.rollout.n,
        "max_tokens": config.rollout.max_response_length,
        "lr": config.optim.lr,
        "warmup": config.optim.warmup_steps,
        "steps": steps,
        "seed": seed,
        "output": str(directory / "trl"),
    }
    with Peer("trl", "bench.trl_learning", {}, threads) as peer:
        return np.array(peer.ask(settings)["rewards"])


def smoothed(curve: Curve) -> Curve:
    """Return the moving average over `WINDOW` steps, over fewer at the start."""
    sums = np.cumsum(np.concatenate(([0.0], curve)))
    ends = np.arange(1, len(curve) + 1)
    starts = np.maximum(0, ends - WINDOW)
    means: Curve = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def share_within(mine: Sequence[Curve], band: Sequence[Curve], rollouts: int) -> float:
    """Return the share of steps at which our mean lies in the peer's band. `rollouts`: number per step, with rewards of 0 or 1."""
    average = np.mean([smoothed(curve) for curve in mine], axis=0)
    curves = np.array([smoothed(curve) for curve in band])
    middle = curves.mean(axis=0)
    steps = np.minimum(np.arange(1, len(average) + 1), WINDOW)
    margin = 2 * np.sqrt(middle * (1 - middle) / (rollouts * steps))
    low = curves.min(axis=0) - margin
    high = curves.max(axis=0) + margin
    return float(np.mean((average >= low) & (average <= high)))


def share_of_others(seeds: int) -> float:
    """Return how often the mean of `seeds` normal numbers lies between the lowest and the highest of as many others."""
    rng = np.random.default_rng(0)
    band = rng.normal(size=(_DRAWS, seeds))
    means = rng.normal(size=(_DRAWS, seeds)).mean(axis=1)
    return float(np.mean((means >= band.min(axis=1)) & (means <= band.max(axis=1))))


def share_alike(mine: Sequence[Curve], theirs: Sequence[Curve]) -> float:
    """Return the share of steps at which Student's t-test of the smoothed rewards finds no difference at 5 %."""
    one, other = (np.array([smoothed(curve) for curve in curves]) for curves in (mine, theirs))
    seeds = len(one)
    error = np.sqrt((one.var(axis=0, ddof=1) + other.var(axis=0, ddof=1)) / seeds)
    t = (one.mean(axis=0) - other.mean(axis=0)) / error
    drawn = np.random.default_rng(0).standard_t(2 * seeds - 2, _DRAWS)
    return float(np.mean(np.abs(t) <= np.quantile(np.abs(drawn), ALIKE)))


def write_curves(curves: Mapping[str, Curve]) -> None:
    """Write one row per step, with one column per run."""
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    with OUTPUT.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *curves])
        for step, values in enumerate(zip(*curves.values(), strict=True), 1):
            writer.writerow([step, *(f"{value:.5f}" for value in values)])


def main() -> None:
    parser = command_line(__doc__, threads=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    if len(arguments.seeds) < 2:
        parser.error("one seed does not show how much seeds differ; give two or more")
    config = read_config(ROOT / CONFIG)
    if not config.model.path or not (ROOT / config.model.path).is_dir():
        parser.error(f"{config.model.path} does not exist; run `make demo` first")
    steps = arguments.steps
    mine = {}
    band = {}
    with tempfile.TemporaryDirectory() as name:
        for seed in arguments.seeds:
            mine[f"ours {seed}"] = ours(seed, steps, Path(name))
            band[f"trl {seed}"] = theirs(config, seed, steps, Path(name), arguments.threads)
            print(
                f"  seed {seed}, last {WINDOW} steps: ours {mine[f'ours {seed}'][-WINDOW:].mean():.4f}, "
                f"TRL {band[f'trl {seed}'][-WINDOW:].mean():.4f}",
                file=sys.stderr,
            )
    write_curves(mine | band)
    rollouts = config.batch.prompts * config.rollout.n
    both = list(mine.values()), list(band.values())
    figures = {
        "in-band": (share_within(*both, rollouts), share_of_others(len(mine))),
        "alike": (share_alike(*both), ALIKE),
    }
    report(
        [
            Result(f"learning/{steps}-steps/{name}", share, None, 1.0, "of steps", share, goal)
            for name, (share, goal) in figures.items()
        ],
        arguments.json,
    )


if __name__ == "__main__":
    main()

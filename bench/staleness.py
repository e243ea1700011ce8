"""Learning from older completions: reward curves of the demo's task at `rollout.ahead` 0, 1 and 4, in one picture.

    python -m bench.staleness [--runs DIRECTORY] [--picture FILE] [--seeds 0 1 2] [SETTING=VALUE ...]

Runs `examples/demo/rl.yaml` with `algorithm.mismatch_cap: 2` and the given settings, from the model of the demo's first stage
(`make demo`). The picture of the docs has `steps=400 batch.prompts=64 optim.lr=1e-4`. A run that is complete in DIRECTORY
is not repeated, so the command may be started again. The picture shows the mean of the seeds, smoothed over 10 steps, and the range
from the lowest to the highest seed. The command prints the share of steps at which a mean lies in the band of `ahead` 0. The band
goes from its lowest to its highest seed, widened on either side by two standard errors of one smoothed reward. The delay is the
number of steps by which the curve has to be moved so that most of it lies in the band. This takes long, so `make bench` leaves it out.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.learning import CONFIG, Curve, share_within, smoothed
from bench.machine import command_line
from bench.peers import ROOT
from burnish.config.load import read_config
from burnish.tracking.trackers import read_metrics

AHEAD = {0: "#1f77b4", 1: "#ff7f0e", 4: "#2ca02c"}
"""Settings of `rollout.ahead`, and their colours."""
MOST_DELAY = 20
"""Most steps by which a curve is moved."""
WIDTH = 640
HEIGHT = 360
MARGIN = 48


def curve(runs: Path, ahead: int, seed: int, steps: int, settings: list[str]) -> Curve:
    """Return the mean reward of each step of one run. Start the run if it is not complete."""
    name = f"ahead{ahead}-seed{seed}"
    found = rewards(runs / name)
    if len(found) < steps:
        command = [sys.executable, "-m", "burnish", "rl", CONFIG, f"name={name}", f"seed={seed}"]
        command += [f"output_dir={runs}", f"rollout.ahead={ahead}"]
        command += ["algorithm.mismatch_cap=2", "data.validation=[]", "evaluation.every=0"]
        command += ["checkpoint.save_every=0", "tracking.report=false", "tracking.trackers=[]"]
        subprocess.run([*command, *settings], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        found = rewards(runs / name)
    return found[:steps]


def rewards(run: Path) -> Curve:
    """Return the rewards that a run has recorded."""
    file = run / "metrics.jsonl"
    rows = read_metrics(file) if file.exists() else []
    return np.array([row["reward/mean"] for row in rows if "reward/mean" in row])


def early(curves: Sequence[Curve], delay: int) -> list[Curve]:
    """Return the curves without their last `delay` steps."""
    return [each[: len(each) - delay] for each in curves]


def picture(curves: dict[int, list[Curve]]) -> str:
    """Return the curves as an SVG."""
    steps = min(len(each) for group in curves.values() for each in group)
    right = WIDTH - MARGIN
    bottom = HEIGHT - MARGIN

    def points(values: Curve) -> list[str]:
        return [
            f"{MARGIN + (right - MARGIN) * step / max(1, steps - 1):.1f},"
            f"{bottom - (bottom - MARGIN / 2) * value:.1f}"
            for step, value in enumerate(values[:steps])
        ]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in (0, 0.25, 0.5, 0.75, 1):
        y = bottom - (bottom - MARGIN / 2) * tick
        parts.append(
            f'<line x1="{MARGIN}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in (1, steps // 2, steps):
        x = MARGIN + (right - MARGIN) * (tick - 1) / max(1, steps - 1)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">step</text>')
    for number, (ahead, group) in enumerate(curves.items()):
        lines = np.array([smoothed(each[:steps]) for each in group])
        around = " ".join(points(lines.max(axis=0)) + points(lines.min(axis=0))[::-1])
        middle = " ".join(points(lines.mean(axis=0)))
        colour = AHEAD[ahead]
        y = MARGIN + 18 * number
        parts.append(
            f'<polygon points="{around}" fill="{colour}" opacity="0.2"/>'
            f'<polyline points="{middle}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{MARGIN + 12}" y="{y}" fill="{colour}">ahead {ahead}, {len(group)} seeds</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "bench" / "staleness")
    parser.add_argument("--picture", type=Path, default=ROOT / "runs" / "bench" / "staleness.svg")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    given = parser.parse_args()
    config = read_config(ROOT / CONFIG, given.settings)
    steps = config.steps
    assert steps is not None  # the demo sets it
    curves: dict[int, list[Curve]] = {ahead: [] for ahead in AHEAD}
    for seed in given.seeds:
        for ahead, group in curves.items():
            group.append(curve(given.runs.resolve(), ahead, seed, steps, given.settings))
    given.picture.parent.mkdir(parents=True, exist_ok=True)
    given.picture.write_text(picture(curves))
    rollouts = config.batch.prompts * config.rollout.n
    for ahead in AHEAD:
        shares = [
            share_within(
                [each[delay:] for each in curves[ahead]], early(curves[0], delay), rollouts
            )
            for delay in range(min(steps, MOST_DELAY + 1))
        ]
        delay = int(np.argmax(shares))
        last = np.mean([each[-10:].mean() for each in curves[ahead]])
        print(
            f"ahead {ahead}: {shares[0]:.2f} of steps within ahead 0, {shares[delay]:.2f} if moved by {delay} steps; "
            f"last 10 steps {last:.4f}"
        )


if __name__ == "__main__":
    main()

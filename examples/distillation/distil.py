"""Teach the demo's small model by a larger one, and compare with GRPO by the tokens that the student draws.

    python examples/distillation/distil.py

Runs are in runs/demo: the student before (sft), a larger teacher, GRPO (grpo), distillation at sampled tokens (sampled) and at all
tokens of the vocabulary (all). The exit status is 1 unless both distillations come to 95 % with at most half of GRPO's tokens.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from burnish.config.load import read_config
from burnish.tracking.trackers import read_metrics

HERE = Path(__file__).parent
DEMO = HERE.parent / "demo"
RUNS = Path("runs/demo")
GOAL = 0.95
SFT = ("sft", DEMO / "sft.yaml")
RL = ("rl", DEMO / "rl.yaml")
# One answer to each prompt is enough for a teacher. The reward only measures.
DISTILLED = (
    *("steps=100", "batch.minibatches=1", "rollout.n=1", "optim.lr=4e-4", "evaluation.every=5"),
    *("reward.functions=[{function: exact_match, weight: 0}]", "distill.teachers=[{path: runs/demo/teacher}]"),
)  # fmt: skip
TEACHER = ("steps=120", "model.fresh.hidden_size=192", "optim.schedule=linear")
RUN_BY_NAME = {
    "sft": SFT,
    "teacher": (*SFT, *TEACHER, "evaluation.every=40"),
    "grpo": (*RL, "steps=60", "optim.schedule=constant", "evaluation.every=5"),
    "sampled": (*RL, *DISTILLED),
    "all": (*RL, *DISTILLED, "distill.tokens=all"),
}


def main() -> None:
    make_world()
    for name, arguments in RUN_BY_NAME.items():
        command = ["burnish", *map(str, arguments), f"name={name}"]
        print("$", *command, flush=True)
        subprocess.run([sys.executable, "-m", *command], check=True)
    needed = {
        name: tokens_to(GOAL, accuracy_by_tokens(RUNS / name))
        for name in ("grpo", "sampled", "all")
    }
    for name, tokens in needed.items():
        print(f"  {name:8} {'never' if tokens is None else f'{tokens:,.0f} tokens'} to {GOAL:.0%}")
    if missed := unkept(needed):
        raise SystemExit(f"\nDistillation did not show what it should: {missed}")


def make_world() -> None:
    sys.path.insert(0, str(DEMO))
    from task import write_data, write_tokenizer

    RUNS.mkdir(parents=True, exist_ok=True)
    write_tokenizer(RUNS / "tokenizer")
    write_data(RUNS)


def accuracy_by_tokens(run: Path) -> list[tuple[float, float]]:
    """Return the tokens that the student has drawn and its held-out accuracy, at each validation."""
    config = read_config(run / "config.yaml")
    samples = config.batch.prompts * config.rollout.n
    drawn = 0.0
    points = []
    for row in read_metrics(run / "metrics.jsonl"):
        drawn += samples * row.get("response_length/mean", 0.0)
        if "val/mean@1" in row:
            points.append((drawn, row["val/mean@1"]))
    return points


def tokens_to(goal: float, points: list[tuple[float, float]]) -> float | None:
    """Return the tokens after which the accuracy is first at `goal`; None if it never is."""
    return next((tokens for tokens, accuracy in points if accuracy >= goal), None)


def unkept(needed: dict[str, float | None]) -> str:
    """Return which distillation needed more than half of GRPO's tokens; empty if none did."""
    most = needed["grpo"]
    late = [
        name
        for name in ("sampled", "all")
        if (own := needed[name]) is None or (most is not None and own > most / 2)
    ]
    return ", ".join(late)


if __name__ == "__main__":
    main()

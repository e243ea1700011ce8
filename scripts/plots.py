"""Draw the learning curves of the README and the guides: of a run by steps, or of several by the tokens that they drew.

    python -m scripts.plots RUN [RUN...] [--out docs/images/learning-curve.svg] [--title TEXT]

It needs matplotlib, which Burnish does not: pip install matplotlib
"""

from __future__ import annotations

import runpy
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.tracking.curves import Curves
from burnish.tracking.rundir import RunDirectory

_GREY = "#80868f"
_EXAMPLE = Path(__file__).parents[1] / "examples/distillation/distil.py"
PALE = "#d9a583"
DARK = "#b04c12"
SHOWN = (
    {
        "reward/mean": ("reward in training", PALE),
        "val/mean@4": ("held-out prompts, share right", DARK),
        "val/mean@1": ("held-out prompts, share right", DARK),
    },
    {
        "train/accuracy": ("pairs in training, share right", PALE),
        "val/accuracy": ("held-out pairs, share right", DARK),
    },
    {"train/loss": ("loss in training", PALE), "val/loss": ("held-out loss", DARK)},
)
"""The metrics of a curve, with labels and colours: the first group of which a run has some."""


def draw(run: Path, out: Path, title: str) -> None:
    """Write an SVG with a transparent ground, which suits light and dark pages."""
    figure, axes = _figure()
    curves = Curves(RunDirectory(run).metrics).whole().by_name
    shown = next(group for group in SHOWN if not curves.keys().isdisjoint(group))
    for name, (label, colour) in shown.items():
        if name in curves:
            curve: Any = curves[name]
            is_held_out = name.startswith("val/")
            style = {"marker": "o", "linewidth": 2.2} if is_held_out else {"linewidth": 1.6}
            axes.plot(curve.steps, curve.values, color=colour, label=label, **style)
    _write(figure, axes, out, title, "step")


def draw_by_tokens(runs: Sequence[Path], out: Path, title: str) -> None:
    """Write the share of right answers to held-out prompts by the tokens of all completions before, a line for each run."""
    accuracy_by_tokens = runpy.run_path(str(_EXAMPLE))["accuracy_by_tokens"]
    figure, axes = _figure()
    for run, colour in zip(runs, ("#80868f", "#b04c12", "#d9a583"), strict=False):
        points = accuracy_by_tokens(run)
        axes.plot(*zip(*points, strict=True), color=colour, label=run.name, marker="o", linewidth=2)
    axes.set_xscale("symlog", linthresh=5000)
    _write(figure, axes, out, title, "tokens that the student drew")


def _figure() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.0))
    return figure, axes


def _write(figure: Any, axes: Any, out: Path, title: str, below: str) -> None:
    axes.set_title(title, color=_GREY, fontsize=10, loc="left")
    axes.set_xlabel(below, color=_GREY)
    axes.tick_params(colors=_GREY)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(_GREY)
    axes.legend(frameon=False, labelcolor=_GREY)
    figure.tight_layout()
    figure.savefig(out, transparent=True, metadata={"Date": None})


def main(arguments: list[str]) -> None:
    """Draw what the arguments ask for."""
    parser = ArgumentParser(
        prog="python -m scripts.plots", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("run", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/images/learning-curve.svg"))
    parser.add_argument("--title", default="")
    args = parser.parse_args(arguments)
    if len(args.run) > 1:
        draw_by_tokens(args.run, args.out, args.title)
    else:
        draw(args.run[0], args.out, args.title)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Draw a run's learning curve for the README and the guides.

    python -m scripts.plots RUN [--out docs/images/learning-curve.svg] [--title TEXT]

It needs matplotlib, which Burnish does not: pip install matplotlib
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from burnish.tracking.curves import Curves
from burnish.tracking.rundir import RunDirectory

SHOWN = {
    "reward/mean": ("reward in training", "#d9a583"),
    "val/mean@4": ("held-out prompts, share right", "#b04c12"),
    "val/mean@1": ("held-out prompts, share right", "#b04c12"),
    "train/loss": ("loss in training", "#d9a583"),
    "val/loss": ("held-out loss", "#b04c12"),
}
"""The metrics of a curve, with labels and colours. A run has some of them."""


def draw(run: Path, out: Path, title: str) -> None:
    """Write an SVG with a transparent ground, which suits light and dark pages."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    grey = "#80868f"
    figure, axes = pyplot.subplots(figsize=(6.4, 3.0))
    curves = Curves(RunDirectory(run).metrics).whole().by_name
    for name, (label, colour) in SHOWN.items():
        if name in curves:
            curve: Any = curves[name]
            is_held_out = name.startswith("val/")
            style = {"marker": "o", "linewidth": 2.2} if is_held_out else {"linewidth": 1.6}
            axes.plot(curve.steps, curve.values, color=colour, label=label, **style)
    axes.set_title(title, color=grey, fontsize=10, loc="left")
    axes.set_xlabel("step", color=grey)
    axes.tick_params(colors=grey)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(grey)
    axes.legend(frameon=False, labelcolor=grey)
    figure.tight_layout()
    figure.savefig(out, transparent=True, metadata={"Date": None})


def main(arguments: list[str]) -> None:
    """Draw what the arguments ask for."""
    parser = ArgumentParser(
        prog="python -m scripts.plots", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images/learning-curve.svg"))
    parser.add_argument("--title", default="")
    args = parser.parse_args(arguments)
    draw(args.run, args.out, args.title)


if __name__ == "__main__":
    main(sys.argv[1:])

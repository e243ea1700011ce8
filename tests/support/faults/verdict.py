"""For tests of crashes: what has to hold after each. No acknowledged step is lost, and nothing half written is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from burnish.checkpoint.manager import Checkpoints, Load
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.steps import verify
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from support.checkpoints.states import committed, fill_and_compare, make_state

ONE = Retention(1)


@dataclass(frozen=True)
class Verdict:
    """What came of a crash."""

    struck: bool = True
    """Whether it came at all."""
    lost: int = 0
    """Committed steps that are gone."""
    uncommitted: int = 0
    """What was loaded, or can be seen, and was never committed."""
    wrong: str = ""
    """Whatever is not as it has to be, in words."""

    @property
    def is_good(self) -> bool:
        """Whether all is as it has to be."""
        return not (self.lost or self.uncommitted or self.wrong)


def resumable(root: Path, acked: int, shapes=None, damaged: str = "no step") -> Verdict:
    """Resume as a run of one process does, see `resumed_with`.

    A step may be set aside for what is called `damaged` only.
    """

    def load(step, source):
        fill_and_compare(source, *make_state(step.step, shapes), Layout())

    return resumed_with(load, root, acked, damaged=damaged)


def resumed_with(
    load: Load,
    root: Path,
    acked: int,
    layout: Layout | None = None,
    *,
    damaged: str = "no step",
) -> Verdict:
    """Resume: the step that was acknowledged, or the one that was just being committed, bit for bit. Collective.

    `load` raises `AssertionError` where it gets other numbers than were saved.
    """
    with Checkpoints(root, layout or Layout(), retention=ONE) as checkpoints:
        try:
            resumed = checkpoints.resume(load)
        except AssertionError as error:
            return Verdict(uncommitted=1, wrong=f"other numbers are loaded: {error}")
        except BurnishError as error:
            return Verdict(lost=1, wrong=str(error))
    found = 0 if resumed is None else resumed.step.step
    half = [] if resumed is None else [why for why in resumed.skipped if damaged not in why]
    if found < acked:
        return Verdict(lost=acked - found, wrong=f"step {acked} was saved, {found} is found")
    if found > acked + 1 or half:
        return Verdict(uncommitted=1, wrong=f"step {found} after {acked}; {'; '.join(half)}")
    return Verdict(wrong=_untidy(root))


def _untidy(root: Path) -> str:
    left = [path.name for path in root.iterdir() if "inflight" in path.name]
    left += [str(error) for step in committed(root) for error in verify(step.path)]
    return "; ".join(left)

"""Steps that are skipped because their gradients are not finite: counted, and too many in a row end the run."""

from __future__ import annotations

import math

from burnish.errors import BurnishError


def skipped_in_a_row(before: int, norm: float, most: int) -> int:
    """How many steps in a row were skipped, where it was `before` ahead of one with this gradient norm. Raises `BurnishError` at `most`."""
    skipped = 0 if math.isfinite(norm) else before + 1
    if skipped >= most:
        raise BurnishError(
            f"training diverged: the gradient norm was not finite in {skipped} steps in a row",
            have=f"gradient norm {norm}",
            want="a finite norm",
            do="lower optim.lr, or start from an earlier checkpoint; "
            "engine.max_skipped_steps sets how many are borne",
        )
    return skipped

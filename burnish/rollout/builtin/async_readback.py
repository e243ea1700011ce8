"""What one step drew, on its way from the device to Python, which reads it one step later.

To look at what was just drawn, an accelerator's queue would have to run empty. So the numbers are copied while the
device computes the next step, and read after that step has been queued: the device never waits, and a
completion that has ended keeps its slot for one step more. A CPU has nothing to wait for and is read at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from burnish.errors import BurnishError
from burnish.records import Experts
from burnish.rollout.builtin.sampling import Drawn

Row = TypeVar("Row")
"""What the caller knows a row by."""


class Token(NamedTuple):
    """A token that was drawn for one row."""

    token: int
    sampled_logprob: float
    """Under the distribution that was drawn from."""
    logprob: float
    """Under softmax(logits)."""
    experts: Experts | None
    """[1, L, k], of the token before it, which was computed to draw this one; None where nobody asked."""


class Arriving(Generic[Row]):
    """A step's draws for `rows`, being copied to the host."""

    def __init__(self, rows: Sequence[Row], drawn: Drawn, experts: Tensor | None) -> None:
        """Begin to copy: `drawn` for n rows, and `experts` [n, L, k]. Does not wait."""
        self._rows = tuple(rows)
        device = drawn.tokens.device
        self._tokens, self._sampled, self._logprobs = (
            part.to("cpu", non_blocking=True)
            for part in (drawn.tokens, drawn.sampled_logprobs, drawn.logprobs)
        )
        self._experts = None if experts is None else experts.to("cpu", non_blocking=True)
        self._copied: torch.Event | None = None
        if device.type != "cpu":
            self._copied = torch.Event(device)
            self._copied.record()

    def read(self) -> Iterator[tuple[Row, Token]]:
        """Each row and its token, after waiting for the copy.

        Raises `BurnishError` where a log-prob is not finite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        if not bool(self._logprobs.isfinite().all()):
            raise BurnishError(
                "the model's logits are not finite, so no token can be drawn",
                do="look at the loss and gradient norm of the steps before; the weights may hold NaN",
            )
        tokens, sampled = self._tokens.tolist(), self._sampled.tolist()
        experts: Iterator[Experts | None] = repeat(None)
        if self._experts is not None:
            # Copied, for completions keep them to their end, and what came from the device lies in pinned memory.
            experts = iter(self._experts.numpy().copy()[:, None])
        numbers = zip(tokens, sampled, self._logprobs.tolist(), experts, strict=False)
        for row, number in zip(self._rows, numbers, strict=True):
            yield row, Token(*number)


def steps_behind(device: torch.device) -> int:
    """How many steps are queued before the first of them is read."""
    return 0 if device.type == "cpu" else 1

"""A calculator that the model may call, and a reward for the right product."""

from __future__ import annotations

import re
from typing import Any

import burnish


def multiply(a: int, b: int) -> int:
    """Return the product.

    Args:
        a: One number.
        b: The other number.
    """
    return a * b


class Calculator(burnish.Environment):
    """One question. The model may call the tool before it answers."""

    tools = (multiply,)

    def begin(self, row: Any, seed: int) -> tuple[()]:
        """Keep the right answer."""
        self.answer = row["answer"]
        return ()

    def step(self, action: burnish.Action) -> burnish.Observation:
        """Run the calls. A turn without one is the answer; its last number counts."""
        observation = super().step(action)
        if not observation.done:
            return observation
        numbers = re.findall(r"\d+", action.content)
        right = bool(numbers) and numbers[-1] == self.answer
        return burnish.Observation(rewards={"right": float(right)}, done=True)

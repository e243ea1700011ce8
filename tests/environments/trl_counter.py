"""A class and functions as they are written for TRL's trainer."""

from __future__ import annotations

import random


class Counter:
    """Counts, from a random number up to the row's target."""

    def reset(self, target: int = 5, **kwargs) -> str | None:
        self.target = target
        self.count = random.randrange(3)
        return f" Count to {target} from {self.count}."

    def add(self, amount: int) -> dict:
        """
        Add to the count.

        Args:
            amount: How much to add.

        Returns:
            The new count.
        """
        self.count += amount
        if amount < 0:
            raise ValueError("only up")
        return {"count": self.count}

    async def look(self) -> int:
        """
        Look at the count.

        Returns:
            The count.
        """
        return self.count

    def roll(self) -> float:
        """
        Roll a die.

        Returns:
            What it shows.
        """
        return random.random()

    def get_reward(self) -> float:
        return 1.0 - abs(self.target - self.count) / 10

    def _hidden(self):
        return None


class Silent:
    """Says nothing first, and leaves rewards to a function."""

    def reset(self, **kwargs):
        self.pressed = 0

    def press(self, times: int) -> None:
        """
        Press the button.

        Args:
            times: How often.
        """
        self.pressed += times


def pressed(environments, completions, **kwargs) -> list[float | None]:
    return [
        environment.pressed + len(said)
        for environment, said in zip(environments, completions, strict=True)
    ]


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    return a * b


class NoReset:
    """Is no environment."""

"""Nim: two players take 1, 2 or 3 sticks in turn, and who takes the last one wins."""

from __future__ import annotations

import random
from typing import Any

import burnish


class Nim(burnish.Environment):
    """A game that the model plays with itself, or with somebody who takes sticks at random, as the row says.

    With itself, every turn is a player's, and the next turn is the other's. A turn's reward is its player's.
    """

    def begin(self, row: Any, seed: int) -> tuple[()]:
        """Lay the row's sticks."""
        self.random = random.Random(seed)
        self.sticks = row["sticks"]
        self.plays_itself = row["opponent"] == "itself"
        return ()

    def step(self, action: burnish.Action) -> burnish.Observation:
        """Take sticks. A move against the rules loses."""
        if action.content not in legal_moves(self.sticks):
            return burnish.Observation(rewards={"won": -1.0}, done=True)
        self.sticks -= int(action.content)
        if self.sticks == 0:
            return burnish.Observation(rewards={"won": 1.0}, done=True)
        if not self.plays_itself:
            self.sticks -= int(self.random.choice(legal_moves(self.sticks)))
            if self.sticks == 0:
                return burnish.Observation(rewards={"won": -1.0}, done=True)
        return burnish.Observation([{"role": "user", "content": asked(self.sticks)}])


def legal_moves(sticks: int) -> list[str]:
    """Return what a player may say."""
    return [str(count) for count in range(1, min(sticks, 3) + 1)]


def asked(sticks: int) -> str:
    """Return what a player is told."""
    return f"{sticks} sticks"

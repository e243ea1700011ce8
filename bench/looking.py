"""The environment and the reward of `bench.conversations`, which its worker processes import."""

from __future__ import annotations

from typing import Any

import burnish

TURNS = 4
ANSWER = "The wind comes from the north and will turn in the evening. "


def look(place: str) -> str:
    """Look at a place.

    Args:
        place: Where to look.
    """
    return ANSWER


class Looking(burnish.Environment):
    """Answers any turn but the last as the tool does, and rewards them."""

    tools = (look,)

    def begin(self, row: Any, seed: int) -> Any:
        """Say nothing."""
        self.turns = 0
        return ()

    def step(self, action: burnish.Action) -> burnish.Observation:
        """Answer."""
        self.turns += 1
        answer = [{"role": "tool", "name": "look", "content": look("north")}]
        reward = float(len(action.text) % 7)
        return burnish.Observation(answer, rewards=reward, done=self.turns == TURNS)


def varied(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Return a reward that costs nothing and varies."""
    return [float(len(completion) % 7) for completion in completions]

"""Servers of OpenEnv: `openenv_server.py echo PORT` has tools, `openenv_server.py guess PORT` has typed actions."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    """Guess a number from 0 to 9."""

    guess: str


class GuessObservation(Observation):
    """What the game says."""

    hint: str
    tries: int = 0


class Guess(Environment):
    """The number follows from the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, low: int = 0, **_: Any) -> GuessObservation:
        self.number = random.Random(seed).randrange(low, 10)
        self.tries = 0
        return GuessObservation(hint=f"Guess a number from {low} to 9.")

    def step(self, action: GuessAction, **_: Any) -> GuessObservation:
        self.tries += 1
        guess = int(action.guess)
        if guess == self.number:
            return GuessObservation(hint="right", tries=self.tries, reward=1.0, done=True)
        hint = "higher" if guess < self.number else "lower"
        return GuessObservation(hint=hint, tries=self.tries, reward=-0.1)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


def echo() -> Any:
    """OpenEnv's example: an environment whose actions are calls of tools."""
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    class Echo(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            server = FastMCP("echo")

            @server.tool
            def echo_message(message: str) -> str:
                """Repeat a message."""
                return message

            super().__init__(server)

        def reset(self, seed: int | None = None, **_: Any) -> Observation:
            return Observation()

        def _step_impl(self, action: Action, **_: Any) -> Observation:
            return Observation()

        @property
        def state(self) -> State:
            return State()

    return create_app(Echo, CallToolAction, CallToolObservation, max_concurrent_envs=8)


def guess() -> Any:
    """A game with actions of its own."""
    return create_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=8)


if __name__ == "__main__":
    app = echo() if sys.argv[1] == "echo" else guess()
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")

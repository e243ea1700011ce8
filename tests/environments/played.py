"""Play environments of other packages with scripted turns, in this process, as a worker plays them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Self

from burnish.config.environment import EnvironmentConfig
from burnish.environments.base import Action, Observation, ToolCall
from burnish.environments.calls import Answered, Begin, Call, Close, Key, Score, Step
from burnish.environments.worker import description_of, serve
from burnish.functions import load_function

Said = str | tuple[str, Mapping[str, Any]] | Sequence[tuple[str, Mapping[str, Any]]]
"""A text, or calls by name and arguments."""


class Played(NamedTuple):
    """What an environment answered."""

    opening: Observation
    turns: list[Observation]
    rewards: Mapping[str, float]
    """Of `score`."""

    @property
    def texts(self) -> list[str]:
        """Contents of all messages after the opening."""
        return [message["content"] for turn in self.turns for message in turn.messages]


class Pool:
    """Answers calls in this process, as a worker does."""

    def __init__(self, **settings: Any) -> None:
        config = EnvironmentConfig(**settings)
        self.make = load_function(str(config.target), "rollout.environment")
        self.kwargs = config.arguments
        self.described = description_of(self.make, str(config.target), self.kwargs)
        self.environments: dict[Key, Any] = {}
        self.runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end([*self.environments])
        self.runner.close()

    def ask(self, calls: Sequence[Call]) -> dict[Key, Answered]:
        """Make calls and return their answers."""
        answers: list[Answered] = []
        make = partial(self.make, **self.kwargs)
        serve(self.environments, calls, make, answers.append, self.runner)
        return {answer.key: answer for answer in answers}

    def begin(self, tasks: Mapping[Key, tuple[Mapping[str, Any], int]]) -> dict[Key, Answered]:
        """Begin conversations with rows and seeds."""
        return self.ask([Begin(key, row, seed) for key, (row, seed) in tasks.items()])

    def step(self, actions: Mapping[Key, Action]) -> dict[Key, Answered]:
        """Say something in each conversation."""
        return self.ask([Step(key, action) for key, action in actions.items()])

    def score(self, keys: Sequence[Key]) -> dict[Key, Answered]:
        """Ask for rewards at the end, if there are some."""
        return self.ask([Score(key) for key in keys] if self.described.scores else [])

    def end(self, keys: Sequence[Key]) -> None:
        """Close environments."""
        self.ask([Close((-1, 0), keys)])


def pool_of(**settings: Any) -> Pool:
    """The environments that settings of `rollout.environment` name."""
    return Pool(**settings)


def play_all(
    pool: Pool,
    rows: Sequence[Mapping[str, Any]],
    scripts: Sequence[Sequence[Said]],
    seed: int = 3,
) -> list[Played]:
    """Play conversations at the same time, each until its script or the environment ends it."""
    keys = [(index, 0) for index in range(len(rows))]
    answers = pool.begin({key: (row, seed) for key, row in zip(keys, rows, strict=True)})
    openings = {key: _good(answers[key]) for key in keys}
    turns: dict[Any, list[Observation]] = {key: [] for key in keys}
    for turn in range(max(map(len, scripts))):
        actions = {
            key: _action(script[turn])
            for key, script in zip(keys, scripts, strict=True)
            if turn < len(script) and not (turns[key] and turns[key][-1].done)
        }
        for key, answer in pool.step(actions).items():
            turns[key].append(_good(answer))
    scores = pool.score(keys)
    pool.end(keys)
    return [
        Played(openings[key], turns[key], _good(scores[key]).rewards if key in scores else {})
        for key in keys
    ]


def play(row: Mapping[str, Any], script: Sequence[Said], seed: int = 3, **settings: Any) -> Played:
    """Play one conversation."""
    with pool_of(**settings) as pool:
        return play_all(pool, [row], [script], seed)[0]


def wait_for(port: int, seconds: float = 600.0) -> None:
    """Wait until a server listens at a port of this machine."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nobody listens at port {port}")


def _action(said: Said) -> Action:
    if isinstance(said, str):
        return Action(said, said)
    calls = [said] if isinstance(said, tuple) else said
    return Action(
        str(said),
        "",
        tuple(ToolCall(name, arguments, f"{n:09d}") for n, (name, arguments) in enumerate(calls)),
    )


def _good(answer: Any) -> Observation:
    assert answer.observation is not None, answer.error
    observation: Observation = answer.observation
    return observation

"""Environment classes and tool functions of TRL's `GRPOTrainer`, as they are written for it. TRL itself is not needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from burnish.environments.base import Action, Message, Observation
from burnish.environments.process_random import ProcessRandom
from burnish.environments.tool_environment import ToolEnvironment
from burnish.errors import UsageError
from burnish.functions import load_function

_SETTING = "rollout.environment.trl"
_EPISODE = "episode"
"""The column of a row that TRL does not have: the number of an episode whose prompt is what `reset` returns."""


class TrlEnvironment(ToolEnvironment):
    """An object of a TRL class, with its public methods as tools, and tool functions.

    `reset` gets the row and ends the last message of the prompt. `get_reward` gives the reward at the end.
    """

    def __init__(
        self,
        trl: str | Sequence[str],
        size: int = 500,
        rewards: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        """`rewards` are TRL's reward functions that read `environments`; `arguments` are the class's, which TRL makes without any."""
        factory, functions = _loaded(trl)
        self._environment = factory(**arguments) if factory else None
        self._tools = _tools_of(self._environment, functions)
        self._rewards = [load_function(name, _SETTING) for name in rewards]
        self._row: Mapping[str, Any] = {}
        self._prompt: Sequence[Message] = ()
        self._said: list[Message] = []
        self._random = ProcessRandom(0)

    @classmethod
    def rows(cls, trl: str | Sequence[str] = (), size: int = 500) -> Iterator[Mapping[str, Any]]:
        """Yield rows with an empty prompt, for a class whose `reset` returns the task. Each row is one task."""
        if _loaded(trl)[0]:
            for episode in range(size):
                yield {"prompt": [{"role": "user", "content": ""}], _EPISODE: episode}

    @classmethod
    def schemas(
        cls,
        trl: str | Sequence[str] = (),
        size: int = 500,
        rewards: Sequence[str] = (),
        **arguments: Any,
    ) -> list[Callable[..., Any]]:
        """Return the functions, and the methods of an object that is made for it."""
        factory, functions = _loaded(trl)
        environment = factory(**arguments) if factory else None
        return [*_tools_of(environment, functions).values()]

    def begin(self, row: Mapping[str, Any], seed: int) -> Observation:
        """See `Environment.begin`."""
        self._row = {key: value for key, value in row.items() if key != _EPISODE}
        self._prompt = row["prompt"]
        if self._environment is None:
            return Observation()
        self._random = ProcessRandom(row.get(_EPISODE, seed))
        with self._random:
            opening = self._environment.reset(**self._row)
        if opening is None:
            return Observation()
        *before, last = row["prompt"]
        content = last["content"]
        if isinstance(opening, list) and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if isinstance(opening, str) and isinstance(content, list):
            opening = [{"type": "text", "text": opening}]
        self._prompt = [*before, {**last, "content": content + opening}]
        return Observation(self._prompt, replaces_prompt=True)

    async def step(self, action: Action) -> Observation:  # type: ignore[override]
        """See `Environment.step`."""
        observation = await super().step(action)
        said: dict[str, Any] = {"role": "assistant", "content": action.content}
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in action.calls
        ]
        self._said += [said | {"tool_calls": calls} if calls else said, *observation.messages]
        return observation

    async def use(self, name: str, arguments: Mapping[str, Any]) -> str | Sequence[Any]:
        """See `ToolEnvironment.use`."""
        if name not in self._tools:
            raise ValueError(f"Tool {name} not found.")
        with self._random:
            result = self._tools[name](**arguments)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, list) else str(result)

    def told(self, error: Exception) -> str:
        """See `ToolEnvironment.told`."""
        return str({"error": str(error)})

    async def score(self) -> Mapping[str, float]:  # type: ignore[override]
        """See `Environment.score`."""
        rewards = {}
        if self._environment is not None and hasattr(self._environment, "get_reward"):
            rewards[type(self._environment).__name__] = await _value(self._environment.get_reward())
        columns = {key: [value] for key, value in self._row.items() if key != "prompt"}
        for function in self._rewards:
            values = await _value(
                function(
                    prompts=[self._prompt],
                    completions=[self._said],
                    environments=[self._environment],
                    **columns,
                )
            )
            rewards[function.__name__] = values[0]
        return {name: reward for name, reward in rewards.items() if reward is not None}


def _loaded(
    trl: str | Sequence[str],
) -> tuple[Callable[..., Any] | None, list[Callable[..., Any]]]:
    """Return what makes an environment, and the functions. Raises `UsageError` for two classes, or one without `reset`."""
    named = [trl] if isinstance(trl, str) else trl
    parts = [load_function(name, _SETTING) for name in named]
    factories = [each for each in parts if not inspect.isroutine(each)]
    problem = "no name" if not parts else "two classes" if len(factories) > 1 else None
    if factories and not problem and not hasattr(factories[0], "reset"):
        problem = "a class without reset"
    if problem:
        raise UsageError(
            f"{_SETTING} is no environment of TRL",
            have=f"{problem}: {', '.join(named)}",
            want="one class with a method reset, and functions",
            do="correct it",
        )
    return next(iter(factories), None), [each for each in parts if inspect.isroutine(each)]


def _tools_of(
    environment: Any, functions: Sequence[Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """Return tools by name: functions, and public methods, which TRL takes from the class."""
    methods = [
        getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
        if not name.startswith("_") and name not in ("reset", "get_reward")
    ]
    return {tool.__name__: tool for tool in (*functions, *methods)}


async def _value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result

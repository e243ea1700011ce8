"""Environments of messages that are written for tinker-cookbook."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from burnish.environments.base import Action, Environment, Message, Observation
from burnish.environments.process_random import ProcessRandom
from burnish.errors import UsageError
from burnish.functions import load_function

_SETTING = "rollout.environment.cookbook"


class CookbookEnvironment(Environment):
    """A `MessageEnv`, or that of an `EnvGroupBuilder`'s environments. Its first messages stand in place of the row's prompt."""

    def __init__(self, cookbook: str, **arguments: Any) -> None:
        """Take what makes a `MessageEnv` or an `EnvGroupBuilder`: it gets `arguments`, and the row's columns of its other parameters' names."""
        self._make = load_function(cookbook, _SETTING)
        self._arguments = arguments
        self._environment: Any = None
        self._messages: list[Message] = []

    @classmethod
    def schemas(cls, cookbook: str = "") -> Sequence[Mapping[str, Any]]:
        """Return no tools: the environments describe theirs to their own renderer. Raises `UsageError` for a file that cannot be imported."""
        load_function(cookbook, _SETTING)
        return ()

    async def begin(self, row: Mapping[str, Any], seed: int) -> Observation:  # type: ignore[override]
        """See `Environment.begin`."""
        parameters = inspect.signature(self._make).parameters.keys() - self._arguments.keys()
        columns = {name: row[name] for name in parameters & row.keys()}
        with ProcessRandom(seed):
            environment = self._make(**columns, **self._arguments)
        if hasattr(environment, "make_envs"):
            _require_no_group_rewards(environment)
            environment = (await environment.make_envs())[0]
        self._environment = getattr(environment, "message_env", environment)
        _require_messages(self._environment)
        self._messages = list(await self._environment.initial_observation())
        return Observation([_plain(message) for message in self._messages], replaces_prompt=True)

    async def step(self, action: Action) -> Observation:  # type: ignore[override]
        """See `Environment.step`. The conversation so far is what the environment itself said of it."""
        said: Message = {"role": "assistant", "content": action.text}
        known = len(self._messages)
        result = await self._environment.step(said)
        messages = list(result.next_messages)
        # Environments answer with the whole conversation, the model's turn in it.
        own = next(
            (i for i, each in enumerate(messages) if i >= known and each["role"] == "assistant"),
            known - 1,
        )
        self._messages = messages
        new = [_plain(message) for message in messages[own + 1 :]]
        return Observation(new, result.reward, result.episode_done, result.metrics)


def _require_no_group_rewards(builder: Any) -> None:
    from tinker_cookbook.rl.types import EnvGroupBuilder

    if type(builder).compute_group_rewards is not EnvGroupBuilder.compute_group_rewards:
        raise UsageError(
            f"{_SETTING}: {type(builder).__name__} rewards a whole group",
            have="compute_group_rewards",
            want="rewards of single conversations",
            do="reward in the environments' step, or write a burnish.Environment",
        )


def _require_messages(environment: Any) -> None:
    parameters = inspect.signature(environment.step).parameters
    if "message" not in parameters:
        raise UsageError(
            f"{_SETTING}: {type(environment).__name__} is no MessageEnv",
            have=f"step({', '.join(parameters)})",
            want="step(message)",
            do="name a MessageEnv: token ids of another renderer would not be the model's own",
        )


def _plain(message: Message) -> Message:
    """Return a message with its text parts as one text. Parts of other types stay, and are refused with a sentence."""
    content = message["content"]
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        content = "".join(part["text"] for part in content)
    return {**message, "content": content}

"""The protocol of an environment: it answers what the model says, until the conversation ends.

A conversation begins with a row's prompt. Then model and environment take turns. Every call runs in a worker process, so that one that
hangs or dies loses its own conversation only.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and what the chat template reads beside them.

A tool's message may have `is_error`, `began` (seconds since 1970) and `seconds` of its call. The model does not see these.
"""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model wrote."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """The call's id, for templates that write one."""


@dataclass(frozen=True, slots=True)
class Action:
    """What the model said in a turn."""

    text: str
    """The whole turn as text, without special tokens."""
    content: str
    """The text outside of calls and thoughts."""
    calls: tuple[ToolCall, ...] = ()
    problem: str | None = None
    """Why a call cannot be read; None if all can."""
    is_cut: bool = False
    """Whether the turn reached a length limit. The conversation ends with it."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment answers."""

    messages: Sequence[Message] = ()
    """Messages that the model sees next. None of their text becomes a control token of the chat template."""
    rewards: Mapping[str, float] | float = field(default_factory=dict)
    """Rewards of the turn, by name. A conversation's reward is the sum over names and turns."""
    done: bool = False
    """Whether the conversation has ended."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers by name, which are reported and not added."""
    replaces_prompt: bool = False
    """Whether the messages stand in place of the row's prompt. Only what `begin` returns may say so."""


@dataclass(frozen=True, slots=True)
class EndedConversation:
    """A conversation that has ended, as `Environment.score_group` gets it."""

    row: Mapping[str, Any]
    sample: int
    """Its number in the group."""
    messages: Sequence[Message]
    """What was said and heard after the row's prompt. Those of the model have `calls`, and `rewards` if there were any."""
    rewards: Mapping[str, float]
    """Sums over the turns, by name."""
    end: str
    """Why it ended."""


class EnvironmentFailure(Exception):
    """The environment itself failed, and the model is not to blame: the rollout is dropped and gets no reward."""


class Environment:
    """One conversation. Subclass it, and name the class in `rollout.environment.function`.

    With `tools` and nothing else, the model may call them until it answers without a call, and `reward.functions` judge the
    conversation. Methods may be coroutines.
    """

    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    """Functions that the model may call. Their type hints and docstrings become the schemas that the model sees."""

    @classmethod
    def rows(cls) -> Iterable[Mapping[str, Any]] | None:
        """Return rows to train on, if they do not come from `data.train`.

        Parameters with the names of the constructor's get the same arguments.
        """
        return None

    @classmethod
    def schemas(cls) -> Iterable[Mapping[str, Any] | Callable[..., Any]] | None:
        """Return the tools, if `call` runs others than `tools`: JSON schemas, or functions. Parameters are as those of `rows`."""
        return None

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Message] | Observation:
        """Return messages that follow the row's prompt, or an observation whose messages replace it.

        The row's `prompt` is its messages. `seed` is a function of the run's seed, the step, the prompt and the sample. All randomness must come from it.
        """
        return ()

    def step(self, action: Action) -> Observation:
        """Answer what the model said. By default run the calls; a turn without any ends the conversation."""
        if not action.calls or action.problem:
            return without_calls(action)
        answers = []
        for call in action.calls:
            began = time.time()
            start = time.monotonic()
            answer = self.call(call)
            answers.append({**answer, "began": began, "seconds": time.monotonic() - start})
        return Observation(answers)

    def call(self, call: ToolCall) -> Message:
        """Run a call, and return the tool's message. The tool's errors are told to the model."""
        known = {tool.__name__: tool for tool in self.tools}
        message = {"role": "tool", "name": call.name, "tool_call_id": call.id}
        failed = message | {"is_error": True}
        tool = known.get(call.name)
        if tool is None:
            return failed | {
                "content": f"Error: there is no tool {call.name}; there are {', '.join(known)}"
            }
        try:
            inspect.signature(tool).bind(**call.arguments)
        except TypeError as error:
            return failed | {"content": f"Error: {call.name}: {error}"}
        try:
            result = tool(**call.arguments)
        except EnvironmentFailure:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is told to the model
            return failed | {"content": f"Error: {type(error).__name__}: {error}"}
        return message | {"content": result if isinstance(result, str) else _as_json(result)}

    def score(self) -> Mapping[str, float] | float:
        """Return rewards of the conversation, once it has ended for whatever reason but a failure. They are added to those of its turns."""
        return {}

    def score_group(
        self, conversations: Sequence[EndedConversation]
    ) -> Sequence[Mapping[str, float] | float]:
        """Return further rewards of each conversation with one prompt, once all have ended, to compare them with each other.

        It is called on an object of its own. Conversations whose environment failed are left out. The last turn gets the reward.
        """
        return [{} for _ in conversations]

    def close(self) -> None:
        """Free what the conversation holds."""


def without_calls(action: Action) -> Observation:
    """Answer a turn without a call to make: tell why it cannot be read, or end the conversation."""
    if action.problem is None:
        return Observation(done=True)
    return Observation([{"role": "tool", "content": f"Error: {action.problem}", "is_error": True}])


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)

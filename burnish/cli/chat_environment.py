"""Let a model in `burnish chat` call tools, or talk with any other environment, between what a person says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from burnish.config.environment import EnvironmentConfig
from burnish.data.messages import Message, messages_of
from burnish.data.tool_forms import Called
from burnish.data.turn_bridge import TurnBridge, call_id
from burnish.environments.base import Action, Observation, ToolCall
from burnish.environments.calls import Answered, Key, TypedRow
from burnish.environments.pool import EnvironmentPool
from burnish.errors import UsageError, count_text
from burnish.records.seeds import derive_seed

if TYPE_CHECKING:
    from burnish.cli.chat_model import Reply

Draw = Callable[[Sequence[int], int], "Reply"]
"""Draws and shows a turn after token ids; gets its number since the person spoke."""
Note = Callable[[str], None]
"""Shows a line that the model did not say."""
_SHOWN_CHARACTERS = 1000


@dataclass(slots=True)
class _Talk:
    """A conversation of a model with a person and an environment, in the token ids that grow as in training."""

    key: Key
    bridge: TurnBridge
    ids: list[int] = field(default_factory=list)
    is_begun: bool = False
    is_judged: bool = True
    """Whether rewards mean something: the environment needs no column that a typed row lacks."""
    calls: list[Called] = field(default_factory=list)
    """Those of the model's last turn."""
    earlier: int = 0
    """How many calls there were before these."""
    ended_by: int | None = None

    def hear(self, new: Sequence[Message]) -> None:
        """Append messages after a turn of the model."""
        self.ids += self.bridge.following(
            self.calls, new, ended_by=self.ended_by, earlier=self.earlier
        )
        self.earlier += len(self.calls)
        self.calls = []


class ChatEnvironment:
    """The environment of `rollout.environment`, with a conversation of each model."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Import the class. Raises `UsageError` as `EnvironmentPool` does."""
        self._config = config.model_copy(update={"workers": 1})
        self._pool = EnvironmentPool(self._config)
        self._talks: dict[str, _Talk] = {}
        self._has_told = False
        self.tools = [dict(tool) for tool in self._pool.described.tools]
        """Schemas of what the model may call."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """What a row of a conversation has beside its messages."""
        return {"tools": self.tools} if self.tools else {}

    @property
    def tool_names(self) -> str:
        """The names of the tools, for people."""
        return ", ".join(str(tool.get("function", tool).get("name")) for tool in self.tools)

    def add(self, name: str, bridge: TurnBridge) -> None:
        """Add a model by its name. `bridge` has the tools."""
        self._talks[name] = _Talk((0, len(self._talks)), bridge)

    def begin_anew(self) -> None:
        """Forget all conversations. The next messages begin others."""
        for talk in self._talks.values():
            self._forget(talk)

    def close(self) -> None:
        """End the process of the environment."""
        self._pool.close()

    def answer(
        self, name: str, messages: list[Message], seed: tuple[int, int], draw: Draw, note: Note
    ) -> None:
        """Let a model and the environment take turns after a person's message, the last one, and append what they say.

        What the environment draws depends on `seed`: the dialogue's, and the number of the message that it begins with. Raises `UsageError` if the environment cannot begin with the messages.
        """
        talk = self._talks[name]
        if talk.is_begun:
            talk.hear(messages[-1:])
        else:
            self._begin(talk, messages, seed, note)
        for turn in range(self._config.max_turns):
            action, said = _read(talk, draw(talk.ids, turn))
            messages.append(said)
            heard = self._heard(talk, action, note)
            if heard is None:
                return
            messages += heard
            talk.hear(heard)
        limit = count_text(self._config.max_turns, "turn")
        note(f"(no further turn: rollout.environment.max_turns is {limit})")

    def _begin(
        self, talk: _Talk, messages: list[Message], seed: tuple[int, int], note: Note
    ) -> None:
        seed_of = derive_seed(seed[0], "environment", seed[1])
        row = {"prompt": [*messages]}
        answer = self._pool.begin({talk.key: (row, seed_of)})[talk.key]
        talk.is_judged = answer.observation is not None
        if answer.observation is None:
            self._pool.end([talk.key])
            answer = self._pool.begin({talk.key: (TypedRow(row), seed_of)})[talk.key]
        if answer.observation is None:
            raise UsageError(
                "the environment cannot begin a conversation with what you type",
                have=answer.error,
                want="an environment whose `begin` needs only the messages of a row",
                do="set environment=null to talk to the model alone",
            )
        if not (talk.is_judged or self._has_told):
            self._has_told = True
            note(
                "(the environment reads columns of a row: here they are empty, and no rewards are shown)"
            )
        opening = list(answer.observation.messages)
        if answer.observation.replaces_prompt:
            messages.clear()
        messages += messages_of(opening, "the environment's opening") if opening else []
        for message in messages[-len(opening) :] if opening else ():
            note(f"{message['role']}: {message['content']}")
        talk.ids = talk.bridge.first((), "the conversation", foreign=messages)
        talk.is_begun = True

    def _heard(self, talk: _Talk, action: Action, note: Note) -> list[Message] | None:
        """Tell the environment what the model said, and show what it answers; None if it waits for the person."""
        answer = self._pool.step({talk.key: action})[talk.key]
        if answer.observation is None:
            self._forget(talk)
            note(f"(the environment failed, and begins anew: {answer.error})")
            return None
        observation = answer.observation
        _show(action, answer, note)
        ends = observation.done or not observation.messages
        rewards = [observation.rewards] if talk.is_judged else []
        if ends and talk.is_judged:
            scored = self._pool.score([talk.key]).values()
            rewards += [each.observation.rewards for each in scored if each.observation]
        for name, value in (pair for each in rewards for pair in _named(each).items()):
            note(f"(reward {value:g}{'' if name == 'reward' else f' for {name}'})")
        return None if ends else messages_of(list(observation.messages), "the environment's answer")

    def _forget(self, talk: _Talk) -> None:
        if talk.is_begun:
            self._pool.end([talk.key])
        talk.is_begun = False
        talk.ids = []
        talk.calls = []
        talk.earlier = 0


def _read(talk: _Talk, reply: Reply) -> tuple[Action, Message]:
    """Return what a model said, for the environment and as a message."""
    turn = talk.bridge.read(reply.ids)
    text = talk.bridge.text_of(reply.ids)
    calls = tuple(
        ToolCall(name, arguments, call_id(number))
        for number, (name, arguments) in enumerate(turn.calls, talk.earlier)
    )
    said = talk.bridge.message_of(turn, text, talk.earlier)
    talk.ids += reply.ids
    talk.calls = turn.calls
    talk.ended_by = talk.bridge.end_of(reply.ids)
    return Action(text, turn.content, calls, turn.problem, reply.is_cut), said


def _show(action: Action, answer: Answered, note: Note) -> None:
    """Show the calls, each with its answer, and what else the environment says."""
    observation: Observation | None = answer.observation
    calls = iter(action.calls)
    for message in observation.messages if observation else ():
        content = message["content"]
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        more = len(text) - _SHOWN_CHARACTERS
        text = text[:_SHOWN_CHARACTERS] + (f" … {more:,} more characters" if more > 0 else "")
        call = next(calls, None) if message["role"] == "tool" else None
        before = str(message["role"]) if call is None else _call_text(call)
        note(f"{before}: {text}" if call is None else f"{before} → {text}")


def _call_text(call: ToolCall) -> str:
    arguments = [
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items()
    ]
    return f"{call.name}({', '.join(arguments)})"


def _named(rewards: Mapping[str, float] | float) -> Mapping[str, float]:
    return rewards if isinstance(rewards, Mapping) else {"reward": rewards}

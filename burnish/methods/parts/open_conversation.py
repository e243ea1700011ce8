"""A conversation as it grows: what was said and heard, and the token ids of its sequences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from burnish.data.messages import Message
from burnish.environments.base import EndedConversation, Observation
from burnish.environments.calls import Answered, Key
from burnish.records import Completion, Prompt
from burnish.records.completion_parts import joined_completions, of_environment
from burnish.records.samples import End, Turn, TurnSpan
from burnish.rollout.base import Sampling

_UNSEEN_CHARACTERS = 2000


@dataclass(slots=True, eq=False)
class Branch:
    """A sequence of token ids that grows. A prompt that does not go on from one begins another."""

    ids: list[int]
    opening: int
    """How many of them stand before the first turn of the model."""
    parts: list[Completion] = field(default_factory=list)
    """Turns of the model, each with the environment's tokens before it, if any."""
    heard: list[int] = field(default_factory=list)
    """The environment's tokens after the last turn."""
    record: list[Mapping[str, Any]] = field(default_factory=list)
    """What was said and heard in it, for people."""
    calls: int = 0
    calling: int = 0
    """Turns with a call."""

    def continues_in(self, ids: Sequence[int]) -> bool:
        """Return whether a prompt goes on from these ids."""
        return [*ids[: len(self.ids)]] == self.ids

    def hear(self, ids: Sequence[int]) -> None:
        """Go on with a prompt."""
        self.heard = [*ids[len(self.ids) :]]
        self.ids = [*ids]

    def say(self, said: Completion) -> None:
        """Go on with a turn of the model."""
        self.ids += said.token_ids.tolist()
        if self.heard:
            said = joined_completions([of_environment(self.heard, said.weights_version), said])
        self.parts.append(said)
        self.heard = []


@dataclass(slots=True, eq=False)
class OpenConversation:
    """One conversation. Its numbers are those of all branches."""

    prompt: Prompt
    sample: int
    key: Key
    branches: Sequence[Branch]
    """The last stands for the conversation: reward functions judge it."""
    before: Sequence[Message] = ()
    """The row's prompt, if the environment has not replaced it."""
    messages: list[Message] = field(default_factory=list)
    """What was said and heard since, as the chat template reads it."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Sums over the turns, by name."""
    turn_rewards: list[float] = field(default_factory=list)
    """Of each turn that was answered."""
    states: list[int] = field(default_factory=list)
    """A digest of what was heard before each turn."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums over the turns, by name."""
    spans: list[TurnSpan] = field(default_factory=list)
    failed_calls: int = 0
    """Calls that told the model of an error."""
    unread: int = 0
    """Turns in a row with a call that cannot be read."""
    end: End | None = None
    error: str | None = None

    @property
    def branch(self) -> Branch:
        """The branch that stands for the conversation."""
        return self.branches[-1]

    @property
    def parts(self) -> list[Completion]:
        """The turns of the model."""
        return [part for branch in self.branches for part in branch.parts]

    @property
    def turns(self) -> int:
        """How many turns the model has taken."""
        return sum(len(branch.parts) for branch in self.branches)

    @property
    def calls(self) -> int:
        """How many calls the model has written."""
        return sum(branch.calls for branch in self.branches)

    def go_on(self, ids: list[int]) -> None:
        """Take in the prompt of the next turn, in a new branch if it is no longer what was said and heard."""
        if self.branch.continues_in(ids):
            self.branch.hear(ids)
        else:
            self.branches = [*self.branches, Branch(ids, len(ids))]

    def tokens_left(self, ids: Sequence[int], sampling: Sampling) -> int:
        """Return how many tokens may follow `ids`. What an environment says first counts too, as memory is planned so."""
        return sampling.max_tokens - (len(ids) - len(self.prompt.token_ids))

    def note(self, answer: Answered, asked: float) -> None:
        """Take in how long the environment and its tools took, and which tools failed."""
        turn = self.turns - 1
        began = asked if answer.began is None else answer.began
        spent = TurnSpan("environment", "environment", turn, began, answer.seconds, answer.error)
        self.spans.append(spent)
        messages = answer.observation.messages if answer.observation else ()
        for message, note in zip(messages, answer.notes, strict=True):
            self.failed_calls += note.get("is_error", False)
            if "seconds" in note:
                name = str(message.get("name", "tool"))
                error = str(message["content"]) if note.get("is_error") else None
                when = note.get("began", began), note["seconds"]
                self.spans.append(TurnSpan("tool", name, turn, *when, error))

    def earn(self, observation: Observation) -> None:
        """Add rewards and numbers, and note the rewards at what the model said last."""
        given = observation.rewards
        rewards = given if isinstance(given, Mapping) else {"reward": float(given)}
        _add(self.rewards, rewards)
        _add(self.metrics, observation.metrics)
        if self.turn_rewards:
            self.turn_rewards[-1] += float(sum(rewards.values()))
        record = self.branch.record if self.branches else []
        said = [place for place, m in enumerate(record) if m["role"] == "assistant"]
        if said and rewards:
            earlier = record[said[-1]].get("rewards", {})
            record[said[-1]] = {**record[said[-1]], "rewards": {**earlier, **rewards}}

    def fail(self, error: str | None) -> None:
        """End, because the environment failed."""
        self.end = "failed"
        self.error = f"environment: {error}"

    def numbers(self) -> dict[str, float]:
        """Return metrics of the conversation."""
        return {
            **self.metrics,
            "turns": float(self.turns),
            "calls": float(self.calls),
            "failed_calls": float(self.failed_calls),
            "calling_turns": sum(each.calling for each in self.branches) / max(self.turns, 1),
        }

    def rewarded_turns(self) -> tuple[Turn, ...]:
        """Return the turns; none if an agent took turns that no step of its own rewards."""
        rewards = [*self.turn_rewards, 0.0]  # a turn that the environment failed to answer has none
        turns = tuple(
            Turn(part.count_drawn, reward, state)
            for part, reward, state in zip(self.parts, rewards, self.states, strict=False)
        )
        return turns if len(turns) == self.turns else ()

    def ended(self) -> EndedConversation:
        """Return the conversation as `score_group` gets it."""
        messages = tuple(message for branch in self.branches for message in branch.record)
        rewards = dict(self.rewards)
        return EndedConversation(self.prompt.columns, self.sample, messages, rewards, str(self.end))


def state_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return a digest of what an environment says."""
    return xxhash.xxh3_64_intdigest(json.dumps(messages, sort_keys=True).encode())


def unseen(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an answer for the record that the model does not get, because the conversation has ended. A long one is cut."""
    content = message["content"]
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    cut = len(text) - _UNSEEN_CHARACTERS
    more = f" … {cut:,} more characters" if cut > 0 else ""
    return {**message, "content": text[:_UNSEEN_CHARACTERS] + more, "unseen": True}


def _add(sums: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value

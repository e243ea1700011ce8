"""What a pool and its workers send each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from burnish.environments.base import Action, EndedConversation, Observation

Key = tuple[int, int]
"""A conversation: its prompt's key and its sample."""


class TypedRow(dict[str, Any]):
    """A row of what a person typed. Columns that it lacks are empty texts."""

    def __missing__(self, column: str) -> str:
        """Return the value of a column that is not there."""
        return ""


class Ask(NamedTuple):
    """What an agent asks of the model over HTTP: token ids, or messages and tools."""

    number: int
    """Counts the session's requests."""
    token_ids: tuple[int, ...] | None
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    sampling: Mapping[str, Any]
    """Further parameters of sampling that the request names."""


class AgentReply(NamedTuple):
    """What the model answers, or why it does not."""

    refusal: str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    content: str = ""
    thoughts: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    """Id, name and arguments, as JSON text, of each call."""
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Asking(Observation):
    """An agent's requests, which wait for answers."""

    asks: tuple[Ask, ...] = ()


class Begin(NamedTuple):
    """Make an environment and call its `begin`."""

    key: Key
    row: Mapping[str, Any]
    seed: int


class Step(NamedTuple):
    """Call an environment's `step`."""

    key: Key
    action: Action | tuple[AgentReply, ...]
    """What the model said; for an agent, answers to its requests in their order."""


class Score(NamedTuple):
    """Call an environment's `score`, once the conversation has ended."""

    key: Key


class Close(NamedTuple):
    """Close environments. Its answer says that they are closed."""

    key: Key
    """One that no conversation has."""
    closed: Sequence[Key]


class ScoreGroup(NamedTuple):
    """Make an environment and call its `score_group`."""

    key: Key
    """The prompt's key, and a sample that no conversation has."""
    conversations: Sequence[EndedConversation]


Asked = Begin | Step | Score | ScoreGroup
"""What asks for something."""
Call = Asked | Close


class Answered(NamedTuple):
    """What a call returned."""

    key: Key
    observation: Observation | None
    """None: the environment failed."""
    error: str | None
    seconds: float
    began: float | None = None
    """In seconds since 1970; None if the call was never made."""
    notes: Sequence[Mapping[str, Any]] = ()
    """What each message says of a tool's call and the model does not see: `is_error`, `began` and `seconds`."""
    rewards: Sequence[Mapping[str, float]] = ()
    """Of a group: the further rewards of each conversation."""


class Described(NamedTuple):
    """What a class says of itself."""

    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of its tools."""
    rows: Sequence[Mapping[str, Any]] | None
    """The rows that it brings; None: it was not asked, or has none."""
    scores: bool = False
    """Whether its conversations have a `score`."""
    scores_groups: bool = False
    """Whether it has a `score_group` of its own."""

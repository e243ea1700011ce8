"""What a pool and its workers send each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from burnish.environments.base import Action, Observation

Key = tuple[int, int]
"""A conversation: its prompt's key and its sample."""


class Begin(NamedTuple):
    """Make an environment and call its `begin`."""

    key: Key
    row: Mapping[str, Any]
    seed: int


class Step(NamedTuple):
    """Call an environment's `step`."""

    key: Key
    action: Action


class Score(NamedTuple):
    """Call an environment's `score`, once the conversation has ended."""

    key: Key


class Close(NamedTuple):
    """Close an environment. It has no answer."""

    key: Key


Asked = Begin | Step | Score
"""What has an answer."""
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


class Described(NamedTuple):
    """What a class says of itself."""

    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of its tools."""
    rows: Sequence[Mapping[str, Any]] | None
    """The rows that it brings; None: it was not asked, or has none."""
    scores: bool = False
    """Whether its conversations have a `score`."""

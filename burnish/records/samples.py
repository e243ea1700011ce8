"""Prompts, completions, rollouts and examples: the data of a step before packing.

Token arrays are 1-D numpy arrays on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from burnish.records.columns import TokenColumn, TrainingArrays

TokenIds = npt.NDArray[np.int64]
"""Token ids, shape [T]."""
Floats = npt.NDArray[np.float32]
"""One fp32 number per token, shape [T]."""
Mask = npt.NDArray[np.bool_]
"""One flag per token, shape [T]."""
Experts = npt.NDArray[np.integer[Any]]
"""The k experts of each token in each of L routers, shape [T, L, k], uint8 or int16."""

StopReason = Literal["stop", "length"]
"""Why a completion ended: at a stop id, stop string or eos ("stop"), or at its limit ("length")."""
End = Literal["done", "length", "turns", "calls", "unreadable", "failed"]
"""Why a conversation ended: the environment ended it, a limit on tokens, turns or calls, unreadable calls, or a failure of the environment."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One task for reinforcement learning or evaluation."""

    index: int
    """Row in the data set before shuffling. It identifies the prompt across steps and runs."""
    token_ids: TokenIds
    """The prompt as the model sees it, chat template applied."""
    text: str
    """The same as text."""
    messages: list[dict[str, Any]] | None
    """Chat messages if the data have them, else None."""
    answer: Any
    """The ground truth that rewards compare with; None when the data has none."""
    source: str
    """The value of the column `data_source` (verl), which names the data set; "" when absent."""
    columns: Mapping[str, Any]
    """Every column of the row, for reward functions."""
    digest: bytes | None = None
    """`digest_of` its tokens, if this rank has only their number."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt for a generator, and the samples to draw."""

    prompt_key: int
    """Identifies the prompt when random draws are derived. Unique within a step."""
    token_ids: TokenIds
    samples: int = 1
    """How many completions to draw; their sample indices are `first_sample`, `first_sample` + 1, ..."""
    first_sample: int = 0
    drawn: int = 0
    """How many tokens at the end of `token_ids` were generated earlier. Completions continue after them and leave them out."""
    turn: int = 0
    """The turn of a conversation that is drawn, part of the key of its random numbers."""
    max_tokens: int | None = None
    """Longest completion, `drawn` included, if it is shorter than the sampling's."""
    prompt: Prompt | None = None
    """The prompt with its text and messages, for generators that take those."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A generator's output for one sample."""

    token_ids: Annotated[TokenIds, TokenColumn(np.int64)]
    """The ids after the prompt, including a stop id that ended the completion. May be empty."""
    sampled_logprobs: Annotated[Floats, TokenColumn(np.float32)]
    """Log-probability of each id under the distribution it was drawn from (after temperature, top-k, top-p, min-p)."""
    logprobs: Annotated[Floats, TokenColumn(np.float32)]
    """Log-probability of each id under the raw model distribution (temperature 1, no truncation), as from `Engine.forward`."""
    stop_reason: StopReason | None
    """Why the completion ended; None while it is being generated."""
    weights_version: int
    """The version given to `load_weights` before its first token."""
    experts: Annotated[Experts | None, TokenColumn(np.int16, 3, covers_prompt=True)] = None
    """If requested: the experts of the prompt's and the completion's tokens, except the last."""
    later_versions: tuple[tuple[int, int], ...] = ()
    """Versions that were loaded during generation (`rollout.in_flight`), each with the index of the first token that it drew."""
    text: str | None = None
    """The text from a generator that returns text; None: decode the token ids."""
    times: tuple[float, float, float] | None = None
    """Times of the request, the first and the last token, in seconds since 1970, if the generator knows them."""
    response_mask: Annotated[Mask | None, TokenColumn(np.bool_)] = None
    """In a conversation: which tokens the model drew. An environment wrote the others, whose log-probs are 0. None: it drew all."""

    @property
    def drawn(self) -> Mask:
        """Return which tokens the model drew."""
        mask = self.response_mask
        return np.ones(len(self.token_ids), np.bool_) if mask is None else mask

    @property
    def count_drawn(self) -> int:
        """Return how many tokens the model drew."""
        return len(self.token_ids) if self.response_mask is None else int(self.response_mask.sum())

    @property
    def versions(self) -> npt.NDArray[np.int64]:
        """Return the version of the weights that drew each token."""
        versions = np.full(len(self.token_ids), self.weights_version)
        for version, first in self.later_versions:
            versions[first:] = version
        return versions


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One call of a reward function or model for a rollout."""

    name: str
    """The part of the reward."""
    value: float | None
    error: str | None
    began: float | None
    """In seconds since 1970; None if the call was never made."""
    seconds: float


class Turn(NamedTuple):
    """A turn of the model in a conversation."""

    tokens: int
    """How many tokens the model drew."""
    reward: float
    """Sum of the rewards of the environment's answer."""
    state: int
    """Digest of what the environment said before the turn. Equal for turns before which it said the same."""


class TurnSpan(NamedTuple):
    """When the model, the environment or a tool was busy with a turn of a conversation."""

    kind: Literal["model", "environment", "tool"]
    name: str
    turn: int
    """0-based; -1 before the first turn."""
    began: float
    """In seconds since 1970."""
    seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """A completion with its prompt and reward."""

    prompt: Prompt
    sample: int
    """Index within the prompt's group, 0-based."""
    completion: Completion
    text: str
    """The completion decoded, special tokens removed."""
    reward: float = 0.0
    """Weighted sum of the values of reward functions and models; NaN if one failed and `reward.on_error` is drop."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Value of each reward function and model and of an environment's rewards, by name, and further numbers that functions returned, as FUNCTION/NAME."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of a conversation that are no reward, by name: its turns and calls, and what its environment reports."""
    turns: tuple[Turn, ...] = ()
    """The model's turns in a conversation, those of all branches with number 0. Empty: one turn has the whole reward."""
    greedy_reward: float | None = None
    """Reward of the greedy completion of the same prompt, if advantages compare with it (ReMax)."""
    reward_error: str | None = None
    """The exceptions or time-outs of reward functions and models that gave no value; None if none failed."""
    calls: tuple[RewardCall, ...] = ()
    """The calls for its reward: functions, then models."""
    conversation: tuple[Mapping[str, Any], ...] = ()
    """What model and environment said, as JSON has it: messages after the prompt, with each turn's calls, tokens and rewards."""
    spans: tuple[TurnSpan, ...] = ()
    """When a conversation's model, environment and tools were busy. No file but a trace has it, so equal runs write equal files."""
    end: End | None = None
    """Why a conversation ended; None without an environment."""
    branch: int = 0
    """Number among the sequences of one conversation, the last first. Each has the reward of number 0, which alone is judged and counts in statistics."""
    owner: int | None = None
    """The rank that has the tokens and texts; others have arrays of the same shapes, of -1 and NaN. None: all ranks have them."""


@dataclass(frozen=True, slots=True, eq=False)
class Example(TrainingArrays[npt.NDArray[Any]]):
    """One training sequence, of SFT or RL. Entry 0 of an array is never trained on."""

    token_ids: TokenIds
    """The whole sequence, prompt and completion."""
    loss_mask: Mask
    """True where the token's prediction is trained on."""
    source: str = ""
    """The row's `data_source`, if it has one."""


def digest_of(token_ids: TokenIds) -> bytes:
    """Return a 16-byte hash of these tokens."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(token_ids, dtype=np.int64).data)

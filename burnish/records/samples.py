"""Prompts, completions, rollouts and examples: the data of a step before packing.

SFT and RL meet in `Example`. Token arrays are 1-D numpy arrays on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import xxhash

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


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One task for reinforcement learning or evaluation."""

    index: int
    """Row in the data set before shuffling; names the prompt across steps and runs."""
    token_ids: TokenIds
    """The prompt as the model sees it, chat template applied."""
    text: str
    """The same as text."""
    messages: list[dict[str, Any]] | None
    """Chat messages where the data had them, else None."""
    answer: Any
    """The ground truth that rewards compare with; None when the data has none."""
    source: str
    """The data set's name for where it came from (verl's `data_source`); "" when absent."""
    columns: Mapping[str, Any]
    """Every column of the row, for reward functions."""
    digest: bytes | None = None
    """Names its tokens where this rank has only their number."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt for a generator, and the samples to draw."""

    prompt_key: int
    """Names the prompt in the derivation of random draws; unique within a step."""
    token_ids: TokenIds
    """The prompt."""
    samples: int = 1
    """How many completions to draw; their sample indices are `first_sample`, `first_sample` + 1, ..."""
    first_sample: int = 0
    """Index of the first sample."""
    drawn: int = 0
    """How many of the last `token_ids` were drawn before. The completions go on after them and leave them out."""
    prompt: Prompt | None = None
    """Where the token ids come from, for generators that are asked in texts or messages."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What a generator returns for one sample."""

    token_ids: TokenIds
    """The generated ids, the stop id included when one ended it. May be empty."""
    sampled_logprobs: Floats
    """Log-probability of each id under the distribution it was drawn from (after temperature, top-k, top-p, min-p)."""
    logprobs: Floats
    """Log-probability of each id under the raw model distribution (temperature 1, no truncation), as `Engine.forward` gives."""
    stop_reason: StopReason | None
    """Why it ended; None while it has not."""
    weights_version: int
    """The version given to `load_weights` before its first token."""
    experts: Experts | None = None
    """Where they were asked for: of the prompt's tokens and its own, but for the very last, which nothing was computed from."""
    later_versions: tuple[tuple[int, int], ...] = ()
    """Versions that were loaded while it was generated (`rollout.in_flight`), each with the first token that it drew."""
    text: str | None = None
    """What a generator said that speaks in texts; None where the token ids are decoded."""
    times: tuple[float, float, float] | None = None
    """When it was asked for, and when its first and its last token came, in seconds since 1970, where the generator knows."""

    @property
    def versions(self) -> npt.NDArray[np.int64]:
        """Return the version of the weights that drew each token."""
        found = np.full(len(self.token_ids), self.weights_version)
        for version, first in self.later_versions:
            found[first:] = version
        return found


def joined_arrays(made: Sequence[Completion], ids: npt.DTypeLike) -> dict[str, npt.NDArray[Any]]:
    """Join completions' arrays, by name; `ids` is the type of token ids."""
    parts: dict[str, list[npt.NDArray[Any]]] = {
        "token_ids": [each.token_ids.astype(ids) for each in made],
        "logprobs": [each.logprobs for each in made],
        "sampled_logprobs": [each.sampled_logprobs for each in made],
        "experts": [each.experts for each in made if each.experts is not None],
    }
    return {name: np.concatenate(each) for name, each in parts.items() if each}


def split_arrays(
    told: Sequence[Mapping[str, Any]], arrays: Mapping[str, npt.NDArray[Any]]
) -> Iterator[Completion]:
    """Undo `joined_arrays`; `told` has each one's other fields, and lengths. Raises `ValueError`."""
    parts = {}
    for name in ("token_ids", "sampled_logprobs", "logprobs", "experts"):
        counts = [each["experts" if name == "experts" else "tokens"] for each in told]
        array = arrays.get(name, np.zeros(0, np.float32))
        if len(array) != sum(counts):
            raise ValueError(f"there are {len(array)} {name} of {sum(counts)} tokens")
        parts[name] = np.split(array, np.cumsum(counts, dtype=int)[:-1])
    for each, ids, sampled, raw, experts in zip(told, *parts.values(), strict=False):
        reason, times = each["stop_reason"], each.get("times")
        yield Completion(
            ids.astype(np.int64),
            sampled,
            raw,
            reason if reason in get_args(StopReason) else None,
            int(each["weights_version"]),
            experts if each["experts"] else None,
            tuple((int(number), int(first)) for number, first in each["later_versions"]),
            times=tuple(times) if times else None,
        )


@dataclass(frozen=True, slots=True)
class RewardCall:
    """What was said of a rollout."""

    name: str
    """The part of the reward."""
    value: float | None
    error: str | None
    began: float | None
    """In seconds since 1970; None if it was given up before."""
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """A completion together with its prompt and what it earned."""

    prompt: Prompt
    """The prompt it answers."""
    sample: int
    """Index within the prompt's group, 0-based."""
    completion: Completion
    """The generated ids and their log-probs."""
    text: str
    """The completion decoded, special tokens removed."""
    reward: float = 0.0
    """Weighted sum of the functions' values."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Each reward function's own value, by its name, and each number that it gave beside it, as NAME/ITS_NAME."""
    greedy_reward: float | None = None
    """Reward of the greedy completion of the same prompt, where advantages compare with it (ReMax)."""
    reward_error: str | None = None
    """The text of the exception or time-out that kept a reward function from answering; None when all answered."""
    calls: tuple[RewardCall, ...] = ()
    """What was called for its reward: functions, then models."""
    owner: int | None = None
    """The rank that has its tokens and texts; others have arrays of their shapes with -1 and NaN. None: all ranks have them."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One training sequence, of SFT or RL.

    Entry t of a per-token array concerns the prediction of token t. Entry 0 is never trained on.
    """

    token_ids: TokenIds
    """The whole sequence, prompt and completion."""
    loss_mask: Mask
    """True where the token's prediction is trained on."""
    advantages: Floats | None = None
    """RL: the advantage of each token, 0 where not trained on."""
    old_logprobs: Floats | None = None
    """RL: log-prob of each token under the policy that the update is measured against."""
    sampled_logprobs: Floats | None = None
    """RL: log-prob of each token under the distribution that the generator drew it from."""
    ref_logprobs: Floats | None = None
    """RL: log-prob of each token under the frozen reference model, where a KL term wants it."""
    returns: Floats | None = None
    """RL with a critic: what it is to learn of the state before each token."""
    old_values: Floats | None = None
    """RL with a critic: what it said of that state before the update."""
    experts: Experts | None = None
    """RL: the experts that each token goes to; those that its routers choose where None."""


def digest_of(token_ids: TokenIds) -> bytes:
    """Return 16 bytes that name these tokens."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(token_ids, dtype=np.int64).data)

"""The interfaces of advantage functions and policy losses, and how they are loaded.

An `Advantage` takes a step's `ScoredRollouts`, on the host in fp64. A `PolicyLoss` takes the
trained policy π's log-probs. `MicroBatch.old_logprobs` are those of π_old; None means that π_old is
π without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from burnish.algorithms.own_settings import with_settings
from burnish.config.algorithm import AdvantageConfig, AlgorithmConfig
from burnish.errors import BurnishError, UsageError
from burnish.extend import ADVANTAGES, POLICY_LOSSES
from burnish.functions import Registry, failure, guarded, load_function
from burnish.records import Floats, MicroBatch, TokenOutputs
from burnish.records.samples import Turn
from burnish.tracking.stats import Stats

BY_TOKEN = ("gae", "reinforce_plus_plus")
"""Advantages that differ among the tokens of a completion (`burnish.algorithms.critic.gae`)."""
_LARGEST_REWARD = 1e30
"""Larger rewards are refused: their differences would not fit in fp32."""
LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before exp, so that no ratio overflows; no gradient flows beyond it."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ScoredRollouts:
    """The N rollouts of a step that have a reward, as host arrays."""

    rewards: Array
    """[N] fp64. KL penalties and the penalty for length are subtracted."""
    groups: npt.NDArray[np.int64]
    """[N]. Rollouts of one prompt have equal numbers."""
    lengths: npt.NDArray[np.int64]
    """[N] tokens of each completion, or of all branches of a conversation; 0 is possible."""
    penalties_of_all: Callable[[], Sequence[Floats]] | None = None
    """Exchanges `penalties` among all ranks. Collective. None without KL in the reward."""
    parts: Mapping[str, Array] = field(default_factory=dict)
    """By reward function or model: its unweighted values [N]; NaN where it gave none because it does not apply."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each part in the reward."""
    turns_of_all: Callable[[], Sequence[Sequence[Turn]]] | None = None
    """Exchanges the conversations' turns among all ranks. Collective. None without conversations."""
    greedy_rewards: Array | None = None
    """[N] rewards of the greedy completion of the same prompt. Burnish generates these only for `remax`."""

    @cached_property
    def penalties(self) -> tuple[Array, ...]:
        """[length] each: KL in the reward per token, with its coefficient."""
        if self.penalties_of_all is not None:
            return tuple(np.asarray(row, np.float64) for row in self.penalties_of_all())
        zeros = {size: np.broadcast_to(0.0, size) for size in np.unique(self.lengths).tolist()}
        return tuple(zeros[size] for size in self.lengths.tolist())

    @cached_property
    def turns(self) -> tuple[tuple[Turn, ...], ...]:
        """Each rollout's turns, whose rewards add up to its reward. What no turn has, such as that of a reward function, is the last one's."""
        of_all = self.turns_of_all() if self.turns_of_all else [()] * len(self.rewards)
        filled = []
        numbers = zip(of_all, self.rewards.tolist(), self.lengths.tolist(), strict=True)
        for own, reward, length in numbers:
            *others, last = own or (Turn(length, reward, 0),)
            rest = reward - sum(turn.reward for turn in others)
            filled.append((*others, last._replace(reward=rest)))
        return tuple(filled)

    def within_groups(self, formula: Callable[[Array], Array], values: Array) -> Array:
        """Apply `formula` to each group's part of `values` [N]."""
        result = np.zeros_like(values)
        for rows in self.members():
            for members in rows:
                result[members] = formula(values[members])
        return result

    def in_rows(self, formula: Callable[[Array], Array], values: Array) -> Array:
        """Apply `formula` to `values` [N], as rows [groups, size] for each group size."""
        result = np.zeros_like(values)
        for rows in self.members():
            result[rows] = formula(values[rows])
        return result

    def members(self) -> list[npt.NDArray[np.int64]]:
        """Return the rollouts' indices by group, an array [groups, size] for each group size."""
        order = np.argsort(self.groups, kind="stable")
        starts = np.flatnonzero(np.diff(self.groups[order], prepend=np.iinfo(np.int64).min))
        sizes = np.diff(starts, append=len(order))
        starts_by_size = ((size, starts[sizes == size]) for size in np.unique(sizes).tolist())
        return [order[first[:, None] + np.arange(size)] for size, first in starts_by_size]


Advantage = Callable[[ScoredRollouts], "npt.ArrayLike | Sequence[npt.ArrayLike]"]
"""[N] numbers, one per rollout; or N arrays, each with one number per token of the completion."""


def load_advantage(formula: AdvantageConfig) -> Advantage | None:
    """Return the function that `algorithm.advantage` names, with its settings; None for those in `BY_TOKEN`.

    Raises `UsageError` if it does not exist or refuses its settings, or if a user's function fails on made-up rollouts.
    """
    name = formula.name
    setting = "algorithm.advantage"
    if name in BY_TOKEN:
        return None
    function = with_settings(load_function(name, setting, ADVANTAGES), formula, setting)
    if name in ADVANTAGES:
        return function
    want = "advantages of ScoredRollouts: [N] numbers, or N arrays with one per token"
    function = guarded(function, name, setting, want)
    rewards = [1.0, 0.0, 0.5, 0.25]
    groups = [0, 0, 1, 1]
    lengths = [2, 3, 1, 2]
    made_up = ScoredRollouts(
        fixed(np.array(rewards)),
        fixed(np.array(groups)),
        fixed(np.array(lengths)),
        parts={"made_up": np.array(rewards)},
        weights={"made_up": 1.0},
        greedy_rewards=np.full(4, 0.5),
    )
    with _trying(f"{setting}: {name} failed on 4 made-up rollouts", want):
        advantages(function, made_up)
    return function


def fixed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """View an array without write access, so that no function changes others' rollouts."""
    view = array.view()
    view.flags.writeable = False
    return view


@contextmanager
def _trying(problem: str, want: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        have = getattr(error, "have", failure(error))
        if type(error) is BurnishError:  # of what the function returned
            have = f"{error.problem}: {have}"
        raise UsageError(problem, have=have, want=want, do="correct the function") from error


def advantages(function: Advantage, scored: ScoredRollouts) -> Floats | list[Floats]:
    """Return each rollout's advantage, fp32 [N], or an fp32 array for each.

    Raises `BurnishError` for other shapes or non-finite numbers.
    """
    lengths = scored.lengths
    if not len(lengths):
        return np.zeros(0, np.float32)
    returned: Any = function(scored)
    if not hasattr(returned, "__len__"):
        raise _misshapen(type(returned).__name__, len(lengths))
    is_plain = isinstance(returned, np.ndarray) and returned.ndim == 1 and returned.dtype != object
    shapes = [] if is_plain else [np.shape(row) for row in returned]
    if len(returned) == len(lengths) and not any(shapes):
        result: Floats | list[Floats] = np.asarray(returned, dtype=np.float32)
        checked = [np.asarray(result)[lengths > 0]]
    elif shapes == [(length,) for length in lengths.tolist()]:
        result = checked = [np.asarray(row, dtype=np.float32) for row in returned]
    else:
        first = shapes[0] if shapes else ()
        raise _misshapen(f"{len(returned)} entries, the first of shape {first}", len(lengths))
    if not all(np.isfinite(row).all() for row in checked):
        raise BurnishError(
            "the advantage function returned numbers that are not finite",
            have="NaN or infinity",
            want="finite fp32 numbers",
            do="correct the function of algorithm.advantage",
        )
    return result


def _misshapen(have: str, count: int) -> BurnishError:
    return BurnishError(
        "the advantage function returned wrong shapes",
        have=have,
        want=f"{count} numbers, or {count} arrays of as many numbers as tokens",
        do="correct the function of algorithm.advantage",
    )


def check_finite(totals: Array) -> None:
    """Refuse total rewards [N] that are not finite or beyond `_LARGEST_REWARD`."""
    bad = np.flatnonzero(~(np.abs(totals) <= _LARGEST_REWARD))
    if bad.size:
        raise BurnishError(
            f"the reward of rollout {bad[0]} is too large to learn from, or not finite",
            have=f"{totals[bad[0]]} ({bad.size} of {totals.size} rollouts)",
            want=f"a finite number of at most {_LARGEST_REWARD:g}",
            do="look at the reward function and, with KL in the reward, at the log-probs",
        )


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """A policy loss by token. Masked tokens have finite, meaningless values."""

    loss: Tensor
    """[T] fp32, to be minimised."""
    clipped: Tensor | None = None
    """[T] bool, where a bound on the ratio takes effect; None: nowhere."""
    clipped_lower: Tensor | None = None
    """[T] bool, where the dual clip takes effect; None: nowhere."""


Loss = Callable[[TokenOutputs, MicroBatch], tuple[Tensor, Stats]]
"""A function that an engine runs on each micro-batch (`burnish.engines.base.LossFn`)."""


@dataclass(frozen=True, slots=True)
class SparseLoss:
    """A loss that gives only some tokens a gradient. Engines need no logits of the others in the backward pass.

    A function that wraps it learns from all tokens, unless it says so itself.
    """

    function: Loss
    learned: Callable[[MicroBatch], Tensor]
    """Takes a micro-batch on the host; returns [T] bool, False where neither log-prob nor entropy ever gets a gradient."""

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
        """Return what `function` does."""
        return self.function(outputs, micro)


PolicyLoss = Callable[..., "TokenLosses | Tensor"]
"""(log-probs [T] with gradient, micro-batch, `algorithm`'s settings) -> `TokenLosses`, or just the losses [T].

One with settings of its own takes them as its last argument, after the others or after the first two (`with_settings`).
"""


def selects_tokens(config: AlgorithmConfig) -> bool:
    """Return whether the policy loss needs `MicroBatch.selected`."""
    return config.top_entropy is not None or config.policy_loss.name in ("clip_cov", "kl_cov")


def load_policy_loss(config: AlgorithmConfig) -> Callable[[Tensor, MicroBatch], TokenLosses]:
    """Return the loss that `algorithm.policy_loss` names. Raises `UsageError` as `load_advantage` does."""
    formula = config.policy_loss
    setting = "algorithm.policy_loss"
    function = load_function(formula.name, setting, POLICY_LOSSES)
    function = with_settings(function, formula, setting)
    return tried_loss(function, formula.name, setting, POLICY_LOSSES, config)


def tried_loss(
    function: Callable[..., Any], name: str, setting: str, builtins: Registry, *further: Any
) -> Callable[[Tensor, MicroBatch], TokenLosses]:
    """Return a loss by token that checks what `function` returns for log-probs, a micro-batch and `further` arguments.

    One that is not in `builtins` is tried on a made-up micro-batch. Raises `UsageError` if it fails.
    """
    want = "finite losses [T] with a gradient, of log-probs [T] and a micro-batch"
    if name not in builtins:
        function = guarded(function, name, setting, want)

    def token_losses(logprobs: Tensor, micro: MicroBatch) -> TokenLosses:
        returned = function(logprobs, micro, *further)
        losses = returned.loss if isinstance(returned, TokenLosses) else returned
        if not isinstance(losses, Tensor) or losses.shape != logprobs.shape:
            raise BurnishError(
                f"{setting}: the loss returned a wrong shape",
                have=f"{[*losses.shape] if isinstance(losses, Tensor) else type(losses).__name__}",
                want=f"one loss per token, {list(logprobs.shape)}",
                do="correct the function",
            )
        return returned if isinstance(returned, TokenLosses) else TokenLosses(losses)

    if name not in builtins:
        with _trying(f"{setting}: {name} failed on a made-up micro-batch", want):
            _try(token_losses)
    return token_losses


def _try(token_losses: Callable[[Tensor, MicroBatch], TokenLosses]) -> None:
    """Raise `ValueError` unless a made-up micro-batch gives finite losses and gradients."""
    mask = torch.tensor([False, True, True, False, True])
    numbers = torch.linspace(-2.0, -0.5, 5)
    micro = MicroBatch(
        input_ids=torch.arange(5),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        loss_mask=mask,
        num_tokens=3,
        num_sequences=2,
        advantages=torch.tensor([0.0, 1.0, 1.0, 0.0, -1.0]),
        old_logprobs=numbers - 0.1,
        sampled_logprobs=numbers - 0.2,
        ref_logprobs=numbers - 0.3,
    )
    logprobs = numbers.clone().requires_grad_()
    loss = token_losses(logprobs, micro).loss[mask].sum()
    loss.backward()  # type: ignore[no-untyped-call]
    if logprobs.grad is None or not (loss.isfinite() and logprobs.grad[mask].isfinite().all()):
        raise ValueError("the loss or its gradient is not finite")


def old_logprobs(logprobs: Tensor, micro: MicroBatch) -> Tensor:
    """Return log π_old [T] without gradient."""
    return logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs


def log_ratio(logprobs: Tensor, micro: MicroBatch) -> Tensor:
    """Return log π/π_old [T] fp32, 0 at masked tokens."""
    difference = logprobs.float() - old_logprobs(logprobs, micro).float()
    return torch.where(micro.loss_mask, difference, 0.0)

"""Divergence of a student's distribution p from a teacher's q at each token, without holding whole logits.

The generalized Jensen-Shannon divergence (GKD, arXiv 2306.13649, equation 1), with m = (1-β) p + β q:

    β = 0:  Σ q (log q - log p), the forward KL
    β = 1:  Σ p (log p - log q), the reverse KL
    else:   β Σ q (log q - log m) + (1-β) Σ p (log p - log m)

in fp32, some rows at a time; the backward pass recomputes the logits. For g = ∂D/∂log p the gradient is ∂D/∂z = g - p Σ g. A probe
reads the states that the head gets (`MicroBatch.probe`). A teacher's returns what a student's compares with: the states, which its
head turns into q again, or the k most probable tokens. Ranks that share the vocabulary add up their parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from burnish.distributed.tensor_collectives import all_gather_rows
from burnish.models.logprobs import LogprobOptions, add_product, row_slices, transformed_logits
from burnish.models.scorer import ScoringPlan

_COPIES = 4
"""Tensors in fp32 of a chunk's size that exist at one time; a chunk has as many times fewer rows than one of log-probs."""
_LEAST_TAIL = 1e-7
"""Smallest probability of all tokens beyond the top k, below which fp32 knows nothing of it."""


class Reference(Protocol):
    """What a teacher says of M scored tokens, by row."""

    def divergence(self, rows: Tensor, logp: Tensor, part: Any) -> Tensor:
        """Return D [c] of rows [c], for log p [c, V] of this rank's vocabulary."""

    def slope(self, rows: Tensor, logp: Tensor, part: Any) -> Tensor:
        """Return ∂D/∂log p, [c, V]."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A teacher's output layer on this rank."""

    weight: Tensor
    """[V, H]."""
    options: LogprobOptions


@dataclass(frozen=True, slots=True)
class HeadProbe:
    """Reads a copy of the output layer."""

    def read(
        self, states: Tensor, weight: Tensor, plan: ScoringPlan, options: LogprobOptions, part: Any
    ) -> Head:
        """Return the head."""
        return Head(weight.detach().clone(), options)


@dataclass(frozen=True, slots=True)
class StatesProbe:
    """Reads a teacher's states."""

    def read(
        self, states: Tensor, weight: Tensor, plan: ScoringPlan, options: LogprobOptions, part: Any
    ) -> tuple[Tensor]:
        """Return the states [M, H] of the scored tokens."""
        return (_by_scored(states, plan),)


@dataclass(frozen=True, slots=True)
class TopProbe:
    """Reads a teacher's most probable tokens."""

    k: int

    def read(
        self, states: Tensor, weight: Tensor, plan: ScoringPlan, options: LogprobOptions, part: Any
    ) -> tuple[Tensor, Tensor]:
        """Return ids [M, k] int64 and log-probs [M, k] fp32, most probable first."""
        pieces = [
            _top(_log_softmax(states[rows], weight, options, part)[0], self.k, part)
            for rows in row_slices(len(states), _rows(options))
        ]
        if not pieces:
            shape = (0, self.k)
            pieces = [(states.new_zeros(shape, dtype=torch.int64), states.new_zeros(shape).float())]
        ids, logprobs = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return _by_scored(ids, plan), _by_scored(logprobs, plan)


@dataclass(frozen=True, slots=True, eq=False)
class DivergenceProbe:
    """Compares a student with a teacher."""

    reference: Reference
    taught: Tensor
    """[M] bool, on the host: which scored tokens have a teacher."""

    def read(
        self, states: Tensor, weight: Tensor, plan: ScoringPlan, options: LogprobOptions, part: Any
    ) -> Tensor:
        """Return the divergence [T], 0 where there is no teacher. Differentiable."""
        count = len(plan.scored)
        places = plan.scored.new_zeros(plan.deal.count)
        # Tokens of sequences with the same beginning may share a prediction.
        places[plan.results.index] = torch.arange(count, device=places.device)
        rows = places[plan.predicted]
        function: Any = _Divergence.apply
        values = function(states, weight, self.reference, rows, options, part)
        taught = self.taught.to(values.device)
        return plan.spread(torch.where(taught[rows], values, 0.0) if count else values)


@dataclass(frozen=True, slots=True, eq=False)
class UniformReference:
    """All words of the vocabulary alike, as label smoothing has them (arXiv 1512.00567). D is the cross-entropy, without u's own."""

    def divergence(self, rows: Tensor, logp: Tensor, part: Any) -> Tensor:
        """See `Reference`."""
        return _added(logp.sum(dim=-1), part).div_(-_words(logp, part))

    def slope(self, rows: Tensor, logp: Tensor, part: Any) -> Tensor:
        """See `Reference`."""
        return torch.full_like(logp, -1.0).div_(_words(logp, part))


def _words(logp: Tensor, part: Any) -> Tensor:
    return _added(logp.new_tensor(logp.shape[1]), part)


@dataclass(frozen=True, slots=True, eq=False)
class WholeReference:
    """A teacher's distribution over the whole vocabulary."""

    states: Tensor
    """[M, H], on the host."""
    head: Head
    mix: float

    def divergence(self, rows: Tensor, logp: Tensor, part: Any) -> Tensor:
        """See `Reference`."""
        logq = self._logprobs(rows, logp, part)
        return _added(_terms(logp, logq, self.mix).sum(dim=-1), part)

    def slope(self, rows: Tensor, logp: Tensor, part: Any) -> Tensor:
        """See `Reference`."""
        logq = self._logprobs(rows, logp, part)
        if self.mix == 0:
            return logq.exp_().neg_()
        if self.mix == 1:
            return logp.exp() * (logp - logq + 1)
        return (1 - self.mix) * logp.exp() * (logp - _log_mixture(logp, logq, self.mix))

    def _logprobs(self, rows: Tensor, logp: Tensor, part: Any) -> Tensor:
        states = self.states[rows.to(self.states.device)].to(logp.device)
        weight = self.head.weight[: logp.shape[1]]
        return _log_softmax(states, weight, self.head.options, part)[0]


@dataclass(frozen=True, slots=True, eq=False)
class TopReference:
    """A teacher's k most probable tokens. All others count as one more token, on both sides."""

    ids: Tensor
    """[M, k] int64, on the host."""
    logprobs: Tensor
    """[M, k] fp32, on the host."""
    mix: float

    def divergence(self, rows: Tensor, logp: Tensor, part: Any) -> Tensor:
        """See `Reference`."""
        return self._compared(rows, self._chosen(rows, logp, part))

    def slope(self, rows: Tensor, logp: Tensor, part: Any) -> Tensor:
        """See `Reference`."""
        with torch.enable_grad():
            chosen = self._chosen(rows, logp, part).requires_grad_()
            (gradient,) = torch.autograd.grad(self._compared(rows, chosen).sum(), chosen)
        columns = self._columns(rows, logp.device, part)
        gradient = gradient.masked_fill(columns < 0, 0)
        return torch.zeros_like(logp).scatter_add_(1, columns.clamp(min=0), gradient)

    def _columns(self, rows: Tensor, device: torch.device, part: Any) -> Tensor:
        ids = self.ids[rows.to(self.ids.device)].to(device)
        columns: Tensor = ids if part is None else part.columns(ids)
        return columns

    def _chosen(self, rows: Tensor, logp: Tensor, part: Any) -> Tensor:
        columns = self._columns(rows, logp.device, part)
        own = logp.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, 0)
        return _added(own, part)

    def _compared(self, rows: Tensor, logp: Tensor) -> Tensor:
        logq = self.logprobs[rows.to(self.logprobs.device)].to(logp.device)
        return _terms(_with_tail(logp), _with_tail(logq), self.mix).sum(dim=-1)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        reference: Reference,
        rows: Tensor,
        options: LogprobOptions,
        part: Any,
    ) -> Tensor:
        ctx.save_for_backward(states, weight, rows)
        ctx.given = reference, options, part
        values = [
            reference.divergence(
                rows[piece], _log_softmax(states[piece], weight, options, part)[0], part
            )
            for piece in row_slices(len(states), _rows(options))
        ]
        return torch.cat(values) if values else states.new_zeros(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, rows = ctx.saved_tensors
        reference, options, part = ctx.given
        (upstream,) = gradients
        of_states = torch.empty_like(states)
        of_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        factor = options.transform.scale / options.temperature
        for piece in row_slices(len(states), _rows(options)):
            logp, bend = _log_softmax(states[piece], weight, options, part)
            slope = reference.slope(rows[piece], logp, part)
            total = _added(slope.sum(dim=-1, keepdim=True), part)
            gradient = slope.sub_(logp.exp_().mul_(total)).mul_(factor * upstream[piece, None])
            gradient = gradient if bend is None else gradient.mul_(bend)
            of_logits = gradient.to(weight.dtype)
            torch.mm(of_logits, weight, out=of_states[piece])
            if of_weight is not None:
                add_product(of_weight, of_logits.T, states[piece])
        cast = None if of_weight is None else of_weight.to(weight.dtype)
        return of_states, cast, None, None, None, None


def _rows(options: LogprobOptions) -> int:
    return max(1, options.chunk // _COPIES)


def _log_softmax(
    states: Tensor, weight: Tensor, options: LogprobOptions, part: Any
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs [c, V] of this rank's tokens, and the derivative of a softcap."""
    z, bend = transformed_logits(states.to(weight.dtype) @ weight.T, options, torch.float32)
    top = z.amax(dim=-1, keepdim=True)
    if part is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, part.group)
    z.sub_(top)
    total = _added(z.exp().sum(dim=-1, keepdim=True), part)
    return z.sub_(total.log_()), bend


def _added(values: Tensor, part: Any) -> Tensor:
    """Return the sum over the ranks that share the vocabulary."""
    if part is not None:
        dist.all_reduce(values, group=part.group)
    return values


def _terms(logp: Tensor, logq: Tensor, mix: float) -> Tensor:
    """Return each token's part of the divergence."""
    if mix == 0:
        return logq.exp() * (logq - logp)
    if mix == 1:
        return logp.exp() * (logp - logq)
    logm = _log_mixture(logp, logq, mix)
    return mix * logq.exp() * (logq - logm) + (1 - mix) * logp.exp() * (logp - logm)


def _log_mixture(logp: Tensor, logq: Tensor, mix: float) -> Tensor:
    return torch.logaddexp(logp + math.log1p(-mix), logq + math.log(mix))


def _with_tail(logprobs: Tensor) -> Tensor:
    """Append the log-prob of all other tokens together."""
    tail = 1 - logprobs.exp().sum(dim=-1, keepdim=True)
    return torch.cat([logprobs, tail.clamp(min=_LEAST_TAIL).log()], dim=-1)


def _top(logq: Tensor, k: int, part: Any) -> tuple[Tensor, Tensor]:
    """Return ids [c, k] and log-probs [c, k] of the most probable tokens of all ranks."""
    values, ids = logq.topk(min(k, logq.shape[1]), dim=-1)
    if part is None:
        return ids, values
    values = all_gather_rows(values.T.contiguous(), part.group).T
    ids = all_gather_rows((ids + part.tokens.start).T.contiguous(), part.group).T
    values, places = values.topk(min(k, values.shape[1]), dim=-1)
    return ids.gather(1, places), values


def _by_scored(values: Tensor, plan: ScoringPlan) -> Tensor:
    """Return values [M, ...] of scored tokens from those [N, ...] of this rank's predictions. Collective if ranks share tokens."""
    whole = values.new_zeros(plan.deal.count, *values.shape[1:])
    whole.index_copy_(0, plan.predicted, values)
    if plan.deal.group is not None:
        dist.all_reduce(whole, group=plan.deal.group)
    return whole[plan.results.index]

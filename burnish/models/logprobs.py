"""Log-probability of each token and entropy of its distribution, without holding the logits.

For a row of hidden state h, head weight W, token y and z = f(W h) / temperature, where f is the
family's `LogitTransform`:

    m = max z,  S = Σ exp(z - m),  log p_y = z_y - m - log S,  H = log S - Σ p (z - m)

in fp32 from logits in the compute dtype, `chunk` rows at a time. The backward pass recomputes them:

    ∂ log p_y / ∂z_j = [j = y] - p_j,    ∂H / ∂z_j = -p_j (log p_j + H).

Ranks that share the vocabulary compute m, S, D = Σ exp(z - m) (z - m) and z_y of their own parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.distributed.device import compiles_triton, is_sm80_or_newer

_CPU_BLOCK_BYTES = 1 << 21
"""Size of the pieces in which a CPU runs the fp32 passes over a chunk, so that they stay in its cache."""
_SUMMED_ROWS = 2048
"""Rows of the vocabulary whose gradient from one chunk exists at a time."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """A family's transform of `W h`: `softcap · tanh(scale · W h / softcap)`."""

    scale: float = 1.0
    """Factor on the raw logits (Cohere's `logit_scale`, 1 / Granite's `logits_scaling`, Falcon-H1's `lm_head_multiplier`)."""
    softcap: float | None = None
    """Bound of the logits (Gemma's `final_logit_softcapping`); None: no bound."""

    def apply_(self, logits: Tensor) -> Tensor:
        """Transform fp32 logits in place."""
        if self.softcap is None:
            return logits if self.scale == 1 else logits.mul_(self.scale)
        return logits.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """How to compute log-probs."""

    chunk: int
    """Rows whose logits exist at one time."""
    temperature: float = 1.0
    """Divides the transformed logits."""
    transform: LogitTransform = LogitTransform()
    """The family's own transform of the logits."""

    @property
    def factors(self) -> tuple[float, float | None]:
        """Return a and b: z = a · W h, or b · tanh(a · W h)."""
        scale = self.transform.scale
        cap = self.transform.softcap
        if cap is None:
            return scale / self.temperature, None
        return scale / cap, cap / self.temperature


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    options: LogprobOptions,
    part: Any = None,
    learned: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of `targets` [N] and entropies [N] in nats, fp32, of `hidden` [N, H] and `weight` [V, H].

    The backward pass works for the rows `learned` [K] int64, or all; what others get must be 0. With `part`
    (`burnish.models.parts.VocabularyPart`), `weight` has its rows, and the gradient of `hidden` is the part's share. Collective then.
    """
    columns = targets if part is None else part.columns(targets)
    logprobs, entropy = _TokenLogprobs.apply(hidden, weight, columns, options, part, learned)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        columns: Tensor,
        options: LogprobOptions,
        part: Any,
        learned: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        sums, last = _softmax_sums(hidden, weight, columns, options)
        top, total, dot, chosen = sums if part is None else part.merged(sums)
        log_total = total.log()
        logprobs = chosen - log_total
        entropy = log_total - dot / total
        ctx.save_for_backward(hidden, weight, columns, log_total + top, entropy, learned)
        ctx.options = options
        # The backward pass of all rows starts with the last chunk's logits and overwrites them; a second one recomputes them.
        keeps = learned is None and any(ctx.needs_input_grad[:2])
        ctx.last = [last] if last is not None and keeps else []
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, columns, normalizer, entropy, learned = ctx.saved_tensors
        if all(each is None for each in gradients):
            return (None,) * 6
        factor = ctx.options.transform.scale / ctx.options.temperature
        of_logprobs, of_entropy = (None if g is None else g * factor for g in gradients)
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(normalizer)
        known = [normalizer, of_logprobs]
        if of_entropy is not None:
            known += [entropy, of_entropy]
        rows = [hidden, columns, *known]
        if learned is not None:
            # Tokens without a gradient, as those of a group with equal rewards, need no logits again.
            rows = [each[learned] for each in rows]
        given = rows[0], rows[1], torch.stack(rows[2:]), weight, ctx.options
        of_rows, of_weight = _gradients(*given, ctx.needs_input_grad[1], ctx.last)
        if learned is not None:
            of_rows = torch.zeros_like(hidden).index_copy_(0, learned, of_rows)
        return of_rows, of_weight, None, None, None, None


def _softmax_sums(
    hidden: Tensor, weight: Tensor, columns: Tensor, options: LogprobOptions
) -> tuple[Tensor, Tensor | None]:
    # Returns m, S, D and z_y - m [4, N], and the last chunk's logits; z_y - m is -∞ where `columns` is -1.
    exact = _exact_dtype(hidden)
    kernels = _kernels(hidden)
    sums = torch.empty(4, len(hidden), dtype=exact, device=hidden.device)
    logits = None
    for rows in row_slices(len(hidden), options.chunk):
        del logits  # frees them before the next are computed
        logits = hidden[rows] @ weight.T
        if kernels is not None:
            sums[:, rows] = kernels.softmax_sums(logits, columns[rows], *options.factors)
            continue
        for local, part in _pieces(rows, logits):
            sums[:, part] = _sums_of(logits[local], columns[part], options, exact)
    return sums, logits


def _sums_of(
    logits: Tensor, columns: Tensor, options: LogprobOptions, exact: torch.dtype
) -> Tensor:
    z = transformed_logits(logits, options, exact)[0]
    column = columns[:, None]
    top = z.amax(dim=-1, keepdim=True)
    exponents = z.sub_(top)
    chosen = exponents.gather(1, column.clamp(min=0)).masked_fill(column < 0, -torch.inf)
    exponentials = exponents.exp()
    total = exponentials.sum(dim=-1)
    dot = exponentials.mul_(exponents).sum(dim=-1)
    return torch.stack([top[:, 0], total, dot, chosen[:, 0]])


def _gradients(
    hidden: Tensor,
    columns: Tensor,
    known: Tensor,
    weight: Tensor,
    options: LogprobOptions,
    wants_weight: bool,
    last: list[Tensor],
) -> tuple[Tensor, Tensor | None]:
    # Returns the gradients of hidden states and, if wanted, of the weight. Overwrites `last`. `known` [2 or 4, N] has m + log S, the
    # gradient of log-probs, and if the loss uses entropies, H and its gradient; both gradients times the constant ∂z / ∂(raw logit).
    kernels = _kernels(hidden)
    hidden_gradient = torch.empty_like(hidden)
    chunks = list(row_slices(len(hidden), options.chunk))
    # Several chunks add up in fp32: a sum in bf16 would be rounded after each.
    total = (
        torch.zeros_like(weight, dtype=known.dtype) if wants_weight and len(chunks) != 1 else None
    )
    alone: Tensor | None = None
    for rows in reversed(chunks):
        logits = last.pop() if last else hidden[rows] @ weight.T
        if kernels is not None:
            kernels.write_gradients(logits, columns[rows], known[:, rows], *options.factors)
        else:
            for local, own in _pieces(rows, logits):
                # Not named, because a name would keep its tensor after the loop.
                logits[local] = _logit_gradient(logits[local], columns[own], known[:, own], options)
        torch.mm(logits, weight, out=hidden_gradient[rows])
        if total is not None:
            add_product(total, logits.T, hidden[rows])
        elif wants_weight:
            alone = logits.T @ hidden[rows]
        del logits  # frees them before the next are computed
    return hidden_gradient, alone if total is None else total.to(weight.dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left` @ `right` to `total`, which may have a wider dtype."""
    if is_sm80_or_newer(left.device) and left.dtype.itemsize == 2:
        torch.addmm(total, left, right, total.dtype, out=total)
        return
    # In pieces, since the product is as large as the weight.
    for rows in row_slices(len(total), _SUMMED_ROWS):
        total[rows] += left[rows] @ right


def _logit_gradient(
    logits: Tensor, columns: Tensor, known: Tensor, options: LogprobOptions
) -> Tensor:
    z, slope = transformed_logits(logits, options, known.dtype)
    (normalizer, upstream, *of_entropy), column = known[..., None], columns[:, None]
    log_p = z.sub_(normalizer)
    if of_entropy:
        (entropy, outer), p = of_entropy, log_p.exp()
        gradient = log_p.add_(entropy).mul_(outer).add_(upstream).mul_(p).neg_()
    else:
        gradient = log_p.exp_().mul_(-upstream)
    gradient.scatter_add_(1, column.clamp(min=0), upstream.masked_fill(column < 0, 0))
    return gradient if slope is None else gradient.mul_(slope)


def transformed_logits(
    logits: Tensor, options: LogprobOptions, exact: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return z, a copy in `exact`, and the softcap's derivative if there is one."""
    factor, bound = options.factors
    if bound is None:
        z = logits.to(exact, copy=True)
        return (z if factor == 1 else z.mul_(factor)), None
    bounded = logits.to(exact).mul(factor).tanh_()
    return bounded * bound, 1 - bounded.square()


def _pieces(rows: slice, logits: Tensor) -> Iterator[tuple[slice, slice]]:
    # Yields pieces of a chunk: their rows in the chunk, and among all rows.
    size = len(logits)
    if logits.device.type == "cpu":
        size = _CPU_BLOCK_BYTES // (4 * logits.shape[1])
    for local in row_slices(len(logits), max(1, size)):
        yield local, slice(rows.start + local.start, rows.start + local.stop)


def row_slices(count: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` of `count` rows."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _kernels(hidden: Tensor) -> Any:
    if compiles_triton(hidden.device) and hidden.dtype != torch.float64:
        from burnish.models.kernels import triton_logprobs

        return triton_logprobs
    return None


def _exact_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32

"""Causal attention on a CPU by batched matrix products, some queries at a time.

The scores of some queries and all keys that they see are one product, small enough to stay in the
cores' caches until they are weights and have met the values. What no query sees is not computed, but
for the triangle at the end of each span of queries. Backward the scores are made again, so nothing is kept but
queries, keys and values. That is Dao et al., arXiv 2205.14135, without a loop over keys: rows of scores
are whole, so softmax and its gradient are torch's own. Queries that share a key head are rows of one product.

    O = P V,  P = softmax(S),  S = s Q Kᵀ, -∞ where a query does not see a key
    dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P ∘ (dP - rowsum(P ∘ dP)),  dQ = s dS K,  dK = s dSᵀ Q

For queries, keys and values in bf16, which are taken to fp32 first; so are all sums. Products are oneDNN's: exact on
most processors, and twice as fast as MKL's on AMD's; with AMX their factors are rounded to bf16 once more, as those of
flash attention are on accelerators. There torch's own kernel is as exact and twice as fast forward, and is what runs forward; backward
it is slower and up to three times less exact.

Left out: other dtypes, sequences of different lengths (`burnish.models.kernels.attention`), and other devices, which have kernels for this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from burnish.distributed.device import has_matrix_units

_SCORES = 1 << 20
"""Scores at a time: 4 MiB in fp32. More leave the caches, fewer are all overhead."""
_MOST_SCORES = 1 << 22
"""The same for the queries of one key head, where so many see so many keys that they have more."""
_FEWEST_QUERIES, _MOST_QUERIES = 64, 512
"""Positions at a time, an eighth of all within these: fewer make slow products, more compute larger triangles for nothing."""


@torch.library.custom_op("burnish::causal_attention", mutates_args=())
def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int
) -> Tensor:
    """Attention `[n, heads, L, dv]` of the tokens of n sequences, each to itself and the `window - 1` tokens before it.

    `query` is `[n, heads, L, d]`, `key` `[n, key heads, L, d]`, `value` `[n, key heads, L, dv]`, all bf16. An operator of its own, so that
    selective checkpointing keeps what it gives and not what it computes on the way.
    """
    if _has_kernel(query, value, window):
        shared = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=shared
        )
    given, asking = _Given.of(key, value), _by_key_head(query, key)
    output = _empty(query, value.shape[3])
    answers = _by_key_head(output, key)
    with _products():
        for span in _spans(asking.shape, window):
            queries = span.rows(asking).mul_(scaling)
            mixed = queries.new_empty(*queries.shape[:2], value.shape[3])
            for some in span.groups:
                keys, values = given.seen(some, span)
                torch.bmm(span.weights(queries[some], keys), values, out=mixed[some])
            span.write(mixed, answers)
    return output


@torch.library.custom_op("burnish::causal_attention_backward", mutates_args=())
def _backward(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from that of the output."""
    given = _Given.of(key, value)
    of_keys, of_values = torch.zeros_like(given.keys), torch.zeros_like(given.values)
    of_query, of_key, of_value = _empty(query), _empty(key), _empty(value)
    asking, of_answers, of_asking = (
        _by_key_head(part, key) for part in (query, upstream, of_query)
    )
    with _products():
        for span in _spans(asking.shape, window):
            queries = span.rows(asking).mul_(scaling)
            of_mixed = span.rows(of_answers)
            of_queries = torch.empty_like(queries)
            for some in span.groups:
                keys, values = given.seen(some, span)
                weights = span.weights(queries[some], keys)
                of_values[some, span.seen].baddbmm_(weights.transpose(1, 2), of_mixed[some])
                of_scores = torch.bmm(of_mixed[some], values.transpose(1, 2))
                torch.ops.aten._softmax_backward_data.out(
                    of_scores, weights, -1, weights.dtype, grad_input=of_scores
                )
                torch.bmm(of_scores, keys, out=of_queries[some])
                of_keys[some, span.seen].baddbmm_(of_scores.transpose(1, 2), queries[some])
            span.write(of_queries.mul_(scaling), of_asking)
    return (
        of_query,
        of_key.copy_(of_keys.view(key.shape)),
        of_value.copy_(of_values.view(value.shape)),
    )


def _has_kernel(query: Tensor, value: Tensor, window: int) -> bool:
    """Whether torch's kernel for the forward pass is the faster one: it multiplies in bf16, and has no windows."""
    return (
        has_matrix_units(query.device)
        and window >= query.shape[2]
        and query.shape[3] == value.shape[3]
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """Keys and values in fp32, by sequence and key head (B of these)."""

    keys: Tensor
    """[B, L, d]."""
    values: Tensor
    """[B, L, dv]."""

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> _Given:
        return cls(_exact(key).flatten(0, 1), _exact(value).flatten(0, 1))

    def seen(self, some: slice, span: _Span) -> tuple[Tensor, Tensor]:
        """Those of some B that the queries of `span` see. Copied here, for torch would copy them for each product."""
        return self.keys[some, span.seen].contiguous(), self.values[some, span.seen].contiguous()


def _empty(part: Tensor, width: int | None = None) -> Tensor:
    """Like `part` [n, heads, L, d], token by token in memory, as the layers around attention have it; with heads of another width where given."""
    n, heads, length, d = part.shape
    return part.new_empty(n, length, heads, width or d).transpose(1, 2)


def _by_key_head(part: Tensor, key: Tensor) -> Tensor:
    """[n, heads, L, d] as [n, key heads, heads that share each, L, d]."""
    n, heads, length, width = part.shape
    return part.view(n, key.shape[1], heads // key.shape[1], length, width)


def _exact(part: Tensor) -> Tensor:
    """A copy in fp32, in order."""
    return part.to(torch.float32, memory_format=torch.contiguous_format, copy=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Consecutive queries, and the keys that they see."""

    asking: slice
    """Of L."""
    seen: slice
    """Of L."""
    bias: Tensor
    """[positions of queries, last keys]: -∞ where a query does not see one of these. All queries see all keys before."""
    groups: tuple[slice, ...]
    """Of B: as many at a time as have scores enough."""

    def rows(self, part: Tensor) -> Tensor:
        """A copy of the span's queries of `part` [n, key heads, shared, L, d], in fp32, as rows: [B, shared · positions, d]."""
        return _exact(part[..., self.asking, :]).flatten(2, 3).flatten(0, 1)

    def write(self, rows: Tensor, part: Tensor) -> None:
        """`rows` as the span's queries of `part`."""
        target = part[..., self.asking, :]
        target.copy_(rows.view(target.shape))

    def weights(self, queries: Tensor, keys: Tensor) -> Tensor:
        """P of some B: [of B, shared · positions, keys]."""
        scores = torch.bmm(queries, keys.transpose(1, 2))
        by_head = scores.view(len(scores), -1, len(self.bias), scores.shape[2])
        by_head[..., -self.bias.shape[1] :].add_(self.bias)
        return torch.softmax(scores, -1, out=scores)


def _spans(queries: torch.Size, window: int) -> Iterator[_Span]:
    """The spans that cover queries of this shape, [n, key heads, shared, L, d]."""
    n, key_heads, shared, length, _ = queries
    total = n * key_heads
    positions = min(_MOST_QUERIES, max(_FEWEST_QUERIES, length // 8))
    positions = max(1, min(positions, _MOST_SCORES // (shared * min(length, window + positions))))
    for start in range(0, length, positions):
        stop, first = min(start + positions, length), max(0, start - window + 1)
        bias = _bias(start, stop, first if stop - first > window else start, window)
        pieces = -(-total * shared * (stop - start) * (stop - first) // _SCORES)
        step = -(-total // pieces)
        groups = tuple(slice(some, some + step) for some in range(0, total, step))
        yield _Span(slice(start, stop), slice(first, stop), bias, groups)


def _bias(start: int, stop: int, first: int, window: int) -> Tensor:
    """[stop - start, stop - first] fp32, for queries from `start` and keys from `first` on: 0 where the query sees the key, else -∞."""
    distance = torch.arange(start, stop)[:, None] - torch.arange(first, stop)[None, :]
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


@contextmanager
def _products() -> Iterator[None]:
    """Products of fp32 by oneDNN, in bf16 where the processor has units for it.

    This is a setting of the process: what other threads multiply meanwhile is multiplied so too.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@causal_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int) -> Tensor:
    return _empty(query, value.shape[3])


@_backward.register_fake
def _(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(query), _empty(key), _empty(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.scaling, ctx.window = inputs[3:]


def _differentiate(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(upstream, *ctx.saved_tensors, ctx.scaling, ctx.window), None, None)


causal_attention.register_autograd(_differentiate, setup_context=_keep)

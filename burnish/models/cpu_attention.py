"""Causal attention on a CPU by batched matrix products, some queries at a time.

The scores of some queries and all keys that they see are one product, small enough to stay in the
cores' caches until they are weights and have met the values. What no query sees is not computed, but
for the triangle at the end of each piece. Backward the scores are made again, so nothing is kept but
queries, keys and values. That is Dao et al., arXiv 2205.14135, without a loop over keys: rows of scores
are whole, so softmax and its gradient are torch's own. Queries that share a key head are rows of one product.

    O = P V,  P = softmax(S),  S = s Q Kᵀ, -∞ where a query does not see a key
    dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P ∘ (dP - rowsum(P ∘ dP)),  dQ = s dS K,  dK = s dSᵀ Q

For queries, keys and values in bf16, which are taken to fp32 first; so are all sums. Products are oneDNN's: exact on
most processors, and twice as fast as MKL's on AMD's; with AMX their factors are rounded to bf16 once more, as those of
flash attention are on accelerators.

Left out: other dtypes, sequences of different lengths (`burnish.models.blocks`), and other devices, which have kernels for this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    given = _Given.of(query, key, value, scaling)
    output = query.new_empty(*given.queries.shape[:3], value.shape[3])
    with _products():
        for piece in _pieces(given.queries.shape, window):
            mixed = torch.bmm(piece.weights(given), given.values[piece.seen])
            output[piece.asking] = piece.by_head(mixed)
    return output.view(*query.shape[:3], value.shape[3])


@torch.library.custom_op("burnish::causal_attention_backward", mutates_args=())
def _backward(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from that of the output."""
    given = _Given.of(query, key, value, scaling)
    upstream = _by_key_head(upstream, key.shape[1])
    of_queries = torch.empty_like(given.queries, dtype=query.dtype)
    of_keys, of_values = torch.zeros_like(given.keys), torch.zeros_like(given.values)
    with _products():
        for piece in _pieces(given.queries.shape, window):
            weights, of_mixed = piece.weights(given), piece.rows(upstream)
            of_values[piece.seen].baddbmm_(weights.transpose(1, 2), of_mixed)
            of_scores = torch.bmm(of_mixed, given.values[piece.seen].transpose(1, 2))
            torch.ops.aten._softmax_backward_data.out(
                of_scores, weights, -1, weights.dtype, grad_input=of_scores
            )
            of_rows = torch.bmm(of_scores, given.keys[piece.seen]).mul_(scaling)
            of_queries[piece.asking] = piece.by_head(of_rows)
            of_keys[piece.seen].baddbmm_(of_scores.transpose(1, 2), piece.rows(given.queries))
    return (
        of_queries.view(query.shape),
        of_keys.view(key.shape).to(key.dtype),
        of_values.view(value.shape).to(value.dtype),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """What is multiplied, in fp32, by sequence and key head (B of these)."""

    queries: Tensor
    """[B, queries that share a key head, L, d], times the scaling of scores."""
    keys: Tensor
    """[B, L, d]."""
    values: Tensor
    """[B, L, dv]."""

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> _Given:
        heads = key.shape[1]
        queries, keys, values = (_by_key_head(part, heads) for part in (query, key, value))
        return cls(queries.mul_(scaling), keys.squeeze(1), values.squeeze(1))


def _by_key_head(part: Tensor, key_heads: int) -> Tensor:
    """A copy of [n, heads, L, d] in fp32: [n · key heads, heads of each, L, d]."""
    n, heads, length, width = part.shape
    copy = part.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return copy.view(n * key_heads, heads // key_heads, length, width)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Consecutive queries of some key heads, and the keys that they see."""

    asking: tuple[slice, slice, slice]
    """Of [B, queries that share a key head, L]."""
    seen: tuple[slice, slice]
    """Of [B, L]."""
    bias: Tensor
    """[positions of queries, last keys]: -∞ where a query does not see one of these. All queries see all keys before."""

    def rows(self, part: Tensor) -> Tensor:
        """The piece's queries of `part` [B, shared, L, d], as rows: [pieces of B, shared · positions, d]."""
        return part[self.asking].flatten(1, 2)

    def by_head(self, rows: Tensor) -> Tensor:
        """`rows` as the piece's queries."""
        return rows.view(len(rows), -1, len(self.bias), rows.shape[2])

    def weights(self, given: _Given) -> Tensor:
        """P of the piece: [pieces of B, shared · positions, keys]."""
        scores = torch.bmm(self.rows(given.queries), given.keys[self.seen].transpose(1, 2))
        self.by_head(scores)[..., -self.bias.shape[1] :].add_(self.bias)
        return torch.softmax(scores, -1, out=scores)


def _pieces(queries: torch.Size, window: int) -> Iterator[_Piece]:
    """The pieces that cover queries of this shape, [B, shared, L, d]."""
    heads, shared, length, _ = queries
    positions = min(_MOST_QUERIES, max(_FEWEST_QUERIES, length // 8))
    positions = max(1, min(positions, _MOST_SCORES // (shared * min(length, window + positions))))
    for start in range(0, length, positions):
        stop, first = min(start + positions, length), max(0, start - window + 1)
        bias = _bias(start, stop, first if stop - first > window else start, window)
        pieces = -(-heads * shared * (stop - start) * (stop - first) // _SCORES)
        step = -(-heads // pieces)
        for head in range(0, heads, step):
            some = slice(head, head + step)
            yield _Piece((some, slice(None), slice(start, stop)), (some, slice(first, stop)), bias)


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
    return query.new_empty(*query.shape[:3], value.shape[3])


@_backward.register_fake
def _(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.scaling, ctx.window = inputs[3:]


def _differentiate(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(upstream, *ctx.saved_tensors, ctx.scaling, ctx.window), None, None)


causal_attention.register_autograd(_differentiate, setup_context=_keep)

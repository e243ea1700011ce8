"""Causal attention by batched matrix products in fp32: in bf16 on a CPU, and where no kernel of torch takes sinks or a soft cap.

The scores of a span of queries stay in the caches. The backward pass computes them again (Dao et al.,
arXiv 2205.14135, without its loop over keys). Queries that share a key head are rows of one product.

    O = P V,  P = softmax(S),  S = s Q Kᵀ, -∞ where a query does not see a key
    dV = Pᵀ dO,  dP = dO Vᵀ,  dS = P ∘ (dP - rowsum(P ∘ dP)),  dQ = s dS K,  dK = s dSᵀ Q

A cap c makes S = c tanh(s Q Kᵀ / c), and dS is multiplied by 1 - (S / c)² (Gemma 2, arXiv 2408.00118). A sink (see
`burnish.models.kernels.sink_attention`) of weight p has the gradient -p rowsum(P ∘ dP).

On a CPU in bf16, products are oneDNN's, twice as fast as MKL's on AMD. Matrix units (AMX) round factors to bf16; with
them, torch's faster kernel computes the forward pass where it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from burnish.distributed.device import has_matrix_units
from burnish.models.kernels.scores import cap, weigh

# Scores computed at a time, 4 MiB in fp32. More do not stay in the caches, fewer cost too many calls.
_SCORES = 1 << 20
# Most scores for the queries of one key head.
_MOST_SCORES = 1 << 22
# Devices other than CPUs take this many times both limits (64 and 256 MiB), for fewer kernels.
_TIMES = 16
# A span has an eighth of all queries, within these limits. Fewer make slow products, more compute larger unused triangles.
_FEWEST_QUERIES = 64
_MOST_QUERIES = 512


@torch.library.custom_op("burnish::causal_attention", mutates_args=())
def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention `[n, heads, L, dv]` of the last L of K tokens: each sees `window` tokens, itself included.

    `query` is `[n, heads, L, d]`, `key` `[n, key heads, K, d]`, `value` `[n, key heads, K, dv]`, `sinks` `[heads]`.
    It is an operator, so that selective checkpointing keeps only its result.
    """
    width = value.shape[3]
    is_plain = softcap is None and sinks is None and window >= key.shape[2]
    if is_plain and has_matrix_units(query.device) and query.shape[3] == width:
        return _by_kernel(query, key, value, scaling)
    keys = _fp32(key).flatten(0, 1)
    values = _fp32(value).flatten(0, 1)
    output = _empty(query, width)
    queries = _by_key_head(query, key)
    sinks = _of_rows(sinks, key)
    with _products(query):
        for span in _spans(queries.shape, key.shape[2], window, query.device):
            rows = span.rows(queries).mul_(scaling)
            mixed = rows.new_empty(*rows.shape[:2], width)
            for part in span.groups:
                # `contiguous`, because torch would copy a slice once for each product.
                scores = span.scores(rows[part], keys[part, span.seen].contiguous(), softcap)
                weights, _ = span.weights(scores, sinks, part)
                torch.bmm(weights, values[part, span.seen].contiguous(), out=mixed[part])
            span.write(mixed, _by_key_head(output, key))
    return output


@torch.library.custom_op("burnish::causal_attention_backward", mutates_args=())
def _backward(  # noqa: PLR0913
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and sinks (empty without any)."""
    keys = _fp32(key).flatten(0, 1)
    values = _fp32(value).flatten(0, 1)
    key_gradient = torch.zeros_like(keys)
    value_gradient = torch.zeros_like(values)
    results = _empty(query), _empty(key), _empty(value), _like(sinks, query)
    queries, upstream, query_gradient = (
        _by_key_head(part, key) for part in (query, upstream, results[0])
    )
    sinks = _of_rows(sinks, key)
    sink_gradient = None if sinks is None else torch.zeros_like(sinks)
    with _products(query):
        for span in _spans(queries.shape, key.shape[2], window, query.device):
            rows = span.rows(queries).mul_(scaling)
            upstream_rows = span.rows(upstream)
            row_gradient = torch.empty_like(rows)
            for part in span.groups:
                seen = keys[part, span.seen].contiguous()
                seen_values = values[part, span.seen].contiguous()
                scores = span.scores(rows[part], seen, softcap)
                slope = None if softcap is None else 1 - (scores / softcap).square_()
                weights, of_sinks = span.weights(scores, sinks, part)
                value_gradient[part, span.seen].baddbmm_(
                    weights.transpose(1, 2), upstream_rows[part]
                )
                scores = torch.bmm(upstream_rows[part], seen_values.transpose(1, 2))
                if sink_gradient is None or of_sinks is None:
                    torch.ops.aten._softmax_backward_data.out(
                        scores, weights, -1, weights.dtype, grad_input=scores
                    )
                else:
                    along = (weights * scores).sum(-1, keepdim=True)
                    scores.sub_(along).mul_(weights)
                    of_sinks.mul_(along.view(of_sinks.shape))
                    sink_gradient[part] -= of_sinks.sum(-2, keepdim=True)
                if slope is not None:
                    scores.mul_(slope)
                torch.bmm(scores, seen, out=row_gradient[part])
                key_gradient[part, span.seen].baddbmm_(scores.transpose(1, 2), rows[part])
            span.write(row_gradient.mul_(scaling), query_gradient)
    results[1].copy_(key_gradient.view(key.shape))
    results[2].copy_(value_gradient.view(value.shape))
    if sink_gradient is not None:
        results[3].copy_(sink_gradient.view(len(query), -1).sum(0))
    return results


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    pairs = query.shape[2], key.shape[2]
    begun = pairs[1] - pairs[0]
    sees = query.new_ones(pairs, dtype=torch.bool).tril_(begun) if begun else None
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=sees,
        is_causal=sees is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _of_rows(sinks: Tensor | None, key: Tensor) -> Tensor | None:
    """Return sinks [heads] as fp32 [B, heads that share a key head, 1, 1]."""
    if sinks is None:
        return None
    return sinks.float().view(key.shape[1], -1, 1, 1).repeat(len(key), 1, 1, 1)


def _like(sinks: Tensor | None, query: Tensor) -> Tensor:
    return query.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _empty(part: Tensor, width: int | None = None) -> Tensor:
    """Return memory for [n, heads, L, d or width] that lies token by token."""
    n, heads, length, d = part.shape
    return part.new_empty(n, length, heads, width or d).transpose(1, 2)


def _by_key_head(part: Tensor, key: Tensor) -> Tensor:
    """View [n, heads, L, d] as [n, key heads, heads that share each, L, d]."""
    n, heads, length, width = part.shape
    return part.view(n, key.shape[1], heads // key.shape[1], length, width)


def _fp32(part: Tensor) -> Tensor:
    return part.to(torch.float32, memory_format=torch.contiguous_format, copy=True)


class _Span(NamedTuple):
    """Consecutive queries, and the keys that they see. B counts pairs of a sequence and a key head."""

    asking: slice
    """The queries, along L."""
    seen: slice
    """The keys, along L."""
    bias: Tensor
    """[queries, last keys]: -∞ where a query does not see one of the last keys. All queries see the keys before."""
    groups: tuple[slice, ...]
    """Slices of B, of at most about `_SCORES` scores each."""

    def rows(self, part: Tensor) -> Tensor:
        """Copy the span's [n, key heads, shared, L, d] to fp32 rows [B, shared · queries, d]."""
        return _fp32(part[..., self.asking, :]).flatten(2, 3).flatten(0, 1)

    def write(self, rows: Tensor, part: Tensor) -> None:
        target = part[..., self.asking, :]
        target.copy_(rows.view(target.shape))

    def scores(self, queries: Tensor, keys: Tensor, softcap: float | None) -> Tensor:
        """Return S [of B, shared · queries, keys], as if queries saw all keys."""
        return cap(torch.bmm(queries, keys.transpose(1, 2)), softcap)

    def weights(
        self, scores: Tensor, sinks: Tensor | None, part: slice
    ) -> tuple[Tensor, Tensor | None]:
        """Return P, in place of S, and the sinks' weights [of B, shared, queries, 1]."""
        by_head = scores.view(len(scores), -1, len(self.bias), scores.shape[2])
        by_head[..., -self.bias.shape[1] :].add_(self.bias)
        return scores, weigh(by_head, None if sinks is None else sinks[part])


def _spans(queries: torch.Size, length: int, window: int, device: torch.device) -> Iterator[_Span]:
    """Divide queries [n, key heads, shared, L, d], the last ones of `length` tokens."""
    n, key_heads, shared, asked, _ = queries
    total = n * key_heads
    begun = length - asked
    times = 1 if device.type == "cpu" else _TIMES
    count = min(_MOST_QUERIES, max(_FEWEST_QUERIES, asked // 8))
    count = max(1, min(count, times * _MOST_SCORES // (shared * min(length, window + count))))
    for start in range(begun, length, count):
        stop = min(start + count, length)
        first = max(0, start - window + 1)
        biased = first if stop - first > window else start
        asking, seen = (torch.arange(at, stop, device=device) for at in (start, biased))
        distance = asking[:, None] - seen[None, :]
        hidden = (distance < 0) | (distance >= window)
        bias = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
        pieces = -(-total * shared * (stop - start) * (stop - first) // (times * _SCORES))
        step = -(-total // pieces)
        groups = tuple(slice(at, at + step) for at in range(0, total, step))
        yield _Span(slice(start - begun, stop - begun), slice(first, stop), bias, groups)


@contextmanager
def _products(like: Tensor) -> Iterator[None]:
    """Let oneDNN compute products of tensors that were bf16 in bf16 where the processor can."""
    if like.device.type != "cpu" or like.dtype != torch.bfloat16:
        yield
        return
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@causal_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return _empty(query, value.shape[3])


@_backward.register_fake
def _(
    upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(query), _empty(key), _empty(value), _like(others[3], query)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, *ctx.numbers, sinks = inputs
    ctx.save_for_backward(query, key, value, sinks)


def _differentiate(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    *parts, sinks = ctx.saved_tensors
    *gradients, of_sinks = _backward(upstream, *parts, *ctx.numbers, sinks)
    return (*gradients, None, None, None, None if sinks is None else of_sinks)


causal_attention.register_autograd(_differentiate, setup_context=_keep)

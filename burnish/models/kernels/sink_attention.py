"""Flash attention over packed sequences with sinks, on GPUs.

A sink is one more score z of every query of a head, without a value (arXiv 2309.17453, gpt-oss). Torch's kernel returns O and
L = log Σ exp(S) without it. With it,

    L' = log(exp(L) + exp(z)),  O' = exp(L - L') O,  dz = -Σ exp(z - L') rowsum(dO' ∘ O')

The kernel's backward pass computes exp(S - L) and rowsum(dO ∘ O) from the L and O that it gets, so it gets L' and O'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("burnish::sink_attention", mutates_args=())
def sink_attention(  # noqa: PLR0913
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    cu_own: Tensor,
    cu_seqlens: Tensor,
    max_own: int,
    max_seqlen: int,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Return O' and L' [heads, C] of bf16 or fp16 queries [C, heads, d], and keys and values [T, key heads, d].

    The last `cu_own.diff()` of each sequence's `cu_seqlens.diff()` tokens have queries. Each sees `window` tokens. `sinks` is
    [heads]. As an operator, it lets selective checkpointing keep only its results.
    """
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *(cu_own, cu_seqlens, max_own, max_seqlen),
        0.0,
        window is None,
        False,
        scale=scaling,
        **_window(window),
    )
    both = torch.logaddexp(lse, sinks.float()[:, None])
    return output.mul_((lse - both).exp_().T[..., None]), both


@torch.library.custom_op("burnish::sink_attention_backward", mutates_args=())
def _backward(  # noqa: PLR0913
    upstream: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    cu_own: Tensor,
    cu_seqlens: Tensor,
    max_own: int,
    max_seqlen: int,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    upstream = upstream.contiguous()
    of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
        upstream,
        query,
        key,
        value,
        output,
        lse,
        *(cu_own, cu_seqlens, max_own, max_seqlen),
        0.0,
        window is None,
        *_no_dropout(query.device),
        scale=scaling,
        **_window(window),
    )
    on_sink = (sinks.float()[:, None] - lse).exp_().T
    of_sinks = -(on_sink * (upstream.float() * output.float()).sum(-1)).sum(0)
    return of_query, of_key, of_value, of_sinks.to(sinks.dtype)


def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a random state that is not used."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _window(window: int | None) -> dict[str, int]:
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


@sink_attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = query.new_empty((query.shape[1], len(query)), dtype=torch.float32)
    return torch.empty_like(query), lse


@_backward.register_fake
def _(upstream: Tensor, output: Tensor, lse: Tensor, *parts: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(part) for part in parts[:4])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.max_own, ctx.max_seqlen, ctx.scaling, ctx.window = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    numbers = ctx.max_own, ctx.max_seqlen, ctx.scaling, ctx.window
    return (*_backward(upstream, *ctx.saved_tensors, *numbers), *[None] * 6)


sink_attention.register_autograd(_differentiate, setup_context=_keep)

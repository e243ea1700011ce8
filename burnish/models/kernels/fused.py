"""RMSNorm and rotary positions, each as one step of autograd, and the layers that use them.

Written as a chain of tensor operations they move every activation through memory a dozen times and
keep most of the intermediate ones for the backward pass. Here they are one function that keeps its
input only, computes in fp32 whatever the dtype of its input, rounds once at the end, and on a CPU
works through the rows in blocks that stay in the core's cache. Elsewhere the norm is torch's own.

    RMSNorm(x) = x r w,  r = (mean x² + ε)^(-1/2)          Zhang & Sennrich, arXiv 1910.07467
    rotate(x)  = x cos + swap(x) sin                       Su et al., arXiv 2104.09864

where swap exchanges the two halves of a head and `sin` carries the sign. Left out: the gated
activation (on a CPU torch's own operations are as fast), kernels in a language of their own (`burnish.models.kernels.liger`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from burnish.families import family_of
from burnish.models.kernels.attention import attention_forward

_CPU_BLOCK_ELEMENTS = 1 << 18
"""Elements of a block on a CPU: 1 MiB in fp32, a few of which fit into the caches of its cores."""


def fuse(model: PreTrainedModel) -> None:
    """Put this module's layers in the place of those of transformers, where the family is known.

    Parameters keep their names and identities. Models with code of their own are left as they are.
    """
    if not family_of(model.config.model_type).has_llama_layers or not is_of_transformers(model):
        return
    replace_layers(model, "RMSNorm", FusedRMSNorm)
    if _rotates_whole_heads(model):
        replace_layers(model, "Attention", FusedAttention)


def replace_layers(
    model: nn.Module, kind: str, replacement: Callable[[nn.Module], nn.Module]
) -> None:
    """Put what `replacement` makes of them in the place of the layers whose class has a name that ends with `kind`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith(kind):
                setattr(parent, name, replacement(child))


def is_of_transformers(model: PreTrainedModel) -> bool:
    """Whether a model's layers are those that transformers has for its family, and no code of its own."""
    return type(model).__module__.startswith("transformers.models.")


def _rotates_whole_heads(model: PreTrainedModel) -> bool:
    base: Any = model.base_model
    return bool(2 * base.rotary_emb.inv_freq.numel() == base.layers[0].self_attn.head_dim)


class FusedRMSNorm(nn.Module):
    """RMSNorm with the parameter of the module it replaces."""

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.weight = replaced.weight
        self.variance_epsilon: float = replaced.variance_epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Any shape [..., n]."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


Positioning = Callable[
    [
        tuple[Tensor, Tensor],
        tuple[FusedRMSNorm | None, FusedRMSNorm | None],
        tuple[Tensor, Tensor],
    ],
    tuple[Tensor, Tensor],
]
"""Like `rotate_both`."""


class FusedAttention(nn.Module):
    """Grouped attention with rotary positions, with the layers of the module it replaces.

    Called as transformers' decoder layers call their attention. Queries and keys are normalized
    before they are rotated where the replaced module has norms for them (Qwen3).
    """

    is_causal = True

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.layer_idx: int = replaced.layer_idx
        self.head_dim: int = replaced.head_dim
        self.scaling: float = replaced.scaling
        self.sliding_window = _sliding_window(replaced)
        self.q_proj, self.k_proj = replaced.q_proj, replaced.k_proj
        self.v_proj, self.o_proj = replaced.v_proj, replaced.o_proj
        self.q_norm = getattr(replaced, "q_norm", None)
        self.k_norm = getattr(replaced, "k_norm", None)
        self.position: Positioning = rotate_both
        """How queries and keys are normalized and rotated."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attention output [1, T, hidden] of `hidden_states` [1, T, hidden], cosines and sines [1, T, head_dim]."""
        heads = (hidden_states.shape[1], -1, self.head_dim)
        query, key = self.q_proj(hidden_states).view(heads), self.k_proj(hidden_states).view(heads)
        query, key = self.position((query, key), (self.q_norm, self.k_norm), position_embeddings)
        value = self.v_proj(hidden_states).view(heads)
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        output, _ = attention_forward(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            packing=options["packing"],
        )
        return self.o_proj(output.flatten(2)), None


def rotate_both(
    heads: tuple[Tensor, Tensor],
    norms: tuple[FusedRMSNorm | None, FusedRMSNorm | None],
    positions: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Queries [T, heads, d] and keys [T, key heads, d], normalized where there are norms, at the positions of cosines and sines [1, T, d]."""
    rotation = rotation_of(*positions)
    query, key = (rotated(part, norm, rotation) for part, norm in zip(heads, norms, strict=True))
    return query, key


def rotated(heads: Tensor, norm: FusedRMSNorm | None, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """`heads` [T, heads, d], normalized where there is a norm, at the positions of `rotation`."""
    if norm is None:
        return rotate(heads, rotation)
    return norm_rotate(heads, norm.weight, norm.variance_epsilon, rotation)


def _sliding_window(attention: Any) -> int | None:
    """Return how many tokens the layer's queries see; None for all before them."""
    always = family_of(attention.config.model_type).windows == "always"
    holder = attention.config if always else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`x` [..., n] over the root of its mean square, times `weight` [n]; in the dtype of `x`."""
    return _norm_rotate(x.flatten(0, -2), weight, epsilon, None).view(x.shape)


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """`heads` [T, heads, d] at the positions of `rotation` (see `rotation_of`)."""
    return _norm_rotate(heads, None, 0.0, rotation)


def norm_rotate(
    heads: Tensor, weight: Tensor, epsilon: float, rotation: tuple[Tensor, Tensor]
) -> Tensor:
    """`rotate(rms_norm(heads))` in one step: `heads` [T, heads, d], `weight` [d].

    Without gradients, `weight` may be [heads, d].
    """
    return _norm_rotate(heads, weight, epsilon, rotation)


def rotation_of(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What `rotate` takes, [T, 1, d] fp32 each, from cosine and sine [1, T, d] as transformers' rotary modules give them."""
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return cos[0, :, None].float(), signed[0, :, None].float()


def _norm_rotate(
    rows: Tensor, weight: Tensor | None, epsilon: float, rotation: tuple[Tensor, Tensor] | None
) -> Tensor:
    """RMSNorm of `rows` [T, ..., n] where there is a weight, then rotation where there is one."""
    if torch.compiler.is_compiling():
        return _plainly(rows, weight, epsilon, rotation)
    if rows.device.type != "cpu" and weight is not None:  # torch has one kernel for the norm there
        flat = weight.ndim == 1
        rows = functional.rms_norm(rows, rows.shape[-1:], weight if flat else None, epsilon)
        rows, weight = rows if flat else rows * weight, None
        if rotation is None:
            return rows
    if torch.is_grad_enabled() or _block_length(rows) < len(rows):
        result: Tensor = _NormRotate.apply(rows, weight, epsilon, *(rotation or (None, None)))  # type: ignore[no-untyped-call]
        return result
    value = rows.to(torch.float32, copy=True)
    if weight is not None:
        value.mul_(_inverse_root(value, epsilon)).mul_(weight.float())
    return (value if rotation is None else _turned(value, *rotation)).to(rows.dtype)


def _plainly(
    rows: Tensor, weight: Tensor | None, epsilon: float, rotation: tuple[Tensor, Tensor] | None
) -> Tensor:
    """`_norm_rotate` as one chain of operations, which a compiler makes one of, and its gradient too."""
    value = rows.float()
    if weight is not None:
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon)
        value = value * weight.float()
    if rotation is not None:
        cos, sin = rotation
        first, second = value.chunk(2, dim=-1)
        value = value * cos + torch.cat((second, first), dim=-1) * sin
    return value.to(rows.dtype)


class _NormRotate(torch.autograd.Function):
    """`_norm_rotate`, block by block, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        epsilon: float,
        cos: Tensor | None,
        sin: Tensor | None,
    ) -> Tensor:
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        inverse = rows.new_empty((*rows.shape[:-1], 1), dtype=torch.float32)
        factor = None if weight is None else weight.float()
        for block in _blocks(rows):
            value = rows[block].to(torch.float32, copy=True)
            if factor is not None:
                inverse[block] = of_block = _inverse_root(value, epsilon)
                value.mul_(of_block).mul_(factor)
            if cos is not None and sin is not None:
                value = _turned(value, cos[block], sin[block])
            out[block] = value
        ctx.save_for_backward(None if weight is None else rows, weight, inverse, cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, inverse, cos, sin = ctx.saved_tensors
        upstream = gradients[0]
        result = torch.empty(upstream.shape, dtype=upstream.dtype, device=upstream.device)
        factor = None if weight is None else weight.float()
        of_weight = None if factor is None else torch.zeros_like(factor)
        for block in _blocks(upstream):
            value = upstream[block].to(torch.float32, copy=True)
            if cos is not None:
                value = _turned(value, cos[block], -sin[block])
            if factor is not None and of_weight is not None:
                normed = rows[block].to(torch.float32, copy=True).mul_(inverse[block])
                products = (value * normed).flatten(0, -2)
                of_weight += products.sum(dim=0)
                along = torch.mv(products, factor).div_(-products.shape[-1])
                value.mul_(factor).addcmul_(normed, along.view(inverse[block].shape))
                value.mul_(inverse[block])
            result[block] = value
        given = None if of_weight is None else of_weight.to(weight.dtype)
        return result, given, None, None, None


def _inverse_root(value: Tensor, epsilon: float) -> Tensor:
    """(mean of squares + ε)^(-1/2) of `value` [..., n] fp32: [..., 1]."""
    norm: Tensor = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
    return norm.square_().div_(value.shape[-1]).add_(epsilon).rsqrt_()


def _turned(value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`value` [T, heads, d] with its halves mixed as pairs of coordinates; all fp32."""
    half = value.shape[-1] // 2
    result = value * cos
    result[..., :half].addcmul_(value[..., half:], sin[..., :half])
    result[..., half:].addcmul_(value[..., :half], sin[..., half:])
    return result


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Slices of the first dimension of `rows` that cover it."""
    step = _block_length(rows)
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


def _block_length(rows: Tensor) -> int:
    """Rows at a time: as many as the cache holds on a CPU, all of them elsewhere."""
    if rows.device.type != "cpu":
        return max(len(rows), 1)
    return max(1, _CPU_BLOCK_ELEMENTS * len(rows) // max(rows.numel(), 1))

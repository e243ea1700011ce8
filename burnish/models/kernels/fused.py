"""RMSNorm and rotary positions as one autograd function, and the layers that use it.

The function keeps only its input, computes in fp32 and rounds once. On a CPU it works in blocks of
rows that stay in the cache. Elsewhere the norm is torch's kernel, and on NVIDIA's GPUs the rotation is Triton's.

    RMSNorm(x) = x r w,  r = (mean x² + ε)^(-1/2)          Zhang & Sennrich, arXiv 1910.07467
    rotate(x)  = x cos + swap(x) sin                       Su et al., arXiv 2104.09864

where swap(a, b) = (-b, a) of the two halves of a head, whose angles are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from burnish.distributed.device import compiles_triton
from burnish.families import family_of
from burnish.models.kernels.attention import attention_forward

# Elements of a block on a CPU, 1 MiB in fp32.
_CPU_BLOCK_ELEMENTS = 1 << 18


def fuse(model: PreTrainedModel) -> None:
    """Replace norms and attention of Llama-shaped families; parameters and their names stay the same."""
    if not family_of(model.config.model_type).has_llama_layers or not is_of_transformers(model):
        return
    replace_layers(model, "RMSNorm", partial(FusedRMSNorm, norm=rms_norm))
    base: Any = model.base_model
    if 2 * base.rotary_emb.inv_freq.numel() == base.layers[0].self_attn.head_dim:  # whole heads
        replace_layers(model, "Attention", FusedAttention)


def replace_layers(model: nn.Module, kind: str, make: Callable[[nn.Module], nn.Module]) -> None:
    """Replace every module whose class name ends with `kind` by `make(module)`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith(kind):
                setattr(parent, name, make(child))


def is_of_transformers(model: PreTrainedModel) -> bool:
    """Return whether the model's class is transformers' own."""
    return type(model).__module__.startswith("transformers.models.")


class FusedRMSNorm(nn.Module):
    """RMSNorm with the parameter of the module it replaces."""

    def __init__(self, replaced: Any, norm: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        """`norm` takes the input, the weight and ε, like `rms_norm`."""
        super().__init__()
        self.weight = replaced.weight
        self.variance_epsilon: float = getattr(replaced, "eps", None) or replaced.variance_epsilon
        self.norm = norm

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Take any shape [..., n]."""
        return self.norm(hidden_states, self.weight, self.variance_epsilon)


Pair = tuple[Tensor, Tensor]


class FusedAttention(nn.Module):
    """Rotary attention with the layers of the module it replaces."""

    is_causal = True

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self.layer_idx: int = replaced.layer_idx
        self.head_dim: int = replaced.head_dim
        self.scaling: float = replaced.scaling
        always = family_of(replaced.config.model_type).windows == "always"
        holder = replaced.config if always else replaced
        self.sliding_window: int | None = getattr(holder, "sliding_window", None)
        self.q_proj = replaced.q_proj
        self.k_proj = replaced.k_proj
        self.v_proj = replaced.v_proj
        self.o_proj = replaced.o_proj
        self.q_norm = getattr(replaced, "q_norm", None)
        self.k_norm = getattr(replaced, "k_norm", None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Pair,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return attention output [1, T, hidden]; cosines and sines are [1, T, head_dim]."""
        heads = (hidden_states.shape[1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads)
        key = self.k_proj(hidden_states).view(heads)
        query, key = rotate_both((query, key), (self.q_norm, self.k_norm), position_embeddings)
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
    heads: Pair, norms: tuple[FusedRMSNorm | None, FusedRMSNorm | None], positions: Pair
) -> Pair:
    """Norm queries [T, heads, d] and keys [T, key heads, d] if norms are given; rotate them by cosines and sines [1, T, d]."""
    rotation = rotation_of(*positions)
    query, key = (
        norm_rotate(part, norm.weight, norm.variance_epsilon, rotation)
        if norm is not None
        else rotate(part, rotation)
        for part, norm in zip(heads, norms, strict=True)
    )
    return query, key


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return RMSNorm of `x` [..., n] in its dtype."""
    return norm_rotate(x.flatten(0, -2), weight, epsilon, None).view(x.shape)


def rotate(heads: Tensor, rotation: Pair) -> Tensor:
    """Rotate `heads` [T, heads, d]; see `rotation_of`."""
    return norm_rotate(heads, None, 0.0, rotation)


def rotation_of(cos: Tensor, sin: Tensor) -> Pair:
    """Return cosines and sines [T, 1, d] fp32, from transformers' [1, T, d]."""
    return cos[0, :, None].float(), sin[0, :, None].float()


def norm_rotate(
    rows: Tensor, weight: Tensor | None, epsilon: float, rotation: Pair | None
) -> Tensor:
    """Apply the norm of `weight` [n] if given, then `rotation` if given, to `rows` [T, ..., n].

    Without gradients, `weight` may be [heads, n].
    """
    if torch.compiler.is_compiling():
        return _plainly(rows, weight, epsilon, rotation)
    if rows.device.type != "cpu" and weight is not None:
        flat = weight.ndim == 1
        rows = functional.rms_norm(rows, rows.shape[-1:], weight if flat else None, epsilon)
        rows = rows if flat else rows * weight
        weight = None
        if rotation is None:
            return rows
    if weight is None and rotation is not None and compiles_triton(rows.device):
        return _Rotate.apply(rows, *rotation)  # type: ignore[no-untyped-call]
    if torch.is_grad_enabled() or _block_length(rows) < len(rows):
        return _NormRotate.apply(rows, weight, epsilon, *(rotation or (None, None)))  # type: ignore[no-untyped-call]
    value = rows.to(torch.float32, copy=True)
    if weight is not None:
        value.mul_(_inverse_root(value, epsilon)).mul_(weight.float())
    return (value if rotation is None else _turned(value, *rotation)).to(rows.dtype)


def _plainly(rows: Tensor, weight: Tensor | None, epsilon: float, rotation: Pair | None) -> Tensor:
    """Compute `norm_rotate` in operations that a compiler fuses."""
    value = rows.float()
    if weight is not None:
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon)
        value = value * weight.float()
    if rotation is not None:
        cos, sin = rotation
        first, second = value.chunk(2, dim=-1)
        value = value * cos + torch.cat((-second, first), dim=-1) * sin
    return value.to(rows.dtype)


def _kernels() -> Any:
    from burnish.models.kernels import triton_rotation

    return triton_rotation


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        rotated: Tensor = _kernels().rotate_heads(rows, (cos, sin))
        return rotated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _kernels().rotate_heads(gradients[0], ctx.saved_tensors, backward=True), None, None


class _NormRotate(torch.autograd.Function):
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
        weight_gradient = None if factor is None else torch.zeros_like(factor)
        for block in _blocks(upstream):
            value = upstream[block].to(torch.float32, copy=True)
            if cos is not None:
                value = _turned(value, cos[block], sin[block], backward=True)
            if factor is not None and weight_gradient is not None:
                normed = rows[block].to(torch.float32, copy=True).mul_(inverse[block])
                products = (value * normed).flatten(0, -2)
                weight_gradient += products.sum(dim=0)
                along = torch.mv(products, factor).div_(-products.shape[-1])
                value.mul_(factor).addcmul_(normed, along.view(inverse[block].shape))
                value.mul_(inverse[block])
            result[block] = value
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        return result, weight_gradient, None, None, None


def _inverse_root(value: Tensor, epsilon: float) -> Tensor:
    """Return (mean square + ε)^(-1/2) [..., 1] of `value` [..., n] fp32."""
    norm: Tensor = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
    return norm.square_().div_(value.shape[-1]).add_(epsilon).rsqrt_()


def _turned(value: Tensor, cos: Tensor, sin: Tensor, *, backward: bool = False) -> Tensor:
    half = value.shape[-1] // 2
    sign = -1 if backward else 1
    result = value * cos
    result[..., :half].addcmul_(value[..., half:], sin[..., :half], value=-sign)
    result[..., half:].addcmul_(value[..., :half], sin[..., half:], value=sign)
    return result


def _blocks(rows: Tensor) -> Iterator[slice]:
    step = _block_length(rows)
    for start in range(0, len(rows), step):
        yield slice(start, start + step)


def _block_length(rows: Tensor) -> int:
    if rows.device.type != "cpu":
        return max(len(rows), 1)
    return max(1, _CPU_BLOCK_ELEMENTS * len(rows) // max(rows.numel(), 1))

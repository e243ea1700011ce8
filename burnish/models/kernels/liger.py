"""Liger's Triton kernels (Hsu et al., arXiv 2410.10989), on CUDA where `liger-kernel` is installed.

Each takes the place of a chain of kernels that move the same activations through memory: the gated activation of an
MLP, which then keeps its two inputs and not what lies between; rotary positions of queries and keys, in one pass; and
the norms of families that `burnish.models.kernels.fused` leaves to transformers. For the norms of the others torch has one kernel
of its own, and the loss is not Liger's because `burnish.models.logprobs` never has whole logits either.
Left out: experts, whose grouped products are transformers'; layers that are compiled, of which the compiler makes one
kernel; the generator and the Megatron engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.errors import UsageError, install
from burnish.families import family_of
from burnish.models.kernels.fused import (
    FusedAttention,
    FusedRMSNorm,
    is_of_transformers,
    replace_layers,
    rotate_both,
)

Gate = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: Mapping[str, Gate] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# The gates that there is a kernel for, by the names that configurations have for them.

Norm = Callable[[Tensor, Tensor, float, float], Tensor]
"""RMSNorm [..., n] in fp32, from its input, weight [n], ε and what is added to the weight."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What Liger computes. All of it may write over what it was given, once that is not needed any more."""

    gated: Mapping[Gate, Callable[[Tensor, Tensor], Tensor]]
    """activation(gate) * up, of tensors of one shape."""
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Queries [1, heads, T, d] and keys [1, key heads, T, d], at the positions of cosines and sines [1, T, d] fp32."""
    norm: Norm
    """For families with `norm_in_fp32`."""


def liger_kernels(device: torch.device) -> Kernels | None:
    """Liger's kernels; None where it is not installed, and on devices other than CUDA. Raises `UsageError` where it does not load."""
    if device.type != "cuda" or find_spec("liger_kernel") is None:
        return None
    try:
        from liger_kernel.ops import (
            LigerGELUMulFunction,
            LigerRMSNormFunction,
            LigerRopeFunction,
            LigerSiLUMulFunction,
        )
    except ImportError as error:
        raise UsageError(
            "liger-kernel is installed and does not load",
            have=error,
            want="a version that has what is used of it, and triton",
            do=f"{install('liger')}, or pip uninstall liger-kernel to do without",
        ) from error

    def norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
        result: Tensor = LigerRMSNormFunction.apply(x, weight, epsilon, offset, "gemma", False)
        return result

    return Kernels(
        {"silu": LigerSiLUMulFunction.apply, "gelu_tanh": LigerGELUMulFunction.apply},
        LigerRopeFunction.apply,
        norm,
    )


def use_kernels(model: PreTrainedModel, kernels: Kernels) -> None:
    """Put layers that use `kernels` in the place of those of transformers, where the family is known.

    Parameters keep their names and identities. Models with code of their own are left as they are.
    """
    if not is_of_transformers(model):
        return
    family = family_of(model.config.model_type)
    for module in model.modules():
        if isinstance(module, FusedAttention):
            module.position = _Position(kernels)
    gate = _ACTIVATIONS.get(_activation(model)) if family.tested else None
    if gate is not None:
        replace_layers(model, "MLP", partial(GatedMLP, gated=kernels.gated[gate]))
    if family.norm_in_fp32:
        norm = partial(LigerRMSNorm, norm=kernels.norm, offset=family.norm_offset)
        replace_layers(model, "RMSNorm", norm)


def _activation(model: PreTrainedModel) -> str:
    config = model.config.get_text_config()
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with the layers of the module it replaces."""

    def __init__(self, replaced: Any, gated: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = replaced.gate_proj, replaced.up_proj
        self.down_proj, self.act_fn = replaced.down_proj, replaced.act_fn
        self._gated = gated

    def forward(self, x: Tensor) -> Tensor:
        """Any shape [..., H]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        plainly = torch.compiler.is_compiling()
        result: Tensor = self.down_proj(
            self.act_fn(gate) * up if plainly else self._gated(gate, up)
        )
        return result


class LigerRMSNorm(nn.Module):
    """RMSNorm with the parameter of the module it replaces."""

    def __init__(self, replaced: Any, norm: Norm, offset: float) -> None:
        super().__init__()
        self.weight = replaced.weight
        self._epsilon: float = getattr(replaced, "eps", None) or replaced.variance_epsilon
        self._norm, self._offset = norm, offset

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Any shape [..., n]."""
        if not torch.compiler.is_compiling():
            return self._norm(hidden_states, self.weight, self._epsilon, self._offset)
        value = hidden_states.float()
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + self._epsilon)
        result: Tensor = value * (self.weight.float() + self._offset)
        return result.to(hidden_states.dtype)


class _Position:
    """What `FusedAttention` calls to normalize and rotate queries and keys."""

    def __init__(self, kernels: Kernels) -> None:
        self._rotate = kernels.rotate

    def __call__(
        self,
        heads: tuple[Tensor, Tensor],
        norms: tuple[FusedRMSNorm | None, FusedRMSNorm | None],
        positions: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return rotate_both(heads, norms, positions)
        # The kernel writes over its input, which has to be nobody else's: selective checkpointing keeps what products gave.
        own = (
            part.clone() if norm is None else norm(part)
            for part, norm in zip(heads, norms, strict=True)
        )
        query, key = (part.transpose(0, 1)[None] for part in own)
        cos, sin = (each.float() for each in positions)
        query, key = self._rotate(query, key, cos, sin)
        return query[0].transpose(0, 1), key[0].transpose(0, 1)

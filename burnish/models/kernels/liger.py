"""Liger's Triton kernels (Hsu et al., arXiv 2410.10989), on CUDA if `liger-kernel` is installed.

They replace gated activations, and norms that `burnish.models.kernels.fused` leaves. Experts, compiled
layers, the generator and the Megatron engine do not use them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.errors import install, refusing
from burnish.families import family_of
from burnish.models.kernels.fused import FusedRMSNorm, is_of_transformers, replace_layers


@dataclass(frozen=True, slots=True)
class Kernels:
    """Liger's functions. Each may write over its inputs."""

    gated: Mapping[str, Callable[[Tensor, Tensor], Tensor]]
    """By the activation's name in config.json: activation(gate) * up, of tensors of one shape."""
    norm: Callable[..., Tensor]
    """RMSNorm [..., n] in fp32 from its input, weight [n], ε and offset of the weight, for families with `norm_in_fp32`."""


def liger_kernels() -> Kernels:
    """Return Liger's kernels. Raises `UsageError` if liger-kernel does not load."""
    with refusing(
        "liger-kernel is installed and does not load",
        want="a version with the kernels that Burnish uses, and triton",
        do=f"{install('liger')}, or pip uninstall liger-kernel to do without",
    ):
        from liger_kernel.ops import (
            LigerGELUMulFunction,
            LigerRMSNormFunction,
            LigerSiLUMulFunction,
        )

    def norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
        return LigerRMSNormFunction.apply(x, weight, epsilon, offset, "gemma", False)

    return Kernels(
        {
            "silu": LigerSiLUMulFunction.apply,
            "swish": LigerSiLUMulFunction.apply,
            "gelu_pytorch_tanh": LigerGELUMulFunction.apply,
        },
        norm,
    )


def use_kernels(model: PreTrainedModel, kernels: Kernels) -> None:
    """Replace layers of known families; parameters stay the same."""
    if not is_of_transformers(model):
        return
    config = model.config.get_text_config()
    family = family_of(config.model_type)
    activation = str(getattr(config, "hidden_activation", None) or config.hidden_act)
    if family.described and (gated := kernels.gated.get(activation)):
        replace_layers(model, "MLP", partial(GatedMLP, gated=gated))
    if family.described and family.norm_in_fp32:
        norm = partial(kernels.norm, offset=family.norm_offset)
        replace_layers(model, "RMSNorm", partial(FusedRMSNorm, norm=norm))


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), with the layers of the module it replaces."""

    def __init__(self, replaced: Any, gated: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj = replaced.gate_proj
        self.up_proj = replaced.up_proj
        self.down_proj = replaced.down_proj
        self._gated = gated

    def forward(self, x: Tensor) -> Tensor:
        """Take any shape [..., H]."""
        return self.down_proj(self._gated(self.gate_proj(x), self.up_proj(x)))

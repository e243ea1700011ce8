"""The modules of Megatron's layers: torch's, or TransformerEngine's where it is installed and can be used.

TransformerEngine fuses a norm with the matrix behind it, and the experts of a layer. It multiplies fp32 in tf32, so it serves
bf16 only. Attention is ours with both, since TransformerEngine's does not know shared prefixes. Apex has a kernel that
accumulates a matrix's gradient in fp32. Left out: TransformerEngine's fp8 and fp4, Apex's layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import layers as linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from burnish.config.schema import EngineConfig
from burnish.engines.megatron.attention import RMSNorm
from burnish.engines.megatron.experts import GroupedExperts
from burnish.errors import UsageError


@dataclass(frozen=True, slots=True)
class LayerModules:
    """Classes that a layer spec names, all with the signatures of Megatron's own."""

    norm: Any
    """RMSNorm."""
    block_norm: Any
    """The same before a block that begins with `column`; nothing, where that has it."""
    column: Any
    """The linear layer that a block begins with, whose outputs tensor ranks divide."""
    row: Any
    """The one that it ends with, whose inputs they divide."""
    experts: ModuleSpec
    """All experts of a layer."""
    adds_gradients: bool = False
    """Whether linear layers add the gradients of their weights to Megatron's buffers themselves, by Apex's kernel."""


def layer_modules(config: EngineConfig, device: torch.device) -> LayerModules:
    """Those that `engine.layers` asks for. Raises `UsageError` where TransformerEngine is asked for and cannot be used."""
    is_installed = transformer_engine.TEGroupedLinear is not None
    if config.layers == "transformer_engine" and not (is_installed and device.type == "cuda"):
        raise UsageError(
            "TransformerEngine's layers are asked for, and cannot be used",
            have=f"device {device}, transformer_engine {'installed' if is_installed else 'not installed, or too old'}",
            want="CUDA, and transformer_engine 1.9 or newer",
            do='pip install --no-build-isolation "transformer_engine[pytorch]", or set engine.layers=torch',
        )
    if config.layers == "torch" or config.precision != "bf16" or device.type != "cuda":
        return _of_torch()
    modules = _of_transformer_engine() if is_installed else _of_torch()
    return replace(modules, adds_gradients=linear._grad_accum_fusion_available)


def _of_torch() -> LayerModules:
    return LayerModules(
        norm=RMSNorm,
        block_norm=RMSNorm,
        column=ColumnParallelLinear,
        row=RowParallelLinear,
        experts=ModuleSpec(module=GroupedExperts),
    )


def _of_transformer_engine() -> LayerModules:
    modules = transformer_engine
    grouped = MLPSubmodules(
        linear_fc1=modules.TEColumnParallelGroupedLinear,
        linear_fc2=modules.TERowParallelGroupedLinear,
    )
    return LayerModules(
        norm=modules.TENorm,
        block_norm=IdentityOp,
        column=modules.TELayerNormColumnParallelLinear,
        row=modules.TERowParallelLinear,
        experts=ModuleSpec(module=TEGroupedMLP, submodules=grouped),
    )

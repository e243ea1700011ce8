"""Stand-ins for TransformerEngine's layers and Apex's kernel, for machines without: names, shapes and marks of theirs, computed by torch.

What they show is that a model with these names is built, trained, saved and loaded rightly, and that Megatron finds
gradients that were added by a kernel. What TransformerEngine and Apex themselves compute only `tests/gpu` can show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.config.schema import EngineConfig
from burnish.engines.megatron import model as building
from burnish.engines.megatron.modules import (
    ColumnParallelLinear,
    IdentityOp,
    LayerModules,
    MLPSubmodules,
    ModuleSpec,
    RMSNorm,
    RowParallelLinear,
    TEGroupedMLP,
    linear,
)
from burnish.models.kernels.fused import rms_norm


class NormedColumnLinear(ColumnParallelLinear):
    """A norm and the linear layer behind it, as `TELayerNormColumnParallelLinear`."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        norm = RMSNorm(config, input_size, config.layernorm_epsilon)
        self.layer_norm_weight, self.epsilon = norm.weight, norm.epsilon
        self.offset = norm.offset

    def forward(self, hidden: Tensor) -> Any:
        weight = self.layer_norm_weight + self.offset
        return super().forward(rms_norm(hidden, weight, self.epsilon))

    def get_extra_state(self) -> Tensor:
        """What TransformerEngine saves of a layer without fp8."""
        return torch.empty(0, dtype=torch.uint8)


class _GroupedLinear(nn.Module):
    """A parameter for each expert, `weight0` and so on, as `TEGroupedLinear`."""

    cut_dim: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str,
        pg_collection: Any,
        name: str | None = None,  # since Megatron-Core 0.19
    ) -> None:
        super().__init__()
        assert is_expert
        assert not bias
        self.num_gemms = num_gemms
        shape = [output_size, input_size]
        shape[self.cut_dim] //= pg_collection.expt_tp.size()
        for number in range(num_gemms):
            weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", weight)

    def forward(self, rows: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        each = zip(rows.split(m_splits), weights, strict=True)
        return torch.cat([functional.linear(own, weight) for own, weight in each]), None


class GroupedColumnLinear(_GroupedLinear):
    """As `TEColumnParallelGroupedLinear`."""

    cut_dim = 0


class GroupedRowLinear(_GroupedLinear):
    """As `TERowParallelGroupedLinear`."""

    cut_dim = 1


STAND_INS = LayerModules(
    norm=RMSNorm,
    block_norm=IdentityOp,
    column=NormedColumnLinear,
    row=RowParallelLinear,
    experts=ModuleSpec(
        module=TEGroupedMLP,
        submodules=MLPSubmodules(linear_fc1=GroupedColumnLinear, linear_fc2=GroupedRowLinear),
    ),
    adds_gradients=True,
)
"""In the places of TransformerEngine's."""


class Kernel:
    """In the place of Apex's `fused_weight_gradient_mlp_cuda`."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows: Tensor, gradient: Tensor, total: Tensor) -> None:
        total.add_(gradient.t() @ rows)


def use_stand_ins() -> None:
    """Have engines of this process built of them where `engine.layers` is transformer_engine."""
    real = building.layer_modules

    def layer_modules(config: EngineConfig, device: torch.device) -> LayerModules:
        return STAND_INS if config.layers == "transformer_engine" else real(config, device)

    building.layer_modules = layer_modules
    linear.fused_weight_gradient_mlp_cuda = Kernel
    linear._grad_accum_fusion_available = True

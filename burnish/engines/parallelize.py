"""Parallelism applied from outside, in one function and a fixed order, to a model that knows nothing of ranks.

Left out so far: tensor and sequence parallelism, activation checkpointing, compilation; they come
before `fully_shard`, in that order.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from burnish.config.schema import EngineConfig
from burnish.parallel.layout import Layout


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a decoder: the entries of its longest ModuleList outside any other."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    outer = [
        modules
        for name, modules in lists
        if not any(name.startswith(f"{other}.") for other, _ in lists)
    ]
    return list(max(outer, key=lambda modules: len(modules), default=[]))


def parallelize(
    scorer: nn.Module, config: EngineConfig, layout: Layout, device: torch.device
) -> None:
    """Shard `scorer` (still on meta) over all processes with FSDP2, one group per decoder layer.

    Main weights stay in the dtype they have; compute happens in bf16 where `config.precision` says
    so; gradients are summed (not averaged) over ranks in fp32.
    """
    mesh = init_device_mesh(device.type, (layout.world,), mesh_dim_names=("data",))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.precision == "bf16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in decoder_layers(scorer):
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=config.reshard_after_forward and layout.world > 1,
        )
    fully_shard(scorer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

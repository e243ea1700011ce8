"""Megatron-Core's own modules with the weights of a model, in the place of this package's, which have no part in Megatron's checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from burnish.engines.megatron.modules import (
    ColumnParallelLinear,
    MLPSubmodules,
    RowParallelLinear,
)


def use_megatron_experts(chunk: Any) -> None:
    """Put Megatron's experts, with the same weights, in the place of ours."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    for layer in chunk.decoder.layers:
        ours = getattr(layer.mlp, "experts", None)
        if ours is None:
            continue
        shared = getattr(layer.mlp, "shared_experts", None)
        if shared is not None and shared.gate is not None:
            shared.gate_weight = shared.gate.weight
            del shared.gate
            shared.use_shared_expert_gate = True
        groups = chunk.pg_collection
        count = layer.mlp.num_local_experts
        config = copy.copy(chunk.config)
        config.add_bias_linear = hasattr(ours.linear_fc1, "bias")
        theirs = SequentialMLP(count, config, submodules, pg_collection=groups)
        for name in ("linear_fc1", "linear_fc2"):
            mine = getattr(ours, name)
            held = list(mine.parameters())  # one of all experts, or of each its own
            matrices = mine.weight if config.add_bias_linear else held
            if len(matrices) < count:
                matrices = held[0]
            for number, expert in enumerate(theirs.local_experts):
                into = getattr(expert, name)
                matrix = matrices[number]
                if config.add_bias_linear:
                    matrix = gate_above_up(matrix.mT) if name == "linear_fc1" else matrix.mT
                    into.bias.data.copy_(
                        gate_above_up(mine.bias[number])
                        if name == "linear_fc1"
                        else whole_bias(mine.bias[number], groups.expt_tp)
                    )
                into.weight.data.copy_(matrix)
        layer.mlp.experts = theirs


def use_megatron_sinks(chunk: Any) -> None:
    """Put Megatron's attention in the place of ours, where heads have sinks."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = copy.copy(chunk.config)
    config.softmax_type = "learnable"
    for layer in chunk.decoder.layers:
        ours = getattr(layer.self_attention, "core_attention", None)
        if getattr(ours, "softmax_offset", None) is None:
            continue
        theirs = DotProductAttention(
            config,
            layer.layer_number,
            AttnMaskType.causal,
            "self",
            pg_collection=chunk.pg_collection,
        )
        theirs.softmax_offset.data.copy_(ours.softmax_offset)
        layer.self_attention.core_attention = theirs


def gate_above_up(rows: Tensor) -> Tensor:
    """Rows that take turns, as Megatron-Bridge's GPTOSSMLPGateUpProjMapping has them."""
    return torch.cat((rows[::2], rows[1::2]))


def whole_bias(own: Tensor, group: Any) -> Tensor:
    """A bias of which each rank of the group has a part."""
    parts = [torch.empty_like(own) for _ in range(group.size())]
    torch.distributed.all_gather(parts, own.detach().contiguous(), group=group)
    return torch.cat(parts)


class _OffsetNorm(nn.Module):
    """RMSNorm by weight + 1, as `layernorm_zero_centered_gamma`."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.rms_norm(rows, rows.shape[-1:], self.weight + 1, self.eps)


def use_megatron_mixers(chunk: Any, directory: Path) -> None:
    """Put Megatron's Gated DeltaNet in the place of ours, and compare it with transformers' on the way.

    It wants flash-linear-attention, of which its deterministic mode needs the norm of queries and keys alone.
    """
    from megatron.core.ssm import gated_delta_net

    if not any(hasattr(layer.self_attention, "mixer") for layer in chunk.decoder.layers):
        return
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    inside = getattr(gated_delta_net, "common", gated_delta_net)
    with (
        mock.patch.object(inside, "HAVE_FLA", new=True),
        mock.patch.object(inside, "l2norm", unit, create=True),
        torch.no_grad(),
    ):
        for layer in chunk.decoder.layers:
            ours = layer.self_attention
            if not hasattr(ours, "mixer"):
                continue
            plain = model.get_submodule(f"model.layers.{ours.number}.linear_attn")
            config = copy.copy(chunk.config)
            config.deterministic_mode = True
            config.linear_conv_kernel_dim = plain.conv_kernel_size
            config.linear_key_head_dim = plain.head_k_dim
            config.linear_value_head_dim = plain.head_v_dim
            config.linear_num_key_heads = plain.num_k_heads
            config.linear_num_value_heads = plain.num_v_heads
            groups = chunk.pg_collection
            submodules = gated_delta_net.GatedDeltaNetSubmodules(
                in_proj=type(ours.in_proj), out_norm=_OffsetNorm, out_proj=type(ours.out_proj)
            )
            theirs = gated_delta_net.GatedDeltaNet(
                config, submodules, layer.layer_number, pg_collection=groups
            )
            fill(theirs, plain, groups.tp.rank(), groups.tp.size())
            if hasattr(ours.in_proj, "layer_norm_weight"):
                theirs.in_proj.layer_norm_weight.copy_(ours.in_proj.layer_norm_weight)
            rows = torch.linspace(-1, 1, 80 * config.hidden_size).sin().view(80, 1, -1)
            found, _ = theirs(
                rows.chunk(theirs.sp_size)[groups.tp.rank() % theirs.sp_size], attention_mask=None
            )
            if hasattr(ours.in_proj, "layer_norm_weight"):
                rows = model.get_submodule(f"model.layers.{ours.number}.input_layernorm")(rows)
            wanted = plain(rows.transpose(0, 1)).transpose(0, 1)
            wanted = wanted.chunk(theirs.sp_size)[groups.tp.rank() % theirs.sp_size]
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
            layer.self_attention = theirs


def unit(rows: Tensor) -> Tensor:
    """`fla.modules.l2norm.l2norm`."""
    return rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def fill(theirs: Any, plain: Any, rank: int, ranks: int) -> None:
    """Give a rank's part of Megatron's module the weights of transformers', as Megatron-Bridge does."""
    heads = plain.num_k_heads
    values = plain.num_v_heads // heads
    widths = (plain.head_k_dim, plain.head_k_dim, values * plain.head_v_dim)

    def by_head(matrix: Tensor, *rows: int) -> list[Tensor]:
        split = matrix.view(heads, sum(rows), -1).split(rows, dim=1)
        return [part.reshape(-1, matrix.shape[-1]) for part in split]

    flat = [heads * width for width in widths]
    if hasattr(plain, "in_proj_qkvz"):
        parts = by_head(plain.in_proj_qkvz.weight, *widths, widths[2])
        parts += by_head(plain.in_proj_ba.weight, values, values)
    else:
        parts = [*plain.in_proj_qkv.weight.split(flat)]
        parts += [plain.in_proj_z.weight, plain.in_proj_b.weight, plain.in_proj_a.weight]

    def own(*parts: Tensor, dim: int = 0) -> Tensor:
        return torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)

    theirs.in_proj.weight.copy_(own(*parts))
    theirs.conv1d.weight.copy_(own(*plain.conv1d.weight.split(flat)))
    theirs.A_log.copy_(own(plain.A_log))
    theirs.dt_bias.copy_(own(plain.dt_bias))
    theirs.out_norm.weight.copy_(plain.norm.weight - 1)
    theirs.out_proj.weight.copy_(own(plain.out_proj.weight, dim=1))

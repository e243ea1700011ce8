"""Apply parallelism to a model that knows nothing of ranks, in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from burnish.config.schema import EngineConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import Mesh
from burnish.engines.base import compute_dtype
from burnish.models.scorer import OutputLayer, Scorer

Run = Callable[..., Any]
"""Calls its first argument with the others: plainly, or as `torch.utils.checkpoint.checkpoint` does."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the entries of the longest ModuleList that is in no other."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    outer = [
        modules
        for name, modules in lists
        if not any(name.startswith(f"{other}.") for other, _ in lists)
    ]
    return list(max(outer, key=lambda modules: len(modules), default=[]))


def keep_activations(
    model: PreTrainedModel, config: EngineConfig, around: Callable[[Run], Run] | None = None
) -> None:
    """Keep the activations that `engine.activation_checkpointing` says; `around` changes how layers are called."""
    if config.activation_checkpointing != "none" or around is not None:
        from burnish.engines.torch.activation_checkpointing import checkpoint_layers

        checkpoint_layers(model, config, around)


def parallelize(
    scorer: Scorer,
    config: EngineConfig,
    mesh: Mesh,
    layout: Layout,
    around: Callable[[Run], Run] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cut `scorer` (on meta) for tensor parallelism, then experts and embeddings; shard it with FSDP2; return the cuts (`burnish.models.parts.ShardRule`).

    Copies of the model (HSDP) are sharded over neighbouring ranks. Gradients are summed in fp32.
    """
    cuts, others, experts = _cut(scorer, config, mesh, layout)
    keep_activations(scorer.model, config, around)
    layers = decoder_layers(scorer)
    if config.compile:
        from burnish.engines.torch.compilation import compile_layers

        compile_layers(scorer.model, layers)
    _shard(scorer, layers, experts, config, mesh)
    if experts:
        from burnish.engines.torch.expert_parallel import gather_ahead

        gather_ahead(layers, experts)
    return cuts, others


def _cut(
    scorer: Scorer, config: EngineConfig, mesh: Mesh, layout: Layout
) -> tuple[dict[str, Any], dict[str, Any], Sequence[nn.Module]]:
    """Keep this rank's parts of what ranks share; return the cuts of tensor parallelism, the others, and the modules of shared experts."""
    cuts: dict[str, Any] = {}
    if mesh.tensor is not None:
        from burnish.engines.torch.tensor_parallel import share_matrices

        cuts = share_matrices(scorer, mesh.tensor)
    others: dict[str, Any] = {}
    experts: Sequence[nn.Module] = ()
    if config.expert_parallel > 1:  # not of a dense model that shares the mesh of a mixture
        assert mesh.of_experts is not None
        from burnish.engines.torch.expert_parallel import share_experts

        others, experts = share_experts(scorer.model, mesh.of_experts["experts"].get_group())
    if mesh.weights["shard"].size() > 1 and mesh.tensor is None and _are_two_tables(scorer):
        from burnish.engines.torch.embedding_rows import share_rows

        others |= share_rows(scorer, config, mesh.weights, layout)
    return cuts, others, experts


def _shard(
    scorer: Scorer,
    layers: Sequence[nn.Module],
    experts: Sequence[nn.Module],
    config: EngineConfig,
    mesh: Mesh,
) -> None:
    """Shard all parameters with FSDP2, except embeddings whose rows are fetched."""
    policy = MixedPrecisionPolicy(
        param_dtype=None if config.precision == "fp32" else compute_dtype(config),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    # Given copies, or a single one as copies, FSDP2 adds up a whole group's gradients at once, and keeps the sums on the device.
    in_groups = mesh.weights["shard"].size() > 1 and not config.parameter_offload
    dims = ("replicas", "shard") if config.replicas > 1 or in_groups else ("shard",)
    weights = mesh.weights[dims]
    how: dict[str, Any] = {"mesh": weights, "mp_policy": policy}
    if config.parameter_offload:  # copies from pinned memory overlap with compute
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=weights.device_type != "cpu")
    regathers = config.reshard_after_forward and mesh.weights["shard"].size() > 1
    meshes = {}
    for module in experts:
        assert mesh.of_experts is not None
        meshes[module] = mesh.of_experts[dims]
        fully_shard(module, reshard_after_forward=regathers, **how | {"mesh": meshes[module]})
    for layer in layers:
        fully_shard(layer, reshard_after_forward=regathers, **how)
    _shard_ends(scorer, how)
    apart = set() if scorer.rows is None else {scorer.model.get_input_embeddings().weight}
    # The backward pass begins with the root's head, so its weights stay gathered.
    fully_shard(scorer, reshard_after_forward=False, ignored_params=apart, **how)
    for module in scorer.modules():
        # The mean over one rank is its sum, without a division.
        if isinstance(module, FSDPModule) and meshes.get(module, weights).size() > 1:
            # Losses are already divided by counts over all ranks. FSDP2 would divide by the number of ranks once more.
            module.set_gradient_divide_factor(1.0)
            # For a factor of its own FSDP2 takes PREMUL_SUM, which only NCCL has.
            module.set_force_sum_reduction_for_comms(True)


def _are_two_tables(scorer: Scorer) -> bool:
    """Return whether the output layer is none, or a plain one that is not the embeddings."""
    head = scorer.model.get_output_embeddings()
    table = scorer.model.get_input_embeddings().weight
    return head is None or (isinstance(head, OutputLayer) and head.weight is not table)


def _shard_ends(scorer: Scorer, how: dict[str, Any]) -> None:
    """Make groups of the embeddings, unless ranks fetch their rows, and of the output layer, unless these are one table.

    The first layer waits for the embeddings alone, and the output layer's gradients travel while layers compute.
    """
    if not _are_two_tables(scorer):
        return
    embedding = scorer.model.get_input_embeddings()
    head = scorer.model.get_output_embeddings()
    if scorer.rows is None:
        fully_shard(embedding, **how)
        embedding.set_unshard_in_backward(False)  # the backward pass needs only the tokens
    if head is not None:
        fully_shard(head, reshard_after_forward=False, **how)
        torch.distributed.fsdp.register_fsdp_forward_method(head, "score")


def global_norm(
    gradients: Mapping[str, Tensor], cuts: Collection[str], mesh: Mesh, device: torch.device
) -> float:
    """Return the 2-norm of all gradients, in fp32. Those not in `cuts` count once among tensor ranks. Collective."""
    shard = mesh.weights["shard"].get_group()
    tensor = mesh.tensor
    is_first = tensor is None or tensor.rank() == 0
    named = gradients.items()
    counted = [each for name, each in named if each.numel() and (is_first or name in cuts)]
    if not counted or counted[0].is_cpu:
        # This makes no copy. It goes by rows, since the norm of a whole matrix at once is less exact.
        rows = [torch.linalg.vector_norm(each, dim=-1, dtype=torch.float32) for each in counted]
        squares = [norms.square_().sum() for norms in rows]
    else:
        norms = torch.stack(torch._foreach_norm(counted, 2, torch.float32))
        squares = [norms.square_().sum()]
    total = torch.stack(squares).sum().to(device) if squares else torch.zeros((), device=device)
    for group in (shard, tensor):
        if group is not None and group.size() > 1:
            dist.all_reduce(total, group=group)
    return float(total.sqrt())

"""Apply parallelism to a model that knows nothing of ranks, in one fixed order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from burnish.config.schema import EngineConfig
from burnish.distributed.processes import Mesh
from burnish.engines.base import compute_dtype
from burnish.models.scorer import Scorer

Run = Callable[..., Any]
"""Calls its first argument with the others: plainly, or as `torch.utils.checkpoint.checkpoint` does."""

_PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "burnish::causal_attention",
        "burnish::sink_attention",
        "torch_attn::_varlen_attn",
    }
)
"""Operators whose results selective checkpointing keeps. Not aten::bmm: Gemma 3n adds to its results in place, and would add twice."""
_GROUPED = frozenset({"aten::_grouped_mm", "transformers::grouped_mm_fallback"})
"""Others that it keeps, unless experts have biases, which transformers adds in place."""


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
    """Recompute activations in the backward pass (Chen et al., arXiv 1604.06174).

    full keeps the input of each decoder layer; selective also keeps the results of matrix products and attention.
    """
    kind = config.activation_checkpointing
    if kind == "none" and around is None:
        return
    # Nothing in a layer draws random numbers (`build_on_meta` removes dropout), so no state is kept for the second pass.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        added = any(getattr(module, "has_bias", False) for module in model.modules())
        policy = partial(_keep, _PRODUCTS if added else _PRODUCTS | _GROUPED)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    run: Run = operator.call if kind == "none" else partial(checkpoint, **options)
    model._set_gradient_checkpointing(gradient_checkpointing_func=around(run) if around else run)


def _keep(
    products: Collection[str], context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any
) -> Any:
    is_product = op._schema.name in products
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def parallelize(
    scorer: Scorer,
    config: EngineConfig,
    mesh: Mesh,
    around: Callable[[Run], Run] | None = None,
) -> dict[str, Any]:
    """Cut `scorer` (on meta) for tensor parallelism, shard it with FSDP2, and return the cuts (`burnish.models.parts.ShardRule`).

    Copies of the model (HSDP) are sharded over neighbouring ranks. Gradients are summed in fp32.
    """
    cuts: dict[str, Any] = {}
    if mesh.tensor is not None:
        from burnish.engines.torch.tensor_parallel import share_matrices

        cuts = share_matrices(scorer, mesh.tensor)
    keep_activations(scorer.model, config, around)
    layers = decoder_layers(scorer)
    if config.compile:
        from burnish.engines.torch.compilation import compile_layers

        compile_layers(scorer.model, layers)
    weights = mesh.weights if config.replicas > 1 else mesh.weights["shard"]
    parts = mesh.weights["shard"].size()
    policy = MixedPrecisionPolicy(
        param_dtype=None if config.precision == "fp32" else compute_dtype(config),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    how: dict[str, Any] = {"mesh": weights, "mp_policy": policy}
    if config.parameter_offload:  # copies from pinned memory overlap with compute
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=weights.device_type != "cpu")
    regathers = config.reshard_after_forward and parts > 1
    for layer in layers:
        fully_shard(layer, reshard_after_forward=regathers, **how)
    # The backward pass begins with the head, so its weights stay gathered.
    fully_shard(scorer, reshard_after_forward=False, **how)
    if weights.size() > 1:  # the mean over one rank is its sum, without a division
        for module in scorer.modules():
            if isinstance(module, FSDPModule):
                # Losses are already divided by counts over all ranks. FSDP2 would divide by the number of ranks once more.
                module.set_gradient_divide_factor(1.0)
                # For a factor of its own FSDP2 takes PREMUL_SUM, which only NCCL has.
                module.set_force_sum_reduction_for_comms(True)
    return cuts


def sum_over(group: ProcessGroup, gradients: list[Tensor]) -> None:
    """Add up gradients of one dtype over a group, in place. Collective."""
    if not gradients:
        return
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(joined, group=group)
    parts = torch.split(joined, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


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

"""Apply parallelism to a model that knows nothing of ranks, in one fixed order.

Sequence parallelism changes no module: it is in the attention of each micro-batch (`burnish.models.kernels.ulysses`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from burnish.config.schema import EngineConfig
from burnish.distributed.processes import Mesh
from burnish.engines.torch.activation_offload import ActivationOffload
from burnish.engines.torch.compilation import compile_layers
from burnish.engines.torch.tensor_parallel import share_matrices
from burnish.models.names import Cut
from burnish.models.scorer import Scorer

CheckpointKind = Literal["none", "full", "selective"]

_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "mm",
        "addmm",
        "bmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
) | {
    torch.ops.burnish.causal_attention,
    torch.ops.torch_attn._varlen_attn,
    torch.ops.transformers.grouped_mm_fallback,
}
"""Operators whose results selective checkpointing keeps."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a decoder: the entries of its longest ModuleList outside any other."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    outer = [
        modules
        for name, modules in lists
        if not any(name.startswith(f"{other}.") for other, _ in lists)
    ]
    return list(max(outer, key=lambda modules: len(modules), default=[]))


def keep_activations(
    model: PreTrainedModel, kind: CheckpointKind, offload: ActivationOffload | None
) -> None:
    """Recompute activations in the backward pass (Chen et al., arXiv 1604.06174), and keep the rest on the host with `offload`.

    full keeps the input of each decoder layer. selective also keeps the results of matrix products and attention. No random state is
    kept, since layers have none.
    """
    if kind == "none" and offload is None:
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    run = _plainly if kind == "none" else partial(checkpoint, **options)
    if offload is not None:
        run = offload.around(run)
    model._set_gradient_checkpointing(gradient_checkpointing_func=run)


def _plainly(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


def _keep_products(context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> Any:
    kept = op.overloadpacket in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def parallelize(
    scorer: Scorer, config: EngineConfig, mesh: Mesh, offload: ActivationOffload | None
) -> dict[str, Cut]:
    """Cut the matrices of `scorer` (on meta) for tensor parallelism, shard it with FSDP2, one group per decoder layer, and return the cuts.

    Each copy of the model is sharded over neighbouring ranks; several copies are HSDP. Main weights keep their dtype, compute is
    bf16 if `config.precision` says so, gradients are summed over all ranks in fp32.
    """
    cuts = {} if mesh.tensor is None else share_matrices(scorer, mesh.tensor)
    keep_activations(scorer.model, config.activation_checkpointing, offload)
    layers = decoder_layers(scorer)
    if config.compile:
        compile_layers(scorer.model, layers)
    weights = mesh.weights if config.replicas > 1 else mesh.weights["shard"]
    parts = mesh.weights["shard"].size()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.precision == "bf16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in layers:
        fully_shard(
            layer,
            mesh=weights,
            mp_policy=policy,
            reshard_after_forward=config.reshard_after_forward and parts > 1,
        )
    fully_shard(scorer, mesh=weights, mp_policy=policy, reshard_after_forward=False)
    if weights.size() > 1:  # the mean over one rank is its sum, without a division
        for module in scorer.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    return cuts

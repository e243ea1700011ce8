"""Keep few activations: recompute the others in the backward pass (Chen et al., arXiv 1604.06174)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from burnish.config.schema import EngineConfig

_Run = Callable[..., Any]
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


def checkpoint_layers(
    model: PreTrainedModel, config: EngineConfig, around: Callable[[_Run], _Run] | None = None
) -> None:
    """Call layers as the configuration says, and `around` that.

    full keeps the input of each decoder layer; selective also keeps the results of matrix products and attention.
    """
    kind = config.activation_checkpointing
    # Nothing in a layer draws random numbers (`build_on_meta` removes dropout), so no state is kept for the second pass.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind == "selective":
        added = any(getattr(module, "has_bias", False) for module in model.modules())
        policy = partial(_keep, _PRODUCTS if added else _PRODUCTS | _GROUPED)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    run: _Run = operator.call if kind == "none" else partial(checkpoint, **options)
    model._set_gradient_checkpointing(gradient_checkpointing_func=around(run) if around else run)


def _keep(
    products: Collection[str], context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any
) -> Any:
    is_product = op._schema.name in products
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

"""Tensor parallelism: several ranks share the matrices of every layer (Shoeybi et al., arXiv 1909.08053).

A block (attention, or a layer's other half) computes some heads, or some of the inner width, on each rank. Between
blocks each rank has some of the tokens (Korthikanti et al., arXiv 2205.05198). So the gradient of an uncut parameter is the sum over
ranks.

Cuts follow transformers' plan of the family (`base_model_tp_plan`). Not supported: families without such a plan.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig, PreTrainedModel

from burnish.distributed.tensor_collectives import all_gather_rows, reduce_scatter_rows
from burnish.errors import IncompatibleError, UsageError
from burnish.models.lora.adapter_config import plain_names
from burnish.models.names import is_matrix
from burnish.models.parts import ShardRule, VocabularyPart, keep_parts
from burnish.models.scorer import Scorer

_STYLES: Mapping[str, tuple[int, int]] = {
    "colwise": (-2, 1),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, 1),
}
"""Styles of a plan that cut a weight: the dim, and how many tensors the weight joins along it."""

_WHOLE_FACTORS = frozenset({("A", -2), ("B", -1)})
"""An adapter's factors that stay whole: A [rank, in] of a weight that is cut by rows, B [out, rank] of one cut by columns."""

_OTHER_STYLES = frozenset({"replicated_with_grad_allreduce", "moe_tp_experts"})
"""Styles for gradients of uncut weights and for sums over ranks. This module handles both in any case."""

_BLOCK = re.compile(r"^.*?\.\d+\.[^.]+")
"""The part of a parameter's name that names a child of a decoder layer."""


def share_matrices(scorer: Scorer, group: ProcessGroup) -> dict[str, ShardRule]:
    """Cut every matrix in `scorer` (on meta) to this rank's part, and return the cuts by parameter.

    Raises `UsageError` for an unknown plan, and `IncompatibleError` for a bias that would be added per rank or a matrix that would stay
    whole.
    """
    model = scorer.model
    rank = group.rank()
    ranks = group.size()
    cuts, blocks = layer_cuts(model, rank, ranks)
    vocabulary = ShardRule.of(model.config.get_text_config().vocab_size, 0, rank, ranks)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tables = {id(layer.weight) for layer in (embedding, head) if layer is not None}
    every = model.named_parameters(remove_duplicate=False)
    cuts |= {name: vocabulary for name, parameter in every if id(parameter) in tables}
    keep_parts(model, cuts)
    tokens = vocabulary.spans[0]
    scorer.vocabulary = VocabularyPart(tokens, group)
    if (padding := getattr(embedding, "padding_idx", None)) is not None:
        embedding.padding_idx = padding - tokens.start if padding in tokens else None
    for name in blocks:
        block = model.get_submodule(name)
        block.register_forward_pre_hook(partial(_gather_tokens, group), with_kwargs=True)
        block.register_forward_hook(partial(_scatter_output, group))
    return cuts


def layer_cuts(
    model: PreTrainedModel, rank: int, ranks: int
) -> tuple[dict[str, ShardRule], list[str]]:
    """Return the cuts of the layers' parameters, and their blocks. Raises as `share_matrices` does."""
    cuts = dict(_layer_cuts(model, _layer_plan(model.config), rank, ranks))
    blocks = sorted({match[0] for match in map(_BLOCK.match, cuts) if match})
    _require_all_cut(blocks, model, cuts)
    return cuts, blocks


def _layer_plan(hf_config: PretrainedConfig) -> Mapping[str, str]:
    """Return the style of each part of a layer, with * for its number."""
    text = hf_config.get_text_config()
    whole: Mapping[str, str] = text.base_model_tp_plan or {}
    plan = {name: style for name, style in whole.items() if ".*." in name}
    strange = sorted(set(plan.values()) - _STYLES.keys() - _OTHER_STYLES)
    if strange or not plan:
        offered = f"a plan with {', '.join(strange)}" if plan else "no plan"
        raise UsageError(
            f"tensor parallelism does not know how to cut models of type {text.model_type}",
            have=f"{offered} in transformers",
            want=f"a plan of {', '.join(sorted((*_STYLES, *_OTHER_STYLES)))} alone",
            do="set engine.tensor_parallel=1; engine.sequence_parallel works for every family",
        )
    return plan


def _require_all_cut(blocks: Sequence[str], model: PreTrainedModel, cuts: Collection[str]) -> None:
    """Raise `IncompatibleError` for matrices that the plan leaves whole.

    A whole matrix would see only some tokens, or be summed over ranks.
    """
    lists = {block.rsplit(".", 2)[0] for block in blocks}
    names = plain_names(model)
    hidden = model.config.get_text_config().hidden_size
    for name, parameter in model.named_parameters():
        match = _BLOCK.match(name)
        if parameter.ndim < 2 or match is None or name in cuts:
            continue
        inside = match[0] in blocks
        is_factor = bool(names[name][1])
        by_head = not is_matrix(name, parameter.ndim)  # a norm with a row for each head
        if inside and not by_head and (parameter.shape[-2] != hidden or is_factor):
            continue
        if inside or match[0].rsplit(".", 2)[0] in lists:
            raise IncompatibleError(
                f"transformers' plan leaves {name if inside else match[0]} whole, which tensor parallelism does not support",
                have=f"{name} {tuple(parameter.shape)} in {model.config.model_type}",
                want="a plan that cuts every block of a layer, and all in it that adds to its output",
                do="set engine.tensor_parallel=1",
            )


def _layer_cuts(
    model: PreTrainedModel, plan: Mapping[str, str], rank: int, ranks: int
) -> Iterator[tuple[str, ShardRule]]:
    names = plain_names(model)
    for name, parameter in model.named_parameters():
        plain, factor = names[name]
        pattern = re.sub(r"\.\d+\.", ".*.", plain.removeprefix(f"{model.base_model_prefix}."))
        style = plan.get(pattern) or plan.get(pattern.rpartition(".")[0], "")
        if style not in _STYLES:
            continue
        dim, joined = _STYLES[style]
        if (factor, dim) in _WHOLE_FACTORS:
            continue
        if parameter.ndim == 1 and dim == -1:
            raise IncompatibleError(
                f"{name} is added to a sum over ranks, which tensor parallelism does not support",
                have=f"{model.config.model_type} with this bias",
                want="output projections without bias",
                do="set engine.tensor_parallel=1",
            )
        dim = dim % parameter.ndim if parameter.ndim > 1 else 0
        yield name, ShardRule.of(parameter.shape[dim], dim, rank, ranks, joined)


def _gather_tokens(
    group: ProcessGroup, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gather hidden states [1, own tokens, H] before a block."""
    if args:
        return (all_gather_rows(args[0][0], group)[None], *args[1:]), options
    hidden = all_gather_rows(options["hidden_states"][0], group)[None]
    return args, options | {"hidden_states": hidden}


def _scatter_output(group: ProcessGroup, _: nn.Module, __: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return reduce_scatter_rows(output[0][0], group)[None], *output[1:]
    return reduce_scatter_rows(output[0], group)[None]


def sum_over(group: ProcessGroup, gradients: list[Tensor]) -> None:
    """Add up gradients of one dtype over a group, in place. Collective."""
    if not gradients:
        return
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(joined, group=group)
    parts = torch.split(joined, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))

"""Canonical names: of which tensors of a Hugging Face checkpoint Megatron's parameters on a rank are made.

Megatron keeps q, k and v of a query group together, gate above up, pads the vocabulary, and cuts all
of that over tensor ranks. Each parameter is described as `Region`s: boxes of checkpoint tensors
that lie in it. Padding belongs to nobody. Pure arithmetic on names and shapes.

Left out: who holds which layers and experts, and their memory (`burnish.engines.megatron.distributed_optimizer`);
experts that are kept transposed in one parameter (Megatron's legacy grouped experts).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from burnish.boxes.box import Box, intersect, whole
from burnish.errors import IncompatibleError
from burnish.families import ModelSizes
from burnish.models.names import Region

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place among those that share matrices."""

    rank: int = 0
    """Its number among them."""
    ranks: int = 1
    """How many they are."""


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_SAME = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}
# Parameters of a layer that are a checkpoint tensor and whole on every tensor rank. Where a norm is
# fused with the matrix behind it, its weight is the matrix's.

IN_LAYER = (
    *_SAME,
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_proj.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.router.weight",
)
"""What a layer's parameters may be called, but for experts'."""
OUTSIDE_LAYERS = (
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
    "score.weight",
    "score.bias",
)
"""What all others are called; `score` is the head of a critic or a reward model, in the place of the output layer."""


def regions_of(
    parameter: str, shape: Shape, sizes: ModelSizes, tensor: Seat, expert: Seat
) -> tuple[Region, ...]:
    """The checkpoint tensors in a rank's part of a Megatron parameter, by tensor and within it ascending.

    `parameter` is Megatron's name with layers and experts counted over the whole model, experts always
    as `mlp.experts.local_experts.N.linear_fc1.weight`; `shape` is that of the rank's part. `tensor`
    cuts all but experts, which `expert` cuts. Raises `IncompatibleError` for a parameter that no
    checkpoint tensor is known for.
    """
    layer = _LAYER.fullmatch(parameter)
    if layer is None:
        return _outside_layers(parameter, shape, sizes, tensor)
    prefix, rest = f"model.layers.{layer[1]}", layer[2]
    of_expert = _EXPERT.fullmatch(rest)
    if of_expert is not None:
        at = f"{prefix}.{sizes.family.experts_module}.experts.{of_expert[1]}"
        return _gated(parameter, shape, at, of_expert[2], sizes.family.expert_projections, expert)
    if rest in _SAME:
        return (_band(f"{prefix}.{_SAME[rest]}", parameter, shape),)
    if rest == "mlp.router.weight":
        return (_band(f"{prefix}.{sizes.family.experts_module}.gate.weight", parameter, shape),)
    if rest.startswith("self_attention.linear_qkv."):
        kind = rest.rpartition(".")[2]
        return _by_group(parameter, shape, f"{prefix}.self_attn", kind, sizes, tensor)
    if rest == "self_attention.linear_proj.weight":
        return (_columns(f"{prefix}.self_attn.o_proj.weight", parameter, shape, tensor),)
    if rest.startswith("mlp."):
        names = ("gate_proj", "up_proj", "down_proj")
        return _gated(parameter, shape, f"{prefix}.mlp", rest.removeprefix("mlp."), names, tensor)
    raise _unknown(parameter)


def stacked(parts: Iterable[tuple[Region, ...]]) -> tuple[Region, ...]:
    """What lies in a parameter whose first dim numbers parts, of which `regions_of` tells."""
    return tuple(
        replace(
            region,
            box=Box((number, *region.box.offsets), (1, *region.box.sizes)),
            dims=tuple(dim + 1 for dim in region.dims),
        )
        for number, regions in enumerate(parts)
        for region in regions
    )


def _outside_layers(
    parameter: str, shape: Shape, sizes: ModelSizes, tensor: Seat
) -> tuple[Region, ...]:
    embeddings = "model.embed_tokens.weight"
    if parameter == "decoder.final_layernorm.weight":
        return (_band("model.norm.weight", parameter, shape),)
    if parameter in ("score.weight", "score.bias"):
        return (_band(parameter, parameter, shape),)
    if parameter == "embedding.word_embeddings.weight":
        return _of_vocabulary(embeddings, parameter, shape, sizes, tensor)
    if parameter == "output_layer.weight":
        name = embeddings if sizes.tied else "lm_head.weight"
        return _of_vocabulary(name, parameter, shape, sizes, tensor)
    raise _unknown(parameter)


def _of_vocabulary(
    name: str, parameter: str, shape: Shape, sizes: ModelSizes, tensor: Seat
) -> tuple[Region, ...]:
    """The rows that stand for tokens; those behind them are padding."""
    start = tensor.rank * shape[0]
    rows = min(shape[0], sizes.vocabulary - start)
    if rows <= 0:
        return ()
    return (_band(name, parameter, shape, (0, rows), start, sizes.vocabulary),)


def _by_group(
    parameter: str, shape: Shape, prefix: str, kind: str, sizes: ModelSizes, tensor: Seat
) -> tuple[Region, ...]:
    """q, k and v: for each group the queries of its heads, then its keys, then its values; of all that an equal run of rows.

    Where there are more ranks than groups, a rank's rows begin and end within one.
    """
    dim, own = sizes.head_dim, Box((tensor.rank * shape[0],), (shape[0],))
    queries = sizes.heads // sizes.key_heads * dim
    each = queries + 2 * dim
    groups = range(
        own.offsets[0] // each, min(-(-(own.offsets[0] + shape[0]) // each), sizes.key_heads)
    )
    found = []
    for letter, first, rows in (("q", 0, queries), ("k", queries, dim), ("v", queries + dim, dim)):
        name = f"{prefix}.{letter}_proj.{kind}"
        for number in groups:
            start = number * each + first
            common = intersect(own, Box((start,), (rows,)))
            if common is None:
                continue
            (at,), (count,) = common.offsets, common.sizes
            band, of_tensor = (at - own.offsets[0], count), number * rows + at - start
            found.append(_band(name, parameter, shape, band, of_tensor, sizes.key_heads * rows))
    return tuple(found)


def _gated(
    parameter: str, shape: Shape, prefix: str, rest: str, names: tuple[str, str, str], seat: Seat
) -> tuple[Region, ...]:
    """The matrices of a gated layer: gate above up in the first, the second cut by columns."""
    gate, up, down = names
    if rest == "linear_fc2.weight":
        return (_columns(f"{prefix}.{down}.weight", parameter, shape, seat),)
    if rest not in ("linear_fc1.weight", "linear_fc1.bias"):
        raise _unknown(parameter)
    kind, rows = rest.rpartition(".")[2], shape[0] // 2
    return tuple(
        _band(
            f"{prefix}.{name}.{kind}",
            parameter,
            shape,
            (half * rows, rows),
            seat.rank * rows,
            seat.ranks * rows,
        )
        for half, name in enumerate((gate, up))
    )


def _band(
    name: str,
    parameter: str,
    shape: Shape,
    band: tuple[int, int] | None = None,
    start: int = 0,
    total: int | None = None,
) -> Region:
    """Some rows of a parameter (first, count; all when not given), as those from `start` on of a tensor with `total`."""
    first, count = band or (0, shape[0])
    rest = shape[1:]
    zeros = (0,) * len(rest)
    return Region(
        name,
        (count if total is None else total, *rest),
        parameter,
        Box((first, *zeros), (count, *rest)),
        tuple(range(len(shape))),
        (start, *zeros),
    )


def _columns(name: str, parameter: str, shape: Shape, seat: Seat) -> Region:
    """All of a matrix that is this rank's columns of a tensor."""
    rows, columns = shape
    total = (rows, columns * seat.ranks)
    return Region(name, total, parameter, whole(shape), (0, 1), (0, columns * seat.rank))


def _unknown(parameter: str) -> IncompatibleError:
    return IncompatibleError(
        f"Megatron's parameter {parameter} has no counterpart in a Hugging Face checkpoint that is known here",
        want="the parameters of a Llama-shaped model",
        do="train this model with engine.kind=torch",
    )

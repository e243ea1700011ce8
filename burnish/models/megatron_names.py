"""Find the tensors of a Hugging Face checkpoint in Megatron's parameters on a rank.

Megatron keeps q, k and v of a query group together, stacks gate above up, pads the vocabulary, and cuts
the result over tensor ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from burnish.boxes.box import Box
from burnish.errors import IncompatibleError
from burnish.families import ModelSizes
from burnish.models.names import Region
from burnish.models.parts import ShardRule, cut_regions

_Shape = tuple[int, ...]
_Span = tuple[int, int, int, int]
"""A run of indices along one dim: its start and size in the uncut parameter, its start in the checkpoint tensor, that tensor's size."""


class MegatronSlot(NamedTuple):
    """A rank's place among the ranks that share matrices."""

    rank: int = 0
    ranks: int = 1


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")

IN_LAYER = {
    "input_layernorm.weight": ("whole", "{norms[0]}.weight"),
    "self_attention.linear_qkv.layer_norm_weight": ("whole", "{norms[0]}.weight"),
    "self_attention.q_layernorm.weight": ("heads", "self_attn.{queries[0]}.weight"),
    "self_attention.k_layernorm.weight": ("heads", "self_attn.{queries[1]}.weight"),
    "self_attention.core_attention.q_layernorm.weight": ("heads", "self_attn.{queries[0]}.weight"),
    "self_attention.core_attention.k_layernorm.weight": ("heads", "self_attn.{queries[1]}.weight"),
    "self_attention.linear_qkv.weight": ("qkv", "self_attn.{qkv}.weight"),
    "self_attention.linear_qkv.bias": ("qkv", "self_attn.{qkv}.bias"),
    "self_attention.linear_q_proj.weight": ("rows", "self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": ("whole", "self_attn.q_a_proj.weight"),
    "self_attention.linear_q_down_proj.bias": ("whole", "self_attn.q_a_proj.bias"),
    "self_attention.linear_q_up_proj.weight": ("rows", "self_attn.q_b_proj.weight"),
    "self_attention.in_proj.layer_norm_weight": ("whole", "{norms[0]}.weight"),
    "self_attention.linear_q_up_proj.layer_norm_weight": (
        "whole",
        "self_attn.q_a_layernorm.weight",
    ),
    "self_attention.linear_kv_down_proj.weight": ("whole", "self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.linear_kv_down_proj.bias": ("whole", "self_attn.kv_a_proj_with_mqa.bias"),
    "self_attention.kv_layernorm.weight": ("whole", "self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": ("rows", "self_attn.kv_b_proj.weight"),
    "self_attention.linear_kv_up_proj.layer_norm_weight": (
        "whole",
        "self_attn.kv_a_layernorm.weight",
    ),
    "self_attention.core_attention.softmax_offset": ("rows", "self_attn.sinks"),
    "self_attention.linear_proj.weight": ("columns", "self_attn.o_proj.weight"),
    "self_attention.linear_proj.bias": ("whole", "self_attn.o_proj.bias"),
    "self_attn_bda.norm.weight": ("whole", "{norms[1]}.weight"),
    "self_attention.linear_proj.post_layernorm.weight": ("whole", "{norms[1]}.weight"),
    "post_self_attn_layernorm.weight": ("whole", "{norms[1]}.weight"),
    "pre_mlp_layernorm.weight": ("whole", "{norms[2]}.weight"),
    "mlp.linear_fc1.layer_norm_weight": ("whole", "{norms[2]}.weight"),
    "mlp.linear_fc1.weight": ("gated", "mlp.{part}.weight"),
    "mlp.linear_fc1.bias": ("gated", "mlp.{part}.bias"),
    "mlp.linear_fc2.weight": ("columns", "mlp.{part}.weight"),
    "mlp.linear_fc2.bias": ("whole", "mlp.{part}.bias"),
    "mlp.router.weight": ("whole", "mlp.{router}.weight"),
    "mlp.router.bias": ("whole", "mlp.{router}.bias"),
    "mlp.router.expert_bias": ("whole", "mlp.{bias}"),
    "mlp.shared_experts.linear_fc1.weight": ("gated", "mlp.{shared}.{part}.weight"),
    "mlp.shared_experts.linear_fc2.weight": ("columns", "mlp.{shared}.{part}.weight"),
    "mlp.shared_experts.gate_weight": ("whole", "mlp.{shared}_gate.weight"),
    "mlp.shared_experts.gate.weight": ("whole", "mlp.{shared}_gate.weight"),
    "mlp_bda.norm.weight": ("whole", "{norms[3]}.weight"),
    "mlp.linear_fc2.post_layernorm.weight": ("whole", "{norms[3]}.weight"),
    "post_mlp_layernorm.weight": ("whole", "{norms[3]}.weight"),
}
"""A layer's parameters except experts: how tensor ranks cut each, and the checkpoint tensors in it.

A norm that is fused with the matrix behind it is named after the matrix. Megatron-Bridge has two names for norms behind a block. The gate of a shared expert has Megatron's name and this engine's. An expert's matrices are cut like those of a dense MLP.
"""
OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": ("vocabulary", "model.embed_tokens.weight"),
    "decoder.final_layernorm.weight": ("whole", "model.norm.weight"),
    "output_layer.weight": ("vocabulary", "lm_head.weight"),
    "score.weight": ("whole", "score.weight"),
    "score.bias": ("whole", "score.bias"),
}
"""All others; `score` is the head of a critic or a reward model, in the place of the output layer."""


def regions_of(
    parameter: str, shape: _Shape, sizes: ModelSizes, tensor: MegatronSlot, expert: MegatronSlot
) -> tuple[Region, ...]:
    """Return the checkpoint tensors in a rank's part of a Megatron parameter, by tensor, then ascending.

    `parameter` counts layers and experts over the whole model, experts always as
    `mlp.experts.local_experts.N.linear_fc1.weight`; `shape` is that of the rank's part. `expert` cuts
    experts, `tensor` all else. Raises `IncompatibleError` for an unknown parameter.
    """
    layer = _LAYER.fullmatch(parameter)
    prefix = ""
    seat = tensor
    family = sizes.family
    projections = family.projections
    if layer is None:
        cut, name = OUTSIDE_LAYERS.get(parameter, ("", ""))
        if parameter == "output_layer.weight" and sizes.tied:
            cut, name = OUTSIDE_LAYERS["embedding.word_embeddings.weight"]
    else:
        prefix = f"model.layers.{layer[1]}."
        rest = layer[2]
        module = family.experts_module
        if of_expert := _EXPERT.fullmatch(rest):
            rest = f"mlp.{of_expert[2]}"
            seat = expert
            projections = family.expert_projections
            module = f"{module}.experts.{of_expert[1]}"
        # Megatron's stacked experts are not those of a checkpoint: gate is above up.
        known = not (of_expert and family.stacks_experts)
        cut, name = IN_LAYER.get(rest, ("", "")) if known else ("", "")
        if of_expert or rest.startswith("mlp.router."):
            name = name.replace("mlp", module, 1)
    absent = {"{shared}": not family.shared_expert, "{bias}": not family.router_bias}
    if not cut or any(part in name and absent[part] for part in absent):
        raise IncompatibleError(
            f"Burnish does not know the Hugging Face name of Megatron's parameter {parameter}",
            want="the parameters of a model that the Megatron engine computes",
            do="train this model with engine.kind=torch",
        )
    if cut == "heads":  # a norm of all heads together has a weight for each head
        cut = "rows" if family.query_norms == "full" else "whole"

    def named(part: str) -> str:
        return name.format(
            part=part,
            norms=family.block_norms,
            queries=family.query_norm_names,
            shared=family.shared_expert,
            bias=family.router_bias,
            router=family.router_module,
            qkv=family.qkv_name.format(part=part),
        )

    seat = MegatronSlot() if cut == "whole" else seat
    dim = int(cut == "columns")
    halves = 2 if cut == "gated" else 1
    size = shape[dim] * seat.ranks
    if cut == "qkv":
        gated = size == 2 * (sizes.query + sizes.key)
        of_groups = _gated_by_group(sizes) if gated else _by_group(sizes)
        spans = [(named(letter), span) for letter, span in of_groups]
    elif cut == "gated":  # gate above up, in two tensors or in one
        rows, (gate, up, _) = size // 2, projections
        start, count = (rows, size) if gate == up else (0, rows)
        spans = [(named(gate), (0, rows, 0, count)), (named(up), (rows, rows, start, count))]
    else:  # rows after those of tokens are padding
        count = sizes.vocabulary if cut == "vocabulary" else size
        spans = [(named(projections[2]), (0, count, 0, count))]
    regions = [_region(prefix + each, parameter, shape, dim, span) for each, span in spans]
    return cut_regions(regions, {parameter: ShardRule.of(size, dim, *seat, halves)})


STACKED = {
    "linear_fc1.weight": (2, "gate_up_proj"),
    "linear_fc1.bias": (1, "gate_up_proj_bias"),
    "linear_fc2.weight": (1, "down_proj"),
    "linear_fc2.bias": (1, "down_proj_bias"),
}
"""Parameters of stacked experts: the dim that ranks divide, and the checkpoint tensor."""


def stacked_experts(
    parameter: str, shape: _Shape, first: int, sizes: ModelSizes, expert: MegatronSlot
) -> tuple[Region, ...]:
    """Return the checkpoint tensor in a rank's part of a layer's experts, where `Family.stacks_experts`.

    `parameter` is as `decoder.layers.N.mlp.experts.linear_fc1.weight`, `shape` that of the rank's part, which begins with expert `first`.
    """
    layer, _, matrix = parameter.partition(".mlp.experts.")
    dim, name = STACKED[matrix]
    start = [first, *(0 for _ in shape[1:])]
    start[dim] = shape[dim] * expert.rank
    total = [sizes.experts, *shape[1:]]
    total[dim] *= expert.ranks
    prefix = f"model.layers.{layer.rpartition('.')[2]}.{sizes.family.experts_module}.experts."
    box = Box((0,) * len(shape), shape)
    dims = tuple(range(len(shape)))
    return (Region(prefix + name, tuple(total), parameter, box, dims, tuple(start)),)


def stacked(parts: Iterable[tuple[Region, ...]]) -> tuple[Region, ...]:
    """Return the tensors in a parameter whose first dim stacks `parts`."""
    return tuple(
        replace(
            region,
            box=Box((number, *region.box.offsets), (1, *region.box.sizes)),
            dims=tuple(dim + 1 for dim in region.dims),
        )
        for number, regions in enumerate(parts)
        for region in regions
    )


def _by_group(sizes: ModelSizes) -> Iterator[tuple[str, _Span]]:
    """Yield the rows of q, k and v in each query group."""
    dim = sizes.head_dim
    queries = sizes.heads // sizes.key_heads * dim
    in_one_tensor = "{part}" not in sizes.family.qkv_name
    for letter, first, rows in (("q", 0, queries), ("k", queries, dim), ("v", queries + dim, dim)):
        before = sizes.key_heads * first if in_one_tensor else 0
        total = sizes.key_heads * (queries + 2 * dim if in_one_tensor else rows)
        for group in range(sizes.key_heads):
            at = group * (queries + 2 * dim) + first
            yield letter, (at, rows, before + group * rows, total)


def _gated_by_group(sizes: ModelSizes) -> Iterator[tuple[str, _Span]]:
    """Yield the same where each query head is followed by its gate. In a group, Megatron has the gates after all queries."""
    dim = sizes.head_dim
    heads = sizes.heads // sizes.key_heads
    width = 2 * (heads + 1) * dim
    for head in range(sizes.heads):
        group, number = divmod(head, heads)
        for half in range(2):
            at = group * width + (half * heads + number) * dim
            yield "q", (at, dim, (2 * head + half) * dim, 2 * sizes.query)
    for number, letter in enumerate("kv"):
        for group in range(sizes.key_heads):
            at = group * width + (2 * heads + number) * dim
            yield letter, (at, dim, group * dim, sizes.key)


class MixerSizes(NamedTuple):
    """Heads of Gated DeltaNet, and their widths."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def rows(self, part: str) -> int:
        """Return the rows of a part of the input's projections for a key head."""
        values = self.value_heads // self.key_heads
        of_values = {"value": self.value_dim, "z": self.value_dim, "beta": 1, "alpha": 1}
        return values * of_values[part] if part in of_values else self.key_dim


_MIXER = "self_attention."
_WHOLE_IN_MIXER = {
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "out_norm.weight": "norm.weight",
    "out_proj.weight": "out_proj.weight",
}
_QKV = ("query", "key", "value")
_PARTS_OF_MIXER = {
    "in_proj_qkvz.weight": ("in_proj", (*_QKV, "z"), True),
    "in_proj_ba.weight": ("in_proj", ("beta", "alpha"), True),
    "in_proj_qkv.weight": ("in_proj", _QKV, False),
    "in_proj_z.weight": ("in_proj", ("z",), False),
    "in_proj_b.weight": ("in_proj", ("beta",), False),
    "in_proj_a.weight": ("in_proj", ("alpha",), False),
    "conv1d.weight": ("conv1d", _QKV, False),
}
"""By checkpoint tensor: Megatron's module, the parts of its weight, and whether these take turns by key head. No model has all."""
MIXER_PARAMETERS = (
    *(f"{_MIXER}{name}" for name in _WHOLE_IN_MIXER),
    *(f"{_MIXER}in_proj.weight.{part}" for part in (*_QKV, "z", "beta", "alpha")),
    *(f"{_MIXER}conv1d.weight.{part}" for part in _QKV),
)
"""A layer's parameters of Megatron's own Gated DeltaNet, as it saves them: each part of a weight by itself, uncut."""


def mixer_regions(
    parameter: str, shape: _Shape, mixer: MixerSizes, canonical: Mapping[str, _Shape]
) -> tuple[Region, ...]:
    """Return the checkpoint tensors in an uncut parameter of Megatron's Gated DeltaNet, such as `decoder.layers.0.self_attention.A_log`.

    `canonical` has the shapes of the model's tensors. No tensor: the parameter has another shape than this model's, or is none of them.
    """
    layer = _LAYER.fullmatch(parameter)
    if layer is None or not layer[2].startswith(_MIXER):
        return ()
    prefix = f"model.layers.{layer[1]}.linear_attn."
    name = layer[2].removeprefix(_MIXER)
    if name in _WHOLE_IN_MIXER:
        tensor = prefix + _WHOLE_IN_MIXER[name]
        if canonical.get(tensor) != shape:
            return ()
        return (_region(tensor, parameter, shape, 0, (0, shape[0], 0, shape[0])),)
    owner, _, part = name.partition(".weight.")
    for tensor, (module, parts, by_head) in _PARTS_OF_MIXER.items():
        whole = canonical.get(prefix + tensor)
        if whole is None or module != owner or part not in parts:
            continue
        heads = mixer.key_heads if by_head else 1
        rows = mixer.rows(part) * mixer.key_heads // heads
        before = sum(map(mixer.rows, parts[: parts.index(part)])) * mixer.key_heads // heads
        if shape != (rows * heads, *whole[1:]):
            return ()
        period = whole[0] // heads
        spans = ((head * rows, rows, head * period + before, whole[0]) for head in range(heads))
        return tuple(_region(prefix + tensor, parameter, shape, 0, span) for span in spans)
    return ()


def _region(name: str, parameter: str, shape: _Shape, dim: int, span: _Span) -> Region:
    def along(index: int, others: _Shape) -> _Shape:
        return (*others[:dim], index, *others[dim + 1 :])

    first, count, start, total = span
    zeros = (0,) * len(shape)
    box = Box(along(first, zeros), along(count, shape))
    dims = tuple(range(len(shape)))
    return Region(name, along(total, shape), parameter, box, dims, along(start, zeros))

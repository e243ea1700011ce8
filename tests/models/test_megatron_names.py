"""Canonical names and boxes: parameters made the way Megatron fuses and cuts give back the checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from support.models.tiny import VOCAB, tiny_config, tiny_model
from torch import Tensor
from transformers import PretrainedConfig

from burnish.boxes.box import Box, whole
from burnish.errors import IncompatibleError
from burnish.models.megatron_names import MegatronSlot, regions_of, stacked
from burnish.models.meta_init import build_on_meta, model_sizes
from burnish.models.names import model_shards, tensor_specs

PADDED = 128
FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "youtu")


def checkpoint(family: str, **changes: object) -> dict[str, Tensor]:
    """A model's tensors by the names on disk."""
    model = tiny_model(family, **changes)
    return {shard.spec.name: shard.tensor for shard in model_shards(model)}


def fused(
    held: Mapping[str, Tensor], config: PretrainedConfig, seat: MegatronSlot
) -> Iterator[tuple[str, Tensor]]:
    """A rank's Megatron parameters as its layers lay them out, by hand from the checkpoint's tensors."""

    def rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(seat.ranks, 0)[seat.rank]

    def columns(name: str) -> Tensor:
        return held[name].chunk(seat.ranks, 1)[seat.rank]

    def padded(name: str) -> Tensor:
        tensor = held[name]
        return rows(torch.cat([tensor, tensor.new_full((PADDED - VOCAB, tensor.shape[1]), -7)]))

    yield "embedding.word_embeddings.weight", padded("model.embed_tokens.weight")
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    yield "output_layer.weight", padded(head)
    yield "decoder.final_layernorm.weight", held["model.norm.weight"]
    groups = config.num_key_value_heads
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            names = [f"{theirs}.self_attn.{letter}_proj.{kind}" for letter in "qkv"]
            if names[1] in held:
                parts = [held[name].chunk(groups, 0) for name in names]
                qkv = torch.cat([part[g] for g in range(groups) for part in parts])
                yield f"{ours}.self_attention.linear_qkv.{kind}", rows(qkv)
        yield (
            f"{ours}.self_attention.linear_proj.weight",
            columns(f"{theirs}.self_attn.o_proj.weight"),
        )
        yield from latents(held, layer, rows)
        for mine, name in (
            ("input_layernorm", "input_layernorm"),
            ("pre_mlp_layernorm", "post_attention_layernorm"),
            ("self_attention.q_layernorm", "self_attn.q_norm"),
            ("self_attention.k_layernorm", "self_attn.k_norm"),
            ("mlp.router", "mlp.gate"),
            ("mlp.router", "block_sparse_moe.gate"),
        ):
            if f"{theirs}.{name}.weight" in held:
                yield f"{ours}.{mine}.weight", held[f"{theirs}.{name}.weight"]
        for mine, name, gated in blocks(held, theirs):
            gate, up, down = (f"{theirs}.{name}.{each}.weight" for each in gated)
            both = torch.cat([rows(held[gate]), rows(held[up])])
            yield f"{ours}.{mine}.linear_fc1.weight", both
            yield f"{ours}.{mine}.linear_fc2.weight", columns(down)


def latents(
    held: Mapping[str, Tensor], layer: int, rows: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    ours, theirs = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
    for mine, name, is_cut in (
        ("linear_q_down_proj", "q_a_proj", False),
        ("linear_q_up_proj", "q_b_proj", True),
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", False),
        ("linear_kv_up_proj", "kv_b_proj", True),
        ("q_layernorm", "q_a_layernorm", False),
        ("kv_layernorm", "kv_a_layernorm", False),
    ):
        if f"{theirs}.{name}.weight" in held:
            weight = held[f"{theirs}.{name}.weight"]
            yield f"{ours}.{mine}.weight", rows(weight) if is_cut else weight
    for mine, name in (
        ("linear_q_down_proj", "q_a_proj"),
        ("linear_kv_down_proj", "kv_a_proj_with_mqa"),
        ("linear_proj", "o_proj"),
    ):
        if f"{theirs}.{name}.bias" in held:
            yield f"{ours}.{mine}.bias", held[f"{theirs}.{name}.bias"]


def blocks(
    held: Mapping[str, Tensor], layer: str
) -> Iterator[tuple[str, str, tuple[str, str, str]]]:
    projections = ("gate_proj", "up_proj", "down_proj")
    if f"{layer}.mlp.gate_proj.weight" in held:
        yield "mlp", "mlp", projections
    for expert in range(4):
        mine = f"mlp.experts.local_experts.{expert}"
        if f"{layer}.mlp.experts.{expert}.gate_proj.weight" in held:
            yield mine, f"mlp.experts.{expert}", projections
        if f"{layer}.block_sparse_moe.experts.{expert}.w1.weight" in held:
            yield mine, f"block_sparse_moe.experts.{expert}", ("w1", "w3", "w2")


@pytest.mark.parametrize("ranks", [1, 2, 4])  # 4: more than groups of heads
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_all_ranks_are_the_checkpoint(family: str, ranks: int) -> None:
    """Name for name, shape for shape, value for value; padding is nobody's."""
    config = tiny_config(family)
    held, sizes = checkpoint(family), model_sizes(config)
    built: dict[str, Tensor] = {}
    for rank in range(ranks):
        seat = MegatronSlot(rank, ranks)
        for parameter, tensor in fused(held, config, seat):
            for region in regions_of(parameter, tuple(tensor.shape), sizes, seat, seat):
                whole = built.setdefault(region.name, torch.full(region.shape, torch.nan))
                part = tuple(
                    slice(start, start + size)
                    for start, size in zip(region.start, region.box.sizes, strict=True)
                )
                whole[part] = tensor[region.box.slices]
    specs = {spec.name: spec.shape for spec in tensor_specs(build_on_meta(config))}
    assert {name: tuple(tensor.shape) for name, tensor in built.items()} == specs
    for name, tensor in built.items():
        assert torch.equal(tensor, held[name]), name


def test_norms_of_latents_may_be_fused_with_the_matrix_behind_them() -> None:
    """As Megatron with TransformerEngine saves them."""
    sizes = model_sizes(tiny_config("youtu"))
    slots = MegatronSlot(), MegatronSlot()
    for letter, matrix in (("q", "linear_q_up_proj"), ("kv", "linear_kv_up_proj")):
        name = f"decoder.layers.1.self_attention.{matrix}.layer_norm_weight"
        (region,) = regions_of(name, (12,), sizes, *slots)
        assert region.name == f"model.layers.1.self_attn.{letter}_a_layernorm.weight"


def test_experts_of_one_parameter_are_boxes_of_it() -> None:
    """Gate above up of one expert after the other, in a parameter that a rank shares with another."""
    sizes = model_sizes(tiny_config("qwen3_moe"))
    names = [f"decoder.layers.0.mlp.experts.local_experts.{n}.linear_fc1.weight" for n in (2, 3)]
    parts = [
        regions_of(name, (24, 32), sizes, MegatronSlot(), MegatronSlot(1, 2)) for name in names
    ]
    found = {region.name: region for region in stacked(parts)}
    up = found["model.layers.0.mlp.experts.3.up_proj.weight"]
    assert (up.box.offsets, up.box.sizes, up.dims) == ((1, 12, 0), (1, 12, 32), (1, 2))
    assert (up.shape, up.start) == ((24, 32), (12, 0))
    held = torch.arange(2 * 24 * 32).view(2, 24, 32)
    shard = up.shard_of(held, whole((2, 24, 32)))
    assert shard is not None
    assert shard.box == Box((12, 0), (12, 32))
    assert torch.equal(shard.tensor, held[1, 12:])


def test_experts_are_cut_by_their_own_seat() -> None:
    sizes = model_sizes(tiny_config("qwen3_moe"))
    name = "decoder.layers.5.mlp.experts.local_experts.3.linear_fc2.weight"
    (region,) = regions_of(name, (32, 12), sizes, MegatronSlot(0, 4), MegatronSlot(1, 2))
    assert region.name == "model.layers.5.mlp.experts.3.down_proj.weight"
    assert region.shape == (32, 24)
    assert region.start == (0, 12)


def test_a_rank_of_padding_alone_holds_nothing() -> None:
    sizes = model_sizes(tiny_config("llama"))
    name = "embedding.word_embeddings.weight"
    assert regions_of(name, (50, 32), sizes, MegatronSlot(1, 3), MegatronSlot())[0].box.sizes == (
        47,
        32,
    )
    assert regions_of(name, (50, 32), sizes, MegatronSlot(2, 3), MegatronSlot()) == ()


@pytest.mark.parametrize(
    "name",
    [
        "embedding.position_embeddings.weight",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.0.mlp.router.expert_bias",
        "decoder.layers.0.mixer.in_proj.weight",
    ],
)
def test_an_unknown_parameter_is_refused_by_name(name: str) -> None:
    with pytest.raises(IncompatibleError, match=name):
        regions_of(name, (8, 8), model_sizes(tiny_config("llama")), MegatronSlot(), MegatronSlot())

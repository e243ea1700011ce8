"""What a rank holds while it saves, beside the plan that a save makes for such tensors."""

import pytest
import torch
from transformers import AutoConfig

from burnish.boxes.box import Box
from burnish.boxes.pieces import PieceTable
from burnish.boxes.shards import TensorSpec
from burnish.checkpoint.write_plan import Outline, PlannedSection
from burnish.config.schema import LoraConfig
from burnish.distributed.host_memory import Arena
from burnish.families import ModelShape
from burnish.models.lora.adapter import Adapter
from burnish.models.meta_init import build_on_meta
from burnish.plan.model import PlannedModel
from burnish.plan.saving import save_buffers

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
SETS = {
    "model": torch.bfloat16,
    "residual": torch.int16,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}


def piece(name, shape, rank, shards, tensor):
    """The rows or columns of a tensor rank, and of these the rows of FSDP's rank."""
    offsets, sizes = [0] * len(shape), list(shape)
    if len(shape) > 1 and tensor > 1:
        dim = int(name.endswith(("o_proj.weight", "down_proj.weight")))
        sizes[dim] //= tensor
        offsets[dim] = rank % tensor * sizes[dim]
    sizes[0] //= shards
    offsets[0] += rank // tensor % shards * sizes[0]
    return Box(tuple(offsets), tuple(sizes))


def held(shapes, world, replicas, tensor):
    """Bytes of host memory that the fullest rank takes for the groups and messages of a real plan."""
    shards = world // replicas // tensor
    tables = [
        PieceTable.of(
            (TensorSpec(f"{kind}/{name}", shape, dtype), piece(name, shape, rank, shards, tensor))
            for name, shape in shapes.items()
            for kind, dtype in SETS.items()
        )
        for rank in range(world)
    ]
    outline = Outline.of((table.tensors for table in tables), [""])
    most = 0
    for share in outline.shares(tables, PlannedSection(slice(None)), world, range(world)):
        arena = Arena(torch.device("cpu"))
        group = max(sum(span.stop - span.start for span in spans) for spans in share.spans)
        waves = [wave for moves in share.moves for wave in moves.waves]
        messages = max((sum(move.bytes for move in wave) for wave in waves), default=0)
        taken = [arena.take(size) for size in (group, group, messages)]
        most = max(most, arena.held)
        del taken
    return most


@pytest.mark.parametrize("words", [2048, 16384])
@pytest.mark.parametrize(
    ("world", "replicas", "tensor"),
    [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1), (4, 2, 1), (4, 1, 2), (8, 1, 8)],
)
def test_groups_and_messages_are_those_of_a_save(words, world, replicas, tensor):
    config = AutoConfig.for_model("llama", vocab_size=words, **SIZES)
    shapes = {name: tuple(p.shape) for name, p in build_on_meta(config).named_parameters()}
    model = PlannedModel(ModelShape.of(config.to_dict()))
    planned = save_buffers([model], world, replicas, tensor)
    assert planned == pytest.approx(held(shapes, world, replicas, tensor), rel=0.15)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("rank", [4, 16, 64, 256])
def test_groups_and_messages_of_adapters(rank, world):
    config = AutoConfig.for_model("llama", vocab_size=2048, **SIZES)
    lora = LoraConfig(rank=rank)
    shapes = Adapter(build_on_meta(config), lora).shapes
    planned = save_buffers([PlannedModel(ModelShape.of(config.to_dict()), lora)], world, 1, 1)
    assert planned == pytest.approx(held(shapes, world, 1, 1), rel=0.15)

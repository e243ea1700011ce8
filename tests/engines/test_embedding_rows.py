"""Rows of embeddings that ranks fetch from each other, against torch's embedding of the whole table in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import LR, assert_relative, cut, loss, make_examples, whole
from support.models.engines import make_engine
from support.models.tiny import VOCAB, save_tiny
from support.ranks.processes import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from burnish.config.schema import LoraConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.engines.torch.embedding_rows import EmbeddingRows
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.errors import BurnishError

SIZE, WIDTH, PADDING, SCALE = 75, 4, 70, 3.0
PASSES = 2


def tokens(rank: int, number: int) -> Tensor:
    """Of each rank other ones, and of another number: [1, C]. Some tokens are on all ranks, one is padding."""
    drawn = torch.randint(SIZE, (1, 9 + 5 * rank), generator=torch.Generator().manual_seed(number))
    return torch.cat([drawn, torch.tensor([[PADDING, SIZE - 1]])], dim=1)


def table() -> Tensor:
    return torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(1))


def weights_of(token_ids: Tensor) -> Tensor:
    """What a loss multiplies the embeddings [1, C, H] by."""
    return token_ids[..., None] * torch.arange(1.0, WIDTH + 1) / SIZE


def exchanging_rank(layout: Layout, replicas: int) -> list[tuple[tuple[range, ...], Tensor, bool]]:
    """Twice: the rows that this rank holds, their gradient after all passes, and whether the embeddings were right."""
    shape = replicas, layout.world // replicas
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shard"))
    copies = mesh["replicas"].get_group() if replicas > 1 else None
    found = []
    for _ in range(2):
        embedding = Gemma3TextScaledWordEmbedding(SIZE, WIDTH, PADDING, embed_scale=SCALE)
        rows = EmbeddingRows(embedding, mesh["shard"].get_group(), copies, layout, torch.float32)
        embedding.weight = nn.Parameter(rows.cut.of_tensor(table()))
        right = True
        for number in range(PASSES):
            token_ids = tokens(layout.rank, number)
            rows.begin(rows.plan(token_ids[0].numpy()))
            embedded = embedding(token_ids)
            right &= torch.equal(embedded, SCALE * functional.embedding(token_ids, table()))
            (embedded * weights_of(token_ids)).sum().backward()
        [parameter] = embedding.parameters()
        rows.sum_copies(parameter.grad)
        found.append((rows.cut.spans, parameter.grad, right))
        with pytest.raises(BurnishError):  # a second call in a pass would get the first one's rows
            embedding(token_ids)
        rows.begin(rows.plan(token_ids[0].numpy()))
        rows.exchanged = refuse  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no route"):
            embedding(token_ids)
        assert embedding.weight is parameter
    return found


def refuse(messages: Tensor) -> Tensor:
    raise RuntimeError("no route")


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_rows_and_gradients_are_those_of_the_whole_table(replicas: int) -> None:
    world = 3 * replicas
    every = table().requires_grad_()
    for rank in range(world):
        for number in range(PASSES):
            token_ids = tokens(rank, number)
            embedded = SCALE * functional.embedding(token_ids, every, PADDING)
            (embedded * weights_of(token_ids)).sum().backward()
    ranks = run_ranks(exchanging_rank, world, replicas)
    held = [row for [(spans, *_), _] in ranks for span in spans for row in span]
    assert sorted(held) == sorted(list(range(SIZE)) * replicas)
    for (spans, gradient, right), (_, again, _) in ranks:
        assert right
        assert len(spans) > 1
        assert torch.equal(gradient, again)
        wanted = torch.cat([every.grad[span.start : span.stop] for span in spans])
        assert_relative(gradient, wanted, 1e-6, "gradient")
        assert torch.equal(gradient == 0, wanted == 0)


def fetching_rank(
    layout: Layout, cases: Sequence[tuple[Path, dict[str, Any], LoraConfig | None]]
) -> list[tuple[bool, bool]]:
    """Whether rows are fetched, and whether the output layer is sharded apart."""
    found = []
    for path, settings, lora in cases:
        engine = make_engine(layout, path, lora=lora, **settings)
        assert isinstance(engine, TorchEngine)
        head = engine._scorer.model.get_output_embeddings()
        found.append((engine._rows is not None, isinstance(head, FSDPModule)))
        engine.close()
    return found


@pytest.mark.nightly
def test_rows_are_fetched_where_that_is_less_than_the_table(tmp_path: Path) -> None:
    own, tied, few = (
        save_tiny(tmp_path / name, "qwen3", torch.float32, tie_word_embeddings=is_tied, **sizes)
        for name, is_tied, sizes in (
            ("own", False, {}),
            ("tied", True, {}),
            ("few", False, {"vocab_size": 15}),
        )
    )
    beside = LoraConfig(rank=2, modules_to_save=["embed_tokens"])
    cases: list[tuple[Path, dict[str, Any], LoraConfig | None, tuple[bool, bool]]] = [
        (own, {}, None, (True, True)),
        (own, {"sequence_parallel": 2}, None, (True, True)),
        (own, {}, LoraConfig(rank=2), (True, True)),
        (own, {}, beside, (False, True)),
        (own, {"replicas": 2}, None, (False, True)),
        (own, {"tensor_parallel": 2}, None, (False, True)),
        (own, {"parameter_offload": True}, None, (False, True)),
        (few, {}, None, (False, True)),
        (tied, {}, None, (False, False)),
    ]
    found = run_ranks(fetching_rank, 2, [case[:3] for case in cases])
    assert found == [[case[3] for case in cases]] * 2


MOMENT = "exp_avg/model.embed_tokens.weight"


def moment_rank(layout: Layout, path: Path) -> list[tuple[str, Any, Tensor]]:
    """Its pieces of the embeddings' first moment after a step in bf16."""
    engine = make_engine(layout, path, precision="bf16")
    engine.forward_backward(cut(make_examples(VOCAB), engine.layout, 2), loss)
    engine.optim_step(LR)
    moments = (shard for shard in engine.shards(Part.TRAINING) if shard.spec.name == MOMENT)
    return [(MOMENT, shard.box, shard.tensor.clone()) for shard in moments]


@pytest.mark.nightly
def test_gradients_in_bf16_are_near_those_of_one_process(tmp_path: Path) -> None:
    """Rows travel in bf16 and are added in fp32."""
    path = save_tiny(tmp_path, "qwen3", torch.float32, tie_word_embeddings=False)
    alone, shared = (run_ranks(moment_rank, world, path) for world in (1, 2))
    [(_, box, _)] = alone[0]
    shapes = {MOMENT: box.sizes}
    found, wanted = (whole(pieces, shapes)[MOMENT] for pieces in (shared, alone))
    assert_relative(found, wanted, 2e-2, MOMENT)
    assert torch.equal(found == 0, wanted == 0)

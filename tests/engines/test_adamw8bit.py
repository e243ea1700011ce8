"""AdamW in 8 bits: torchao's own optimizer where both quantize alike, and state that comes back bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import LR, cut, loss, make_examples, whole
from ranks import run_ranks
from tiny import VOCAB, save_tiny
from torch import Tensor
from torchao.optim import AdamW8bit as TorchaoAdamW8bit
from transformers import AutoConfig

from burnish.boxes.box import Box
from burnish.boxes.box import whole as whole_box
from burnish.config.schema import EngineConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.engines.optim import adamw8bit
from burnish.engines.optim.adamw import SLOTS
from burnish.engines.optim.adamw8bit import BLOCK, SCALES, AdamW8bit, scale_regions
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.errors import UsageError, install
from burnish.models.loading import SafetensorsSource
from burnish.models.names import Cut, Region, cut_regions

CPU = torch.device("cpu")
OPTIM = OptimConfig(kind="adamw8bit", betas=(0.9, 0.95), weight_decay=0.1)


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.logspace(-1, 0, shape[-1])


def stepped(
    weights: dict[str, Tensor], steps: int, lr: float = LR
) -> tuple[AdamW8bit, dict[str, Tensor]]:
    made = {name: tensor.clone() for name, tensor in weights.items()}
    adamw = AdamW8bit(made, OPTIM)
    for step in range(1, steps + 1):
        gradients = {name: noise(*t.shape, seed=step) for name, t in made.items()}
        adamw.step(lr, step, gradients)
    return adamw, made


def test_on_whole_blocks_it_is_torchaos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw8bit, "_CHUNK_ELEMENTS", 3 * 2 * BLOCK)  # uneven chunks
    start = noise(16, 2 * BLOCK)
    theirs = torch.nn.Parameter(start.clone())
    oracle = TorchaoAdamW8bit([theirs], lr=LR, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=0.1)
    for step in range(1, 5):
        theirs.grad = noise(*start.shape, seed=step)
        with torch.compiler.set_stance("force_eager"):
            oracle.step()
    adamw, weights = stepped({"w": start}, 4)
    torch.testing.assert_close(weights["w"], theirs.detach(), rtol=2e-6, atol=1e-7)
    for slot, scale in zip(SLOTS, SCALES, strict=True):
        state = oracle.state[theirs][slot]
        codes = adamw.slots()[slot]["w"]
        assert codes.dtype == torch.uint8
        assert int((codes.int() - state.codes.int()).abs().max()) <= 1
        assert float((codes != state.codes).float().mean()) < 1e-3
        torch.testing.assert_close(adamw.scales()[scale]["w"].flatten(), state.scale)


@pytest.mark.parametrize("shape", [(3, 40), (5, 300), (2, 4, 257), (1, 1)])
def test_any_width_follows_adamw(shape: tuple[int, ...]) -> None:
    start = noise(*shape, seed=9)
    theirs = torch.nn.Parameter(start.clone())
    oracle = torch.optim.AdamW([theirs], lr=LR, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=0.1)
    for step in range(1, 5):
        theirs.grad = noise(*shape, seed=step)
        oracle.step()
    adamw, weights = stepped({"w": start}, 4)
    for slot in SLOTS:
        assert adamw.slots()[slot]["w"].shape == shape
    moved, wanted = weights["w"] - start, theirs.detach() - start
    assert float((moved - wanted).norm() / wanted.norm()) < 0.05


def test_a_weight_without_a_gradient_and_one_without_elements_stay() -> None:
    weights = {"w": noise(2, 8), "empty": torch.zeros(0, 8)}
    adamw = AdamW8bit(dict(weights), OPTIM)
    adamw.step(LR, 1, {"empty": torch.zeros(0, 8)})
    assert torch.equal(weights["w"], noise(2, 8))
    assert not adamw.scales()[SCALES[0]]["w"].any()
    assert adamw.slots()[SLOTS[0]]["empty"].shape == (0, 8)


def test_it_is_a_fourth_of_adamws_state() -> None:
    adamw = AdamW8bit({"w": torch.zeros(64, 1024)}, OPTIM)
    held = [*adamw.slots().values(), *adamw.scales().values()]
    assert sum(each["w"].nbytes for each in held) == 2 * 64 * (1024 + 4 * 4)


def test_columns_that_are_no_whole_blocks_are_refused() -> None:
    half = Region("w", (4, 2 * BLOCK), "p", whole_box((4, BLOCK)), (0, 1), start=(0, BLOCK))
    (region,) = scale_regions([half], 2)
    assert (region.shape, region.box, region.start) == ((4, 2), Box((0, 0), (4, 1)), (0, 1))
    columns = 600
    uncut = Region("w", (4, columns), "p", whole_box((4, columns)), (0, 1))
    for rank in range(2):  # also the one whose columns begin at 0
        own = cut_regions([uncut], {"p": Cut.of(columns, 1, rank, 2)})
        with pytest.raises(UsageError, match="columns of w cannot be shared out") as caught:
            scale_regions(own, 2)
        assert "column 300" in str(caught.value)
    assert scale_regions([uncut], 2)[0].shape == (4, 3)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UsageError, match="not installed") as caught:
        AdamW8bit({"w": torch.zeros(2, 2)}, OPTIM)
    assert install("adamw8bit") in str(caught.value)


def make_engine(layout: Layout, path: Path, **settings: Any) -> TorchEngine:
    config = EngineConfig(precision="fp32", logprob_chunk=5, **settings)
    hf_config = AutoConfig.from_pretrained(path)
    engine = TorchEngine(hf_config, config, OPTIM, layout=layout, device=CPU)
    engine.load(SafetensorsSource(path), Part.WEIGHTS)
    return engine


def trained_rank(layout: Layout, path: Path, layouts: list[dict[str, int]]) -> list[dict[str, Any]]:
    """Each layout's norms, its slots after three steps, and what becomes of foreign ones that it is given."""
    found = []
    for settings in layouts:
        engine = make_engine(layout, path, **settings)
        batch = cut(make_examples(VOCAB), engine.layout, 2)
        norms = []
        for _ in range(3):
            engine.forward_backward(batch, loss)
            norms.append(engine.optim_step(LR).values_by_name()["grad_norm"])
        engine.load(Pattern(), Part.TRAINING)
        slots = [(s.spec, s.box, s.tensor.clone()) for s in engine.shards(Part.TRAINING)]
        found.append({"norms": norms, "slots": slots})
    return found


class Pattern:
    """A `ShardSource` of numbers that tell every element from its neighbours."""

    def fill(self, shards: Any) -> None:
        for shard in shards:
            count = torch.Size(shard.spec.shape).numel()
            numbers = (torch.arange(count) * 7 % 251).view(shard.spec.shape)
            shard.tensor.copy_(numbers[shard.box.slices])


def test_every_layout_holds_the_same_state_in_other_pieces(tmp_path: Path) -> None:
    """Half a hidden width is one block, so tensor parallelism can cut the columns."""
    shapes = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128}
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32, num_hidden_layers=1, **shapes)
    ((alone,),) = run_ranks(trained_rank, 1, path, [{}])
    ranks = run_ranks(trained_rank, 2, path, [{}, {"tensor_parallel": 2}])
    for number in range(2):
        assert ranks[0][number]["norms"] == pytest.approx(alone["norms"], rel=2e-3)
        pieces = [rank[number]["slots"] for rank in ranks]
        sizes = {spec.name: spec.shape for rank in pieces for spec, _, _ in rank}
        assert sizes == {spec.name: spec.shape for spec, _, _ in alone["slots"]}
        named = [[(spec.name, box, tensor) for spec, box, tensor in rank] for rank in pieces]
        together = whole(named, sizes)
        for spec, _, tensor in alone["slots"]:
            assert torch.equal(together[spec.name], tensor.float()), spec.name
    kinds = {spec.name.partition("/")[0]: spec.dtype for spec, _, _ in alone["slots"][:1]}
    assert kinds == {"exp_avg": torch.uint8}
    norm = next(s for s, _, _ in alone["slots"] if s.name == "exp_avg/model.norm.weight")
    assert norm.dtype == torch.float32

"""Muon on the Megatron engine takes the steps of the torch engine, whose own are torch's, at any layout and through checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import BETAS, assert_relative, cut, loss, make_examples, whole
from safetensors.torch import load_file
from support.checkpoints.layout_pairs import require_every_pair
from support.models.engines import make_engine
from support.models.tiny import VOCAB, save_tiny
from support.models.transformer_engine import use_stand_ins
from support.ranks.processes import run_ranks
from torch import Tensor

from burnish.boxes.shards import Shard
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.save import Contents, ModelContents
from burnish.checkpoint.steps import newest
from burnish.checkpoint.write_plan import MAIN
from burnish.config.schema import LoraConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine, Part
from burnish.engines.megatron.megatron_engine import MegatronEngine
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.models.names import model_shards

OPTIM = OptimConfig(kind="muon", betas=BETAS, momentum=0.9, weight_decay=0.1)
LR = 1e-4
STEPS = 2
"""Between two checkpoints."""
SAVED = (Part.WEIGHTS, Part.TRAINING)
TORCH: dict[str, Any] = {"kind": "torch"}
ONE: dict[str, Any] = {"kind": "megatron"}
TENSOR = ONE | {"tensor_parallel": 2}
PIPELINE = ONE | {"pipeline_parallel": 2}
EXPERTS = ONE | {"expert_parallel": 2}
OFFLOADED = ONE | {"optimizer_offload": True}
WITH_TE = TENSOR | {"layers": "transformer_engine"}
ALONE: dict[str, list[dict[str, Any]]] = {
    "qwen3_moe": [TORCH, ONE],
    "phi3": [TORCH, ONE],
    "deepseek_v3": [TORCH, ONE],
    "glm4_moe": [TORCH, ONE, OFFLOADED],
}
"""phi3 has queries, keys and values in one tensor, and gate and up too; glm4_moe an expert of all tokens."""
ADAPTER = LoraConfig(rank=4, targets=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
TOGETHER: dict[str, list[dict[str, Any]]] = {
    "qwen3": [
        TORCH,
        ONE,
        WITH_TE,
        PIPELINE | {"virtual_stages": 2},
        ONE | {"sequence_parallel": 2},
    ],
    "qwen3_moe": [TORCH, EXPERTS, TENSOR, PIPELINE],
    "phi3": [TORCH, TENSOR],
}
AFTERWARDS = {"overlap_grad_reduce": False, "overlap_param_gather": False}
"""Gradients are added up after the backward pass, so that they can be replaced before."""
Pieces = list[tuple[str, Any, Tensor, tuple[int, ...]]]
CHAIN: list[tuple[int, dict[str, Any]]] = [(1, TORCH), (2, TENSOR), (2, EXPERTS), (2, TORCH)]


class Given:
    """Gradients of the matrices in layers, by name alone: the same bits for every engine and layout."""

    def fill(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            name, shape, _ = shard.spec
            if ".layers." in name and len(shape) == 2:
                seed = int.from_bytes(name.encode()) % (1 << 63)
                whole_one = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
                shard.tensor.copy_(whole_one[shard.box.slices])


def give_gradients(engine: Engine) -> None:
    """Replace the gradients that a backward pass has left."""
    if isinstance(engine, TorchEngine):
        model = engine._scorer.model
        gradients = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        Given().fill(model_shards(model, gradients, parts=engine._regions))
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        return
    assert isinstance(engine, MegatronEngine)
    groups = engine.mesh.groups
    given = {}
    for name, parameter in engine._shards._parameters.items():
        parameter.main_grad.zero_()
        copies = [groups.dp_cp if getattr(parameter, "allreduce", True) else groups.expt_dp]
        if getattr(parameter, "sequence_parallel", False):
            copies.append(groups.tp)
        if all(group.rank() == 0 for group in copies):  # whose gradients are added up
            given[name] = parameter.main_grad
    Given().fill(engine._shards._whole(given))


def train_rank(
    layout: Layout,
    path: Path,
    cases: Sequence[Mapping[str, Any]],
    root: Path | None = None,
    gradients: str = "given",
) -> list[Pieces]:
    """What some steps of each case leave. With `root` they go on from the newest checkpoint below it, and save there."""
    use_stand_ins()
    found = []
    for settings in cases:
        # Nothing is clipped: the norms of engines differ in the last bit, and orthogonalizing in bf16 makes much of that.
        told = {"max_grad_norm": 1e6, "megatron": AFTERWARDS if gradients == "given" else {}}
        lora = ADAPTER if path.name == "lora" else None
        engine = make_engine(layout, path, OPTIM, lora=lora, **told | settings)
        step = newest(root) if root and root.exists() else None
        if step is not None:
            source = CheckpointSource(step, layout)
            for part in SAVED:
                engine.load(source, part)
            engine.steps = step.state["steps"]
        batch = cut(make_examples(VOCAB), engine.layout, 2)
        for _ in range(STEPS):
            engine.forward_backward(batch, loss)
            if gradients == "given":
                give_gradients(engine)
            engine.optim_step(LR)
        weights, training = (list(engine.shards(part)) for part in SAVED)
        if root is not None:
            contents = {MAIN: ModelContents(weights, training)}
            with Checkpoints(root, layout) as checkpoints:
                checkpoints.save(
                    engine.steps, Contents(models=contents, state={"steps": engine.steps})
                )
        found.append(
            [(s.spec.name, s.box, s.tensor.clone(), s.spec.shape) for s in weights + training]
        )
        engine.close()
    return found


def together(ranks: Sequence[Pieces]) -> dict[str, Tensor]:
    shapes = {name: shape for pieces in ranks for name, _, _, shape in pieces}
    return whole([[piece[:3] for piece in pieces] for pieces in ranks], shapes)


def require_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    assert found.keys() == wanted.keys(), what
    for name, tensor in wanted.items():
        error = float((found[name] - tensor).abs().max())
        assert error <= 1e-6, f"{what}: {name} is off by {error:.1e}"


def moved(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)])


def check(root: Path, cases: Mapping[str, Sequence[Mapping[str, Any]]], world: int) -> None:
    """Steps by given gradients are the torch engine's to 1e-6, those of training in their direction."""
    for family, settings in cases.items():
        path = save_tiny(root / family, family, torch.float32, num_hidden_layers=4)
        for gradients in ("given", "own"):
            ranks = run_ranks(train_rank, world, path, settings, None, gradients)
            wanted, *others = (together(of_case) for of_case in zip(*ranks, strict=True))
            before = {n: t.float() for n, t in load_file(path / "model.safetensors").items()}
            for found, how in zip(others, settings[1:], strict=True):
                what = f"{family} with {how}"
                if gradients == "given":
                    require_close(found, wanted, what)
                assert_relative(moved(found, before), moved(wanted, before), 2e-2, what)
            assert "momentum_buffer/model.layers.3.self_attn.o_proj.weight" in wanted
            assert "exp_avg/model.layers.3.self_attn.o_proj.weight" not in wanted


def test_a_process_takes_the_torch_engines_steps(tmp_path: Path) -> None:
    check(tmp_path, {"qwen3_moe": ALONE["qwen3_moe"]}, 1)


@pytest.mark.nightly
def test_every_kind_of_matrix_takes_the_torch_engines_steps(tmp_path: Path) -> None:
    check(tmp_path, ALONE, 1)


@pytest.mark.nightly
def test_every_layout_takes_the_torch_engines_steps(tmp_path: Path) -> None:
    check(tmp_path, TOGETHER, 2)


@pytest.mark.nightly
def test_an_adapter_takes_the_torch_engines_steps(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "lora", "qwen3", torch.float32)
    ranks = run_ranks(train_rank, 2, path, [TORCH, ONE, TENSOR, PIPELINE])
    wanted, *others = (together(of_case) for of_case in zip(*ranks, strict=True))
    for found in others:
        require_close(found, wanted, "adapter")
    assert {name.partition("/")[0] for name in wanted if "/" in name} == {"momentum_buffer"}


@pytest.mark.nightly
def test_a_run_that_changes_engines_is_the_uninterrupted_one(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32)
    last: dict[str, Tensor] = {}
    for world, settings in CHAIN:
        ranks = run_ranks(train_rank, world, path, [settings], tmp_path / "run")
        last = together([rank[0] for rank in ranks])
    for _ in CHAIN:
        [[pieces]] = run_ranks(train_rank, 1, path, [TORCH], tmp_path / "uninterrupted")
    require_close(last, together([pieces]), "after all engines")


@pytest.mark.nightly
def test_states_go_through_pairs_of_layouts(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32, num_hidden_layers=5)
    two = {"torch": TORCH, "tp 2": TENSOR, "pp 2": PIPELINE, "ep 2": EXPERTS}
    layouts = {1: {"torch 1": TORCH, "megatron 1": ONE}, 2: two}
    require_every_pair(path, tmp_path, layouts, each=[1, 3], optim=OPTIM)

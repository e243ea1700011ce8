"""Megatron's torch_dist checkpoints, written by Megatron at several layouts, become the model that was in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.tiny import save_tiny
from support.models.transformer_engine import use_stand_ins
from support.ranks.processes import run_ranks
from transformers import AutoConfig

from burnish.checkpoint.load import StepReader
from burnish.checkpoint.steps import open_step, verify
from burnish.checkpoint.tools import import_pickled as pickled
from burnish.checkpoint.tools.import_pickled import pickled_kind
from burnish.checkpoint.tools.importing import mapped_tensors, save_foreign
from burnish.checkpoint.tools.unpickle import convert
from burnish.config.schema import EngineConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.engines.megatron.host import megatron_called
from burnish.engines.megatron.megatron_engine import MegatronEngine
from burnish.errors import IncompatibleError, MissingError
from burnish.files.safetensors import weight_files
from burnish.files.storage import LocalStorage
from burnish.models.loading import SafetensorsSource

pytestmark = pytest.mark.nightly

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen2": {},
    "mixtral": {"sliding_window": None},
    "gemma2": {},
    "glm4_moe": {},
    "deepseek_v3": {},
}
SAVED: dict[str, tuple[str, int, dict[str, Any], dict[str, Any] | None]] = {
    "numbered layers, stacked experts": ("qwen3_moe", 1, {}, None),
    "experts of two ranks": ("qwen3_moe", 2, {"expert_parallel": 2}, None),
    "numbered experts": ("qwen3_moe", 1, {}, {"singleton_local_shards": True}),
    "stacked layers and experts": ("mixtral", 1, {}, None),
    "stacked layers, cut matrices": ("qwen2", 2, {"tensor_parallel": 2}, None),
    "TransformerEngine's names": (
        "qwen3_moe",
        2,
        {"tensor_parallel": 2, "layers": "transformer_engine"},
        None,
    ),
    "two stages": ("qwen2", 2, {"pipeline_parallel": 2}, None),
    "norms behind blocks": ("gemma2", 2, {"tensor_parallel": 2}, None),
    "norms behind blocks, fused ones before": (
        "gemma2",
        1,
        {"layers": "transformer_engine"},
        None,
    ),
    "routers by sigmoid, shared experts": ("glm4_moe", 2, {"expert_parallel": 2}, None),
    "latent attention": ("deepseek_v3", 2, {"tensor_parallel": 2}, None),
}
"""Models, processes, settings, and what Megatron is told of how to save."""


def save_rank(
    layout: Layout,
    saved: list[tuple[Path, Path, dict[str, Any], dict[str, Any] | None]],
) -> None:
    use_stand_ins()
    for model, target, settings, metadata in saved:
        config = EngineConfig(kind="megatron", precision="fp32", **settings)
        hf_config = AutoConfig.from_pretrained(model)
        cpu = torch.device("cpu")
        engine = MegatronEngine(hf_config, config, None, layout=layout, device=cpu)
        engine.load(SafetensorsSource(model), Part.WEIGHTS)
        with megatron_called():
            from megatron.core import dist_checkpointing

            state: dict[str, Any] = {"iteration": 7}
            for chunk in engine._chunks:
                use_megatron_experts(chunk)
                state |= chunk.sharded_state_dict(metadata=metadata)
                state |= like_moments(chunk.sharded_state_dict(metadata=metadata))
            name_as_bridge(state)
            dist_checkpointing.save(state, str(target))
        engine.close()


def use_megatron_experts(chunk: Any) -> None:
    """Put Megatron's own experts, with the same weights, in the place of ours, which have no part in its checkpoints."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    for layer in chunk.decoder.layers:
        ours = getattr(layer.mlp, "experts", None)
        if ours is None:
            continue
        groups = chunk.pg_collection
        count = layer.mlp.num_local_experts
        theirs = SequentialMLP(count, chunk.config, submodules, pg_collection=groups)
        for name in ("linear_fc1", "linear_fc2"):
            held = list(getattr(ours, name).parameters())  # one of all experts, or of each its own
            matrices = held[0] if len(held) < count else held
            for expert, matrix in zip(theirs.local_experts, matrices, strict=True):
                getattr(expert, name).weight.data.copy_(matrix)
        layer.mlp.experts = theirs


BRIDGE = {
    "self_attn_bda.norm": "self_attention.linear_proj.post_layernorm",
    "mlp_bda.norm": "mlp.linear_fc2.post_layernorm",
}
"""Megatron-Bridge's names for norms behind blocks, by ours."""


def name_as_bridge(state: dict[str, Any]) -> None:
    for saved in state.values():
        for ours, theirs in BRIDGE.items():
            if ours in getattr(saved, "key", ""):
                saved.key = saved.key.replace(ours, theirs)


def like_moments(state: dict[str, Any]) -> dict[str, Any]:
    """Other numbers under the names that Megatron's optimizer gives its moments."""
    found = {}
    for name, saved in state.items():
        if getattr(saved, "data", None) is not None and torch.is_tensor(saved.data):
            saved.key = f"optimizer.state.exp_avg.{saved.key}"
            saved.data = saved.data + 1
            found[f"moment of {name}"] = saved
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        family: save_tiny(root / family, family, torch.float32, **changes)
        for family, changes in MODELS.items()
    }


@pytest.fixture(scope="module")
def checkpoints(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("torch_dist")
    targets = {name: root / str(number) for number, name in enumerate(SAVED)}
    for target in targets.values():
        target.mkdir()
    for world in (1, 2):
        told = [
            (models[family], targets[name], settings, metadata)
            for name, (family, processes, settings, metadata) in SAVED.items()
            if processes == world
        ]
        run_ranks(save_rank, world, told)
    return targets


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert in this process: a child with torch takes seconds to start, and is tried once."""

    monkeypatch.setattr(pickled, "_unpickle", lambda *task, sandboxed: convert(*task))


def require_imported(source: Path, model: Path, root: Path) -> None:
    assert pickled_kind(source) == "torch_dist"
    foreign = pickled.pickled("torch_dist", source, model, without_sandbox=True)
    step = open_step(save_foreign(foreign, root, 0), LocalStorage())
    assert list(verify(step.path)) == []
    wanted = {
        name: tensor
        for path in weight_files(model)
        for name, tensor in mapped_tensors(path).items()
    }
    with StepReader(step) as tensors:
        assert {name.removeprefix("model/") for name in tensors.tensors} == wanted.keys()
        for name, tensor in wanted.items():
            found = tensors.read_range(f"model/{name}", 0, tensor.numel()).view(tensor.shape)
            assert torch.equal(found, tensor), name


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", SAVED)
def test_it_is_the_model_that_megatron_saved(
    models: dict[str, Path], checkpoints: dict[str, Path], name: str, tmp_path: Path
) -> None:
    require_imported(checkpoints[name], models[SAVED[name][0]], tmp_path / "run/checkpoints")


def test_a_child_unpickles_it(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source = checkpoints["stacked layers, cut matrices"]
    require_imported(source, models["qwen2"], tmp_path / "run/checkpoints")


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("family", "name", "change", "error"),
    [
        ("qwen2", "two stages", {"num_hidden_layers": 1}, IncompatibleError),
        ("qwen2", "two stages", {"num_hidden_layers": 3}, MissingError),
        ("qwen2", "two stages", {"vocab_size": 500}, IncompatibleError),
        ("qwen2", "two stages", {"num_key_value_heads": 4}, IncompatibleError),
        ("qwen2", "two stages", {"intermediate_size": 40}, IncompatibleError),
        ("qwen3_moe", "numbered experts", {"num_hidden_layers": 2}, IncompatibleError),
        ("qwen3_moe", "numbered experts", {"num_local_experts": 3}, IncompatibleError),
        ("qwen3_moe", "experts of two ranks", {"num_local_experts": 8}, IncompatibleError),
    ],
)
def test_weights_of_another_model_are_refused(
    models: dict[str, Path],
    checkpoints: dict[str, Path],
    tmp_path: Path,
    family: str,
    name: str,
    change: dict[str, int],
    error: type[Exception],
) -> None:
    assets, root = tmp_path / "assets", tmp_path / "run/checkpoints"
    assets.mkdir()
    said = json.loads((models[family] / "config.json").read_text())
    said.pop("layer_types", None)  # one for each layer
    (assets / "config.json").write_text(json.dumps(said | change))
    foreign = pickled.pickled("torch_dist", checkpoints[name], assets, without_sandbox=True)
    with pytest.raises(error) as caught:
        save_foreign(foreign, root, 0)
    assert "--assets" in str(caught.value)
    assert not root.exists()

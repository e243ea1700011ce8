"""Megatron's torch_dist checkpoints, written by Megatron at several layouts, become the model that was in them."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.megatron_modules import (
    use_megatron_experts,
    use_megatron_mixers,
    use_megatron_sinks,
)
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
    "gpt_oss": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
}
_NUMBERED = {"non_homogeneous_layers": True}
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
    "sinks, experts with biases": ("gpt_oss", 1, {}, None),
    "parts of experts with biases": ("gpt_oss", 2, {"tensor_parallel": 2}, None),
    "numbered experts with biases": (
        "gpt_oss",
        2,
        {"expert_parallel": 2},
        {"singleton_local_shards": True},
    ),
    "Gated DeltaNet by head": ("qwen3_next", 1, {}, _NUMBERED),
    "Gated DeltaNet by head, cut": ("qwen3_next", 2, {"tensor_parallel": 2}, _NUMBERED),
    "Gated DeltaNet": ("qwen3_5_text", 2, {"tensor_parallel": 2}, _NUMBERED),
    "TransformerEngine's names of Gated DeltaNet": (
        "qwen3_5_text",
        1,
        {"layers": "transformer_engine"},
        _NUMBERED,
    ),
    "Gated DeltaNet and experts": ("qwen3_5_moe_text", 2, {"expert_parallel": 2}, _NUMBERED),
}
"""Models, processes, settings, and what Megatron is told of how to save."""


def save_rank(
    layout: Layout,
    saved: list[tuple[Path, Path, dict[str, Any], dict[str, Any] | None]],
) -> None:
    # It compiles functions when it is imported, which `megatron_called` would hinder.
    importlib.import_module("megatron.core.ssm.gated_delta_net")
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
                use_megatron_mixers(chunk, model)
                use_megatron_sinks(chunk)
                # Megatron adds the layout's groups to what it is told.
                for marked in (dict, like_moments):
                    told = dict(metadata or {})
                    state |= marked(chunk.sharded_state_dict(metadata=told))
            name_as_bridge(state)
            dist_checkpointing.save(state, str(target))
        engine.close()


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
            # Megatron's norm lacks 1, so Burnish adds what rounding has taken.
            distance = (found - tensor).abs().max()
            assert distance <= (1e-7 if name.endswith("linear_attn.norm.weight") else 0), name


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
        ("gpt_oss", "sinks, experts with biases", {"num_local_experts": 8}, IncompatibleError),
        ("gpt_oss", "numbered experts with biases", {"intermediate_size": 40}, IncompatibleError),
        ("qwen3_next", "Gated DeltaNet by head", {"linear_num_value_heads": 2}, IncompatibleError),
        ("qwen3_5_text", "Gated DeltaNet", {"linear_num_key_heads": 1}, IncompatibleError),
        ("qwen3_5_text", "Gated DeltaNet", {"linear_conv_kernel_dim": 3}, IncompatibleError),
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
    if "num_hidden_layers" in change:
        said.pop("layer_types", None)  # one for each layer
    (assets / "config.json").write_text(json.dumps(said | change))
    foreign = pickled.pickled("torch_dist", checkpoints[name], assets, without_sandbox=True)
    with pytest.raises(error) as caught:
        save_foreign(foreign, root, 0)
    assert "--assets" in str(caught.value)
    assert not root.exists()


@pytest.mark.usefixtures("in_process")
def test_a_gate_without_its_up_is_missed(
    models: dict[str, Path],
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_but_one(*task: Any, sandboxed: bool) -> None:
        convert(*task)
        scratch = task[-1]
        for path in sorted(scratch.glob("*.safetensors")):
            ((name, tensor),) = mapped_tensors(path).items()
            if "linear_fc1.bias" in name and tensor.shape[0] > 0:
                path.unlink()
                return

    monkeypatch.setattr(pickled, "_unpickle", all_but_one)
    source = checkpoints["sinks, experts with biases"]
    foreign = pickled.pickled("torch_dist", source, models["gpt_oss"], without_sandbox=True)
    with pytest.raises(MissingError):
        save_foreign(foreign, tmp_path / "run/checkpoints", 0)


def test_gates_in_blocks_are_refused(
    models: dict[str, Path], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoints["sinks, experts with biases"], source)
    config = source / "run_config.yaml"
    for size in ("null", "32"):
        config.write_text(f"model:\n  moe_mlp_glu_interleave_size: {size}\n")
        if size == "null":
            pickled.pickled("torch_dist", source, models["gpt_oss"], without_sandbox=True)
            continue
        with pytest.raises(IncompatibleError):
            pickled.pickled("torch_dist", source, models["gpt_oss"], without_sandbox=True)

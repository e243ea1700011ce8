"""What leaves the device for a while, on one device: nothing changes, and an accelerator's memory is free meanwhile."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from contracts.engine import LR, cut, loss, make_examples
from support.models.tiny import VOCAB, save_tiny
from transformers import AutoConfig

from burnish.config.schema import EngineConfig, OptimConfig
from burnish.distributed.device import total_memory
from burnish.distributed.layout import Layout
from burnish.engines.base import Part
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.models.loading import SafetensorsSource
from burnish.runs.out_of_memory import recording_allocations, write_snapshot


def allocated(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_activations_on_the_host_change_nothing_and_free_an_accelerators_memory(
    tmp_path: Path, alone: Layout, device: torch.device, checkpointing: str
) -> None:
    """Also where the copies have to hurry: layers of which computing is quicker than copying."""
    path = save_tiny(
        tmp_path / "deep", "qwen3", torch.float32, hidden_size=256, num_hidden_layers=6
    )
    batch = cut(make_examples(VOCAB, (300, 90, 200)), alone, 3)
    found, peaks = [], []
    for moves in (False, True):
        config = EngineConfig(
            precision="bf16",
            activation_checkpointing=checkpointing,
            activation_offload=moves,
        )
        hf_config = AutoConfig.from_pretrained(path)
        engine = TorchEngine(hf_config, config, OptimConfig(), layout=alone, device=device)
        engine.load(SafetensorsSource(path), Part.WEIGHTS)
        for _ in range(3):
            before = allocated(device) if device.type == "cuda" else 0
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            engine.forward_backward(batch, loss)
            if device.type == "cuda":
                peaks.append(torch.cuda.max_memory_allocated(device) - before)
            norm = engine.optim_step(LR).values_by_name()["grad_norm"]
        found.append(norm)
        engine.close()
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    if device.type == "cuda":
        assert peaks[-1] < peaks[2]


def test_the_snapshot_of_a_device_that_ran_out_names_the_lines_that_took_its_memory(
    tmp_path: Path, device: torch.device
) -> None:
    path = tmp_path / "snapshot.pickle"
    if not write_snapshot(device, path):
        pytest.skip(f"torch keeps no account of {device.type}'s memory")
    with recording_allocations(device):
        held = torch.zeros(1 << 20, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(2 * total_memory(device), dtype=torch.uint8, device=device)
        write_snapshot(device, path)
    snapshot = pickle.loads(path.read_bytes())  # noqa: S301
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    [ours] = [each for each in blocks if each.get("address") == held.data_ptr()]
    assert __file__ in {frame["filename"] for frame in ours["frames"]}
    assert any(event["action"] == "oom" for trace in snapshot["device_traces"] for event in trace)


def test_weights_and_gradients_on_the_host_change_nothing_and_free_an_accelerators_memory(
    tmp_path: Path, alone: Layout, device: torch.device
) -> None:
    path = save_tiny(
        tmp_path / "deep", "qwen3", torch.float32, hidden_size=256, num_hidden_layers=6
    )
    batch = cut(make_examples(VOCAB, (300, 90, 200)), alone, 3)
    norms, held = [], []
    for moves in (False, True):
        config = EngineConfig(precision="bf16", parameter_offload=moves)
        hf_config = AutoConfig.from_pretrained(path)
        before = allocated(device) if device.type == "cuda" else 0
        engine = TorchEngine(hf_config, config, OptimConfig(), layout=alone, device=device)
        engine.load(SafetensorsSource(path), Part.WEIGHTS)
        for _ in range(3):
            engine.forward_backward(batch, loss)
            norm = engine.optim_step(LR).values_by_name()["grad_norm"]
        places = {s.tensor.device.type for part in Part for s in engine.shards(part)}
        assert places == {"cpu" if moves else device.type}
        if device.type == "cuda":
            held.append(allocated(device) - before)
        norms.append(norm)
        engine.close()
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    if device.type == "cuda":
        assert held[1] < held[0] / 4

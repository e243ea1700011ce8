import math
import subprocess
from pathlib import Path

import pytest
from support.models.known_sizes import COUNTED as MODEL
from support.models.planned import beside

from burnish.config.schema import RunConfig
from burnish.distributed.accelerators import ACCELERATORS, accelerator_named
from burnish.errors import UsageError
from burnish.families import ModelShape
from burnish.methods.table import METHODS
from burnish.plan import devices
from burnish.plan.devices import GIB, devices_here, parse_devices
from burnish.plan.layout_search import Planner


@pytest.mark.parametrize(
    ("text", "count", "name", "gib"),
    [
        ("64xH100-80G", 64, "H100", 80),
        ("8xH100", 8, "H100", 80),
        ("2xA100-40GB", 2, "A100", 40),
        ("1xRTX4090-24G", 1, "RTX4090", 24),
        ("4xh100-pcie-80G", 4, "h100-pcie", 80),
        ("16xCPU-24G", 16, "CPU", 24),
        ("1xcpu-0.5GiB", 1, "CPU", 0.5),
    ],
)
def test_names(text, count, name, gib):
    found = parse_devices(text)
    assert (found.count, found.name, found.memory) == (count, name, gib * GIB)
    assert found.cpu == (name == "CPU")


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_device_of_the_table_can_be_named(name):
    found = parse_devices(f"8x{name}")
    assert (found.kind.flops, found.memory) == (
        ACCELERATORS[name].flops,
        ACCELERATORS[name].memory_gib * GIB,
    )


def test_an_unknown_device_needs_memory_and_speed():
    with pytest.raises(UsageError, match=r"(?s)Z9.*--device-memory.*GIB.*--device-tflops"):
        parse_devices("8xZ9-48G")
    found = parse_devices("8xZ9", memory_gib=48, teraflops=200)
    assert (found.memory, found.kind.flops) == (48 * GIB, 200e12)


@pytest.mark.parametrize(
    ("text", "amounts"),
    [
        ("8xH100-0G", {}),
        ("8xH100", {"memory_gib": -5.0}),
        ("8xH100", {"memory_gib": math.nan}),
        ("8xH100", {"teraflops": 0.0}),
        ("8xH100", {"teraflops": math.inf}),
    ],
)
def test_amounts_are_above_0(text, amounts):
    with pytest.raises(UsageError):
        parse_devices(text, **amounts)


@pytest.mark.parametrize("text", ["", "H100", "0xH100", "8x", "eight x H100", "8xH100-G", "-8xH100", "nanxH100", "infxH100", "1000001xH100", "99999999999xH100", f"{'9' * 5000}xH100"])  # fmt: skip
def test_what_cannot_be_read(text):
    with pytest.raises(UsageError):
        parse_devices(text)


def test_names_of_drivers():
    assert accelerator_named("NVIDIA H100 80GB HBM3") is ACCELERATORS["H100"]
    assert accelerator_named("NVIDIA H100 PCIe") is ACCELERATORS["H100 PCIe"]
    assert accelerator_named("NVIDIA A10") is ACCELERATORS["A10"]
    assert accelerator_named("Radeon") is None


@pytest.fixture
def nvidia(monkeypatch, tmp_path):
    """An nvidia-smi that prints a line."""

    def says(line):
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\necho '{line}'\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return says


def test_this_machine_with_an_accelerator(nvidia):
    nvidia("NVIDIA H100 80GB HBM3, 81559")
    found = devices_here(16, 8)
    assert found is not None
    assert (found.count, found.memory, found.kind.flops) == (16, 81559 * (1 << 20), 989e12)


def test_this_machine_with_an_unknown_accelerator(nvidia):
    nvidia("NVIDIA Z9, 1000")
    assert devices_here(1, 1) is None


def test_this_machine_without_one_shares_its_memory(monkeypatch):
    monkeypatch.setattr(devices, "_nvidia", lambda: None)
    one, two = devices_here(1, 1), devices_here(2, 2)
    assert one is not None
    assert two is not None
    assert one.cpu
    assert two.memory == one.memory / 2
    if Path("/proc/meminfo").exists():
        kilobytes = int(
            subprocess.run(
                ["awk", "/MemTotal/ {print $2}", "/proc/meminfo"], capture_output=True, check=True
            ).stdout
        )
        assert one.memory <= kilobytes * 1024


PRODUCTS, ATTENTION = 2 * (3 * 640 + 256), 3 * 4 * 8
"""Operations of a token, and of a pair of tokens: two for each element, four for each number of a head's width.

The model has 3 layers with matrices of 4 · 8·8 + 3 · 8·16 = 640 elements, an output layer of 32·8, and attention 8 wide.
"""


def forward(length):
    return length * PRODUCTS + length * (length + 1) // 2 * ATTENTION


def operations(command="sft", devices="1xH100-80G", judges=(), lora=(), **sections):
    values = {
        "model": {"fresh": MODEL, "tokenizer": "t", "lora": dict(lora)},
        "data": {"max_length": 64, "max_prompt_length": 16},
        "batch": {"examples": 1, "tokens_per_device": 64},
    }
    config, found = RunConfig.model_validate(values | sections), parse_devices(devices)
    planner = Planner(ModelShape.of(MODEL), config, METHODS[command], found, beside(judges))
    return planner.as_configured()[0].operations


def test_an_update_is_three_passes_and_what_is_computed_again():
    assert operations() == {"update": 3 * forward(64)}
    full = operations(engine={"activation_checkpointing": "full"})
    assert full == {"update": 4 * forward(64)}
    adapter = operations(lora={"rank": 2})["update"]
    assert adapter == pytest.approx(3 * forward(64) - 64 * PRODUCTS)


def test_a_device_has_the_most_sequences_or_its_part_of_them():
    batch = {"examples": 3, "tokens_per_device": 64}
    assert operations(devices="2xH100-80G", batch=batch) == {"update": 2 * 3 * forward(64)}
    for name in ("tensor_parallel", "sequence_parallel"):
        shared = operations(devices="2xH100-80G", batch=batch, engine={name: 2})
        assert shared == {"update": 3 * 3 * forward(64) / 2}
    pipeline = {"kind": "megatron", "pipeline_parallel": 2}
    assert operations(devices="2xH100-80G", batch=batch, engine=pipeline) == shared


def test_prompts_are_read_once_and_completions_written_one_by_one():
    """Four sequences of two prompts, with 16 tokens of prompt and 48 of completion."""
    rollout, batch = {"n": 2, "max_response_length": 48}, {"prompts": 2, "tokens_per_device": 64}
    sections = {"rollout": rollout, "batch": batch}
    critic = {"advantage": "gae", "kl": {"coef": 0.1}}
    found = operations("rl", judges=[MODEL], algorithm=critic, **sections)
    judged = 4 * (forward(64) - 2 * 64 * 256 + 2 * 64 * 8)
    assert found == {
        "rollout": 4 * forward(64) - 2 * forward(16) + judged,
        "log-probs": 2 * 4 * forward(64),
        "update": 2 * 3 * 4 * forward(64),
    }
    assert "log-probs" not in operations("rl", **sections)


def test_comparing_distributions_is_a_second_pass_of_the_output_layer():
    """64 trained tokens; the output layer has 32 · 8 elements. A teacher's whole one is computed in both passes."""
    head = 64 * 2 * 32 * 8
    smooth = operations(method={"label_smoothing": 0.1})
    assert smooth == {"update": 3 * forward(64) + 3 * head}
    frozen = operations(lora={"rank": 2})["update"]
    assert (
        operations(lora={"rank": 2}, method={"label_smoothing": 0.1})["update"] == frozen + 2 * head
    )
    start = {"teachers": [{"path": "initial"}]}
    whole = operations(distill={**start, "tokens": "all"})
    assert whole == {"log-probs": forward(64), "update": 3 * forward(64) + 5 * head}
    top = operations(distill={**start, "tokens": "topk"})
    assert top == {"log-probs": forward(64) + head, "update": 3 * forward(64) + 3 * head}

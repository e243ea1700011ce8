"""What a device computes, against products that are counted by hand.

The model has 3 layers with matrices of 4 · 8·8 + 3 · 8·16 = 640 elements, an output layer of 32·8, and attention
8 wide. Two operations for each element and token; four for each pair of tokens and number of a head's width.
"""

import pytest

from burnish.config.schema import RunConfig
from burnish.families import ModelShape
from burnish.plan.devices import parse_devices
from burnish.plan.layouts import Planner
from tests.model_shapes import COUNTED as MODEL

PRODUCTS, ATTENTION = 2 * (3 * 640 + 256), 3 * 4 * 8


def forward(length):
    return length * PRODUCTS + length * (length + 1) // 2 * ATTENTION


def operations(command="sft", devices="1xH100-80G", judges=(), lora=(), **sections):
    values = {
        "model": {"fresh": MODEL, "tokenizer": "t", "lora": dict(lora)},
        "data": {"max_length": 64, "max_prompt_length": 16},
        "batch": {"examples": 1, "tokens_per_device": 64},
    }
    config, shapes = RunConfig.model_validate(values | sections), [ModelShape.of(j) for j in judges]
    planner = Planner(ModelShape.of(MODEL), config, command, parse_devices(devices), shapes)
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

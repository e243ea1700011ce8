"""Which moments are planned: of gathering and of the output layer; on CPUs and on accelerators."""

import pytest

from burnish.config.schema import RunConfig
from burnish.families import ModelShape
from burnish.plan.devices import parse_devices
from burnish.plan.memory import Needs
from burnish.plan.model import PlannedModel, Workload

WIDTH, WORDS = 64, 65536
MODEL = {
    "model_type": "llama",
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
HEAD = WIDTH * WORDS
LAYER = 4 * WIDTH**2 + 3 * WIDTH * 128 + 2 * WIDTH
MIB = 1 << 20


def needs(replicas, shards, *, device="CPU", tokens=8, command="rl", precision="fp32", **sections):
    """Of a step of a few tokens, in which parameters are most."""
    batch = {"prompts": 8, "minibatches": 2} if command == "rl" else {"examples": 2}
    values = {
        "model": {"fresh": MODEL},
        "engine": {},
        "batch": batch | {"tokens_per_device": tokens},
        "data": {"max_prompt_length": 2, "max_length": tokens},
        "rollout": {"n": 2, "max_response_length": tokens - 2},
    } | sections
    values["engine"] |= {"precision": precision, "replicas": replicas}
    config = RunConfig.model_validate(values)
    model = PlannedModel(ModelShape.of(config.model.fresh), config.model.adapter)
    devices = parse_devices(f"{replicas * shards}x{device}")
    work = Workload.of_examples(config.batch, config.data)
    if command == "rl":
        work = Workload.of_completions(config.batch, config.data, config.rollout, config.algorithm)
    return Needs(model, work, devices, config.engine, config.optim)


@pytest.mark.parametrize(("shards", "device"), [(2, "CPU"), (2, "H100"), (4, "CPU")])
def test_what_the_root_came_in_is_there_when_the_first_layer_comes(shards, device):
    """The root twice, and that layer, which gloo has twice."""
    tied = {"fresh": MODEL | {"tie_word_embeddings": True}}
    parts = needs(1, shards, device=device, model=tied).phases("none")["log-probs"]
    assert parts["gathered"] == 4 * (2 * (HEAD + WIDTH) + (1 + (device == "CPU")) * LAYER)


@pytest.mark.parametrize("device", ["CPU", "H100"])
def test_the_output_layer_and_the_embeddings_are_not_there_at_one_time(device):
    """Each is copied out of what it came in."""
    parts = needs(1, 2, device=device).phases("none")["log-probs"]
    assert parts["gathered"] == 4 * (WIDTH + 2 * HEAD)


def test_one_process_gathers_nothing_twice():
    parts = needs(1, 1).phases("none")["log-probs"]
    assert parts["gathered"] == 4 * (WIDTH + HEAD + 2 * LAYER)


def test_gloo_has_what_it_reduces_twice():
    """And half of it as what comes out, of the embeddings, beside what was reduced before."""
    tied = {"fresh": MODEL | {"tie_word_embeddings": True}}
    parts = needs(1, 2, command="sft", model=tied).phases("none")["update"]
    assert parts["gradients"] == 4 * (2 * LAYER / 2 + 2.5 * (HEAD + WIDTH))


@pytest.mark.parametrize(
    ("device", "piece"), [("CPU", 2 * MIB), ("MI300X", 512 * WORDS * 4), ("H100", 0)]
)
def test_the_gradient_of_the_output_layer_is_added_up_some_rows_at_a_time(device, piece):
    logits, rows = 512 * WORDS, 2048 * WIDTH
    added = 0 if device == "H100" else 2 * rows
    chunk = {"engine": {"logprob_chunk": 512}, "command": "sft", "device": device}
    forward, backward = needs(1, 1, tokens=2048, **chunk)._logits
    assert forward == 4 * logits + 2 * piece
    assert backward == 4 * logits + 4 * HEAD + max(2 * piece, 4 * rows)
    forward, backward = needs(1, 1, tokens=512, precision="bf16", **chunk)._logits
    assert forward == 2 * logits + 2 * piece
    assert backward == 2 * logits + max(2 * piece, 2 * HEAD)
    backward = needs(1, 1, tokens=2048, precision="bf16", **chunk)._logits[1]
    assert backward == 4 * HEAD + max(2 * logits + max(2 * piece, added), 2 * HEAD)

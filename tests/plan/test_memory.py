"""State, parts that leave the device, and reward models, against numbers that are written out.

The model has 3 layers of 4 · 8·8 + 3 · 8·16 + 2 · 8 = 656 elements, and outside of them two tables of
32·8 and a norm of 8: 520; together 2488. All is fp32 where nothing else is said.
"""

import pytest
from support.models.known_sizes import COUNTED as MODEL
from support.models.planned import beside

from burnish.config.schema import RunConfig
from burnish.families import ModelShape
from burnish.methods.table import METHODS
from burnish.plan.devices import parse_devices
from burnish.plan.layout_search import Planner

ALL, HEAD = 2488, 256
TOKENS = 64
TWO = {"examples": 2, "tokens_per_device": TOKENS}
LARGE = MODEL | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
LARGE |= {"num_hidden_layers": 32, "vocab_size": 151936}


def plan(command="sft", devices="1xH100-80G", model=MODEL, judges=(), **sections):
    values = {
        "model": {"fresh": model, "tokenizer": "t", "lora": sections.pop("lora", {})},
        "engine": {"precision": "fp32"} | sections.pop("engine", {}),
        "data": {"max_length": TOKENS, "max_prompt_length": 16},
        "batch": {"examples": 1, "prompts": 1, "tokens_per_device": TOKENS},
        "rollout": {"n": 1, "max_response_length": 48},
    }
    config = RunConfig.model_validate(values | sections)
    found = parse_devices(devices)
    shape = ModelShape.of(model)
    return Planner(shape, config, METHODS[command], found, beside(judges)).as_configured()[0]


def test_slots_of_each_kind():
    """AdamW has 8 bytes a number, or 4; Muon 4 of a matrix of a layer."""

    def slots(devices="1xH100-80G", **optim):
        return plan(devices=devices, optim=optim, batch=TWO).phases["save"]["optimizer"]

    assert slots() == 8 * ALL
    assert slots(moments="bf16", betas=[0.9, 0.95]) == 4 * ALL
    assert slots(kind="muon") == 8 * ALL - 4 * 3 * 640
    assert slots("2xH100-80G") == 4 * ALL


def test_a_step_brings_256_mib_of_slots():
    most = MODEL | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 30}

    def step(offload=True, **optim):
        # Few tokens, so that the optimizer's step is the fullest moment.
        small = {"examples": 1, "tokens_per_device": TOKENS}
        engine = {"optimizer_offload": offload, "activation_checkpointing": "full"}
        update = plan(model=most, engine=engine, optim=optim, batch=small).phases["update"]
        return update.get("optimizer step")

    assert step(False) is None
    assert step() == 2**28
    for offload in (False, True):  # in fp32, wherever they rest
        assert step(offload, moments="bf16", betas=[0.9, 0.95]) == 2**28


def test_an_optimizer_on_the_host():
    found = plan(engine={"optimizer_offload": True})
    assert found.host == {"optimizer": 8 * ALL}
    assert found.phases["save"]["weights"] == 4 * ALL
    assert "optimizer" not in found.phases["save"]
    saved = plan(engine={"optimizer_offload": True}, checkpoint={"background": True})
    assert saved.host == {"optimizer": 8 * ALL, "saving": 12 * ALL}
    sharded = plan(engine={"optimizer_offload": True}, devices="2xH100-80G", batch=TWO)
    assert sharded.host == {"optimizer": 4 * ALL}


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_activations_of_all_layers_but_the_last_wait_on_the_host(depth):
    """With full checkpointing a layer keeps its input: 64 tokens of 8 numbers."""
    engine = {"activation_offload": True, "activation_checkpointing": "full"}
    found = plan(engine=engine, model=MODEL | {"num_hidden_layers": depth})
    expected = {"activations": (depth - 1) * TOKENS * 8 * 4}
    assert found.host == (expected if depth > 1 else {})


def test_two_layers_of_activations_stay_on_the_device():
    def activations(depth, offload):
        engine = {"activation_offload": offload}
        found = plan(engine=engine, model=MODEL | {"num_hidden_layers": depth})
        return found.phases["update"]["activations"]

    two = activations(2, False)
    assert activations(2, True) == activations(3, True) == activations(6, True) == two
    (host,) = plan(engine={"activation_offload": True}).host.values()
    assert activations(3, False) == two + host / 2  # the host has two of three layers


def test_parked_models_leave_the_device_to_the_generator():
    kl = {"kl": {"coef": 0.1}}
    park = {"offload_during_rollout": True}
    found = plan("rl", engine=park, algorithm=kl)
    assert found.phases["rollout"].keys() == {"generator", "kv cache", "activations", "logits"}
    assert found.host == {"offloaded": 12 * ALL + 4 * ALL}  # a reference has no optimizer
    assert {"weights", "optimizer", "reference"} <= found.phases["update"].keys()
    critic = plan("rl", engine=park, algorithm={"advantage": "gae"})
    assert critic.host == {"offloaded": 12 * ALL + 12 * (ALL - HEAD)}
    both = plan("rl", engine=park | {"optimizer_offload": True}, algorithm=kl)
    assert both.host == {"optimizer": 8 * ALL, "offloaded": 8 * ALL}
    adapter = plan("rl", engine=park, lora={"rank": 2, "targets": ["q_proj"]})
    assert adapter.host == {"offloaded": 4 * ALL + 12 * 3 * 2 * (8 + 8)}


def test_conversations_are_kept_beside_those_that_take_a_turn():
    def cached(**environment):
        rollout = {"n": 2, "max_response_length": 48, "environment": environment}
        return plan("rl", rollout=rollout).phases["rollout"]["kv cache"]

    assert cached(function="a.py:A") == 2 * cached() > 0


def test_the_host_has_room_for_what_is_away_at_one_time():
    engine = {"offload_during_rollout": True, "activation_offload": True}
    full = engine | {"activation_checkpointing": "full"}
    assert plan("rl", engine=full).host == {"offloaded": 12 * ALL}
    assert plan("rl", engine=engine).host.keys() == {"activations"}


def test_between_processes_on_cpus_the_host_is_the_device():
    engine = {"optimizer_offload": True, "offload_during_rollout": True}
    away, here = (
        plan("rl", "1xCPU-24G", engine=each, rollout={"n": 1, "max_response_length": 48})
        for each in (engine, {})
    )
    assert away.host == {}
    assert {parts["host"] for parts in away.phases.values()} == {12 * ALL}
    assert away.total("publish") == here.total("publish") + 4 * ALL  # parked, and back in its place


def test_reward_models_lie_beside_the_policy():
    """A head of one number for each token instead of an output layer; in the dtype of computing, and gathered."""
    found = plan("rl", judges=[MODEL])
    assert found.phases["save"]["reward models"] == 4 * (2 * (ALL - HEAD) - HEAD)
    bf16 = {"precision": "bf16", "offload_during_rollout": True}
    two = plan("rl", "2xH100-80G", judges=[MODEL] * 3, engine=bf16, batch={"prompts": 2})
    root = 8  # stays gathered, the embeddings and the layers do not
    assert two.phases["rollout"]["reward models"] == 3 * 2 * ((ALL - HEAD) / 2 + root)
    assert "reward models" not in two.host
    wide = plan("rl", judges=[MODEL | {"intermediate_size": 1 << 16}]).phases["rollout"]
    assert "gathered" in wide
    assert "kv cache" not in wide  # reading what was generated needs more than generating it
    assert found.seconds["rollout"] > plan("rl").seconds["rollout"]


def test_a_generators_weights_are_where_they_generate():
    """On an accelerator they leave it while training, unless the next batch is drawn meanwhile; behind servers they are elsewhere."""

    def phases(devices="1xH100-80G", **rollout):
        given = {"n": 1, "max_response_length": 48, **rollout}
        return plan("rl", devices, rollout=given).phases

    def held(found):
        return {name for name, parts in found.items() if "generator" in parts}

    assert held(phases()) == {"rollout", "publish", "save"}
    assert held(phases(place="child")) == {"rollout", "publish", "save"}
    assert held(phases(place="child", ahead=1)) == set(phases())
    assert held(phases("1xCPU-24G")) == set(phases())
    assert held(phases(place="servers")) == set()
    assert "rollout" not in phases(place="servers")


@pytest.mark.parametrize(
    ("engine", "cpu", "device"),
    [
        ({}, 2.5, 2),
        ({"replicas": 2}, 0, 0),
        ({"tensor_parallel": 2}, 2.5, 2),
        ({"kind": "megatron"}, 1, 0),
        ({"kind": "megatron", "tensor_parallel": 2}, 2.5, 2),
    ],
)
def test_weights_are_published_in_waves_of_what_processes_lack(engine, cpu, device):
    """Two processes. Beside a wave are its copy by gloo and half of it as a message, or what is copied out of it.

    Megatron's data-parallel processes lack what others have stepped; before publishing they exchange that.
    """
    batch = {"prompts": 2, "tokens_per_device": TOKENS}
    wide = MODEL | {"num_attention_heads": 2, "num_key_value_heads": 2}
    for devices, waves in (("2xCPU-24G", cpu), ("2xH100-80G", device)):
        parts = plan("rl", devices, model=wide, engine=engine, batch=batch).phases["publish"]
        assert parts.get("buffers", 0) == waves * parts["generator"]

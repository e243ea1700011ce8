"""What leaves the device, moments of 8 bits, and reward models, against numbers that are written out.

The model has 3 layers of 4 · 8·8 + 3 · 8·16 + 2 · 8 = 656 elements, and outside of them two tables of
32·8 and a norm of 8: 520; together 2488. All is fp32 where nothing else is said.
"""

import pytest

from burnish.config.schema import LoraConfig, RunConfig
from burnish.plan.advice import advice
from burnish.plan.devices import parse_devices
from burnish.plan.layouts import Planner
from burnish.plan.shape import PlannedModel, Weight
from burnish.plan.share import PlannedLayout, Share
from burnish.plan.slots import Slots
from burnish.plan.workload import Workload

MODEL = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
ALL, HEAD = 2488, 256
TOKENS = 64
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
    shapes = [PlannedModel.of(each) for each in judges]
    work, found = Workload.of(config, command), parse_devices(devices)
    return Planner(PlannedModel.of(model), config, work, found, shapes), config


def configured(*args, **kwargs):
    return plan(*args, **kwargs)[0].as_configured()


def slots(kind, *, offload=False, model=MODEL, shards=1, lora=None, moments="fp32"):
    optim = {"kind": kind, "moments": moments}
    values = {"optim": optim, "engine": {"optimizer_offload": offload}}
    share = Share(PlannedModel.of(model), PlannedLayout(1, shards))
    return Slots(share, RunConfig.model_validate(values), lora)


def test_slots_of_each_kind():
    """AdamW has 8 bytes a number, or 4; Muon 4 of a matrix of a layer."""
    assert slots("adamw").bytes == 8 * ALL
    assert slots("adamw", moments="bf16").bytes == 4 * ALL
    assert slots("muon").bytes == 8 * ALL - 4 * 3 * 640
    # 8 bits: n bytes, and 4 for each row, whose 8 or 16 numbers share a scale, twice
    attention, mlp = 4 * (64 + 4 * 8), 2 * (128 + 4 * 16) + (128 + 4 * 8)
    tables = 2 * (256 + 4 * 32)
    vectors = 8 * (3 * 2 * 8 + 8)
    assert slots("adamw8bit").bytes == 2 * (3 * (attention + mlp) + tables) + vectors == 7552
    assert slots("adamw8bit", shards=2).bytes == 7552 / 2
    # an adapter of rank 2 beside the four 8·8: A 2·8 with 2 rows, B 8·2 with 8
    lora = LoraConfig(rank=2, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
    assert slots("adamw8bit", lora=lora).bytes == 2 * 3 * 4 * (16 + 4 * 2 + 16 + 4 * 8)


def test_rows_have_a_scale_for_every_256_elements():
    assert Weight(2, 300).scales(1) == Weight(2, 512).scales(1) == 4
    assert Weight(3, 300).scales(2) == 4  # two of three rows
    assert Weight(4, 1024, shared=True).scales(2, tensor=2) == 4
    assert Weight(4, 6 * 300, width=300).scales(4) == 6 * 2  # an expert's six rows


def test_a_step_brings_256_mib_of_slots_or_one_weights():
    assert list(slots("adamw").steps()) == []
    assert list(slots("adamw", offload=True).steps()) == [{"optimizer step": 8 * ALL}]
    most = MODEL | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 30}
    assert list(slots("adamw", offload=True, model=most).steps()) == [{"optimizer step": 2**28}]
    table = 8 * 151936 * 4096
    assert list(slots("adamw", offload=True, model=LARGE).steps()) == [{"optimizer step": table}]
    for offload in (False, True):  # in fp32, wherever they rest
        narrow = slots("adamw", offload=offload, model=most, moments="bf16")
        assert list(narrow.steps()) == [{"optimizer step": 2**28}]
    adamw, muon = slots("muon", offload=True).steps()
    assert adamw == {"optimizer step": 8 * (ALL - 3 * 640)}
    assert muon == {"muon": 2 * 2 * 3 * 640, "optimizer step": 4 * 128}
    assert list(slots("adamw8bit").steps()) == [{"optimizer step": 10 * 4 * 256}]
    assert list(slots("adamw8bit", model=LARGE).steps()) == [{"optimizer step": 10 * 4 * 2**22}]


def test_an_optimizer_on_the_host():
    found = configured(engine={"optimizer_offload": True})
    assert found.host == {"optimizer": 8 * ALL}
    assert found.phases["save"]["weights"] == 4 * ALL
    assert "optimizer" not in found.phases["save"]
    saved = configured(engine={"optimizer_offload": True}, checkpoint={"background": True})
    assert saved.host == {"optimizer": 8 * ALL, "saving": 12 * ALL}
    sharded = configured(engine={"optimizer_offload": True}, devices="2xH100-80G")
    assert sharded.host == {"optimizer": 4 * ALL}


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_activations_of_all_layers_but_the_last_wait_on_the_host(depth):
    """With full checkpointing a layer keeps its input: 64 tokens of 8 numbers."""
    engine = {"activation_offload": True, "activation_checkpointing": "full"}
    found = configured(engine=engine, model=MODEL | {"num_hidden_layers": depth})
    expected = {"activations": (depth - 1) * TOKENS * 8 * 4}
    assert found.host == (expected if depth > 1 else {})


def test_two_layers_of_activations_stay_on_the_device():
    def activations(depth, offload):
        engine = {"activation_offload": offload}
        found = configured(engine=engine, model=MODEL | {"num_hidden_layers": depth})
        return found.phases["update"]["activations"]

    two = activations(2, False)
    assert activations(2, True) == activations(3, True) == activations(6, True) == two
    (host,) = configured(engine={"activation_offload": True}).host.values()
    assert activations(3, False) == two + host / 2  # the host has two of three layers


def test_parked_models_leave_the_device_to_the_generator():
    kl = {"kl": {"coef": 0.1}}
    park = {"park": True}
    found = configured("rl", engine=park, algorithm=kl)
    assert found.phases["rollout"].keys() == {"generator", "kv cache", "activations", "logits"}
    assert found.host == {"parked": 12 * ALL + 4 * ALL}  # a reference has no optimizer
    assert {"weights", "optimizer", "reference"} <= found.phases["update"].keys()
    critic = configured("rl", engine=park, algorithm={"advantage": "gae"})
    assert critic.host == {"parked": 12 * ALL + 12 * (ALL - HEAD)}
    both = configured("rl", engine=park | {"optimizer_offload": True}, algorithm=kl)
    assert both.host == {"optimizer": 8 * ALL, "parked": 8 * ALL}
    adapter = configured("rl", engine=park, lora={"rank": 2, "targets": ["q_proj"]})
    assert adapter.host == {"parked": 4 * ALL + 12 * 3 * 2 * (8 + 8)}


def test_the_host_has_room_for_what_is_away_at_one_time():
    engine = {"park": True, "activation_offload": True}
    full = engine | {"activation_checkpointing": "full"}
    assert configured("rl", engine=full).host == {"parked": 12 * ALL}
    assert configured("rl", engine=engine).host.keys() == {"activations"}


def test_between_processes_on_cpus_the_host_is_the_device():
    engine = {"optimizer_offload": True, "park": True}
    away, here = (
        configured("rl", "1xCPU-24G", engine=each, rollout={"n": 1, "max_response_length": 48})
        for each in (engine, {})
    )
    assert away.host == {}
    assert {parts["host"] for parts in away.phases.values()} == {12 * ALL}
    assert away.total("publish") == here.total("publish") + 4 * ALL  # parked, and back in its place


def test_reward_models_lie_beside_the_policy():
    """A head of one number for each token instead of an output layer; in the dtype of computing, and gathered."""
    found = configured("rl", judges=[MODEL])
    assert found.phases["save"]["reward models"] == 4 * 2 * (ALL - HEAD)
    bf16 = {"precision": "bf16", "park": True}
    two = configured("rl", "2xH100-80G", judges=[MODEL] * 3, engine=bf16, batch={"prompts": 2})
    root = 32 * 8 + 8  # stays gathered, the layers do not
    assert two.phases["rollout"]["reward models"] == 3 * 2 * ((ALL - HEAD) / 2 + root)
    assert "reward models" not in two.host
    wide = configured("rl", judges=[MODEL | {"intermediate_size": 1 << 16}]).phases["rollout"]
    assert "gathered" in wide
    assert "kv cache" not in wide  # reading what was generated needs more than generating it
    assert found.seconds["rollout"] > configured("rl").seconds["rollout"]


@pytest.mark.parametrize(
    ("command", "engine", "phase", "remedy"),
    [
        ("rl", {}, "rollout", "engine.park=true"),
        ("sft", {}, "save", "engine.optimizer_offload=true"),
        ("sft", {"activation_checkpointing": "full"}, "update", "engine.activation_offload=true"),
    ],
)
def test_advice_names_what_can_leave_the_device(command, engine, phase, remedy):
    def advised(devices, **settings):
        batch = {"examples": 8, "prompts": 8, "tokens_per_device": 1 << 20}
        data = {"max_length": 1 << 20, "max_prompt_length": 512}
        planner, config = plan(
            command, devices, LARGE, engine=engine | settings, batch=batch, data=data
        )
        return advice(planner.as_configured().within(phase), config)

    name = remedy.split("=")[0]
    assert remedy in advised("1xA100-40G")
    assert name not in advised("1xA100-40G", **{name.split(".")[1]: True})
    assert name not in advised("1xCPU-24G")


def test_moments_of_8_bits_are_cut_in_whole_blocks():
    wide = LARGE | {"num_key_value_heads": 8, "intermediate_size": 256 * 4}
    for kind, most in (("adamw", 8), ("adamw8bit", 4)):
        batch = {"examples": 8, "tokens_per_device": TOKENS}
        planner, _ = plan("sft", "8xH100-80G", wide, optim={"kind": kind}, batch=batch)
        assert max(each.layout.tensor for each in planner.all_plans()) == most

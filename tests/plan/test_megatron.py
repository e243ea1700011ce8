"""What the Megatron engine's stages, experts and data-parallel processes hold, by counting."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.known_sizes import QWEN3_8B, QWEN3_30B_A3B
from support.models.planned import beside
from support.models.tiny import tiny_config

from burnish.config.document import dump_yaml
from burnish.config.load import read_config
from burnish.config.schema import RunConfig
from burnish.errors import UsageError
from burnish.families import ModelShape
from burnish.methods.table import METHODS
from burnish.plan.devices import parse_devices
from burnish.plan.layout_search import Planner
from burnish.plan.megatron_memory import MegatronNeeds
from burnish.plan.model import PlannedModel, Workload
from burnish.plan.shapes import model_shape

MODEL = QWEN3_8B | {"tie_word_embeddings": False}
MIXTURE = QWEN3_30B_A3B | {"tie_word_embeddings": False}
SHARED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


def values_of(model=MODEL, **engine):
    return {
        "model": {"fresh": model, "tokenizer": "t"},
        "data": {"train": ["t.jsonl"], "max_length": 4096},
        "batch": {"examples": 256, "tokens_per_device": 8192},
        "engine": {"kind": "megatron"} | engine,
    }


def planner(values, devices="64xH100-80G"):
    config = RunConfig.model_validate(values)
    shape = ModelShape.of(values["model"]["fresh"])
    return Planner(shape, config, METHODS["sft"], parse_devices(devices))


def plan_of(values, devices="64xH100-80G"):
    plan, _ = planner(values, devices).as_configured()
    return plan


def planned(fields):
    return PlannedModel(ModelShape.of(fields))


def layer_of(fields):
    (layer,) = planned(fields).layers.values()
    return sum(weight.elements for weight in layer)


def parts_of(model=MODEL, phase="save", devices="64xH100-80G", **engine):
    return plan_of(values_of(model, **engine), devices).phases[phase]


@pytest.mark.parametrize(("precision", "width", "state"), [("bf16", 2, 12), ("fp32", 4, 8)])
def test_one_process_holds_weights_gradients_and_state(precision, width, state):
    elements = planned(MODEL).elements
    parts = parts_of(precision=precision, devices="1xB200-180G")
    assert parts["weights"] == width * elements
    assert parts["gradients"] == 4 * elements
    assert parts["optimizer"] == state * elements


def test_data_parallel_processes_divide_the_state_alone():
    elements = planned(MODEL).elements
    parts = parts_of()
    assert parts["weights"] + parts["gradients"] == 6 * elements
    assert parts["optimizer"] == 12 * elements / 64


def test_moments_on_the_host_leave_the_fp32_weights_on_the_device():
    stepped = planned(MODEL).elements / 64
    plain = plan_of(values_of())
    moved = plan_of(values_of(optimizer_offload=True))
    assert moved.phases["save"]["optimizer"] == pytest.approx(4 * stepped)
    assert moved.host["optimizer"] == pytest.approx(8 * stepped)
    assert "optimizer" not in plain.host


def test_moments_in_bf16_are_half_as_large_wherever_they_rest():
    stepped = planned(MODEL).elements / 64
    optim = {"optim": {"moments": "bf16"}, "checkpoint": {"background": True}}
    here = plan_of(values_of() | optim)
    assert here.phases["save"]["optimizer"] == pytest.approx((4 + 2 * 2) * stepped)
    assert here.host["saving"] == pytest.approx((4 + 2 * 2) * stepped)
    away = plan_of(values_of(optimizer_offload=True) | optim)
    assert away.phases["save"]["optimizer"] == pytest.approx(4 * stepped)
    assert away.host["optimizer"] == pytest.approx(2 * 2 * stepped)


@pytest.mark.parametrize("rests", ["on the host", "in bf16"])
def test_resting_moments_come_some_at_a_time(rests):
    """Those of the widest weight at once, in fp32, its temporaries beside them."""
    short = {"batch": {"examples": 64, "tokens_per_device": 64}}
    short["data"] = {"train": ["t.jsonl"], "max_length": 64}
    on_host = rests == "on the host"
    values = values_of(optimizer_offload=on_host, activation_checkpointing="full") | short
    values["optim"] = {"moments": "fp32" if on_host else "bf16"}
    parts = plan_of(values, "1xB200-180G").phases["update"]
    assert parts["optimizer step"] == 12 * 151936 * 4096


def test_a_critic_and_a_judge_are_cut_as_the_policy_is():
    """One has all of its state beside the policy's, the other its weights."""
    values = values_of(pipeline_parallel=4) | {
        "data": {"train": ["t.jsonl"], "max_length": 4096, "max_prompt_length": 512},
        "batch": {"prompts": 64, "tokens_per_device": 8192},
        "algorithm": {"advantage": "gae"},
        "reward": {"models": [{"path": "judge"}]},
    }
    config, shape = RunConfig.model_validate(values), ModelShape.of(MODEL)
    devices = parse_devices("8xB200-180G")
    plan, _ = Planner(shape, config, METHODS["rl"], devices, beside([MODEL])).as_configured()
    parts = plan.phases["save"]
    stage = parts["weights"] / 2
    assert parts["critic"] == pytest.approx((2 + 4 + 12 / 2) * stage)
    assert parts["reward models"] == 2 * stage
    alone = plan_of(values_of(pipeline_parallel=4), "8xB200-180G")
    assert plan.phases["update"]["gradients"] == alone.phases["update"]["gradients"]


def test_the_fullest_stage_has_the_most_layers_and_a_table():
    """36 layers over 8 stages: some have five of them."""
    layer, table = layer_of(MODEL), 151936 * 4096
    assert parts_of(pipeline_parallel=8)["weights"] == 2 * (5 * layer + table)
    assert parts_of(pipeline_parallel=4)["weights"] == 2 * (9 * layer + table)


def test_tied_tables_are_at_both_ends_of_a_pipeline_and_once_without_one():
    tied = MODEL | {"tie_word_embeddings": True}
    for stages, tables in ((1, 1), (2, 0)):
        freed = parts_of(pipeline_parallel=stages)["weights"]
        freed -= parts_of(tied, pipeline_parallel=stages)["weights"]
        assert freed == tables * 2 * 151936 * 4096


def test_experts_are_divided_and_the_rest_is_not():
    shape = planned(MIXTURE)
    experts = 48 * 128 * 3 * 2048 * 768
    others = shape.elements - experts
    parts = parts_of(MIXTURE, expert_parallel=8)
    assert parts["weights"] == 2 * (experts / 8 + others)
    assert parts["optimizer"] == pytest.approx(12 * shape.elements / 64)
    both = parts_of(MIXTURE, expert_parallel=8, tensor_parallel=2, expert_tensor_parallel=1)
    assert both["weights"] > 2 * (experts / 8 + others / 2)
    assert both["optimizer"] == pytest.approx(
        12 * (experts / 64 + (both["weights"] / 2 - experts / 8) / 32)
    )


def activations(**engine):
    return parts_of(phase="update", **engine)["activations"]


def test_what_shares_or_computes_again_holds_less():
    plain = activations()
    assert activations(activation_checkpointing="full") < activations(
        activation_checkpointing="selective"
    )
    assert activations(tensor_parallel=2) < 0.6 * plain
    assert activations(tensor_parallel=2) < activations(
        tensor_parallel=2, megatron_sequence_parallel=False
    )


def test_micro_batches_in_flight():
    """The first of four stages has four micro-batches of a quarter of the layers; shorter stages keep more."""
    plain, stages = activations(), activations(pipeline_parallel=4)
    assert stages == pytest.approx(plain, rel=0.15)
    assert stages < activations(pipeline_parallel=4, virtual_stages=3) < 2 * stages


@pytest.mark.parametrize(
    ("model", "devices"),
    [
        (MODEL, "16xH100-80G"),
        pytest.param(MIXTURE, "16xH100-80G", marks=pytest.mark.nightly),
    ],
)
def test_what_is_recommended_is_a_good_configuration(model, devices, tmp_path):
    plans = planner(values_of(model), devices).all_plans()
    fitting = [plan for plan in plans if plan.fits]
    assert fitting == plans[: len(fitting)]
    assert 0 < len(fitting) < len(plans)
    assert {plan.engine.pipeline_parallel for plan in plans} >= {1, 2, 4}
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(RunConfig.model_validate(values_of(model))))
    for plan in plans[::10]:
        config = read_config(path, plan.overrides())
        METHODS["sft"].check(config, plan.devices.count)
        assert config.engine == plan.engine


def test_the_gradient_of_a_weight_is_made_before_it_joins_the_buffer():
    parts = parts_of(MIXTURE | {"vocab_size": 1024}, "update", expert_parallel=8)
    assert parts["gradients"] == 2 * parts["weights"]
    assert parts["new gradient"] == 2 * 128 / 8 * (2 * 768 * 2048)


def test_experts_keep_the_tokens_that_they_get():
    """Eight of 128 experts, so as much as a dense layer of eight times their width, and the tokens."""
    routed_model = MIXTURE | {"vocab_size": 1024}
    dense = MODEL | {name: routed_model[name] for name in SHARED} | {"intermediate_size": 8 * 768}
    plain, routed = (
        parts_of(each, "update", expert_parallel=degree)["activations"]
        for each, degree in ((dense, 1), (routed_model, 64))
    )
    per_layer = 8192 * 8 * 2048 * 2
    assert routed - plain == pytest.approx((48 + 2) * per_layer)


def test_experts_that_are_evened_out_are_counted_by_a_pass():
    values = values_of(MIXTURE)
    evened = values_of(MIXTURE, router_aux_loss=0.001)
    plain, counted = (plan_of(v, "1xB200-180G").seconds for v in (values, evened))
    assert counted["update"] == pytest.approx(plain["update"] * 4 / 3, rel=0.05)


def test_types_without_a_description_are_counted_on_this_engine_alone():
    fields = tiny_config("deepseek_v3").to_dict()
    assert planner_of(fields, "megatron").model.elements > 0
    with pytest.raises(UsageError):
        planner_of(fields, "torch")
    with pytest.raises(UsageError):
        planner_of(tiny_config("falcon_h1").to_dict(), "megatron")


def planner_of(fields, kind):
    config = RunConfig.model_validate(values_of(fields, kind=kind))
    return Planner(model_shape(fields, kind), config, METHODS["sft"], parse_devices("8xH100"))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 20},
        ),  # columns, of which 8 ranks have no part
        (
            "qwen3_5_text",
            {"num_key_value_heads": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 8},
        ),  # gated heads
    ],
)
def test_no_plan_divides_what_tensor_ranks_cannot(kind, changes):
    fields = tiny_config(kind, num_attention_heads=8, **changes).to_dict()
    short = {"data": {"train": ["t.jsonl"], "max_length": 64}}
    config = RunConfig.model_validate(values_of(fields) | short)
    shape = model_shape(fields, "megatron")
    plans = Planner(shape, config, METHODS["sft"], parse_devices("8xH100")).all_plans()
    assert {plan.engine.tensor_parallel for plan in plans} == {1, 2, 4}


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 12), st.booleans())
def test_micro_batches_in_flight_are_those_of_a_simulated_schedule(stages, virtual, turns, is_last):
    """Stages run some forward passes ahead, then one of each in turn; chunks take turns of as many as there are stages."""
    virtual = virtual if stages > 1 else 1
    count = turns * stages if virtual > 1 else turns
    values = values_of(
        MODEL | {"num_hidden_layers": stages * virtual},
        virtual_stages=virtual,
        pipeline_parallel=stages,
    )
    values["batch"] = {"examples": 2 * count, "tokens_per_device": 8192}
    config = RunConfig.model_validate(values)
    model = planned(values["model"]["fresh"])
    work = Workload.of_examples(config.batch, config.data)
    needs = MegatronNeeds(model, work, parse_devices(f"{stages}xH100"), config.engine, config.optim)
    stage = stages - 1 if is_last else 0
    ahead = stages - stage - 1
    if virtual > 1:
        ahead = 2 * ahead + (virtual - 1) * stages
    assert needs.microbatches == count
    chunks = min(ahead + 1, count * virtual)
    assert needs._in_flight()[is_last] == pytest.approx(chunks / virtual)

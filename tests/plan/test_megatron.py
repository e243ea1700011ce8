"""What the Megatron engine's stages, experts and data-parallel processes hold, by counting."""

import sys
from collections import Counter
from itertools import product

import pytest
from model_shapes import QWEN3_8B
from transformers import AutoConfig

from burnish.config.check import check
from burnish.config.load import dump_yaml, load_config
from burnish.config.schema import EngineConfig, RunConfig
from burnish.engines.megatron.megatron_compatibility import require_fitting
from burnish.errors import UsageError
from burnish.plan.devices import parse_devices
from burnish.plan.layouts import Planner
from burnish.plan.megatron_layouts import divides_trained
from burnish.plan.shape import PlannedModel
from burnish.plan.workload import Workload

MODEL = QWEN3_8B | {"tie_word_embeddings": False}
MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def values_of(model=MODEL, **engine):
    return {
        "model": {"fresh": model, "tokenizer": "t"},
        "data": {"train": ["t.jsonl"], "max_length": 4096},
        "batch": {"examples": 256, "tokens_per_device": 8192},
        "engine": {"kind": "megatron"} | engine,
    }


def planner(values, devices="64xH100-80G"):
    config = RunConfig.model_validate(values)
    shape = PlannedModel.of(values["model"]["fresh"])
    return Planner(shape, config, Workload.of(config, "sft"), parse_devices(devices))


def parts_of(model=MODEL, phase="save", devices="64xH100-80G", **engine):
    return planner(values_of(model, **engine), devices).as_configured().phases[phase]


@pytest.mark.parametrize(("precision", "width", "state"), [("bf16", 2, 12), ("fp32", 4, 8)])
def test_one_process_holds_weights_gradients_and_state(precision, width, state):
    elements = PlannedModel.of(MODEL).elements
    parts = parts_of(precision=precision, devices="1xB200-180G")
    assert parts["weights"] == width * elements
    assert parts["gradients"] == 4 * elements
    assert parts["optimizer"] == state * elements


def test_data_parallel_processes_divide_the_state_alone():
    elements = PlannedModel.of(MODEL).elements
    parts = parts_of()
    assert parts["weights"] + parts["gradients"] == 6 * elements
    assert parts["optimizer"] == 12 * elements / 64


def test_moments_on_the_host_leave_the_fp32_weights_on_the_device():
    stepped = PlannedModel.of(MODEL).elements / 64
    plain = planner(values_of()).as_configured()
    moved = planner(values_of(optimizer_offload=True)).as_configured()
    assert moved.phases["save"]["optimizer"] == pytest.approx(4 * stepped)
    assert moved.host["optimizer"] == pytest.approx(8 * stepped)
    assert "optimizer" not in plain.host


def test_moments_in_bf16_are_half_as_large_wherever_they_rest():
    stepped = PlannedModel.of(MODEL).elements / 64
    optim = {"optim": {"moments": "bf16"}, "checkpoint": {"background": True}}
    here = planner(values_of() | optim).as_configured()
    assert here.phases["save"]["optimizer"] == pytest.approx((4 + 2 * 2) * stepped)
    assert here.host["saving"] == pytest.approx((4 + 2 * 2) * stepped)
    away = planner(values_of(optimizer_offload=True) | optim).as_configured()
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
    parts = planner(values, "1xB200-180G").as_configured().phases["update"]
    assert parts["optimizer step"] == 12 * 151936 * 4096


def test_a_critic_and_a_judge_are_cut_as_the_policy_is():
    """One has all of its state beside the policy's, without a second table in the last stage, the other its weights."""
    values = values_of(pipeline_parallel=4) | {
        "data": {"train": ["t.jsonl"], "max_length": 4096, "max_prompt_length": 512},
        "batch": {"prompts": 64, "tokens_per_device": 8192},
        "algorithm": {"advantage": "gae"},
        "reward": {"models": [{"path": "judge"}]},
    }
    config, shape = RunConfig.model_validate(values), PlannedModel.of(MODEL)
    work, devices = Workload.of(config, "rl"), parse_devices("8xB200-180G")
    plan = Planner(shape, config, work, devices, [shape]).as_configured()
    parts, (layer, _), table = plan.phases["save"], shape.layers[0], 151936 * 4096
    stages = [9 * layer.elements + table, 9 * layer.elements + 4096]
    held = parts["weights"] / 2
    critic = next(each for each in stages if held - each in (0, table))
    assert parts["critic"] == pytest.approx((2 + 4 + 12 / 2) * critic)
    assert parts["reward models"] == 2 * critic
    alone = planner(values_of(pipeline_parallel=4), "8xB200-180G").as_configured()
    assert plan.phases["update"]["gradients"] == alone.phases["update"]["gradients"]


def test_the_ends_of_a_pipeline_have_the_embedding_and_the_output_layer():
    """36 layers over 8 stages: the first four have five of them, and the first the embedding as well."""
    shape = PlannedModel.of(MODEL)
    (layer, _), table = shape.layers[0], 151936 * 4096
    assert parts_of(pipeline_parallel=8)["weights"] == 2 * (5 * layer.elements + table)
    whole = parts_of(pipeline_parallel=4)["weights"]
    assert whole == 2 * (9 * layer.elements + table + 4096)  # the last, for its norm


def test_tied_tables_are_at_both_ends_of_a_pipeline_and_once_without_one():
    tied = MODEL | {"tie_word_embeddings": True}
    for stages, tables in ((1, 1), (2, 0)):
        freed = parts_of(pipeline_parallel=stages)["weights"]
        freed -= parts_of(tied, pipeline_parallel=stages)["weights"]
        assert freed == tables * 2 * 151936 * 4096


def test_experts_are_divided_and_the_rest_is_not():
    shape = PlannedModel.of(MIXTURE)
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


@pytest.mark.parametrize(("model", "devices"), [(MODEL, "16xH100-80G"), (MIXTURE, "16xH100-80G")])
def test_what_is_recommended_is_a_good_configuration(model, devices, tmp_path):
    plans = planner(values_of(model), devices).all_plans()
    fitting = [plan for plan in plans if plan.fits]
    assert fitting == plans[: len(fitting)]
    assert 0 < len(fitting) < len(plans)
    assert {plan.layout.pipeline for plan in plans} >= {1, 2, 4}
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(RunConfig.model_validate(values_of(model))))
    for plan in plans[::10]:
        config = load_config(path, plan.overrides()).config
        check(config, "sft", plan.layout.world)
        assert config.engine == plan.engine


def test_the_gradients_of_a_matrix_of_experts_are_made_at_once():
    """On an accelerator, before they are added to the buffer."""
    parts = parts_of(MIXTURE | {"vocab_size": 1024}, "update", expert_parallel=8)
    held = parts["weights"] / 2
    assert parts["gradients"] - 4 * held == 2 * 128 / 8 * (2 * 768 * 2048)


def test_experts_that_are_evened_out_are_counted_by_a_pass():
    values = values_of(MIXTURE)
    evened = values_of(MIXTURE, router_aux_loss=0.001)
    plain, counted = (planner(v, "1xB200-180G").as_configured().seconds for v in (values, evened))
    assert counted["update"] == pytest.approx(plain["update"] * 4 / 3, rel=0.05)


SMALL = MODEL | {"hidden_size": 32, "head_dim": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 48, "num_hidden_layers": 4}  # fmt: skip
MIXED = SMALL | {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "mlp_only_layers": []}  # fmt: skip


@pytest.mark.parametrize("model", [SMALL, MIXED], ids=["dense", "mixture"])
def test_what_cannot_be_cut_is_what_the_engine_refuses(model):
    hf_config, shape = AutoConfig.for_model(**model), PlannedModel.of(model)
    degrees = product((1, 2, 3, 8), (1, 2, 3), (1, 3, 4), (1, 2), (1, 2, 4), (None, 1, 2, 8), (True, False))  # fmt: skip
    seen = Counter()
    for tensor, sequence, pipeline, virtual, experts, within, spread in degrees:
        engine = EngineConfig(
            kind="megatron",
            tensor_parallel=tensor,
            sequence_parallel=sequence,
            pipeline_parallel=pipeline,
            virtual_stages=virtual,
            expert_parallel=experts,
            expert_tensor_parallel=within,
            megatron_sequence_parallel=spread,
        )
        try:
            require_fitting(hf_config, engine)
            fits = True
        except UsageError:
            fits = False
        assert divides_trained(shape, engine) == fits, engine
        seen[fits] += 1
    assert min(seen[True], seen[False]) > 10


def test_a_family_that_the_engine_does_not_compute_is_refused():
    with pytest.raises(UsageError, match="does not compute models of this type"):
        planner(values_of(MODEL | {"model_type": "olmo2"}))


def test_thousands_of_layouts_share_what_they_have_in_common():
    """What a layer holds is worked out for 1 in 50 layouts of a trillion parameters, and all else takes few steps."""
    shape = MIXTURE | {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64}
    shape |= {"num_key_value_heads": 8, "moe_intermediate_size": 2048, "num_experts": 384}
    values = values_of(shape) | {"batch": {"examples": 8192, "tokens_per_device": 16384}}
    calls = Counter()

    def count(frame, event, argument):
        if event == "call":
            calls[frame.f_code.co_name] += 1

    many = planner(values, "16384xH100-80G")
    sys.setprofile(count)
    try:
        plans = many.all_plans()
    finally:
        sys.setprofile(None)
    assert len(plans) > 4000
    assert 0 < calls["megatron_passes"] < len(plans) / 50
    assert calls.total() < 250 * len(plans)

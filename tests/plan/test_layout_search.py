import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.known_sizes import QWEN3_8B, QWEN3_30B_A3B
from support.nightly import draws

from burnish.config.document import dump_yaml
from burnish.config.load import read_config
from burnish.config.schema import LoraConfig, RunConfig
from burnish.families import ModelShape
from burnish.methods.table import METHODS
from burnish.plan.devices import parse_devices
from burnish.plan.layout_search import Planner, why_not
from burnish.plan.model import PlannedModel

SFT = {
    "model": {"fresh": QWEN3_8B, "tokenizer": "t"},
    "data": {"train": ["t.jsonl"], "max_length": 4096},
    "batch": {"examples": 256, "tokens_per_device": 16384},
}
RL = SFT | {
    "data": {"train": ["t.jsonl"], "max_prompt_length": 512},
    "batch": {"prompts": 64, "minibatches": 2, "tokens_per_device": 16384},
    "rollout": {"n": 8, "max_response_length": 2048},
    "reward": {"functions": [{"function": "numeric"}]},
    "algorithm": {"kl": {"coef": 0.01}},
}


def planner(values=SFT, command="sft", devices="64xH100-80G"):
    config = RunConfig.model_validate(values)
    shape = ModelShape.of(values["model"]["fresh"])
    return Planner(shape, config, METHODS[command], parse_devices(devices))


def plan_of(values=SFT, command="sft", devices="64xH100-80G"):
    plan, _ = planner(values, command, devices).as_configured()
    return plan


MODEL = PlannedModel(ModelShape.of(QWEN3_8B))


@pytest.mark.parametrize(("values", "command"), [(SFT, "sft"), (RL, "rl")])
def test_plans_that_fit_come_first_and_the_quickest_of_them(values, command):
    plans = planner(values, command).all_plans()
    fitting = [plan for plan in plans if plan.fits]
    assert fitting == plans[: len(fitting)]
    assert 0 < len(fitting) < len(plans)
    assert [p.step_seconds for p in fitting] == sorted(p.step_seconds for p in fitting)
    assert all(plan.devices.count == 64 for plan in plans)
    assert all(plan.need <= plan.devices.usable for plan in fitting)


def test_automatic_slots_are_as_many_as_fit():
    long = RL | {
        "rollout": {"n": 8, "max_response_length": 4096},
        "batch": RL["batch"] | {"prompts": 512},
    }
    whole = planner(
        long | {"rollout": long["rollout"] | {"slots": 512}}, "rl", "8xH100-80G"
    ).all_plans()
    fitting = planner(long, "rl", "8xH100-80G").all_plans()
    assert not any(plan.fits for plan in whole)
    assert fitting[0].fits
    assert fitting[0].phases["rollout"]["kv cache"] < whole[0].phases["rollout"]["kv cache"]


def test_larger_microbatches_are_advised_where_weights_travel_too_often():
    mixture = SFT | {
        "model": SFT["model"] | {"fresh": QWEN3_30B_A3B},
        "batch": {"examples": 512, "tokens_per_device": 8192},
        "engine": {"activation_checkpointing": "full"},
    }
    larger = planner(mixture, devices="8xH100-80G").larger_microbatch(
        plan_of(mixture, devices="8xH100-80G")
    )
    set_so = mixture | {"batch": {"examples": 512, "tokens_per_device": larger.tokens}}
    assert larger == plan_of(set_so, devices="8xH100-80G")
    assert larger.fits
    assert larger.step_seconds < 0.95 * plan_of(mixture, devices="8xH100-80G").step_seconds
    assert planner().larger_microbatch(plan_of()) is None


OFFLOADED = SFT | {"engine": {"activation_offload": True}}
LONG = SFT | {"data": SFT["data"] | {"max_length": 3 * SFT["batch"]["tokens_per_device"]}}
LONG_COMPLETIONS = RL | {"rollout": RL["rollout"] | {"max_response_length": 20_000}}
MEGATRON = LONG | {"engine": {"kind": "megatron"}}


@pytest.mark.parametrize(
    ("values", "command"),
    [
        (RL, "rl"),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (
                (SFT, "sft"),
                (OFFLOADED, "sft"),
                (LONG, "sft"),
                (LONG_COMPLETIONS, "rl"),
                (MEGATRON, "sft"),
            )
        ),
    ],
)
def test_what_is_recommended_is_a_good_configuration(values, command, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(RunConfig.model_validate(values)))
    for plan in planner(values, command).all_plans()[::10]:
        config = read_config(path, plan.overrides())
        METHODS[command].check(config, 64)
        assert config.engine == plan.engine


def test_phases_of_each_kind():
    (sft, *_), (rl, *_) = planner().all_plans(), planner(RL, "rl").all_plans()
    assert list(sft.phases) == list(sft.seconds) == ["update", "save"]
    assert (
        list(rl.phases) == list(rl.seconds) == ["rollout", "log-probs", "update", "publish", "save"]
    )
    assert {"reference", "generator", "kv cache"} <= set(rl.phases["rollout"])
    assert not {"reference", "generator"} & set(sft.phases["update"])


def test_state_is_twelve_bytes_a_parameter():
    plan = plan_of(devices="1xB200-180G")
    parts = plan.phases["save"]
    elements = MODEL.elements
    assert parts["weights"] + parts["optimizer"] == 12 * elements


def test_offloaded_parameters_need_the_host_alone():
    plan = plan_of(SFT | {"engine": {"parameter_offload": True}}, devices="1xB200-180G")
    assert not {"weights", "optimizer"} & set(plan.phases["save"])
    assert plan.host["weights"] + plan.host["optimizer"] == 16 * MODEL.elements


def test_muon_keeps_one_number_of_a_matrix():
    values = SFT | {"optim": {"kind": "muon"}}
    parts = plan_of(values, devices="1xB200-180G").phases["save"]
    (layer,) = MODEL.layers.values()
    others = sum(w.elements for w in MODEL.root)
    others += 36 * sum(w.elements for w in layer if w.columns == 1)
    assert parts["optimizer"] == 4 * (MODEL.elements + others)


def test_muon_keeps_one_number_of_a_matrix_on_megatron_too():
    values = SFT | {"batch": {"examples": 64, "tokens_per_device": 64}, "data": {"max_length": 64}}
    values |= {
        "engine": {"kind": "megatron", "tensor_parallel": 2, "activation_checkpointing": "full"}
    }
    adamw = plan_of(values, devices="2xB200-180G")
    muon = plan_of(values | {"optim": {"kind": "muon"}}, devices="2xB200-180G")
    saved = adamw.phases["save"]["optimizer"] - muon.phases["save"]["optimizer"]
    assert saved == 4 * MODEL.matrices / 2
    assert muon.phases["update"]["muon"] >= 2 * 2 * MODEL.matrices / 2


def configured(**changes):
    values = SFT | {"engine": changes.pop("engine", {}), **changes}
    return plan_of(values)


@draws(20)
@given(st.sampled_from(["bf16", "fp32"]), st.booleans(), st.sampled_from([4096, 16384, 65536]))
def test_keeping_less_needs_less(precision, reshard, tokens):
    needs = [
        configured(
            engine={
                "precision": precision,
                "reshard_after_forward": reshard,
                "activation_checkpointing": kind,
            },
            batch={"examples": 256, "tokens_per_device": tokens},
        ).total("update")
        for kind in ("full", "selective", "none")
    ]
    assert needs == sorted(needs)


@draws(20)
@given(st.sampled_from(["full", "none"]), st.sampled_from([1, 2, 4, 8]))
def test_more_copies_need_more(kind, replicas):
    one, more = (
        configured(engine={"activation_checkpointing": kind, "replicas": each}).need
        for each in (replicas, 2 * replicas)
    )
    assert one < more


def test_several_micro_batches_keep_whole_gradients_unless_each_is_reduced():
    """FSDP2 adds up unsharded gradients until it may reduce them."""
    full, batch = {"activation_checkpointing": "full"}, {"tokens_per_device": 16384}
    once = full | {"reduce_each_microbatch": False}
    few = configured(engine=once, batch=batch | {"examples": 256})
    many, each = (configured(engine=e, batch=batch | {"examples": 2560}) for e in (once, full))
    assert (few.microbatches, many.microbatches, each.microbatches) == (1, 10, 10)
    whole = 4 * MODEL.elements
    gradients = [plan.phases["update"]["gradients"] for plan in (few, each, many)]
    assert gradients == sorted(gradients)
    assert gradients[1] - gradients[0] <= whole / 64 < whole <= gradients[2]


def test_gradients_travel_as_often_as_they_are_reduced():
    """Four bytes an element, beside two times two for weights that are gathered in every micro-batch."""
    batch, slow = {"examples": 640, "tokens_per_device": 256}, {"max_length": 256}
    each, once = (
        configured(engine={"reduce_each_microbatch": reduces}, batch=batch, data=slow)
        for reduces in (True, False)
    )
    assert each.microbatches == 10
    assert each.seconds["update"] / once.seconds["update"] == pytest.approx(80 / 44)


def test_ranks_that_share_matrices_hold_their_part():
    whole, half = (
        configured(engine={"tensor_parallel": tensor, "activation_checkpointing": "full"})
        for tensor in (1, 2)
    )
    assert (half.shards, half.engine.tensor_parallel) == (32, 2)
    assert half.phases["update"]["activations"] < whole.phases["update"]["activations"]
    assert half.phases["save"]["weights"] == pytest.approx(
        whole.phases["save"]["weights"], rel=0.01
    )


def test_what_tensor_parallelism_does_not_know_is_not_planned_with_it():
    values = SFT | {"model": SFT["model"] | {"fresh": QWEN3_8B | {"model_type": "olmo2"}}}
    assert {plan.engine.tensor_parallel for plan in planner(values).all_plans()} == {1}


def test_an_adapter_needs_no_state_for_the_model():
    values = RL | {"model": RL["model"] | {"lora": {"rank": 16}}}
    adapter, full = (plan_of(v, "rl") for v in (values, RL))
    assert adapter.phases["save"]["optimizer"] < full.phases["save"]["optimizer"] / 50
    assert "reference" not in adapter.phases["save"]


def test_an_adapter_beside_the_model_is_all_that_travels():
    def plan(**how):
        values = RL | {"model": RL["model"] | {"lora": {"rank": 4, **how}}}
        return plan_of(values, "rl")

    merged, beside = plan(), plan(publish="adapter")
    adapter = PlannedModel(MODEL.shape, LoraConfig(rank=4)).adapter
    held = beside.phases["rollout"]["generator"] - merged.phases["rollout"]["generator"]
    assert held == 2 * adapter
    assert "merging" in merged.phases["publish"]
    assert "merging" not in beside.phases["publish"]
    assert beside.phases["publish"]["buffers"] == 2 * 2 * adapter
    ratio = beside.seconds["publish"] / merged.seconds["publish"]
    assert ratio == pytest.approx(adapter / MODEL.elements)
    assert beside.seconds["rollout"] > merged.seconds["rollout"]


MOE = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1024,
}


@pytest.mark.parametrize(
    ("model", "targets", "widths"),
    [
        (
            QWEN3_8B,
            [],
            [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)] + [(4096, 12288)] * 3,
        ),
        (QWEN3_8B, ["q_proj", "down_proj"], [(4096, 4096), (12288, 4096)]),
        (MOE, [], [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)]),
        (MOE, ["experts.gate_up_proj"], [(64 * 4096, 64 * 2048)]),
        (MOE, ["v_proj", "experts.down_proj"], [(4096, 1024), (64 * 1024, 64 * 4096)]),
    ],
    ids=["all", "some", "not the experts", "the experts", "a part of them"],
)
def test_an_adapter_is_beside_the_linear_layers_that_it_is_for(model, targets, widths):
    lora = {"rank": 16, "targets": targets}
    values = SFT | {"model": SFT["model"] | {"fresh": model | {"head_dim": 128}, "lora": lora}}
    parts = plan_of(values, devices="1xB200-180G").phases["save"]
    assert parts["optimizer"] == 8 * 16 * 36 * sum(map(sum, widths))


def test_an_adapter_spares_the_gradients_of_the_matrices():
    """Two thirds of the products, all of attention's; nothing of the model is sent or saved."""
    adapted = SFT | {"model": SFT["model"] | {"lora": {"rank": 16}}}
    adapter, full = (plan_of(v, devices="1xB200-180G") for v in (adapted, SFT))
    assert 2 / 3 < adapter.seconds["update"] / full.seconds["update"] < 0.75
    assert adapter.seconds["save"] < full.seconds["save"] / 50


def test_a_critic_takes_an_update_and_a_pass_of_its_own():
    values = [RL | {"algorithm": {"advantage": each}} for each in ("grpo", "gae")]
    grpo, gae = (plan_of(v, "rl").seconds for v in values)
    assert gae["update"] == pytest.approx(2 * grpo["update"])
    assert gae["log-probs"] == pytest.approx(2 * grpo["log-probs"])
    assert gae["save"] == pytest.approx(2 * grpo["save"])


MIXTURE = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 1536,
    "num_experts": 16,
    "num_experts_per_tok": 8,
}


def test_ranks_that_share_experts_hold_as_much_and_gather_less():
    """Experts are 64 × 3 × 4096 × 1536 numbers of a layer, in bf16; two layers are gathered at one time."""
    values = RL | {"model": RL["model"] | {"fresh": MIXTURE | {"num_experts": 64}}}
    whole, shared = (
        plan_of(values | {"engine": {"precision": "bf16", "expert_parallel": parts}}, "rl")
        for parts in (1, 8)
    )
    assert shared.phases["save"]["weights"] == whole.phases["save"]["weights"]
    experts = 2 * 2 * 64 * 3 * 4096 * 1536
    less = whole.phases["log-probs"]["gathered"] - shared.phases["log-probs"]["gathered"]
    assert less > experts / 3  # the fullest moments are others
    assert shared.seconds["update"] < whole.seconds["update"]  # links between machines are slow
    plans = planner(values, "rl").all_plans()
    assert {plan.engine.expert_parallel for plan in plans} == {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("algorithm", "policy", "critic"),
    [
        ({}, 1, 0),
        ({"router_replay": "recompute"}, 0, 0),
        ({"router_replay": "rollout"}, 0, 0),
        ({"router_replay": "rollout", "advantage": "gae"}, 0, 1),
    ],
    ids=str,
)
def test_experts_that_are_evened_out_are_counted_by_a_pass_where_they_are_not_known(
    algorithm, policy, critic
):
    """A pass over the sequences takes as long as one that scores them, where nothing waits for links."""
    values = RL | {"model": RL["model"] | {"fresh": MIXTURE}, "algorithm": algorithm}
    evened = values | {"engine": {"router_aux_loss": 0.001}}
    plain, with_loss = (plan_of(v, "rl", "1xH100-80G") for v in (values, evened))
    scoring = plain.seconds["log-probs"] / (2 if critic else 1)
    more = with_loss.seconds["update"] - plain.seconds["update"]
    assert more == pytest.approx((policy + critic) * scoring)


def test_replayed_routers_are_recorded_by_a_pass_before_several_updates():
    """Also where the generator's log-probs are kept."""
    algorithm = {"old_logprobs": "rollout", "router_replay": "recompute"}
    found = [
        planner(RL | {"algorithm": algorithm, "batch": RL["batch"] | batch}, "rl").work
        for batch in ({"minibatches": 2}, {"minibatches": 1, "epochs": 2}, {"minibatches": 1})
    ]
    assert [(work.scorings, work.is_replayed) for work in found] == 2 * [(1, True)] + [(0, False)]


@pytest.mark.parametrize("kind", ["torch", "megatron"])
def test_epochs_take_as_many_updates_and_no_more_memory(kind):
    values = RL | {"engine": {"kind": kind}, "batch": RL["batch"] | {"minibatches": 1}}
    values |= {"algorithm": {"advantage": "gae"}}
    epochs = values | {"batch": values["batch"] | {"epochs": 3}}
    one, three = (plan_of(v, "rl", "8xH100-80G") for v in (values, epochs))
    for found in ("seconds", "operations"):
        before, after = getattr(one, found), getattr(three, found)
        assert after["update"] == pytest.approx(3 * before["update"])
        assert after["log-probs"] == pytest.approx(2 * before["log-probs"])  # of the policy as well
    assert three.phases["update"] == one.phases["update"]


def test_a_critic_beside_an_adapter_needs_the_memory_of_a_whole_update():
    values = RL | {"model": RL["model"] | {"lora": {"rank": 16}}}
    values |= {"engine": {"activation_checkpointing": "full"}}
    values |= {"batch": RL["batch"] | {"tokens_per_device": 4096}}
    alone = plan_of(values, "rl", "1xB200-180G")
    values |= {"algorithm": {"advantage": "gae"}}
    beside = plan_of(values, "rl", "1xB200-180G")
    update = beside.phases["update"]
    assert update["gradients"] > 10 * alone.phases["update"]["gradients"]
    assert update["critic"] == beside.phases["save"]["critic"]


def test_muon_makes_whole_matrices():
    values = SFT | {"batch": {"examples": 64, "tokens_per_device": 64}, "data": {"max_length": 64}}
    values |= {"optim": {"kind": "muon"}, "engine": {"activation_checkpointing": "full"}}
    parts = plan_of(values, devices="1xB200-180G").phases["update"]
    (layer,) = MODEL.layers.values()
    matrices = 36 * sum(w.elements for w in layer if w.columns > 1)
    assert parts["muon"] == 2 * 2 * matrices


def test_a_critic_is_a_second_model_that_learns():
    values = RL | {"algorithm": {"advantage": "gae"}}
    parts = plan_of(values, "rl").phases["save"]
    head = QWEN3_8B["vocab_size"] * QWEN3_8B["hidden_size"]
    elements = MODEL.elements
    assert parts["critic"] == pytest.approx(12 * (elements - head) / 64, rel=0.01)


def test_reasons_count_every_layout_that_does_not_fit():
    plans = planner(devices="16xA100-40G").all_plans()
    counted = [int(reason.split()[0]) for reason in why_not(plans)]
    assert sum(counted) == sum(not plan.fits for plan in plans) > 0
    assert counted == sorted(counted, reverse=True)


def test_a_save_in_the_background_copies_to_the_host():
    values = SFT | {"checkpoint": {"background": True}}
    on_gpu = plan_of(values)
    on_cpu = plan_of(values, devices="64xCPU-96G")
    state = sum(on_gpu.phases["save"][part] for part in ("weights", "optimizer"))
    assert on_gpu.host == {"saving": state}
    adapted = values | {"model": SFT["model"] | {"lora": {"rank": 16}}}
    assert plan_of(adapted).host["saving"] < state / 50
    critic = RL | {"algorithm": {"advantage": "gae"}, "checkpoint": {"background": True}}
    plan = plan_of(critic, "rl")
    saved = sum(plan.phases["save"][part] for part in ("weights", "optimizer", "critic"))
    assert plan.host == {"saving": saved}
    assert "staging" not in on_gpu.phases["save"]
    assert (on_cpu.host, on_cpu.phases["save"]["staging"]) == ({}, state)


@pytest.mark.parametrize(("width", "most"), [(768, 8), (24, 1), (40, 1)])
def test_experts_are_not_cut_finer_than_grouped_products_take(width, most):
    """In bf16 rows of 8 numbers, on every process."""
    fresh = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": width,
        "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 32000,
    }  # fmt: skip
    plans = planner(SFT | {"model": {"fresh": fresh, "tokenizer": "t"}}).all_plans()
    assert max(plan.engine.tensor_parallel for plan in plans) == most

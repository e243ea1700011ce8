"""Whole runs on the Megatron engine: they do what the torch engine does, go on from each other, and survive kills."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from support.models.tiny import save_base
from support.runs import same_runs
from support.runs.same_runs import assert_same
from support.runs.training_files import (
    BY_SIGMOID,
    FRESH,
    STATE,
    At,
    burnish,
    done,
    metrics,
    outcome,
    ranks,
    weights,
)

MEGATRON = "engine.kind=megatron"
STEP = "burnish.engines.megatron.megatron_engine:MegatronEngine.optim_step"
RL = [
    *same_runs.RL,
    "optim.lr=0.003",
]  # at 0.01 rounding grows to half a percent of a gradient in six steps
PPO = [*RL, "algorithm.advantage=gae", "critic.lr=0.003", "critic.warmup_steps=1", "steps=2"]
LAYOUTS = {"TP 2": "engine.tensor_parallel=2", "PP 2": "engine.pipeline_parallel=2"}
MIXTURE = FRESH | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
LATENT = FRESH | {
    "model_type": "deepseek_v3",
    "head_dim": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}

KILLED = [
    [],
    ["engine.tensor_parallel=2"],
    ["engine.pipeline_parallel=2"],
    ["engine.pipeline_parallel=2", "engine.virtual_stages=2"],
    ["engine.expert_parallel=2"],
    ["engine.sequence_parallel=2"],
]
"""Of two processes; the first with data parallelism alone."""
REPLAYED = {
    "recompute": ["engine.expert_parallel=2"],
    "rollout": ["engine.expert_parallel=2", "engine.pipeline_parallel=2"],
}


@pytest.fixture(scope="module")
def of_torch(work):
    return done(work, *RL, "name=of_torch")


@pytest.fixture(scope="module")
def critics_of_torch(work):
    return done(work, *PPO, "name=ppo_torch")


@pytest.mark.parametrize("layout", ["PP 2", pytest.param("TP 2", marks=pytest.mark.nightly)])
def test_reinforcement_learning_is_that_of_the_torch_engine(work, of_torch, layout):
    argv = [*RL, MEGATRON, LAYOUTS[layout], f"name={layout.replace(' ', '')}"]
    assert_same(done(work, *argv, world=2), of_torch)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["PP 2", "TP 2"])
def test_ppo_is_that_of_the_torch_engine(work, critics_of_torch, layout):
    """A critic learns beside the policy, and one step before it."""
    argv = [*PPO, MEGATRON, LAYOUTS[layout], f"name=ppo_{layout[:2]}"]
    run = done(work, *argv, world=2)
    assert_same(run, critics_of_torch)
    assert any("critic/model" in name for name in weights(run))


@pytest.mark.nightly
def test_adapters_of_policy_and_critic_go_on_from_engine_to_engine(work):
    """Either engine resumes what the other has saved, and trains what one run of the torch engine does."""
    save_base(work / "base", seed=0)
    adapted = [*PPO, "model.fresh=null", "model.path=base", "model.lora.rank=4"]
    adapted += ["critic.lora_rank=2", "steps=4", "evaluation.every=1"]
    wanted = done(work, *adapted, "name=adapted")
    assert all(
        "model.safetensors" not in name or "lora_" in name or "score" in name
        for name in weights(wanted)
    )
    assert any("critic/model/adapter_model" in name for name in weights(wanted))
    for layout in LAYOUTS.values():
        argv = [*adapted, f"name=chain_{layout[-10]}"]
        for steps, how in ((2, []), (3, [MEGATRON, layout]), (4, [])):
            run = done(work, *argv, *how, f"steps={steps}", world=1 + bool(how))
        assert_same(run, wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("replay", ["rollout", "recompute"])
@pytest.mark.parametrize("fresh", [MIXTURE, BY_SIGMOID], ids=lambda each: each["model_type"])
def test_replayed_mixtures_are_those_of_the_torch_engine(work, fresh, replay):
    """Experts that others chose, the generator or the policy before its update, are those of the second update too."""
    name = f"{fresh['model_type']}_{replay}"
    argv = [*RL, f"model.fresh={json.dumps(fresh)}"]
    argv += ["engine.router_bias_update_rate=0.01"] if fresh is BY_SIGMOID else []
    not_replayed = done(work, *argv, f"name={name}_not")
    argv.append(f"algorithm.router_replay={replay}")
    wanted = done(work, *argv, f"name={name}_torch")
    with pytest.raises(AssertionError):
        assert_same(not_replayed, wanted)
    for number, layout in enumerate(REPLAYED[replay]):
        run = done(work, *argv, MEGATRON, layout, f"name={name}_{number}", world=2)
        assert_same(run, wanted)


@pytest.mark.nightly
def test_layers_with_state_learn_as_in_the_torch_engine(work):
    """From prompts that completions share, on tensor ranks, then in the torch engine."""
    argv = [*RL, f"model.fresh={json.dumps(STATE)}", "optim.lr=0.001"]
    done(work, *argv, "name=state", MEGATRON, LAYOUTS["TP 2"], "steps=3", world=2)
    assert_same(done(work, *argv, "name=state"), done(work, *argv, "name=state_torch"))


@pytest.mark.nightly
def test_it_draws_ahead_as_the_torch_engine_does(work):
    argv = [*RL, "rollout.ahead=1", "algorithm.mismatch_cap=2"]
    run = done(work, *argv, MEGATRON, LAYOUTS["PP 2"], "name=ahead", world=2)
    assert_same(run, done(work, *argv, "name=ahead_torch"))


GPT_OSS = {
    **FRESH,
    "model_type": "gpt_oss",
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "swiglu_limit": 0.5,
}
CHAIN = [
    [MEGATRON, LAYOUTS["TP 2"]],
    ["engine.sequence_parallel=2"],
    [MEGATRON, LAYOUTS["PP 2"]],
    [MEGATRON, "engine.expert_parallel=2"],
]


@pytest.mark.nightly
def test_gpt_oss_goes_on_from_engine_to_engine(work):
    argv = ["sft", "sft.yaml", f"model.fresh={json.dumps(GPT_OSS)}", "optim.lr=0.003"]
    wanted = weights(done(work, *argv, "name=gpt_oss", "steps=5", "checkpoint.save_every=5"))
    for steps, engine in enumerate(CHAIN, 1):
        done(work, *argv, "name=gpt_oss_goes_on", f"steps={steps}", *engine, world=2)
    found = weights(done(work, *argv, "name=gpt_oss_goes_on", "steps=5"))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if "model/model.safetensors" in name:
            torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-4)


@pytest.mark.nightly
def test_biases_of_routers_go_on_in_the_other_engine(work):
    """Biases that follow the load, to the bit, in a model that is saved in bf16."""
    argv = ["sft", "sft.yaml", f"model.fresh={json.dumps(BY_SIGMOID)}", "optim.lr=0.003"]
    argv += ["engine.router_bias_update_rate=0.01", "checkpoint.save_every=2"]
    wanted = weights(done(work, *argv, "name=biases"))
    done(work, *argv, "name=biases_go_on", "steps=2", MEGATRON, LAYOUTS["PP 2"], world=2)
    done(work, *argv, "name=biases_go_on", "steps=4", "engine.sequence_parallel=2", world=2)
    found = weights(done(work, *argv, "name=biases_go_on", MEGATRON))
    assert found.keys() == wanted.keys()
    biases = [name for name in wanted if name.endswith("correction_bias")]
    assert len(biases) == 2
    for name in biases:
        assert torch.equal(found[name], wanted[name])
        assert wanted[name].abs().max() > 0.005


@pytest.mark.nightly
@pytest.mark.parametrize("begins", ["megatron", "torch"])
def test_engines_go_on_from_each_other(work, of_torch, begins):
    engines = [[MEGATRON, LAYOUTS["PP 2"]], ["engine.tensor_parallel=2"]]
    first, second = engines if begins == "megatron" else reversed(engines)
    argv = [*RL, f"name={begins}_begins"]
    done(work, *argv, "steps=3", *first, world=2)
    assert_same(done(work, *argv, *second, world=2), of_torch)


@pytest.mark.nightly
def test_latent_attention_goes_on_from_engine_to_engine(work):
    argv = ["sft", "sft.yaml", f"model.fresh={json.dumps(LATENT)}", "evaluation.every=1"]
    wanted = done(work, *argv, "name=latent_torch")
    argv.append("name=latent")
    done(work, *argv, "steps=2")
    done(work, *argv, "steps=3", MEGATRON, *LAYOUTS.values(), world=4)
    done(work, *argv, "steps=5", MEGATRON, "engine.expert_parallel=2", world=2)
    assert_same(done(work, *argv, "engine.sequence_parallel=2", world=2), wanted)


@pytest.mark.nightly
def test_supervised_fine_tuning_is_that_of_the_torch_engine(work):
    argv = ["sft", "sft.yaml", "batch.tokens_per_device=32"]
    run = done(work, *argv, MEGATRON, "name=sft_data", world=2)
    assert_same(run, done(work, *argv, "name=sft_torch"))


@pytest.mark.nightly
def test_a_killed_mixture_goes_on_as_if_nothing_had_happened(work):
    argv = ["sft", "sft.yaml", f"model.fresh={json.dumps(MIXTURE)}"]
    require_unharmed(work, "sft", [*argv, "engine.expert_parallel=2"], update=4)


@pytest.mark.contract
@pytest.mark.parametrize("degrees", KILLED, ids=lambda degrees: ", ".join(degrees) or "data")
def test_reinforcement_learning_goes_on_as_if_nothing_had_happened(work, degrees):
    """Of a mixture with a reference, two updates a step and experts that are replayed, at every kind of layout."""
    fresh = f"model.fresh={json.dumps(MIXTURE | {'num_hidden_layers': 4})}"
    name = f"rl_{KILLED.index(degrees)}"
    argv = [*RL, fresh, "algorithm.router_replay=recompute", *degrees]
    require_unharmed(work, name, argv, update=7)


def require_unharmed(work, name, argv, update):
    """A run that saves in the background, of which a rank is killed in an update, comes to the end of one that is left alone, bit for bit."""
    left_alone = done(work, *argv, MEGATRON, f"name=left_alone_{name}", world=2)
    argv = [*argv, MEGATRON, "checkpoint.save_every=1", "checkpoint.background=true"]
    started = ranks(work, [*argv, f"name=killed_{name}"], 2, at=At(STEP, update, signal.SIGKILL))
    assert [each.wait() for each in started] == [-signal.SIGKILL, 1]
    assert outcome(done(work, *argv, f"name=killed_{name}", world=2)) == outcome(left_alone)


@pytest.mark.nightly
def test_a_signal_in_a_pipeline_leaves_a_checkpoint(work):
    argv = [*RL, MEGATRON, LAYOUTS["PP 2"], "name=stopped", "steps=5000"]
    started = ranks(work, argv, 2)
    assert started[0].reached(2), started[0].output
    started[1].send(signal.SIGTERM)
    assert [each.wait() for each in started] == [143, 143]
    assert "is committed in runs/stopped" in started[0].output


def test_what_the_engine_does_not_have_is_refused_at_once(work):
    code, output = burnish(work, *RL, MEGATRON, "engine.compile=true", "--dry-run")
    assert code == 2
    assert "engine.compile" in output


@pytest.mark.nightly
def test_it_is_evaluated(work, of_torch):
    started = ranks(work, ["eval", str(of_torch), MEGATRON, LAYOUTS["TP 2"]], 2)
    assert [each.wait() for each in started] == [0, 0], started[0].output
    assert f"{metrics(of_torch)[-1]['val/mean@1']:.3f}" in started[0].output

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from burnish.config import constraints
from burnish.config.keys import known_keys
from burnish.config.load import read_config
from burnish.config.schema import RunConfig
from burnish.errors import UsageError, together
from burnish.methods.table import METHODS

GOOD = ["model.path=m", "data.train=[t]", "reward.functions=[{function: numeric}]"]


def config_of(*overrides: str) -> RunConfig:
    return read_config(None, [*GOOD, *overrides])


def refused(command: str, *overrides: str, world: int = 1) -> str:
    with pytest.raises(UsageError) as caught:
        METHODS[command].check(config_of(*overrides), world)
    return str(caught.value)


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_a_good_configuration_passes(command: str) -> None:
    METHODS[command].check(config_of(), world=4)


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_copies_of_the_model_divide_the_processes(command: str) -> None:
    METHODS[command].check(config_of("engine.replicas=2"), world=4)
    message = refused(command, "engine.replicas=4", world=6)
    assert "engine.replicas: 4, 6 processes" in message
    assert "engine.replicas=2 or 3" in message


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_groups_that_share_a_micro_batch_divide_the_processes(command: str) -> None:
    shared = ["engine.sequence_parallel=2", "engine.tensor_parallel=2"]
    METHODS[command].check(config_of(*shared, "engine.replicas=2"), world=8)
    message = refused(command, *shared, world=6)
    assert "engine.sequence_parallel: 2, engine.tensor_parallel: 2, 6 processes" in message
    assert " 2 or 3" in message
    message = refused(command, *shared, "engine.replicas=2", world=12)
    assert "engine.replicas: 2, 12 " in message
    assert "engine.replicas=1 or 3" in message


def test_a_pipeline_shares_its_micro_batches() -> None:
    megatron = ["engine.kind=megatron", "engine.pipeline_parallel=2", "engine.tensor_parallel=2"]
    METHODS["sft"].check(config_of(*megatron), world=8)
    message = refused("sft", *megatron, world=6)
    assert "engine.tensor_parallel: 2, engine.pipeline_parallel: 2, 6 processes" in message
    assert " 2 or 3" in message
    assert "batch.examples: 3, 4 " in refused("sft", *megatron, "batch.examples=3", world=16)
    message = refused("sft", "engine.kind=megatron", "engine.virtual_stages=2", world=2)
    assert "engine.virtual_stages: 2, engine.pipeline_parallel: 1" in message


def test_experts_divide_the_processes_of_a_stage() -> None:
    experts = ["engine.kind=megatron", "engine.tensor_parallel=2", "engine.expert_parallel=4"]
    METHODS["sft"].check(config_of(*experts), world=8)
    message = refused("sft", *experts, world=4)
    assert "engine.expert_parallel: 4 × 2 " in message
    METHODS["sft"].check(config_of(*experts, "engine.expert_tensor_parallel=1"), world=4)
    message = refused("sft", *experts, "engine.pipeline_parallel=2", world=8)
    assert "4 processes" in message


def test_experts_divide_the_processes_of_a_copy() -> None:
    shared = ["engine.expert_parallel=2", "engine.replicas=2"]
    METHODS["sft"].check(config_of(*shared), world=4)
    assert "engine.expert_parallel: 2 " in refused("sft", *shared, world=6)
    refused("sft", *shared, "engine.tensor_parallel=2", world=4)


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        ("megatron", "engine.replicas", "2"),
        ("megatron", "engine.compile", "true"),
        ("megatron", "engine.parameter_offload", "true"),
        ("megatron", "engine.reshard_after_forward", "false"),
        ("megatron", "engine.reduce_each_microbatch", "false"),
        ("megatron", "model.lora.dropout", "0.1"),
        ("megatron", "model.lora.modules_to_save", "[lm_head]"),
        ("torch", "engine.pipeline_parallel", "2"),
        ("torch", "engine.megatron_sequence_parallel", "false"),
        ("torch", "engine.expert_tensor_parallel", "1"),
        ("torch", "engine.layers", "torch"),
        ("torch", "engine.megatron.overlap_grad_reduce", "true"),
    ],
)
def test_an_engine_refuses_what_only_the_other_has(kind: str, setting: str, value: str) -> None:
    message = refused("rl", f"engine.kind={kind}", f"{setting}={value}", world=2)
    other = "torch" if kind == "megatron" else "megatron"
    assert setting in message
    assert f"engine.kind: {kind}" in message
    assert f"engine.kind={other}" in message


def test_transformer_engines_layers_are_refused_for_what_is_to_be_exact() -> None:
    asked = ["engine.kind=megatron", "engine.layers=transformer_engine"]
    METHODS["sft"].check(config_of(*asked), world=1)
    message = refused("sft", *asked, "engine.precision=fp32", world=1)
    assert "engine.precision: fp32" in message
    assert "engine.precision=auto" in message


@pytest.mark.parametrize("beta", [0.9, 0.995, 0.996, 0.997, 0.999])
def test_decays_are_refused_that_rounding_to_bf16_may_undo(beta: float) -> None:
    """Every positive number that is not too small for bf16's full precision has to fall."""
    numbers = torch.arange(0x0080, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    stands = bool(torch.any((numbers.float() * beta).bfloat16() == numbers))
    for betas in (f"[{beta},0.9]", f"[0.9,{beta}]"):
        asked = ["optim.moments=bf16", f"optim.betas={betas}"]
        if stands:
            assert f"optim.betas: {betas.replace(',', ', ')}" in refused("sft", *asked)
        else:
            METHODS["sft"].check(config_of(*asked))


def test_a_micro_batch_is_as_long_as_its_processes_are_many() -> None:
    lengths = ["data.max_length=100", "batch.tokens_per_device=50"]
    METHODS["sft"].check(config_of(*lengths, "engine.sequence_parallel=2"), world=2)
    message = refused("sft", *lengths, "data.max_length=101", "engine.sequence_parallel=2", world=2)
    assert "batch.tokens_per_device: 50 × engine.sequence_parallel: 2" in message
    assert "batch.tokens_per_device=51" in message


def test_how_an_adapter_is_published_is_no_part_of_it() -> None:
    METHODS["sft"].check(
        config_of(
            "model.path=m",
            "model.lora.path=a",
            "model.lora.publish=adapter",
            "model.lora.dropout=0.1",
        )
    )


def test_a_reward_model_is_a_reward() -> None:
    METHODS["rl"].check(config_of(*GOOD, "reward.functions=[]", "reward.models=[{path: judge}]"))


def test_reward_models_are_refused_beside_an_endpoint() -> None:
    asked = ["rollout.engine=openai", "rollout.url=http://x/v1", "rollout.model=m"]
    message = refused("eval", *asked, "data.validation=[v]", "reward.models=[{path: judge}]")
    assert "reward.models: [{path: judge," in message


def test_a_good_evaluation_passes() -> None:
    METHODS["eval"].check(read_config(None, ["model.path=m", "data.validation=[v]"]))


@pytest.mark.parametrize(
    ("place", "is_fine"),
    [
        ("localhost:8000/v1", True),
        ("[::1]:8000/v1", True),
        ("api.example.org", True),
        ("localhost:abc/v1", False),
        ("localhost:99999/v1", False),
        ("[::1/v1", False),
        ("/v1", False),
        ("host/v1?version=1", False),
    ],
)
def test_an_endpoints_url_is_an_address(place: str, is_fine: bool) -> None:
    asked = ["rollout.engine=openai", f"rollout.url=http://{place}", "rollout.model=m"]
    given = ["model.path=m", "data.validation=[v]", "reward.functions=r.py:right", *asked]
    if is_fine:
        METHODS["eval"].check(read_config(None, given))
    else:
        assert f"rollout.url: http://{place}" in refused("eval", *given)


BAD: list[tuple[str, list[str], list[str]]] = [
    ("sft", ["checkpoint.keep_best.metric=val/loss", "evaluation.every=1", "data.validation=[v]"], ["checkpoint.keep_best.metric: val/loss", "set checkpoint.keep_best.mode"]),
    ("rl", ["checkpoint.keep_best.mode=max"], ["checkpoint.keep_best.mode: max", "set checkpoint.keep_best.metric"]),
    ("sft", ["checkpoint.keep_best={metric: val/loss, mode: min}"], ["evaluation.every: 0", "set evaluation.every"]),
    ("sft", ["checkpoint.save_every=10", "checkpoint.keep_every=25"], ["keep_every: 25", "checkpoint.keep_every=30"]),
    ("sft", ["model.path=null"], ["exactly one of model.path and model.fresh", "neither"]),
    ("eval", ["model.path=null", "data.validation=[v]"], ["exactly one of", "neither"]),
    ("rl", ["model.fresh={a: 1}", "model.tokenizer=t"], ["exactly one of", "both"]),
    ("sft", ["model.path=null", "model.fresh=c.json"], ["model.tokenizer"]),
    ("rl", ["model.lora.publish=adapter"], ["model.lora.rank: 0", "model.lora.rank=16"]),
    ("sft", ["model.lora.alpha=16"], ["model.lora.rank: 0", "model.lora.rank=16"]),
    ("sft", ["model.lora.dropout=0.1"], ["model.lora.rank: 0", "model.lora.rank=16"]),
    ("rl", ["model.lora.rank=4", "model.lora.dropout=0.1", "model.lora.targets=[q_proj,experts.down_proj]"], ["experts.down_proj", "model.lora.dropout=0"]),
    ("sft", ["model.lora.rank=4", "model.lora.dropout=0.1", "engine.compile=true"], ["engine.compile", "model.lora.dropout"]),
    ("rl", ["model.lora.rank=4", "model.path=null", "model.fresh=c.json", "model.tokenizer=t"], ["model.path: null", "remove model.lora"]),
    ("sft", ["optim.moments=bf16", "optim.betas=[0.9,0.997]"], ["optim.betas: [0.9, 0.997]", "at most 0.996", "optim.betas=[0.9,0.95]"]),
    ("sft", ["optim.moments=bf16", "optim.betas=[0.9,0.95]", "optim.kind=muon"], ["optim.kind: muon", "change optim.moments"]),
    ("sft", ["model.lora.path=a", "model.lora.rank=4"], ["model.lora.path: a, and model.lora.rank", "remove model.lora.rank"]),
    ("sft", ["data.train=[]"], ["data.train: []", "data.train=FILE"]),
    ("rl", ["data.train=[]"], ["data.train: []"]),
    ("eval", [], ["data.validation: []"]),
    ("rl", ["reward.functions=[]"], ["reward.functions: []"]),
    ("rl", ["reward.functions=[{function: numeric, weight: 0}]"], ["a weight of 0"]),
    (
        "sft",
        ["engine.compile=true", "engine.activation_checkpointing=selective"],
        ["engine.compile: true", "none or full"],
    ),
    (
        "rl",
        ["engine.activation_offload=true", "engine.activation_checkpointing=selective"],
        ["engine.activation_offload: true", "none or full"],
    ),
    ("sft", ["engine.offload_during_rollout=true"], ["nothing is generated", "engine.offload_during_rollout: true", "engine.optimizer_offload"]),
    ("sft", ["name=a/b"], ["name", "'a/b'"]),
    ("sft", ["name=.."], ["name"]),
    ("rl", ["name=''"], ["name"]),
    ("sft", ["optim.schedule=wsd"], ["optim.schedule: wsd, optim.decay_steps: 0"]),
    ("rl", ["optim.decay_steps=5"], ["optim.decay_steps: 5", "optim.schedule: constant"]),
    ("sft", ["optim.min_lr_ratio=0.1"], ["optim.min_lr_ratio: 0.1"]),
    ("sft", ["optim.warmup_steps=9", "steps=8"], ["optim.warmup_steps: 9", "steps=9"]),
    (
        "sft",
        ["optim.schedule=wsd", "optim.warmup_steps=60%", "optim.decay_steps=50%"],
        ["optim.warmup_steps: 60%, optim.decay_steps: 50%"],
    ),
    (
        "rl",
        ["optim.schedule=wsd", "optim.warmup_steps=60%", "optim.decay_steps=5", "steps=10"],
        ["optim.warmup_steps: 60%, optim.decay_steps: 5, steps: 10"],
    ),
    (
        "sft",
        ["checkpoint.save_every=1 epoch", "checkpoint.keep_every=10"],
        ["checkpoint.keep_every: 10", "checkpoint.keep_last"],
    ),
    ("sft", ["data.validation=100%"], ["data.validation: [100%]"]),
    ("rl", ["data.validation=0%"], ["data.validation: [0%]"]),
    ("rl", ["data.validation=0.05"], ["data.validation: ['0.05']", "5%"]),
    ("sft", ["data.validation=[v, 5%]"], ["data.validation: [v, 5%]"]),
    ("eval", ["data.validation=5%", "data.train=[]"], ["data.train: []"]),
    ("sft", ["data.validation=5%", "data.streaming=9", "steps=5"], ["data.streaming: 9"]),
    (
        "rl",
        ["optim.schedule=wsd", "optim.decay_steps=5", "optim.warmup_steps=5", "steps=8"],
        ["optim.warmup_steps: 5, optim.decay_steps: 5, steps: 8", "steps=10"],
    ),
    (
        "rl",
        ["algorithm.advantage=gae", "critic.warmup_steps=3", "optim.warmup_steps=6", "steps=8"],
        ["warmup_steps: 6, steps: 8, critic.warmup_steps: 3", "at most 5", "steps=9"],
    ),
    (
        "sft",
        ["data.chat_template_kwargs={tokenize: false, enable_thinking: false}"],
        ["data.chat_template_kwargs", "remove tokenize;"],
    ),
    (
        "sft",
        ["data.max_length=9000", "batch.tokens_per_device=8192"],
        ["9000", "batch.tokens_per_device: 8192"],
    ),
    (
        "rl",
        ["batch.prompts=10", "batch.minibatches=4"],
        ["10 does not divide by batch.minibatches 4", "to 8 or 12", "to 2 or 5"],
    ),
    ("rl", ["batch.prompts=3", "batch.minibatches=7"], ["batch.prompts to 7,", "minibatches to 3"]),
    (
        "rl",
        ["data.max_prompt_length=100", "rollout.max_response_length=100", "batch.tokens_per_device=199"],
        ["= 200 tokens", "batch.tokens_per_device=200"],
    ),
    ("rl", ["rollout.max_response_length=8192", "batch.tokens_per_device=8192"], ["8193"]),
    ("rl", ["algorithm.overlong.buffer=257"], ["257", "256"]),
    ("rl", ["rollout.temperature=0"], ["rollout.temperature: 0", "rollout.temperature=1.0"]),
    (
        "rl",
        ["rollout.temperature=0.7", "algorithm.old_logprobs=rollout"],
        ["rollout.temperature: 0.7", "algorithm.old_logprobs"],
    ),
    ("rl", ["rollout.n=1"], ["grpo", "rollout.n: 1", "reinforce_plus_plus"]),
    ("rl", ["rollout.n=1", "algorithm.advantage=dr_grpo"], ["dr_grpo"]),
    ("rl", ["rollout.n=1", "algorithm.advantage=rloo"], ["rloo"]),
    (
        "rl",
        ["rollout.n=1", "algorithm.advantage=reinforce_plus_plus_baseline"],
        ["reinforce_plus_plus_baseline"],
    ),
    (
        "rl",
        ["rollout.n=1", "algorithm.advantage=reinforce_plus_plus", "algorithm.dynamic_sampling.enabled=true"],
        ["dynamic_sampling", "rollout.n: 1"],
    ),
    (
        "rl",
        ["algorithm.dynamic_sampling={enabled: true, part: accuracy}"],
        ["dynamic_sampling.part: accuracy", "want: one of numeric"],
    ),
    ("rl", ["algorithm.dynamic_sampling.part=numeric"], ["enabled: false", "enabled=true"]),
    (
        "rl",
        ["algorithm.mismatch_cap=2", "algorithm.old_logprobs=rollout"],
        ["mismatch_cap: 2.0, algorithm.old_logprobs: rollout", "old_logprobs=recompute"],
    ),
    ("rl", ["algorithm.mismatch_level=sequence"], ["mismatch_level: sequence", "mismatch_cap"]),
    ("rl", ["algorithm.mismatch_low=0.7"], ["mismatch_low: 0.7", "mismatch_reject: none"]),
    ("rl", ["algorithm.mismatch_high=2"], ["mismatch_high: 2.0", "mismatch_reject: none"]),
    ("sft", ["tracking.torch_profiler=true"], ["torch_profiler: true", "profile_steps"]),
    ("rl", ["critic.lr=1e-4"], ["critic.lr", "algorithm.advantage: grpo", "gae"]),
    ("rl", ["critic.path=c", "critic.clip=null"], ["remove critic.path and critic.clip"]),
    (
        "rl",
        ["algorithm.advantage=gae", "critic.warmup_steps=5", "steps=5"],
        ["critic.warmup_steps: 5", "less than 5"],
    ),
    ("sft", ["evaluation.every=5"], ["evaluation.every: 5", "data.validation"]),
    ("rl", ["evaluation.every=5"], ["evaluation.every: 5"]),
    (
        "eval",
        ["data.validation=[v]", "evaluation.n=4", "evaluation.temperature=0"],
        ["evaluation.n: 4", "evaluation.n=1"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("command", "overrides", "facts"), BAD)
def test_what_does_not_go_together(command: str, overrides: list[str], facts: list[str]) -> None:
    message = refused(command, *overrides)
    for fact in facts:
        assert fact in message
    for part in ("have:", "want:", "do:"):
        assert message.count(part) == 1, message


@pytest.mark.parametrize(
    ("command", "overrides"),
    [
        ("rl", ["rollout.n=1", "algorithm.advantage=reinforce_plus_plus"]),
        ("rl", ["algorithm.policy_loss.dual_clip=3"]),
        ("rl", ["algorithm.dynamic_sampling={enabled: true, part: numeric}"]),
        ("rl", ["algorithm.dynamic_sampling={enabled: true, part: numeric/extracted}"]),
        ("rl", ["algorithm.advantage=gae", "critic.lr=1e-4", "critic.clip=null", "rollout.n=1"]),
        ("rl", ["algorithm.advantage=gae", "critic.warmup_steps=5"]),
        ("rl", ["algorithm.old_logprobs=rollout", "rollout.top_p=0.9"]),
        ("rl", ["rollout.temperature=0.7"]),
        ("rl", ["evaluation.temperature=0"]),
        ("rl", ["algorithm.overlong.buffer=256"]),
        ("rl", ["checkpoint.save_every=10", "checkpoint.keep_every=50"]),
        (
            "rl",
            [
                "checkpoint.keep_best={metric: val/reward, mode: max}",
                "evaluation.every=1",
                "data.validation=[v]",
            ],
        ),
        ("rl", ["rollout.max_response_length=8191"]),
        ("rl", ["batch.prompts=12", "batch.minibatches=4"]),
        ("sft", ["optim.schedule=wsd", "optim.decay_steps=4", "optim.warmup_steps=4", "steps=8"]),
        ("sft", ["optim.warmup_steps=100"]),
        ("rl", ["data.validation=5%", "evaluation.every=1"]),
        ("eval", ["data.validation=0.5%"]),
        ("sft", ["optim.schedule=wsd", "optim.decay_steps=90%", "optim.warmup_steps=10%"]),
        ("rl", ["optim.schedule=wsd", "optim.decay_steps=20%", "optim.warmup_steps=2", "steps=9"]),
        (
            "rl",
            ["evaluation.every=1/4 epoch", "data.validation=[v]", "checkpoint.save_every=1 epoch"],
        ),
        ("sft", ["rollout.n=1", "rollout.temperature=0", "reward.functions=[]"]),
        ("sft", ["data.max_length=8192"]),
    ],
)
def test_what_goes_together(command: str, overrides: list[str]) -> None:
    METHODS[command].check(config_of(*overrides))


def test_every_process_needs_a_sequence() -> None:
    METHODS["sft"].check(config_of("batch.examples=4"), world=4)
    assert "batch.examples: 4, 5 processes" in refused("sft", "batch.examples=4", world=5)
    one_each = ["batch.prompts=4", "batch.minibatches=2", "rollout.n=2"]
    METHODS["rl"].check(config_of(*one_each), world=4)
    assert "= 4, 5 processes" in refused("rl", *one_each, world=5)
    shared = ["batch.examples=4", "engine.sequence_parallel=2"]
    METHODS["sft"].check(config_of(*shared), world=8)
    assert "batch.examples: 4, 5 " in refused("sft", *shared, world=10)


def test_every_row_of_the_table_names_settings_and_their_values() -> None:
    tables = [rows for name, rows in vars(constraints).items() if name.startswith("_OF_")]
    conditions = [
        each for rows in tables for when, needs, _ in rows for each in (when, needs) if each
    ]
    assert len(conditions) > 60
    for condition in conditions:
        name, _, values = condition.partition("=")
        for value in values.split("|") if values else ():
            config_of(f"{name}={value.replace('FILE:NAME', 'my.py:mine')}")
        assert name in known_keys()


def test_all_is_reported_together() -> None:
    message = refused("rl", "model.path=null", "data.train=[]", "rollout.n=1", "evaluation.every=1")
    assert message.count("do:") == 4


def test_equal_problems_are_one() -> None:
    missing, other = UsageError("no file a"), UsageError("no file b")
    assert str(together([missing, UsageError("no file a")], "the inputs")) == "no file a"
    assert "2 problems" in str(together([missing, other, missing], "the inputs"))


@given(prompts=st.integers(1, 200), minibatches=st.integers(2, 40))
def test_the_sizes_suggested_divide(prompts: int, minibatches: int) -> None:
    assume(prompts % minibatches)
    message = refused("rl", f"batch.prompts={prompts}", f"batch.minibatches={minibatches}")
    advice = message.partition("set batch.prompts to ")[2]
    sizes, _, parts = advice.partition(", or batch.minibatches to ")
    for size in sizes.split(" or "):
        assert int(size) % minibatches == 0
        assert abs(int(size) - prompts) < minibatches
    for part in parts.split(" or "):
        assert prompts % int(part) == 0


@pytest.mark.parametrize("command", ["rl", "eval"])
@pytest.mark.parametrize(
    ("setting", "needed"),
    [
        ("rollout.engine=vllm", "rollout.place"),
        ("rollout.engine=sglang", "rollout.place"),
        ("rollout.servers=2", "rollout.place"),
        ("rollout.tensor_parallel=2", "rollout.engine"),
    ],
)
def test_a_place_is_refused_in_training_and_evaluation(
    command: str, setting: str, needed: str
) -> None:
    assert needed in refused(command, setting)


def test_the_weights_of_a_mixture_fit_its_entries() -> None:
    mixed = ["data.train=[a, b]", "data.weights=[3, 1]"]
    METHODS["rl"].check(config_of(*mixed, "steps=5"))
    for wrong in (
        mixed,  # without steps
        ["data.train=[a]", *mixed[1:], "steps=5"],
        [mixed[0], "data.weights=[3000, 1]", "steps=5"],
    ):
        assert "data.weights" in refused("rl", *wrong)


def test_what_needs_all_rows_is_refused_where_they_are_streamed() -> None:
    streamed = ["data.train=[a]", "data.streaming=64"]
    METHODS["rl"].check(config_of(*streamed, "steps=5"))
    for wrong in (
        [],
        ["steps=5", "data.curriculum=hard"],
        ["steps=5", "data.overlong=error"],
        ["steps=5", "data.max_rows=9"],
        ["steps=5", "checkpoint.save_every=1 epoch"],
        ["steps=5", "evaluation.every=1/2 epoch", "data.validation=[v]"],
    ):
        assert "data.streaming" in refused("sft", *streamed, *wrong)


def test_a_mixture_has_no_epochs() -> None:
    mixed = ["data.train=[a, b]", "data.weights=[3, 1]", "steps=5"]
    assert "data.weights" in refused("sft", *mixed, "checkpoint.save_every=1 epoch")


def test_a_measured_curriculum_needs_rewards_to_compare() -> None:
    measured = ["data.train=[a]", "data.curriculum=measured"]
    METHODS["rl"].check(config_of(*measured, "steps=5"))
    models = ["reward.models=[{path: m}]", "rollout.place=child"]
    for wrong in (
        [],
        ["steps=5", "data.weights=[1]"],
        ["steps=5", "rollout.n=1"],
        ["steps=5", *models],
    ):
        assert "data.curriculum" in refused("rl", *measured, *wrong)
    assert "data.curriculum" in refused("sft", *measured, "steps=5")


MTP = ("model.train_mtp=true", "engine.kind=megatron")


def test_layers_for_multi_token_prediction_are_trained_by_sft_on_megatron() -> None:
    METHODS["sft"].check(config_of(*MTP), world=4)
    for command in ("rl", "dpo", "rm", "online-dpo", "rejection-sampling"):
        assert "model.train_mtp" in refused(command, *MTP, world=4)


@pytest.mark.parametrize(
    "other",
    [
        "engine.kind=torch",
        "engine.pipeline_parallel=2",
        "model.lora.rank=2",
        "method.loss=dft",
        "distill.teachers=[x]",
    ],
)
def test_what_does_not_train_such_layers_is_refused(other: str) -> None:
    said = refused("sft", *MTP, other, world=4)
    assert "model.train_mtp" in said
    assert other.partition("=")[0] in said

"""Arguments as people type them elsewhere, and the settings that say the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from burnish.config.load import read_config
from burnish.config.schema import RunConfig
from burnish.errors import MissingError, UsageError
from burnish.methods.table import METHODS
from burnish.translate.translation import translate_arguments

VERL = r"""
set -x
export HYDRA_FULL_ERROR=1
MODEL=Qwen/Qwen3-8B
python3 -m verl.trainer.main_ppo --config-path=config \
    algorithm.adv_estimator=rloo \
    data.train_files=/data/gsm8k/train.parquet \
    data.val_files="['a.parquet', 'b.parquet']" \
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 \
    data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.optim.lr=3e-6 `# a remark` \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
    algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.5 \
    trainer.logger='["console","wandb"]' trainer.experiment_name='my_run' \
    trainer.n_gpus_per_node=8 trainer.save_freq=20 trainer.total_epochs=15 \
    +custom_reward_function.path=rewards.py $@ && echo done
"""
GRPO = (
    "accelerate launch --num_processes 4 trl/scripts/grpo.py --model_name_or_path Qwen/Qwen3-0.6B --model_revision v1 "
    "--dataset_name openai/gsm8k --dataset_config main --learning_rate 2.0e-5 --lr_scheduler_type cosine "
    "--reward_funcs accuracy_reward my.rewards.short --reward_weights 1.0 0.5 --per_device_train_batch_size=8 "
    "--gradient_accumulation_steps 8 --num_generations 4 --max_completion_length 512 --lora_r 32 --use_peft "
    "--gradient-checkpointing --logging_steps 25 --loss_type cispo --epsilon_high 5.0 --beta 0.04 --no_such_flag "
    "--warmup_ratio 0.1 --max_steps 100 --adam_beta2 0.95 --scale_rewards batch --temperature 0.7"
)
SFT = (
    "trl sft --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --num_train_epochs 3 --packing "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_length 2048 --report_to none --bf16 false"
)


def loaded(tmp_path: Path, text: str) -> RunConfig:
    (tmp_path / "new.yaml").write_text(text)
    return read_config(tmp_path / "new.yaml")


def test_a_script_of_verl(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(VERL)
    text = translate_arguments([str(script)])
    config = loaded(tmp_path, text)
    METHODS["rl"].check(config, None)
    assert (config.name, config.epochs, config.model.path) == ("my_run", 15, "Qwen/Qwen3-8B")
    assert config.data.train == ["/data/gsm8k/train.parquet"]
    assert config.data.validation == ["a.parquet", "b.parquet"]
    assert (config.data.max_prompt_length, config.rollout.max_response_length) == (512, 1024)
    assert (config.batch.prompts, config.batch.minibatches, config.rollout.n) == (1024, 4, 5)
    assert (config.optim.lr, config.algorithm.advantage.name) == (3e-6, "rloo")
    assert (config.algorithm.kl.coef, config.algorithm.kl.place) == (0.001, "loss")
    assert config.algorithm.aggregation == "sequence_mean"
    assert config.engine.activation_checkpointing == "full"
    assert config.checkpoint.save_every == 20
    assert [each.function for each in config.reward.functions] == ["rewards.py:compute_score"]
    named = set(re.findall(r"^#   ([\w.]+)=", text, re.M))
    assert "trainer.n_gpus_per_node" in named
    rollout = config.rollout
    assert (rollout.engine, rollout.place, rollout.tensor_parallel) == ("vllm", "child", 2)
    assert config.tracking.trackers == ["wandb"]
    assert "actor_rollout_ref.actor.fsdp_config.param_offload" in named
    assert config.optim.weight_decay == 0.01, "verl's own default is another"
    assert config.evaluation.temperature == 0


def test_arguments_of_trls_grpo(tmp_path: Path) -> None:
    text = translate_arguments(GRPO.split())
    config = loaded(tmp_path, text)
    METHODS["rl"].check(config, None)
    assert config.model.path == "Qwen/Qwen3-0.6B@v1"
    assert config.data.train == ["openai/gsm8k:main"]
    assert (config.batch.prompts, config.rollout.n) == (8 * 8 * 4 // 4, 4)
    functions = [(each.function, each.weight) for each in config.reward.functions]
    assert functions == [("trl.rewards:accuracy_reward", 1.0), ("my.rewards:short", 0.5)]
    assert (config.algorithm.policy_loss.name, config.algorithm.clip_high) == ("cispo", 4.0)
    assert (config.algorithm.kl.coef, config.algorithm.advantage.name) == (0.04, "grpo_batch_std")
    assert (config.optim.schedule, config.optim.warmup_steps, config.steps) == (
        "cosine",
        "10%",
        100,
    )
    assert (config.optim.betas, config.rollout.temperature) == ((0.9, 0.95), 0.7)
    assert (config.engine.activation_checkpointing, config.model.lora.rank) == ("full", 32)
    assert "no_such_flag=true" in text.partition("\n# ")[2]


def test_the_upper_clip_of_trl_is_a_ratio_only_for_cispo(tmp_path: Path) -> None:
    text = translate_arguments(
        [*GRPO.replace("cispo --epsilon_high 5.0", "grpo --epsilon_high 0.28").split()]
    )
    assert loaded(tmp_path, text).algorithm.clip_high == 0.28


def test_a_warm_up_of_unlimited_steps_is_a_share_and_a_beta_of_0_is_kept() -> None:
    text = translate_arguments(
        ["--warmup_ratio", "0.1", "--max_steps", "-1", "--adam_beta1", "0", "--adam_beta2", "0.95"]
    )
    assert yaml.safe_load(text) == {"optim": {"betas": [0, 0.95], "warmup_steps": "10%"}}


@pytest.mark.parametrize("whole", [["data.train_batch_size=64"], []])
def test_mini_batches_that_do_not_divide_the_batch_are_left_out(whole: list[str]) -> None:
    text = translate_arguments([*whole, "actor.ppo_mini_batch_size=48"])
    settings, _, left_out = text.partition("\n# ")
    assert "ppo_mini_batch_size=48" in left_out
    assert "minibatches" not in settings


def test_arguments_of_trls_sft(tmp_path: Path) -> None:
    text = translate_arguments(SFT.split())
    config = loaded(tmp_path, text)
    METHODS["sft"].check(config, None)
    assert (config.epochs, config.batch.examples, config.data.max_length) == (3, 8, 2048)
    assert config.engine.precision == "fp32"
    assert "#   report_to=none" in text


@pytest.mark.parametrize(
    ("written", "settings"),
    [
        ("learning_rate: 1.0e-4\nnum_generations: 4\n", {"optim.lr": 1e-4, "rollout.n": 4}),
        ("data:\n  train_batch_size: 64\n  train_files: a.parquet\n", {"batch.examples": 64}),
    ],
)
def test_yaml(tmp_path: Path, written: str, settings: dict[str, Any]) -> None:
    (tmp_path / "old.yaml").write_text(written)
    program = ["trl", "grpo"] if "num_generations" in written else []
    for words in ([str(tmp_path / "old.yaml")], [*program, "--config", str(tmp_path / "old.yaml")]):
        config = loaded(tmp_path, translate_arguments(words))
        for name, value in settings.items():
            section, _, last = name.partition(".")
            assert getattr(getattr(config, section), last) == value


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["."],
        ["--max_steps", ".inf", "--warmup_ratio", "0.1"],
        ["trl", "sft"],
        ["--num_generations", "many"],
        ["data.train_batch_size=x", "ppo_mini_batch_size=3"],
        ["--reward_funcs", "a.b", "c.d", "e.f", "--reward_weights", "1", "2"],
    ],
)
def test_what_cannot_be_translated(words: list[str]) -> None:
    with pytest.raises(UsageError):
        translate_arguments(words)


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(MissingError):
        translate_arguments(["missing.sh"])


def test_what_is_missing_and_what_does_not_fit_is_said(tmp_path: Path) -> None:
    text = translate_arguments(["rollout.n=eight", "learning_rate=1e-3", "learning_rate_=2"])
    assert "rollout.n" in text.partition("\n# ")[2]
    assert "model.path" in text.partition("# Still to do:")[2]
    assert loaded(tmp_path, text).optim.lr == 1e-3


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--model_revision v1", "model_revision"),
        ("--dataset_config main", "dataset_config"),
        ("--reward_weights 1 2", "reward_weights"),
        ("--gradient_accumulation_steps 8", "gradient_accumulation_steps"),
        ("--num_processes 4 --learning_rate 1", "num_processes"),
        ("custom_reward_function.name=score", "custom_reward_function.name"),
    ],
)
def test_a_part_of_a_setting_whose_other_part_is_missing_is_named(words: str, named: str) -> None:
    text = translate_arguments(words.split())
    assert f"#   {named}=" in text
    assert "not known here" not in text


def test_the_model_of_a_critic_is_not_that_of_the_policy() -> None:
    words = ["critic.model.path=judge", "actor_rollout_ref.model.path=policy"]
    settings = yaml.safe_load(translate_arguments(words))
    assert settings["model"] == {"path": "policy"}
    assert settings["critic"] == {"path": "judge", "clip": 0.5}, "verl clips values at 0.5"


@pytest.mark.parametrize(
    ("words", "coefficient"),
    [
        ("--kl_coef 0.05", 0.05),
        ("kl_ctrl.kl_coef=0.05", None),
        ("algorithm.use_kl_in_reward=false algorithm.kl_ctrl.kl_coef=0.05", None),
        ("algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.05", 0.05),
        ("actor.kl_loss_coef=0.05", None),
        ("actor.use_kl_loss=true actor.kl_loss_coef=0.05", 0.05),
    ],
)
def test_a_kl_term_counts_where_its_framework_switches_it_on(
    words: str, coefficient: float | None
) -> None:
    settings = yaml.safe_load(translate_arguments([*words.split(), "rollout.n=2"]))
    assert settings.get("algorithm", {}).get("kl", {}).get("coef") == coefficient

"""Each argument is carried, as by default, without a counterpart, or left to the person, and named where no setting shows it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws

from burnish.config.foreign_names import foreign_names
from burnish.config.keys import known_keys
from burnish.errors import UsageError
from burnish.translate.translation import translate_arguments

NAMES = foreign_names()
KNOWN = sorted(
    name
    for name in {*NAMES.renamed, *NAMES.different, *NAMES.absent, *known_keys()} - {"config"}
    if "[" not in name  # a setting of a list's item
)
"""Every name that a table of another framework has, and every name that is one here."""
OF_VERL = (Path(__file__).parent / "verl_names.txt").read_text().split()
"""Names of arguments that scripts for verl's PPO, DAPO and SFT programs give."""
REFUSED = {"finetuning_type", "process_reward_model", "reward_model", "rl", "stage"}
"""Names that alone say that something else is trained, or that do not take every value."""
SECTIONS = ["", "actor_rollout_ref.actor.", "actor_rollout_ref.ref.", "critic.", "trainer.", "x."]
COUNT = re.compile(
    r"^# (\d+) settings?: (\d+) carried, (\d+) as by default, (\d+) have no counterpart, "
    r"(\d+) left for you to decide, (\d+) lost$",
    re.M,
)


def values_of(name: str) -> st.SearchStrategy[str]:
    listed = [each for each in NAMES.values.get(name.rpartition(".")[2], {}) if each != "*"]
    plain = ["true", "false", "0", "1", "3.0", "0.5", "-1", "null", "text", "[a, b]", "''"]
    return st.sampled_from([*plain, *listed])


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, str]:
    names = draw(st.lists(st.sampled_from(KNOWN) | st.just("zzz"), min_size=1, max_size=25))
    return {draw(st.sampled_from(SECTIONS)) + name: draw(values_of(name)) for name in names}


def check_account(text: str, names: set[str]) -> None:
    counts = COUNT.search(text)
    assert counts, text
    whole, carried, *others = map(int, counts.groups())
    assert (whole, others[-1]) == (len(names), 0)
    assert whole == carried + sum(others)
    comments = re.findall(r"^#   ([^\s=]+)=", text, re.M)
    assert len(comments) == len(set(comments)) == whole - carried
    assert set(comments) <= names
    assert isinstance(yaml.safe_load(text), dict | None)


@given(arguments())
@draws(200, day=20)
def test_no_argument_is_lost(words: dict[str, str]) -> None:
    try:
        text = translate_arguments([f"{name}={value}" for name, value in words.items()])
    except UsageError:
        return  # arguments that do not fit together
    check_account(text, set(words))


@pytest.mark.nightly
def test_each_known_name_alone_is_in_one_list() -> None:
    refused = []
    for name in KNOWN:
        try:
            text = translate_arguments(["seed=1", f"{name}=1"])
        except UsageError:
            refused.append(name)
            continue
        check_account(text, {"seed", name})
    assert set(refused) <= REFUSED


def test_a_word_that_is_no_argument_is_named() -> None:
    text = translate_arguments(["trl", "sft", "--seed", "1", "--bf16=true", "stray", "~x"])
    assert {"#   stray: no argument", "#   ~x: no argument"} <= set(text.splitlines())
    assert text.rstrip().endswith(" 2 left for you to decide, 0 lost")


@pytest.mark.nightly
def test_all_names_that_scripts_of_verl_give_are_in_one_list() -> None:
    text = translate_arguments([f"{name}=1" for name in OF_VERL])
    check_account(text, set(OF_VERL))
    kept = re.findall(r"^#   ([^\s=]+)=.*: (?:not known|did you mean)", text, re.M)
    assert len(kept) < len(OF_VERL) / 5, "most names have an answer"


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (
            "data.filter_overlong_prompts=true data.truncation=error",
            {"data": {"max_prompt_length": 512}},
        ),
        ("data.truncation=error", {"data": {"max_prompt_length": 512, "overlong": "error"}}),
        (
            "actor.optim.lr_warmup_steps_ratio=0.05",
            {"optim": {"lr": 1e-6, "weight_decay": 0.01, "warmup_steps": "5%"}},
        ),
        ("trainer.save_freq=-1", {"checkpoint": {"save_every": 0}}),
        ("trainer.logger=[swanlab]", {"tracking": {"trackers": ["swanlab"]}}),
        ("trainer.logger=[console]", {}),
        (
            "reward.reward_kwargs.overlong_buffer_cfg.enable=true reward.reward_kwargs.overlong_buffer_cfg.len=512",
            {
                "algorithm": {
                    "advantage": "gae",
                    "policy_loss": {"dual_clip": 3.0},
                    "overlong": {"buffer": 512},
                }
            },
        ),
        (
            "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.1 actor.policy_loss.loss_mode=gspo",
            {
                "algorithm": {
                    "advantage": "gae",
                    "policy_loss": "gspo",
                    "kl": {"coef": 0.1, "place": "reward", "estimator": "k1"},
                }
            },
        ),
        (
            "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=false critic.optim.lr=1",
            {"algorithm": {"advantage": "dr_grpo", "policy_loss": {"dual_clip": 3.0}}},
        ),
        (
            "algorithm.rollout_correction.rollout_is=sequence algorithm.rollout_correction.rollout_rs=seq_mean_k1 "
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
            {
                "algorithm": {
                    "advantage": "gae",
                    "policy_loss": {"dual_clip": 3.0},
                    "mismatch_cap": 2.0,
                    "mismatch_level": "sequence",
                    "mismatch_reject": "geometric",
                    "mismatch_high": 2.0,
                }
            },
        ),
        (
            "algorithm.rollout_correction.bypass_mode=true algorithm.rollout_correction.rollout_is=token",
            {
                "algorithm": {
                    "advantage": "gae",
                    "policy_loss": {"dual_clip": 3.0},
                    "old_logprobs": "rollout",
                }
            },
        ),
        (
            "trainer.nnodes=2 trainer.n_gpus_per_node=8 actor.fsdp_config.fsdp_size=8 actor_rollout_ref.nccl_timeout=1200 "
            "actor.fsdp_config.reshard_after_forward=false actor.router_replay.mode=R3",
            {
                "engine": {"replicas": 2, "reshard_after_forward": False},
                "distributed": {"timeout_seconds": 1200},
            },
        ),
        (
            "custom_reward_function.path=r.py custom_reward_function.name=f custom_reward_function.reward_kwargs.k=3",
            {"reward": {"functions": [{"function": "r.py:f", "kwargs": {"k": 3}}]}},
        ),
        (
            "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.target_modules=all-linear",
            {"model": {"lora": {"rank": 8, "alpha": 16}}},
        ),
        (
            "data.apply_chat_template_kwargs.enable_thinking=false data.train_max_samples=100",
            {
                "data": {
                    "max_rows": 100,
                    "chat_template_kwargs": {"enable_thinking": False},
                    "max_prompt_length": 512,
                    "overlong": "error",
                }
            },
        ),
        (
            "actor.optim.lr=1e-5 actor.optim.min_lr=1e-6 actor.optim.lr_decay_style=cosine",
            {
                "optim": {
                    "lr": 1e-5,
                    "min_lr_ratio": 0.1,
                    "schedule": "cosine",
                    "weight_decay": 0.01,
                }
            },
        ),
        (
            "model_engine=megatron actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=4",
            {"engine": {"kind": "megatron"}},
        ),
        (
            "model_engine=megatron actor.megatron.override_ddp_config.overlap_grad_reduce=false"
            " actor.megatron.override_transformer_config.recompute_granularity=selective"
            " actor.megatron.override_transformer_config.recompute_modules=[core_attn,mlp]",
            {
                "engine": {
                    "kind": "megatron",
                    "activation_checkpointing": "selective",
                    "megatron": {
                        "overlap_grad_reduce": False,
                        "recompute_modules": ["core_attn", "mlp"],
                    },
                }
            },
        ),
    ],
)
def test_what_several_arguments_of_verl_mean(words: str, settings: dict[str, Any]) -> None:
    words = "actor_rollout_ref.rollout.n=4 " + words.replace(" actor.", " actor_rollout_ref.actor.")
    got = yaml.safe_load(translate_arguments(words.split()))
    for section, values in settings.items():
        assert got[section] == values
    if not settings:
        assert "tracking" not in got


def test_verls_program_on_demonstrations() -> None:
    words = "torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=m data.train_files=a.parquet"
    got = yaml.safe_load(
        translate_arguments(
            [
                *words.split(),
                "optim.lr=2e-5",
                "data.multiturn.messages_key=turns",
                "optim.warmup_steps_ratio=0.1",
            ]
        )
    )
    assert (got["batch"], got["epochs"]) == ({"examples": 256}, 4)
    assert (got["optim"]["lr"], got["optim"]["warmup_steps"]) == (2e-5, "10%")
    assert got["data"]["messages_column"] == "turns"
    assert (got["data"]["max_length"], "rollout" in got) == (1024, False)

"""Translate settings that depend on several arguments of verl, and what verl does without being told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from burnish.errors import count_text
from burnish.translate.foreign_arguments import Arguments
from burnish.translate.framework import Framework

_PROGRAM = re.compile(r"verl\.trainer\.|main_ppo|main_dapo")
_OFFLINE = re.compile("sft_trainer")
"""In the name of the program that trains on demonstrations."""
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref."
_OF_PPO = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.truncation": "error",
    f"{_ACTOR}.optim.lr": 1e-6,
    f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.kl_loss_coef": 0.001,
    f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{_ACTOR}.clip_ratio_c": 3.0,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.val_kwargs.temperature": 0,
    "algorithm.adv_estimator": "gae",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_penalty": "kl",
    "critic.cliprange_value": 0.5,
    "trainer.total_epochs": 30,
}
"""What the PPO trainer does without being told, where Burnish would do something else."""
_OF_SFT = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "optim.lr": 1e-3,
    "optim.weight_decay": 0.01,
    "trainer.total_epochs": 4,
}
"""The same of the trainer on demonstrations."""
_KL_TERMS = {
    "use_kl_loss": ("kl_loss_coef", "kl_loss_type"),
    "use_kl_in_reward": ("kl_ctrl.kl_coef", "algorithm.kl_penalty", "kl_ctrl.type"),
}
"""What switches a KL term on, and what counts only then."""
_TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
_SWITCHED_OFF = -1
"""A frequency, a limit or a number of steps that stands for none."""
_SPEED = "only speed and memory depend on it"
_SAME_AS_POLICY = "the reference and the critic are held as the policy is"
_LAUNCHED = (
    "Burnish needs no such program or configuration; see --processes, --ray, torchrun or Slurm"
)
_WITHOUT_COUNTERPART = (
    (rf"{_REF}(?!model\.path)", _SAME_AS_POLICY),
    (r"critic\.(?!model\.path|optim\.lr$|cliprange_value|path$)", _SAME_AS_POLICY),
    (
        r"ray_kwargs\.|ray_init\.|hydra\.|config_path$|nnodes$|node_rank$|standalone$|rdzv_|master_",
        _LAUNCHED,
    ),
    (r"(nproc_per_node|engine|model|optim)$|actor@|algorithm@", _LAUNCHED),
    (rf"{_ACTOR}\.veomni\.|data\.ignore_input_ids", _SPEED),
    (r"trainer\.(v1|use_v1|use_legacy|ray_wait|device|esi_|del_local)", _LAUNCHED),
    (
        r"(.*\.)?(profiler|global_profiler)\.",
        "tracking.torch_profiler and tracking.profile_steps record steps",
    ),
    (r"distillation\.", "Burnish does not distil from a teacher"),
    (
        r"async_training\.|transfer_queue\.|skip\.",
        "rollout.ahead generates while the model is trained",
    ),
    (r".*\.(multi_turn|agent|trace|prometheus)\.", "Burnish does not support agents with tools"),
    (r".*\.(qat|mtp|turbo_config|disaggregation)\.", "Burnish does not have it"),
    (
        r".*\.(override_\w+_config)\.(?!.*(aux_loss|z_loss|dropout|router_load|fp8|num_layers$|eps))",
        _SPEED,
    ),
    (r".*\.(engine_kwargs|checkpoint_engine)\.", "the generator's own options have no setting"),
    (
        r"reward_model\.rollout\.|reward\.reward_model\.rollout\.",
        "judges run in the training processes",
    ),
    (
        r".*(log_prob|forward)_(use_dynamic_bsz|max_token_len_per_gpu|micro_batch_size(_per_gpu)?)$",
        _SPEED,
    ),
    (r".*micro_batch_size(_per_gpu)?$", _SPEED),
    (r"data\.max_token_len_per_gpu$|data\.num_workers|data\.dataloader_num_workers", _SPEED),
    (
        r".*(forward_prefetch|use_orig_params|offload_policy|use_torch_compile|grad_offload)$",
        _SPEED,
    ),
    (
        r".*(entropy_checkpointing|entropy_from_logits_.*|use_mbridge|vanilla_mbridge|dist_checkpointing.*)$",
        _SPEED,
    ),
    (
        r".*(use_dist_checkpointing|nccl_timeout|layered_summon|multi_stage_wake_up|sequence_parallel)$",
        _SPEED,
    ),
    (
        rf"{_ROLLOUT}\.(enable_chunked|enable_prefix|enable_sleep|disable_|calculate_|data_parallel|expert_parallel|max_num_batched|skip_)",
        _SPEED,
    ),
    (
        r".*filter_overlong_prompts_workers$|data\.(return_raw|image_|video_|tools_key|pad_mode)",
        _SPEED,
    ),
    (
        r"trainer\.(log_val_generations|resume_from_path|max_critic)",
        "the run's directory holds all of it",
    ),
    (r".*overlong_buffer(_cfg)?\.log$", "the part of the reward is always logged"),
)
"""Beginnings of names, and why they have no counterpart."""


def _recognizes(arguments: Arguments) -> bool:
    named = any(_PROGRAM.search(word) for word in arguments.program)
    return named or any(name.startswith("actor_rollout_ref.") for name in arguments.given)


def _generates(arguments: Arguments) -> bool:
    return not any(_OFFLINE.search(word) for word in arguments.program)


def _defaults(arguments: Arguments) -> Mapping[str, Any]:
    return _OF_PPO if _generates(arguments) else _OF_SFT


def _combine(arguments: Arguments) -> None:
    for switch, dependent in _KL_TERMS.items():
        if not arguments.look_up(switch):
            arguments.carry({}, switch)
            arguments.drop(f"it counts only with {switch}=true", *dependent)
    if arguments.look_up("use_kl_in_reward"):
        coefficient = arguments.number("kl_ctrl.kl_coef") or 0.0
        settings = {"algorithm.kl.coef": coefficient, "algorithm.kl.place": "reward"}
        arguments.carry(settings, "use_kl_in_reward", "kl_ctrl.kl_coef")
    _advantage(arguments)
    for name in ("model_engine", "config_name", "engine"):
        if "megatron" in str(arguments.look_up(name)):
            arguments.carry({"engine.kind": "megatron"}, name)
    _without_counterpart(arguments)
    _reward(arguments)
    _minibatches(arguments)
    _lengths(arguments)
    _overlong(arguments)
    _switched_off(arguments)
    _loss(arguments)
    _validation(arguments)
    _others(arguments)


def _advantage(arguments: Arguments) -> None:
    """Carry a GRPO without the deviation; drop a critic that the advantage does not use."""
    estimator = arguments.look_up("algorithm.adv_estimator")
    if estimator == "grpo" and arguments.look_up("norm_adv_by_std_in_grpo") is False:
        arguments.carry(
            {"algorithm.advantage": "dr_grpo"}, "algorithm.adv_estimator", "norm_adv_by_std_in_grpo"
        )
    if estimator not in (None, "gae"):
        for name in [
            name
            for name in arguments.unsettled
            if name.startswith("critic.") and name not in ("critic.model.path", "critic.path")
        ]:
            arguments.drop("only algorithm.advantage=gae has a critic", name)
        arguments.drop("only algorithm.advantage=gae has it", "algorithm.gamma", "algorithm.lam")


def _without_counterpart(arguments: Arguments) -> None:
    devices = [arguments.look_up(name) for name in ("trainer.nnodes", "trainer.n_gpus_per_node")]
    if all(isinstance(each, int) for each in devices):
        count = count_text(devices[0] * devices[1], "device")
        arguments.remarks.append(
            f"the script runs on {count}; batch is that of a whole step, whatever their number"
        )
    for name in arguments.unsettled:
        reason = next(
            (reason for start, reason in _WITHOUT_COUNTERPART if re.match(start, name)), None
        )
        if reason:
            arguments.drop(reason, name)


def _reward(arguments: Arguments) -> None:
    path = arguments.look_up("custom_reward_function.path")
    if path:
        function = arguments.look_up("custom_reward_function.name") or "compute_score"
        arguments.carry(
            {"reward.functions": f"{path}:{function}"},
            "custom_reward_function.path",
            "custom_reward_function.name",
        )
    for name in ("reward_manager", "reward_manager.name"):
        if arguments.look_up(name) in ("naive", "dapo", "batch"):
            arguments.drop("reward.functions are called as these managers call them", name)


def _minibatches(arguments: Arguments) -> None:
    """Carry the mini-batches of a step if they divide it; else the table of names says how to choose."""
    prompts = arguments.number("train_batch_size")
    of_minibatch = arguments.number("ppo_mini_batch_size")
    if prompts and of_minibatch and prompts % of_minibatch == 0:
        arguments.carry({"batch.minibatches": prompts // of_minibatch}, "ppo_mini_batch_size")


def _lengths(arguments: Arguments) -> None:
    """Carry what happens to prompts that are too long: they are filtered first, and else truncated or refused."""
    is_filtered = arguments.look_up("filter_overlong_prompts")
    if is_filtered or arguments.look_up("data.truncation") == "error":
        settings = {"data.overlong": "drop" if is_filtered else "error"}
        arguments.carry(settings, "filter_overlong_prompts", "data.truncation")


def _overlong(arguments: Arguments) -> None:
    """Carry DAPO's penalty for length, which stands under several names."""
    for start in ("overlong_buffer_cfg", "overlong_buffer"):
        names = [f"{start}.{last}" for last in ("enable", "len", "penalty_factor")]
        is_enabled, length, penalty = map(arguments.look_up, names)
        if is_enabled and length:
            settings = {
                "algorithm.overlong.buffer": length,
                "algorithm.overlong.penalty": 1.0 if penalty is None else penalty,
            }
            arguments.carry(settings, *names)
        elif is_enabled is not None:
            arguments.drop("the penalty for length is off", *names)
    if arguments.look_up("max_resp_len") == arguments.look_up("data.max_response_length"):
        arguments.carry({}, "max_resp_len")


def _switched_off(arguments: Arguments) -> None:
    """Carry -1, which stands for none."""
    keys = {
        "save_freq": {"checkpoint.save_every": 0},
        "test_freq": {"evaluation.every": 0},
        "val_kwargs.top_k": {"evaluation.top_k": 0},
        "rollout.top_k": {"rollout.top_k": 0},
        "lr_warmup_steps": {},
        "fsdp_size": {},
        "total_training_steps": {},
        "max_samples": {},
    }
    for name, settings in keys.items():
        if arguments.look_up(name) == _SWITCHED_OFF:
            arguments.carry(settings, name)


def _loss(arguments: Arguments) -> None:
    """Drop the dual clip of losses that have none; carry a warm-up that is a share of the steps."""
    if arguments.look_up("policy_loss.loss_mode") not in (None, "vanilla"):
        arguments.drop("only the loss vanilla has it", "clip_ratio_c")
    share = arguments.number("lr_warmup_steps_ratio")
    if share is not None and arguments.look_up("lr_warmup_steps") is None:
        settings = {"optim.warmup_steps": f"{100 * share:g}%"} if share else {}
        arguments.carry(settings, "lr_warmup_steps_ratio")


def _validation(arguments: Arguments) -> None:
    """Carry sampling in validation: without `do_sample` the most probable token is taken."""
    if arguments.look_up("val_kwargs.do_sample") is False:
        arguments.carry(
            {"evaluation.temperature": 0}, "val_kwargs.do_sample", "val_kwargs.temperature"
        )
    else:
        arguments.carry({}, "val_kwargs.do_sample")


def _others(arguments: Arguments) -> None:
    logger = arguments.look_up("trainer.logger")
    named = [str(each) for each in (logger if isinstance(logger, list) else [logger])]
    if logger is not None and all(each in (*_TRACKERS, "console", "file") for each in named):
        trackers = [each for each in named if each in _TRACKERS]
        arguments.carry({"tracking.trackers": trackers} if trackers else {}, "trainer.logger")
    if str(arguments.look_up("config_name")).startswith(
        ("ppo_trainer", "sft_trainer", "dapo_trainer")
    ):
        arguments.carry({}, "config_name")
    if arguments.look_up("data.custom_cls.path") is None:
        arguments.drop(
            "data are read by Burnish's own reader", "data.custom_cls.path", "data.custom_cls.name"
        )


VERL = Framework(
    "verl",
    recognizes=_recognizes,
    combine=_combine,
    defaults=_defaults,
    generates=_generates,
    table="verl",
)

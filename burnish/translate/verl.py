"""Translate settings that depend on several arguments of verl, and what verl does without being told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from burnish.errors import count_text
from burnish.translate.foreign_arguments import Arguments
from burnish.translate.framework import Framework
from burnish.translate.trainer import share_text
from burnish.translate.verl_absent import why_absent

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
    f"{_ROLLOUT}.name": "vllm",
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
_RATIOS = {
    "token": "token",
    "seq_sum": "sequence",
    "sequence": "sequence",
    "seq_mean": "geometric",
    "geometric": "geometric",
}
"""What verl's rejection compares, and its name here. Its divergences (k2, k3) are not implemented."""
_OF_JUDGE = ("reward_model.model.path", "reward_model.model_path")


def _recognizes(arguments: Arguments) -> bool:
    named = any(_PROGRAM.search(word) for word in arguments.program)
    return named or any(name.startswith("actor_rollout_ref.") for name in arguments.given)


def _generates(arguments: Arguments) -> bool:
    return not any(_OFFLINE.search(word) for word in arguments.program)


def _defaults(arguments: Arguments) -> Mapping[str, Any]:
    defaults: dict[str, Any] = dict(_OF_PPO if _generates(arguments) else _OF_SFT)
    if arguments.number("lora_rank"):
        defaults["lora_alpha"] = 16
    return defaults


def _combine(arguments: Arguments) -> None:
    if arguments.look_up("use_kl_in_reward") is None and arguments.look_up("kl_ctrl.kl_coef"):
        arguments.leave(
            "algorithm.kl.coef and algorithm.kl.place=reward: earlier versions of verl always subtract it from the reward, "
            "later ones only with use_kl_in_reward",
            *[name for name in ("kl_ctrl.kl_coef",) if arguments.name_of(name) in arguments.given],
        )
    for switch, dependent in _KL_TERMS.items():
        if not arguments.look_up(switch):
            arguments.carry({}, switch)
            arguments.drop(f"it counts only with {switch}=true", *dependent)
    if arguments.look_up("use_kl_in_reward"):
        coefficient = arguments.number("kl_ctrl.kl_coef") or 0.0
        settings = {"algorithm.kl.coef": coefficient, "algorithm.kl.place": "reward"}
        arguments.carry(settings, "use_kl_in_reward", "kl_ctrl.kl_coef")
    _advantage(arguments)
    _groups(arguments)
    _lora(arguments)
    for name in ("model_engine", "config_name", "engine"):
        if "megatron" in str(arguments.look_up(name)):
            arguments.carry({"engine.kind": "megatron"}, name)
    _reward(arguments)
    _resumption(arguments)
    _without_counterpart(arguments)
    _correction(arguments)
    _ahead(arguments)
    _learning_rate(arguments)
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


def _groups(arguments: Arguments) -> None:
    """Drop what counts only where groups are filtered."""
    if not arguments.look_up("filter_groups.enable"):
        arguments.drop(
            "it counts only with filter_groups.enable",
            "filter_groups.metric",
            "filter_groups.max_num_gen_batches",
        )


def _lora(arguments: Arguments) -> None:
    """Drop what counts only with an adapter; carry that all layers are adapted, by any of their names."""
    ranks = [arguments.look_up(name) for name in ("model.lora_rank", "model.lora.rank")]
    if not any(ranks) and not arguments.look_up("lora_adapter_path"):
        alphas = ("model.lora_alpha", "model.lora.alpha")
        arguments.drop(
            "it counts only with a rank above 0",
            *alphas,
            "model.target_modules",
            "lora.target_modules",
        )
    layers = arguments.look_up("target_modules")
    is_all = layers in ("all-linear", "all")
    if is_all or (isinstance(layers, list) and all("linear_" in str(each) for each in layers)):
        arguments.carry({}, "target_modules")


def _without_counterpart(arguments: Arguments) -> None:
    devices = [arguments.look_up(name) for name in ("trainer.nnodes", "trainer.n_gpus_per_node")]
    if all(isinstance(each, int) for each in devices):
        world = devices[0] * devices[1]
        arguments.remarks.append(
            f"the script runs on {count_text(world, 'device')}; batch is that of a whole step, whatever their number"
        )
        shards = arguments.look_up("fsdp_size")
        if isinstance(shards, int) and shards > 0 and max(world, shards) % shards == 0:
            arguments.carry({"engine.replicas": max(1, world // shards)}, "fsdp_size")
    if arguments.look_up("multi_turn.enable") is True:
        arguments.remarks.append(
            "the script trains an agent over several turns with tools; Burnish trains on one completion a prompt"
        )
    for name in arguments.unsettled:
        reason = why_absent(name)
        if reason:
            arguments.drop(reason, name)


def _reward(arguments: Arguments) -> None:
    """Carry a function with what it gets, and a judge. The managers that only call a function need nothing."""
    path = arguments.look_up("custom_reward_function.path")
    mark = "custom_reward_function.reward_kwargs."
    named = {name: name.partition(mark)[2] for name in arguments.unsettled if mark in name}
    if path:
        function = arguments.look_up("custom_reward_function.name") or "compute_score"
        whole: Any = f"{path}:{function}"
        if named:
            kwargs = {last: arguments.unsettled[name] for name, last in named.items()}
            whole = [{"function": whole, "kwargs": kwargs}]
        arguments.carry(
            {"reward.functions": whole},
            "custom_reward_function.path",
            "custom_reward_function.name",
            *named,
        )
    for name in ("reward_manager", "reward_manager.name"):
        if arguments.look_up(name) in ("naive", "dapo", "batch"):
            arguments.drop("reward.functions are called as these managers call them", name)
    if any(arguments.look_up(name) for name in _OF_JUDGE):
        arguments.carry({}, "reward_model.enable")
    for name in arguments.unsettled:
        if ".reward_kwargs." in name and not re.search(r"overlong_buffer|max_resp_len", name):
            arguments.leave("reward.functions[].kwargs: what a function needs", name)
        elif ".sandbox_fusion." in name:
            arguments.leave("reward.functions: a function that asks the sandbox", name)


def _resumption(arguments: Arguments) -> None:
    """Leave a checkpoint that the script resumes to the person. A path counts only in one mode."""
    if arguments.look_up("resume_mode") == "resume_path":
        arguments.leave(
            "model.path or output_dir: burnish ckpt import reads verl's checkpoints; a run of Burnish's own is resumed by the same command",
            "resume_mode",
            "resume_from_path",
        )
    else:
        arguments.drop("it counts only with resume_mode=resume_path", "resume_from_path")


def _correction(arguments: Arguments) -> None:
    """Carry importance sampling and rejection against the generator's log-probs."""
    bypass = arguments.look_up("rollout_correction.bypass_mode")
    level = arguments.look_up("rollout_is")
    kind = str(arguments.look_up("rollout_rs")).removesuffix("_k1")
    if bypass and arguments.look_up("rollout_correction.loss_type") in (None, "ppo_clip"):
        arguments.carry(
            {"algorithm.old_logprobs": "rollout"},
            "rollout_correction.bypass_mode",
            "rollout_correction.loss_type",
        )
        arguments.drop("the ratio of the loss has it already", "rollout_is", "rollout_is_threshold")
    elif bypass:
        arguments.leave(
            "algorithm.old_logprobs: rollout, with a loss that is clipped",
            "rollout_correction.bypass_mode",
            "rollout_correction.loss_type",
        )
    else:
        arguments.carry({}, "rollout_correction.bypass_mode")
        arguments.drop("it counts only with bypass_mode", "rollout_correction.loss_type")
    if level in ("token", "sequence"):
        limit = arguments.look_up("rollout_is_threshold")
        settings = {
            "algorithm.mismatch_level": level,
            "algorithm.mismatch_cap": 2.0 if limit is None else limit,
        }
        arguments.carry(settings, "rollout_is", "rollout_is_threshold")
    elif level in (None, False):
        arguments.drop("it counts only with rollout_is", "rollout_is_threshold")
    if arguments.look_up("rollout_is_batch_normalize") is False:
        arguments.carry({}, "rollout_is_batch_normalize")
    limits = _limits(
        arguments.look_up("rollout_rs_threshold"), arguments.look_up("rollout_rs_threshold_lower")
    )
    names = ("rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower")
    if kind in ("None", "False"):
        arguments.drop("it counts only with rollout_rs", *names)
    elif kind in _RATIOS and limits:
        settings = {
            "algorithm.mismatch_reject": _RATIOS[kind],
            "algorithm.mismatch_low": limits[0],
            "algorithm.mismatch_high": limits[1],
        }
        arguments.carry(settings, *names)
    else:
        arguments.leave(
            "algorithm.mismatch_reject: token, sequence or geometric, by the ratio; one of them",
            *names,
        )


def _limits(upper: Any, lower: Any) -> tuple[float, float] | None:
    """Return both limits of a ratio, from `0.6_1.6`, or from the upper one, whose inverse is the lower."""
    texts = str(upper).split("_") if lower is None else [str(lower), str(upper)]
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return None
    if len(numbers) == 1 and numbers[0] > 0:
        numbers = [1 / numbers[0], *numbers]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def _ahead(arguments: Arguments) -> None:
    """Leave how old completions may be to the person: verl counts otherwise."""
    for name in arguments.unsettled:
        if name.startswith("async_training."):
            arguments.leave(
                "rollout.ahead and rollout.in_flight: how many steps before training completions are drawn, and whether weights change meanwhile",
                name,
            )


def _learning_rate(arguments: Arguments) -> None:
    """Carry a lowest learning rate, which is a share here, and the schedule by Megatron's name."""
    rate = arguments.number("optim.lr")
    lowest = arguments.number("optim.min_lr")
    if rate and lowest is not None and lowest <= rate:
        arguments.carry({"optim.min_lr_ratio": float(f"{lowest / rate:.9g}")}, "optim.min_lr")


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
        "train_max_samples": {},
    }
    for name, settings in keys.items():
        if arguments.look_up(name) == _SWITCHED_OFF:
            arguments.carry(settings, name)


def _loss(arguments: Arguments) -> None:
    """Drop the dual clip of losses that have none; carry a warm-up that is a share of the steps."""
    if arguments.look_up("policy_loss.loss_mode") not in (None, "vanilla"):
        arguments.drop("only the loss vanilla has it", "clip_ratio_c")
    for name in ("lr_warmup_steps_ratio", "warmup_steps_ratio"):
        share = arguments.number(name)
        if share is not None and arguments.look_up("lr_warmup_steps") is None:
            arguments.carry({"optim.warmup_steps": share_text(share)} if share else {}, name)


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
    if re.match(r"(ppo|sft|dapo)\w*_trainer", str(arguments.look_up("config_name"))):
        arguments.carry({}, "config_name")
    arguments.leave("what its file sets is not here; translate it as well", "config_name")
    if arguments.look_up("data.custom_cls.path") is None:
        arguments.drop("it counts only with data.custom_cls.path", "data.custom_cls.name")
    arguments.leave(
        "data.train: rows as Burnish's own reader knows them",
        "data.custom_cls.path",
        "data.custom_cls.name",
    )
    arguments.leave(
        "data.curriculum: a column of numbers to sort by",
        "data.sampler.class_path",
        "data.sampler.class_name",
    )
    kwargs = "apply_chat_template_kwargs."
    for name, value in arguments.unsettled.items():
        if kwargs in name:
            arguments.carry({f"data.chat_template_kwargs.{name.partition(kwargs)[2]}": value}, name)


VERL = Framework(
    "verl",
    recognizes=_recognizes,
    combine=_combine,
    defaults=_defaults,
    generates=_generates,
    table="verl",
)

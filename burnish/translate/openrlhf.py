"""Translate settings that depend on several arguments of OpenRLHF, and what it does without being told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.config.foreign_names import marks_of
from burnish.translate.foreign_arguments import Arguments
from burnish.translate.framework import Framework, refuse_preferences
from burnish.translate.trainer import share_text

_OF_SFT = ("data.dataset", "model.model_name_or_path", "data.output_key", "dataset", "output_key")
"""Arguments that only its supervised fine-tuning has."""
_ON_PREFERENCES = ("train_dpo", "train_kto", "train_rm")
_BOTH = {
    "adam.betas": [0.9, 0.95],
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "min_lr_ratio": 0.1,
}
_DEFAULTS_OF_PPO = {
    **_BOTH,
    "actor.adam.lr": 1e-6,
    "critic.adam.lr": 9e-6,
    "critic.value_clip": 0.5,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "train.batch_size": 128,
    "algo.advantage.estimator": "gae",
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "data.max_len": 2048,
    "data.input_key": "input",
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
}
_DEFAULTS_OF_SFT = {
    **_BOTH,
    "adam.lr": 5e-6,
    "train.batch_size": 128,
    "train.max_epochs": 2,
    "data.max_len": 2048,
    "data.input_key": "input",
}
_FLAT = {
    "actor.adam.lr": "actor_learning_rate",
    "critic.adam.lr": "critic_learning_rate",
    "critic.value_clip": "value_clip",
    "adam.betas": "adam_betas",
    "adam.lr": "learning_rate",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "train.batch_size": "train_batch_size",
    "train.max_epochs": "max_epochs",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.estimator": "kl_estimator",
    "data.max_len": "max_len",
    "data.input_key": "input_key",
    "eval.temperature": "eval_temperature",
    "eval.n_samples_per_prompt": "eval_n_samples_per_prompt",
}
"""What an argument was called before OpenRLHF had dots."""
_NEVER = {
    "ckpt.save_steps": {"checkpoint.save_every": 0},
    "save_steps": {"checkpoint.save_every": 0},
    "eval.steps": {"evaluation.every": 0},
    "eval_steps": {"evaluation.every": 0},
}
"""What -1 means here."""
_LEVELS = {"tis": "token", "icepop": "token", "seq-mask-tis": "geometric"}


def _recognizes(arguments: Arguments) -> bool:
    named = any("openrlhf" in word for word in arguments.program)
    return named or not marks_of("openrlhf").isdisjoint(arguments.given)


def _generates(arguments: Arguments) -> bool:
    """Raise `UsageError` for a program that is not supported."""
    for word in arguments.program:
        last = word.rpartition(".")[2]
        if last in _ON_PREFERENCES:
            raise refuse_preferences("OpenRLHF", last)
        if last == "train_sft":
            return False
    return not any(name in arguments.given for name in _OF_SFT)


def _defaults(arguments: Arguments) -> Mapping[str, Any]:
    defaults = _DEFAULTS_OF_PPO if _generates(arguments) else _DEFAULTS_OF_SFT
    given = {f".{name}" for name in arguments.given}
    known = {name: (name, _FLAT.get(name, name)) for name in defaults}
    missing = {
        name: value
        for name, value in defaults.items()
        if not any(each.endswith(f".{ending}") for ending in known[name] for each in given)
    }
    if "algo.advantage.estimator" not in missing and "gae" not in map(
        str, arguments.given.values()
    ):
        missing = {name: value for name, value in missing.items() if not name.startswith("critic.")}
    return missing


def _combine(arguments: Arguments) -> None:
    for switch in ("optim",):
        if arguments.look_up(switch) == "adam":
            arguments.carry({"optim.kind": "adamw"}, switch)
    warmup = arguments.number("lr_warmup_ratio")
    if warmup:
        arguments.carry({"optim.warmup_steps": share_text(warmup)}, "lr_warmup_ratio")
    for name, settings in _NEVER.items():
        if arguments.number(name) == -1:
            arguments.carry(settings, name)
    if arguments.look_up("logger.wandb.key") or arguments.look_up("use_wandb"):
        arguments.carry({"tracking.trackers": ["wandb"]}, "logger.wandb.key", "use_wandb")
    if _generates(arguments):
        _rl(arguments)
    else:
        _sft(arguments)


def _sft(arguments: Arguments) -> None:
    for name, key in {
        "train.batch_size": "batch.prompts",
        "max_epochs": "epochs",
        "max_len": "data.max_length",
    }.items():
        for ending in (name, _FLAT.get(name, name)):
            value = arguments.number(ending)
            if value:
                arguments.carry({key: value}, ending)


def _rl(arguments: Arguments) -> None:
    _minibatches(arguments)
    _lengths(arguments)
    _kl(arguments)
    _reward(arguments)
    _correction(arguments)
    limits = arguments.look_up("eps_clip_low_high")
    if isinstance(limits, list) and len(limits) == 2:
        arguments.carry(
            {"algorithm.clip_low": limits[0], "algorithm.clip_high": limits[1]}, "eps_clip_low_high"
        )
    span = arguments.look_up("dynamic_filtering_range") or arguments.look_up(
        "dynamic_filtering_reward_range"
    )
    if span == [0, 1]:
        arguments.carry({}, "dynamic_filtering_range", "dynamic_filtering_reward_range")
    passes = arguments.number("max_epochs")
    if passes:
        arguments.carry({"batch.epochs": passes}, "max_epochs")


def _minibatches(arguments: Arguments) -> None:
    """Carry the optimizer steps of one generation. OpenRLHF counts completions."""
    prompts = arguments.number("rollout.batch_size") or arguments.number("rollout_batch_size")
    completions = arguments.number("n_samples_per_prompt")
    trained = arguments.number("train.batch_size") or arguments.number("train_batch_size")
    if prompts and completions and trained and prompts * completions % trained == 0:
        minibatches = prompts * completions // trained
        arguments.carry({"batch.minibatches": minibatches}, "train.batch_size")
        arguments.carry({"batch.minibatches": minibatches}, "train_batch_size")


def _lengths(arguments: Arguments) -> None:
    """Carry the limit of prompt and completion together as the limit of a completion, or as both."""
    whole = arguments.number("data.max_len") or arguments.number("max_len")
    completion = arguments.number("rollout.max_new_tokens") or arguments.number("generate_max_len")
    if not whole:
        return
    names = ("data.max_len", "max_len")
    if completion and completion < whole:
        for name in names:
            arguments.carry({"data.max_prompt_length": whole - completion}, name)
        return
    if not completion:
        for name in names:
            arguments.carry({"rollout.max_response_length": whole}, name)
        arguments.remarks.append(
            f"OpenRLHF limits prompt and completion together to {whole} tokens, Burnish the completion alone"
        )


def _kl(arguments: Arguments) -> None:
    in_loss = bool(arguments.look_up("kl.use_loss") or arguments.look_up("use_kl_loss"))
    place = {"algorithm.kl.place": "loss" if in_loss else "reward"}
    for name in ("kl.init_coef", "init_kl_coef"):
        coef = arguments.number(name)
        if coef is not None:
            arguments.carry({"algorithm.kl.coef": coef, **place}, name)
    for name in ("kl.use_loss", "use_kl_loss"):
        arguments.carry(place, name)


def _reward(arguments: Arguments) -> None:
    """Carry a file with `reward_func`. An address is a server, which a function has to ask."""
    for name in ("reward.remote_url", "remote_rm_url"):
        path = arguments.look_up(name)
        if isinstance(path, str) and path.endswith(".py"):
            arguments.carry({"reward.functions": f"{path}:reward_func"}, name)
            arguments.remarks.append(
                f"{path}: OpenRLHF calls reward_func(queries, prompts, labels); give it the arguments (prompts, completions, answer) and return a list of numbers"
            )


def _correction(arguments: Arguments) -> None:
    """Carry the correction for the generator's log-probs."""
    if not arguments.look_up("is_correction_enable"):
        arguments.carry({}, "is_correction_enable")
        arguments.drop(
            "it counts only with is_correction_enable",
            "is_correction_type",
            "is_correction_threshold",
        )
        return
    kind = arguments.look_up("is_correction_type") or "tis"
    limits = arguments.look_up("is_correction_threshold")
    low, high = limits if isinstance(limits, list) and len(limits) == 2 else (0.5, 5.0)
    settings: dict[str, Any] = {"algorithm.mismatch_cap": high}
    if kind in ("icepop", "seq-mask-tis"):
        settings |= {
            "algorithm.mismatch_reject": _LEVELS[kind],
            "algorithm.mismatch_low": low,
            "algorithm.mismatch_high": high,
        }
    arguments.carry(
        settings, "is_correction_enable", "is_correction_type", "is_correction_threshold"
    )
    if kind == "tis" and low:
        arguments.remarks.append(
            f"OpenRLHF also raises weights below {low} to it; Burnish only caps those above {high}"
        )


OPENRLHF = Framework(
    "OpenRLHF",
    table="openrlhf",
    recognizes=_recognizes,
    combine=_combine,
    defaults=_defaults,
    generates=_generates,
)

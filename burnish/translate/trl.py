"""Translate settings that depend on several arguments of TRL, and what its trainers do without being told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from burnish.config.foreign_names import marks_of
from burnish.errors import UsageError, count_text
from burnish.translate.foreign_arguments import Arguments
from burnish.translate.framework import Framework, refuse_preferences
from burnish.translate.preferences import carry_losses, carry_numbers, weighted
from burnish.translate.trainer import combine_batch, combine_trainer, lora_settings

_ONLINE = ("grpo", "gspo", "rloo", "ppo")
_ON_PREFERENCES = {"dpo": "dpo", "kto": "dpo", "orpo": "dpo", "cpo": "dpo", "reward": "rm"}
"""Trainers on preferences, and the methods here."""
_OTHER_PREFERENCES = ("bco", "tpo", "xpo", "prm", "mpo", "nash")
_DISTILLS = "gkd"
_OTHERS = ("gold", "sdft", "sdpo", "ssd", "distillation", "minillm", "vllm_serve", "async")
_OF_PREFERENCES = {
    "precompute_ref_log_probs": "dpo",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
    "rpo_alpha": "dpo",
    "label_smoothing": "dpo",
    "cpo_alpha": "cpo",
    "center_rewards_coefficient": "reward",
}
"""Arguments that only trainers on preferences have, and which one."""
_OF_ONLINE = [
    "num_generations",
    "reward_funcs",
    "max_completion_length",
    "num_iterations",
    "scale_rewards",
    "epsilon",
    "epsilon_high",
    "beta",
    "use_vllm",
    "vllm_mode",
    "steps_per_generation",
    "generation_batch_size",
    "importance_sampling_level",
    "mask_truncated_completions",
    "log_completions",
]
"""Arguments that only trainers on completions have."""
_LORA = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
    "lora_modules_to_save",
)
_OF_PEFT = {
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": ["q_proj", "v_proj"],
}
"""What `--use_peft` means without more. The layers are those of PEFT for Llama, Qwen, Mistral and Gemma."""
_OF_TRAINER = {
    "lr_scheduler_type": "linear",
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
}
_OF_SFT = {"learning_rate": 2e-5, "max_length": 1024}
_OF_GRPO = {"learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512}
_OF_DPO = {"learning_rate": 1e-6, "max_length": 1024}
_OF_REWARD = {"learning_rate": 1e-4, "max_length": 1024}
_OF_GKD = {
    "learning_rate": 2e-5,
    "temperature": 0.9,
    "max_new_tokens": 128,
    "beta": 0.5,
    "lmbda": 0.5,
}
_OF_RLOO = {"num_generations": 2, "max_completion_length": 512, "beta": 0.05}
_OF_VLLM = {"vllm_mode": "colocate", "vllm_importance_sampling_mode": "sequence_mask"}
_MODES = {
    "token_truncate": ("token", False),
    "token_mask": ("token", True),
    "sequence_truncate": ("sequence", False),
    "sequence_mask": ("sequence", True),
}
"""What TRL compares, and whether it leaves out what is above the limit."""


def trainer_of(arguments: Arguments) -> str:
    """Return the trainer that the program or the arguments name: sft, grpo, dpo, ... Raises `UsageError` for one that is not translated."""
    words = [PurePath(word).stem for word in arguments.program if not word.startswith("-")]
    named = [
        word for word in words if word not in ("trl", "accelerate", "launch", "python", "python3")
    ]
    for word in reversed(named):
        head = word.split("_")[0]
        if head in _OTHER_PREFERENCES or word.startswith("online_dpo"):
            raise refuse_preferences("TRL", word)
        if head in (*_ON_PREFERENCES, _DISTILLS):
            return head
        if word in _OTHERS or head in _OTHERS:
            raise UsageError(
                f"TRL's {word} has no counterpart",
                have=word,
                want="sft, grpo, rloo, dpo, kto, orpo, cpo, reward or gkd",
                do="translate one of these",
            )
        if head in _ONLINE:
            return "grpo" if head == "gspo" else head
        if head == "sft":
            return "sft"
    for name, trainer in _OF_PREFERENCES.items():
        if name in arguments.given:
            return trainer
    if "teacher_model_name_or_path" in arguments.given:
        return _DISTILLS
    return "grpo" if any(name in arguments.given for name in _OF_ONLINE) else "sft"


def combine_shared(arguments: Arguments) -> None:
    """Give a fate to arguments that others have too. Raise `UsageError` for values that do not fit together."""
    combine_rewards(arguments)
    _datasets(arguments)
    with_suffixes(arguments, "model.path", "model_name_or_path", "@", ["model_revision"])
    combine_batch(arguments, "per_device_train_batch_size")
    combine_trainer(arguments, generates=_generates(arguments))
    _upper_clip(arguments)


def combine_trl(arguments: Arguments) -> None:
    """Give a fate to arguments that mean something together. Raise `UsageError` for values that do not fit together."""
    trainer = trainer_of(arguments)
    is_online = _generates(arguments)
    if trainer in _ON_PREFERENCES:
        _preferences(arguments, trainer)
    if trainer == _DISTILLS:
        _distillation(arguments)
    _lora(arguments)
    combine_shared(arguments)
    if trainer == "rloo":
        arguments.carry(
            {
                "algorithm.advantage": "rloo",
                "algorithm.kl.place": "reward",
                "algorithm.kl.coef": arguments.number("beta"),
            },
            "beta",
        )
    if is_online:
        _correction(arguments)
    else:
        arguments.drop("only trainers on completions read it", *_OF_ONLINE)
        if trainer == "sft" and "dft" in (
            arguments.look_up("loss_type"),
            "dft" if arguments.look_up("use_dft") else "",
        ):
            arguments.carry({"method.loss": "dft"}, "loss_type", "use_dft")
        elif trainer == "sft":
            carry_numbers(arguments, {"label_smoothing_factor": "method.label_smoothing"})
        _say_what_is_cut(arguments, trainer)


def _preferences(arguments: Arguments, trainer: str) -> None:
    """Carry the loss of preferences."""
    arguments.carry({}, "precompute_ref_log_probs")
    arguments.carry({}, "precompute_ref_batch_size")
    types = arguments.look_up("loss_type")
    beta = arguments.number("beta")
    endings = ["loss_type", "loss_weights", "rpo_alpha", "cpo_alpha"]
    match trainer:
        case "reward":
            carry_numbers(arguments, {"center_rewards_coefficient": "method.center"})
            return
        case "kto":
            losses = weighted(types or "kto")
        case "orpo":
            losses = {"orpo": beta, "nll": 1.0}
            endings.append("beta")
        case "cpo" if types != "simpo":
            raise refuse_preferences("TRL", f"cpo with the loss_type {types or 'sigmoid'}")
        case "cpo":
            alpha = arguments.number("cpo_alpha")
            losses = {"simpo": 1.0, "nll": 1.0 if alpha is None else alpha}
        case _:
            losses = weighted(types or "sigmoid", arguments.look_up("loss_weights"))
            losses["nll"] = losses.get("nll", 0.0) + (arguments.number("rpo_alpha") or 0.0)
    carry_losses(arguments, losses, endings)
    keys = ("beta", "label_smoothing", "simpo_gamma", "desirable_weight", "undesirable_weight")
    carry_numbers(arguments, {name: f"method.{name}" for name in keys})
    if arguments.look_up("f_divergence_type") in ("reverse_kl", "FDivergenceType.REVERSE_KL"):
        arguments.carry({}, "f_divergence_type")
    arguments.drop(
        "this formula is not implemented",
        *("f_divergence_type", "f_alpha_divergence_coef", "ld_alpha", "use_weighting"),
        *("discopop_tau", "alpha"),
    )


def _distillation(arguments: Arguments) -> None:
    """Carry the teacher and the divergence. Completions are all the student's, or all those of the data."""
    teacher = arguments.look_up("teacher_model_name_or_path")
    if teacher:
        arguments.carry({"distill.teachers": [{"path": teacher}]}, "teacher_model_name_or_path")
    arguments.carry({"distill.tokens": "all", "distill.mix": arguments.number("beta")}, "beta")
    share = arguments.number("lmbda")
    arguments.carry({}, "use_fused_linear_loss")
    arguments.drop(
        "a teacher is loaded as the student is, by engine.precision", "teacher_model_init_kwargs"
    )
    if arguments.look_up("seq_kd") and share != 1:
        arguments.leave(
            "the teacher's own completions: draw them with burnish eval of the teacher, and give them to burnish sft as data",
            "seq_kd",
        )
    arguments.carry({}, "seq_kd")
    if share == 0:
        arguments.carry({}, "lmbda")
        arguments.drop("nothing is drawn where lmbda is 0", "max_new_tokens", "temperature")
        return
    length = {"rollout.n": 1, "rollout.max_response_length": arguments.number("max_new_tokens")}
    arguments.carry(length, "max_new_tokens")
    if share == 1:
        arguments.carry({}, "lmbda")
    else:
        reason = "burnish rl draws every completion from the student, as with lmbda 1, and burnish sft none, as with lmbda 0"
        arguments.leave(reason, "lmbda")
        if "lmbda" not in arguments.given:
            arguments.remarks.append(f"GKD draws half of the completions (lmbda 0.5); {reason}")
    if arguments.number("temperature") != 1:
        arguments.remarks.append(
            "GKD compares the distributions at temperature 1; burnish rl compares them at rollout.temperature"
        )


def _defaults(arguments: Arguments) -> Mapping[str, Any]:
    trainer = trainer_of(arguments)
    of_others: dict[str, Mapping[str, Any]] = {"sft": _OF_SFT, "grpo": _OF_GRPO}
    of_others |= {"rloo": _OF_RLOO, _DISTILLS: _OF_GKD}
    of_others |= dict.fromkeys(("dpo", "cpo"), _OF_DPO) | {"reward": _OF_REWARD}
    of_others |= {"kto": {**_OF_DPO, "loss_type": "kto"}, "orpo": {**_OF_DPO, "beta": 0.1}}
    own = of_others.get(trainer, {})
    if trainer == _DISTILLS and not _generates(arguments):
        own = {**_OF_SFT, **own}
    return {**_OF_TRAINER, **own, **_implied_by_switches(arguments, **_OF_VLLM)}


def _implied_by_switches(arguments: Arguments, **of_vllm: str) -> dict[str, Any]:
    """Return what `use_peft` and `use_vllm` mean without more."""
    given = arguments.given
    implied: dict[str, Any] = dict(_OF_PEFT) if given.get("use_peft") else {}
    if implied and "lora_target_parameters" in given:
        del implied["lora_target_modules"]
    if given.get("use_vllm"):
        implied |= of_vllm
    return implied


def combine_rewards(arguments: Arguments) -> None:
    """Carry reward functions with their weights. Raise `UsageError` if their numbers differ."""
    functions = arguments.look_up("reward_funcs")
    if not functions:
        return
    functions = functions if isinstance(functions, list) else [functions]
    weights = arguments.look_up("reward_weights")
    if not isinstance(weights, list):
        weights = [weights or 1.0] * len(functions)
    if len(weights) != len(functions):
        raise UsageError(
            "reward_weights does not fit reward_funcs",
            have=f"{count_text(len(weights), 'weight')}, {count_text(len(functions), 'function')}",
            want="a weight for each function",
            do="correct reward_weights, or leave it out",
        )
    rewards = [
        {"function": _reward_function(str(function)), "weight": weight}
        for function, weight in zip(functions, weights, strict=True)
    ]
    arguments.carry({"reward.functions": rewards}, "reward_funcs", "reward_weights")


def _reward_function(name: str) -> str:
    """Return a function's name here; only TRL's own have no module."""
    if ":" in name:
        return name
    module, _, function = name.rpartition(".")
    return f"{module or 'trl.rewards'}:{function}"


def _datasets(arguments: Arguments) -> None:
    """Carry the data set, and its test split where the trainer evaluates."""
    name = arguments.look_up("dataset_name")
    subset = arguments.look_up("dataset_config")
    strategy = str(arguments.look_up("eval_strategy") or "no").lower()
    if name and strategy not in ("no", "false"):
        parts = [
            str(part)
            for part in (subset, arguments.look_up("dataset_test_split") or "test")
            if part
        ]
        arguments.carry({"data.validation": [f"{name}:{'/'.join(parts)}"]}, "dataset_test_split")
    elif name:
        arguments.carry({}, "dataset_test_split")
    parts = ["dataset_config", "dataset_train_split"]
    with_suffixes(arguments, "data.train", "dataset_name", ":", parts)


def with_suffixes(
    arguments: Arguments, key: str, main: str, mark: str, suffixes: list[str]
) -> None:
    """Carry a name and its suffixes as one setting: `OWNER/NAME@REVISION` or `OWNER/NAME:SUBSET/SPLIT`."""
    value = arguments.look_up(main)
    if value:
        named = map(arguments.look_up, suffixes)
        parts = [str(part) for part in named if part and (part != "main" or mark == ":")]
        whole = f"{value}{mark}{'/'.join(parts)}" if parts else str(value)
        arguments.carry({key: whole}, main, *suffixes)


def _lora(arguments: Arguments) -> None:
    """Carry the adapter that `use_peft` switches on; without it TRL reads none of its settings."""
    if not arguments.look_up("use_peft"):
        arguments.carry({}, "use_peft")
        arguments.drop("it counts only with use_peft", *_LORA)
        return
    if arguments.look_up("lora_target_modules") == _OF_PEFT["lora_target_modules"]:
        arguments.remarks.append(
            "PEFT adapts q_proj and v_proj of Llama, Qwen, Mistral and Gemma; of other models it adapts other layers"
        )
    arguments.carry(lora_settings(arguments, "lora_r", 32), "use_peft", "lora_r", "lora_alpha")


def _upper_clip(arguments: Arguments) -> None:
    """Carry the upper clip. With CISPO, TRL caps the whole ratio at it, which is 1 + clip_high here."""
    high = arguments.number("epsilon_high")
    low = arguments.number("epsilon")
    if not high:
        return
    is_cispo = arguments.look_up("loss_type") == "cispo"
    arguments.carry({"algorithm.clip_high": high - 1 if is_cispo else high}, "epsilon_high")
    if low is not None:
        arguments.carry({"algorithm.clip_low": low}, "epsilon")


def _correction(arguments: Arguments) -> None:
    """Carry the correction for vLLM's log-probs, which is on if vLLM draws."""
    names = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode")
    limits = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    every = (*names, *limits, "vllm_importance_sampling_clip_min")
    mode = arguments.look_up(names[1])
    if arguments.look_up(names[0]) is False or not arguments.look_up("use_vllm") or not mode:
        arguments.carry({}, *every)
        return
    limit = next((value for value in map(arguments.number, limits) if value), 3.0)
    lowest = arguments.number("vllm_importance_sampling_clip_min")
    if mode not in _MODES:
        return
    level, leaves_out = _MODES[mode]
    settings: dict[str, Any] = {"algorithm.mismatch_cap": limit, "algorithm.mismatch_level": level}
    if leaves_out:
        settings |= {
            "algorithm.mismatch_reject": level,
            "algorithm.mismatch_high": limit,
            "algorithm.mismatch_low": lowest or 1e-6,
        }
    arguments.carry(settings, *every)


def _say_what_is_cut(arguments: Arguments, trainer: str) -> None:
    arguments.remarks.append("TRL cuts examples over max_length; Burnish leaves them out")
    if trainer == "sft" and not arguments.look_up("assistant_only_loss"):
        arguments.remarks.append(
            "of chats TRL trains on every turn unless assistant_only_loss is true; Burnish trains on the assistant's turns"
        )


def _recognizes(arguments: Arguments) -> bool:
    if _is_open_r1(arguments) or not marks_of("axolotl").isdisjoint(arguments.given):
        return False
    names = {name.partition("/")[0] for name in arguments.program}
    return "trl" in names or not marks_of("trl").isdisjoint(arguments.given)


def _is_open_r1(arguments: Arguments) -> bool:
    named = any("open_r1" in word for word in arguments.program)
    return named or not marks_of("open_r1").isdisjoint(arguments.given)


def _generates(arguments: Arguments) -> bool:
    trainer = trainer_of(arguments)
    draws = trainer == _DISTILLS and arguments.given.get("lmbda") != 0
    return draws or trainer in ("grpo", "rloo", "ppo")


def _preferred(arguments: Arguments) -> str:
    return _ON_PREFERENCES.get(trainer_of(arguments), "")


_OF_OPEN_R1 = {
    "max_completion_length": 256,
    "max_prompt_length": 512,
    "num_generations": 8,
    "dataset_prompt_column": "prompt",
}
"""What GRPO of TRL 0.18 does, which open-r1 asks for."""


def _defaults_of_open_r1(arguments: Arguments) -> Mapping[str, Any]:
    own = {"learning_rate": 1e-6, **_OF_OPEN_R1} if _generates(arguments) else _OF_SFT
    return {**_OF_TRAINER, **own, **_implied_by_switches(arguments, vllm_mode="server")}


def _combine_open_r1(arguments: Arguments) -> None:
    """Say what its names of rewards are, before TRL's meaning is asked."""
    functions = arguments.look_up("reward_funcs")
    if functions:
        arguments.leave(
            "these are names of open-r1's own functions; with the package open_r1 installed write reward.functions: "
            "[open_r1.rewards:accuracy_reward], else bring functions of your own",
            "reward_funcs",
            "reward_weights",
        )
    column = arguments.look_up("dataset_prompt_column")
    if column:  # its text becomes a user's message
        settings = {"data.prompt_column": column, "data.string_prompts": "user"}
        arguments.carry(settings, "dataset_prompt_column")
    combine_trl(arguments)


TRL = Framework(
    "TRL",
    table="trl",
    recognizes=_recognizes,
    combine=combine_trl,
    defaults=_defaults,
    generates=_generates,
    preferences=_preferred,
)
OPEN_R1 = Framework(
    "open-r1",
    table="open_r1",
    recognizes=_is_open_r1,
    combine=_combine_open_r1,
    defaults=_defaults_of_open_r1,
    generates=_generates,
)

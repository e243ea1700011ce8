"""Translate settings that depend on several arguments of TRL, or of transformers' trainer, which others use too."""

from __future__ import annotations

from typing import Any

from burnish.errors import UsageError, count_text
from burnish.translate.foreign_arguments import Arguments, look_up, number, take

_BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}
"""The names of AdamW's coefficients, and their defaults."""
_BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "generation_batch_size",
    "steps_per_generation",
    "num_processes",
    "nproc_per_node",
)
"""What the size of a step's batch follows from."""


def combine_trl(arguments: Arguments) -> dict[str, Any]:
    """Return the settings, and remove the arguments. Raises `UsageError` for values that do not fit together."""
    return {
        **_rewards(arguments),
        **_betas(arguments),
        **_with_suffixes(arguments, "model.path", "model_name_or_path", "@", ["model_revision"]),
        **_with_suffixes(
            arguments, "data.train", "dataset_name", ":", ["dataset_config", "dataset_train_split"]
        ),
        **_batch(arguments),
        **_steps(arguments),
        **_upper_clip(arguments),
    }


def _rewards(arguments: Arguments) -> dict[str, Any]:
    functions = take(arguments, "reward_funcs")
    if not functions:
        return {}
    functions = functions if isinstance(functions, list) else [functions]
    weights = take(arguments, "reward_weights")
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
    return {"reward.functions": rewards}


def _reward_function(name: str) -> str:
    """Return a function's name here; only TRL's own have no module."""
    if ":" in name:
        return name
    module, _, function = name.rpartition(".")
    return f"{module or 'trl.rewards'}:{function}"


def _betas(arguments: Arguments) -> dict[str, Any]:
    betas_given = {name: number(arguments, name) for name in _BETAS}
    for name in betas_given:
        take(arguments, name)
    if all(beta is None for beta in betas_given.values()):
        return {}
    betas = [_BETAS[name] if beta is None else beta for name, beta in betas_given.items()]
    return {"optim.betas": betas}


def _with_suffixes(
    arguments: Arguments, key: str, main: str, mark: str, suffixes: list[str]
) -> dict[str, Any]:
    """Return one setting for a name and its suffixes, as `OWNER/NAME@REVISION` or `OWNER/NAME:SUBSET/SPLIT`."""
    if not look_up(arguments, main):
        return {}
    value = str(take(arguments, main))
    parts = [str(part) for part in (take(arguments, suffix) for suffix in suffixes) if part]
    return {key: f"{value}{mark}{'/'.join(parts)}" if parts else value}


def _batch(arguments: Arguments) -> dict[str, Any]:
    """Return the prompts and mini-batches of a step, from sequences per device, micro-batches and devices."""
    completions = number(arguments, "num_generations")
    take(arguments, "num_generations")
    settings = {"rollout.n": completions} if completions else {}
    sizes = {name: number(arguments, name) for name in _BATCH}
    if not sizes["per_device_train_batch_size"] and not sizes["generation_batch_size"]:
        return settings
    for name in sizes:
        take(arguments, name)
    accumulated = sizes["gradient_accumulation_steps"] or 1
    # A generation lasts for so many micro-batches. By default all of them make up one optimizer step.
    micro_batches = sizes["steps_per_generation"] or accumulated
    devices = sizes["num_processes"] or sizes["nproc_per_node"] or 1
    sequences = sizes["generation_batch_size"]
    if not sequences:
        sequences = sizes["per_device_train_batch_size"] * devices * micro_batches
    settings["batch.prompts"] = max(1, sequences // (completions or 1))
    if sizes["steps_per_generation"]:
        settings["batch.minibatches"] = max(1, micro_batches // accumulated)
    return settings


def _steps(arguments: Arguments) -> dict[str, Any]:
    """Return the number of steps, and a warm-up that is a share of them. A share of unlimited steps stays an argument."""
    steps = number(arguments, "max_steps")
    share = number(arguments, "warmup_ratio")
    take(arguments, "max_steps")
    settings = {} if steps in (None, -1) else {"steps": steps}
    if share and settings:
        settings["optim.warmup_steps"] = round(share * steps)
    if not share or settings:
        take(arguments, "warmup_ratio")
    return settings


def _upper_clip(arguments: Arguments) -> dict[str, Any]:
    """Return the upper clip. With CISPO, TRL caps the whole ratio at it, which is 1 + clip_high here."""
    high = number(arguments, "epsilon_high")
    if not high:
        return {}
    take(arguments, "epsilon_high")
    is_cispo = look_up(arguments, "loss_type") == "cispo"
    return {"algorithm.clip_high": high - 1 if is_cispo else high}

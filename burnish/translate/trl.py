"""Translate settings that depend on several arguments of TRL, or of transformers' trainer, which others use too."""

from __future__ import annotations

from burnish.errors import UsageError, count_text
from burnish.translate.foreign_arguments import Arguments
from burnish.translate.framework import Framework

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


def _recognizes(arguments: Arguments) -> bool:
    return arguments.program[:1] == ("trl",)


def _combine(arguments: Arguments) -> None:
    """Raise `UsageError` for values that do not fit together."""
    _rewards(arguments)
    _betas(arguments)
    _with_suffixes(arguments, "model.path", "model_name_or_path", "@", ["model_revision"])
    parts = ["dataset_config", "dataset_train_split"]
    _with_suffixes(arguments, "data.train", "dataset_name", ":", parts)
    _batch(arguments)
    _steps(arguments)
    _upper_clip(arguments)


def _rewards(arguments: Arguments) -> None:
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


def _betas(arguments: Arguments) -> None:
    given = {name: arguments.number(name) for name in _BETAS}
    if any(beta is not None for beta in given.values()):
        betas = [_BETAS[name] if beta is None else beta for name, beta in given.items()]
        arguments.carry({"optim.betas": betas}, *given)


def _with_suffixes(
    arguments: Arguments, key: str, main: str, mark: str, suffixes: list[str]
) -> None:
    """Carry a name and its suffixes as one setting: `OWNER/NAME@REVISION` or `OWNER/NAME:SUBSET/SPLIT`."""
    value = arguments.look_up(main)
    if value:
        parts = [str(part) for part in map(arguments.look_up, suffixes) if part]
        whole = f"{value}{mark}{'/'.join(parts)}" if parts else str(value)
        arguments.carry({key: whole}, main, *suffixes)


def _batch(arguments: Arguments) -> None:
    """Carry the prompts and mini-batches of a step, from sequences per device, micro-batches and devices."""
    completions = arguments.number("num_generations") or 1
    sizes = {name: arguments.number(name) for name in _BATCH}
    if not sizes["per_device_train_batch_size"] and not sizes["generation_batch_size"]:
        return
    accumulated = sizes["gradient_accumulation_steps"] or 1
    # A generation lasts for so many micro-batches. By default all of them make up one optimizer step.
    micro_batches = sizes["steps_per_generation"] or accumulated
    devices = sizes["num_processes"] or sizes["nproc_per_node"] or 1
    sequences = sizes["generation_batch_size"]
    if not sequences:
        sequences = sizes["per_device_train_batch_size"] * devices * micro_batches
        arguments.remarks.append(
            f"batch: as on {count_text(devices, 'device')}, for which the arguments are"
        )
    settings = {"batch.prompts": max(1, sequences // completions)}
    if sizes["steps_per_generation"]:
        settings["batch.minibatches"] = max(1, micro_batches // accumulated)
    arguments.carry(settings, *_BATCH)


def _steps(arguments: Arguments) -> None:
    """Carry the number of steps, and a warm-up that is a share of them. A share of unlimited steps is left."""
    steps = arguments.number("max_steps")
    share = arguments.number("warmup_ratio")
    if steps == -1:
        arguments.carry({}, "max_steps")
    elif steps is not None and share:
        arguments.carry({"optim.warmup_steps": round(share * steps)}, "warmup_ratio")


def _upper_clip(arguments: Arguments) -> None:
    """Carry the upper clip. With CISPO, TRL caps the whole ratio at it, which is 1 + clip_high here."""
    high = arguments.number("epsilon_high")
    if high:
        is_cispo = arguments.look_up("loss_type") == "cispo"
        arguments.carry({"algorithm.clip_high": high - 1 if is_cispo else high}, "epsilon_high")


TRL = Framework("TRL", recognizes=_recognizes, combine=_combine)

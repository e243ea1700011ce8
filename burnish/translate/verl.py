"""Translate settings that depend on several arguments of verl."""

from __future__ import annotations

from typing import Any

from burnish.translate.foreign_arguments import Arguments, look_up, number, take

_KL_TERMS = {"use_kl_loss": "kl_loss_coef", "use_kl_in_reward": "kl_ctrl.kl_coef"}
"""What switches a KL term on, and its coefficient, which counts only then."""


def combine_verl(arguments: Arguments) -> dict[str, Any]:
    """Return the settings, and remove the arguments."""
    for switch, coefficient in _KL_TERMS.items():
        if not look_up(arguments, switch):
            take(arguments, switch)
            take(arguments, coefficient)
    return {**_reward(arguments), **_minibatches(arguments)}


def _reward(arguments: Arguments) -> dict[str, Any]:
    path = look_up(arguments, "custom_reward_function.path")
    if not path:
        return {}
    take(arguments, "custom_reward_function.path")
    function = take(arguments, "custom_reward_function.name") or "compute_score"
    return {"reward.functions": f"{path}:{function}"}


def _minibatches(arguments: Arguments) -> dict[str, Any]:
    """Return the mini-batches of a step if they divide it; else the table of names says how to choose."""
    prompts = number(arguments, "train_batch_size")
    of_minibatch = number(arguments, "ppo_mini_batch_size")
    if not prompts or not of_minibatch or prompts % of_minibatch:
        return {}
    take(arguments, "ppo_mini_batch_size")
    return {"batch.minibatches": prompts // of_minibatch}

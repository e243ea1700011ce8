"""Translate settings that depend on several arguments of verl."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from burnish.translate.foreign_arguments import Arguments
from burnish.translate.framework import Framework

_KL_TERMS = {"use_kl_loss": "kl_loss_coef", "use_kl_in_reward": "kl_ctrl.kl_coef"}
"""What switches a KL term on, and its coefficient, which counts only then."""
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_PROGRAM = re.compile(r"verl\.trainer\.|main_ppo|main_dapo")
_OFFLINE = re.compile("sft_trainer")
"""In the name of the program that trains on demonstrations."""
_OF_PPO = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{_ACTOR}.optim.lr": 1e-6,
    f"{_ACTOR}.optim.weight_decay": 0.01,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.clip_ratio_c": 3.0,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.val_kwargs.temperature": 0,
    "algorithm.adv_estimator": "gae",
    "trainer.total_epochs": 30,
}
"""What the PPO trainer does without being told, where Burnish would do something else."""


def _recognizes(arguments: Arguments) -> bool:
    named = any(_PROGRAM.search(word) for word in arguments.program)
    return named or any(name.startswith("actor_rollout_ref.") for name in arguments.given)


def _generates(arguments: Arguments) -> bool:
    return not any(_OFFLINE.search(word) for word in arguments.program)


def _defaults(arguments: Arguments) -> Mapping[str, Any]:
    return _OF_PPO if _generates(arguments) else {}


def _combine(arguments: Arguments) -> None:
    for switch, coefficient in _KL_TERMS.items():
        if not arguments.look_up(switch):
            arguments.carry({}, switch)
            arguments.drop(f"it counts only with {switch}=true", coefficient)
    _reward(arguments)
    _minibatches(arguments)


def _reward(arguments: Arguments) -> None:
    path = arguments.look_up("custom_reward_function.path")
    if path:
        function = arguments.look_up("custom_reward_function.name") or "compute_score"
        arguments.carry(
            {"reward.functions": f"{path}:{function}"},
            "custom_reward_function.path",
            "custom_reward_function.name",
        )


def _minibatches(arguments: Arguments) -> None:
    """Carry the mini-batches of a step if they divide it; else the table of names says how to choose."""
    prompts = arguments.number("train_batch_size")
    of_minibatch = arguments.number("ppo_mini_batch_size")
    if prompts and of_minibatch and prompts % of_minibatch == 0:
        arguments.carry({"batch.minibatches": prompts // of_minibatch}, "ppo_mini_batch_size")


VERL = Framework(
    "verl",
    recognizes=_recognizes,
    combine=_combine,
    defaults=_defaults,
    generates=_generates,
)

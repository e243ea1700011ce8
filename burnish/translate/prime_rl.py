"""Translate settings that depend on several of prime-rl's, and what it does without being told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.translate.foreign_arguments import Arguments
from burnish.translate.framework import Framework

_SECTIONS = ("orchestrator.", "inference.", "trainer.model.", "trainer.optim.", "trainer.loss.")
_OF_SFT = ("data.batch_size", "data.seq_len", "data.name", "data.fake")
_DEFAULTS_OF_RL = {
    "orchestrator.algo.type": "grpo",
    "trainer.loss.type": "default",
    "trainer.optim.weight_decay": 0.01,
    "orchestrator.group_size": 1,
    "seq_len": 2048,
}
_DEFAULTS_OF_SFT = {"data.batch_size": 128, "data.seq_len": 128, "optim.weight_decay": 0.01}


def _recognizes(arguments: Arguments) -> bool:
    named = any(name.startswith(_SECTIONS) for name in arguments.given)
    is_sft = "model.name" in arguments.given and any(
        name.startswith(_OF_SFT) for name in arguments.given
    )
    return named or is_sft


def _generates(arguments: Arguments) -> bool:
    return any(name.startswith(("orchestrator.", "trainer.")) for name in arguments.given)


def _defaults(arguments: Arguments) -> Mapping[str, Any]:
    defaults = _DEFAULTS_OF_RL if _generates(arguments) else _DEFAULTS_OF_SFT
    given = {f".{name}" for name in arguments.given}
    return {
        name: value
        for name, value in defaults.items()
        if not any(each.endswith(f".{name}") for each in given)
    }


def _combine(arguments: Arguments) -> None:
    _betas(arguments)
    arguments.drop(
        "prime-rl evaluates on environments, which are not supported yet",
        "eval.interval",
        "eval.num_examples",
        "eval.group_size",
        "eval.sampling.max_completion_tokens",
    )
    if arguments.look_up("monitors.wandb.project") or arguments.look_up("monitors.wandb.name"):
        arguments.carry({"tracking.trackers": ["wandb"]}, "monitors.wandb.project")
    if _generates(arguments):
        _batch(arguments)
        _lengths(arguments)
        return
    arguments.remarks.append(
        "prime-rl's batch counts rows of seq_len tokens, each of several examples; batch.examples counts examples, "
        "so raise it by how many fit into a row"
    )
    for name in ("data.seq_len", "model.seq_len"):
        if arguments.number(name):
            arguments.carry({"data.max_length": arguments.number(name)}, name)


def _betas(arguments: Arguments) -> None:
    first = arguments.number("optim.betas1")
    second = arguments.number("optim.betas2")
    if first is not None or second is not None:
        betas = [0.9 if first is None else first, 0.999 if second is None else second]
        arguments.carry({"optim.betas": betas}, "optim.betas1", "optim.betas2")


def _batch(arguments: Arguments) -> None:
    """Carry the prompts of a step. prime-rl counts completions."""
    sequences = arguments.number("orchestrator.batch_size")
    completions = arguments.number("orchestrator.group_size")
    if sequences and completions:
        arguments.carry(
            {"batch.prompts": max(1, sequences // completions)}, "orchestrator.batch_size"
        )


def _lengths(arguments: Arguments) -> None:
    """Carry the limit of prompt and completion together as two limits."""
    names = ("orchestrator.seq_len", "seq_len")
    whole = next((value for value in map(arguments.number, names) if value), None)
    completion = arguments.number("train.sampling.max_completion_tokens")
    if not whole:
        return
    settings = {"rollout.max_response_length": whole}
    if completion and completion < whole:
        settings = {"data.max_prompt_length": whole - completion}
    else:
        arguments.remarks.append(
            f"prime-rl limits prompt and completion together to {whole} tokens, Burnish the completion alone"
        )
    arguments.carry(settings, "orchestrator.seq_len")
    arguments.carry({}, "trainer.model.seq_len")
    arguments.carry(settings, "seq_len")


PRIME_RL = Framework(
    "prime-rl",
    table="prime_rl",
    recognizes=_recognizes,
    combine=_combine,
    defaults=_defaults,
    generates=_generates,
)

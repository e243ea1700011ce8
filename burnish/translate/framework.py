"""What `burnish config translate` knows of one framework beside its table of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from burnish.errors import UsageError
from burnish.translate.foreign_arguments import Arguments


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework whose arguments are translated."""

    name: str
    recognizes: Callable[[Arguments], bool]
    """Whether arguments can only be its own, by their program or by names that no other framework has."""
    combine: Callable[[Arguments], None]
    """Give a fate to arguments that mean something together. The table of names answers the others."""
    defaults: Callable[[Arguments], Mapping[str, Any]] = lambda _: {}
    """What it does without being told, by the names of its arguments; only where it changes the result."""
    generates: Callable[[Arguments], bool | None] = lambda _: None
    """Whether its program generates completions; None if the settings say so."""
    preferences: Callable[[Arguments], str] = lambda _: ""
    """The method that learns from preferences as its program does: dpo or rm; "" for another program."""
    table: str = ""
    """The table of its names, in `burnish.config.foreign_names`; "" for those of all."""


def refuse_preferences(framework: str, found: str) -> UsageError:
    """Return the error for training on preferences that would become something else."""
    return UsageError(
        f"{framework}'s {found} is not translated: it learns from preferences in a way of its own",
        have=found,
        want="DPO, KTO, ORPO, SimPO or a reward model of TRL, axolotl or LLaMA-Factory; supervised fine-tuning; GRPO or PPO",
        do="write a configuration with burnish init dpo or burnish init rm",
    )

"""Translate losses of preferences. TRL, axolotl and LLaMA-Factory name most of them alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from burnish.extend import ANSWER_LOSSES, PREFERENCE_LOSSES
from burnish.translate.foreign_arguments import Arguments

_NAMES = {"sft": "nll", "sigmoid_norm": "sigmoid"}
"""Losses that have another name here."""
_WITHOUT_REFERENCE = {"simpo", "orpo", "nll"}


def weighted(types: Any, weights: Any = None) -> dict[str, float]:
    """Return losses by name, given as one name or a list, with their weights."""
    names = types if isinstance(types, list) else [types]
    factors = weights if isinstance(weights, list) else [weights or 1.0] * len(names)
    return dict(zip(map(str, names), map(float, factors), strict=False))


def carry_losses(arguments: Arguments, losses: Mapping[str, float], endings: Sequence[str]) -> None:
    """Carry losses, and what follows from them. Leave those to the person that are not here."""
    settings: dict[str, Any] = {
        "method.loss": {_NAMES.get(name, name): weight for name, weight in losses.items() if weight}
    }
    known = {*PREFERENCE_LOSSES, *ANSWER_LOSSES}
    if others := [name for name in losses if _NAMES.get(name, name) not in known]:
        reason = (
            f"method.loss: {', '.join(others)} is not here; file.py:function is a loss of your own"
        )
        arguments.leave(reason, *endings)
        return
    if "sigmoid_norm" in losses:
        settings["method.length_normalized"] = True
    if settings["method.loss"].keys() <= _WITHOUT_REFERENCE:
        settings["method.reference"] = "none"
    arguments.carry(settings, *endings)


def carry_numbers(arguments: Arguments, keys: Mapping[str, str]) -> None:
    """Carry each argument that is given as the setting of the same meaning."""
    for ending, key in keys.items():
        value = arguments.number(ending)
        if value is not None:
            arguments.carry({key: value}, ending)

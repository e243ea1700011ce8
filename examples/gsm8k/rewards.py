"""A reward function in TRL's signature. Burnish calls it once with all completions of a process."""

from __future__ import annotations

from typing import Any


def boxed(completions: list[Any], **columns: Any) -> list[float]:
    """Return 1 for an answer in \\boxed{}, else 0. Completions are texts, or messages for chat prompts."""
    return [float("\\boxed{" in _text(completion)) for completion in completions]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])

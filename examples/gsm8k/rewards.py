"""A reward of one's own, in TRL's signature: called once with all completions of this process."""

from __future__ import annotations

from typing import Any


def boxed(completions: list[Any], **columns: Any) -> list[float]:
    """1 for an answer in \\boxed{}, 0 without; completions are texts, or messages for chat prompts."""
    return [float("\\boxed{" in _text(completion)) for completion in completions]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])

"""A callback with which transformers' Trainer, or one derived from it, takes turns step by step. Runs under a peer's Python."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from transformers import TrainerCallback

from bench.peers import Turns


class TakeTurns(TrainerCallback):  # type: ignore[misc]  # transformers has no types for it
    """Begins a step when it gets a question, and answers when the device has finished it."""

    def __init__(self, turns: Turns, examples: int) -> None:
        """`examples`: rows per step."""
        self._turns = turns
        self._examples = examples
        self._start = 0.0
        self._lengths: list[int] = []

    def take_data(self, rows: Any) -> None:
        """Take the rows in the order of training, which starts again after the last."""
        self._lengths = [len(row["input_ids"]) for row in rows]

    def on_step_begin(self, *arguments: Any, **options: Any) -> None:
        """Wait for a question."""
        self._turns.next()
        self._start = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Answer the question."""
        seconds = _now() - self._start
        first = (state.global_step - 1) * self._examples
        numbers = [i % len(self._lengths) for i in range(first, first + self._examples)]
        tokens = sum(self._lengths[i] for i in numbers)
        self._turns.answer(seconds=seconds, tokens=tokens, peak=peak_bytes())


def peak_bytes() -> int:
    """Return the most memory that this process has held: of its accelerator, or of the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that all these trainers share."""
    return {
        "output_dir": settings["model"] + "-trained",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": True,
        "per_device_train_batch_size": settings["rows"],
        "gradient_accumulation_steps": settings["examples"] // settings["rows"],
        "learning_rate": settings["lr"],
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "max_steps": 1_000_000,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": settings["seed"],
    }

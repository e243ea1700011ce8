"""The peer of `bench.gpu` for SFT: TRL's SFTTrainer, one optimizer step per question. Runs under the peer's Python.

Settings: `model` and `texts` (paths), `examples` (sequences per step), `rows` (sequences per forward and backward
pass), `lr`, `seed`, `weights_dtype` (of the model and so of AdamW: float32 computes in bf16 by
autocast, bfloat16 is bf16 throughout). A question's answer has `seconds`, and `tokens` trained on.
"""

from __future__ import annotations

import time
from typing import Any

from bench.peers import Turns

TURNS = Turns()

import torch  # noqa: E402 (stdout is moved first)
from datasets import load_dataset  # noqa: E402
from transformers import AutoTokenizer, Qwen3ForCausalLM, TrainerCallback  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402


class TakeTurns(TrainerCallback):
    """Begins a step when asked to, and answers when the device has done it."""

    def __init__(self, examples: int) -> None:
        self._examples = examples
        self._start = 0.0
        self._lengths: list[int] = []

    def take_data(self, rows: Any) -> None:
        """Rows in the order they are trained on, from the beginning again after the last."""
        self._lengths = [len(row["input_ids"]) for row in rows]

    def on_step_begin(self, *arguments: Any, **options: Any) -> None:
        """Wait for a question."""
        TURNS.next()
        self._start = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Answer it."""
        seconds = _now() - self._start
        first = (state.global_step - 1) * self._examples
        numbers = [i % len(self._lengths) for i in range(first, first + self._examples)]
        TURNS.answer(seconds=seconds, tokens=sum(self._lengths[i] for i in numbers))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def trainer(settings: dict[str, Any]) -> SFTTrainer:
    config = SFTConfig(
        output_dir=settings["model"] + "-trl-sft",
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        gradient_checkpointing=False,
        max_length=None,
        per_device_train_batch_size=settings["rows"],
        gradient_accumulation_steps=settings["examples"] // settings["rows"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        max_steps=1_000_000,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=settings["seed"],
    )
    turns = TakeTurns(settings["examples"])
    made = SFTTrainer(
        Qwen3ForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["weights_dtype"])
        ),
        config,
        train_dataset=load_dataset("json", data_files=settings["texts"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[turns],
    )
    turns.take_data(made.train_dataset)
    return made


if __name__ == "__main__":
    ready = trainer(TURNS.next())
    TURNS.answer(ready=True)
    ready.train()

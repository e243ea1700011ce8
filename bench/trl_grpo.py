"""The peer of `bench.grpo`: TRL's GRPOTrainer, one optimizer step per question. Runs under the peer's Python.

Settings: `model` and `prompts` (paths), `prompts_per_step`, `samples`, `max_tokens`, `lr`, `seed`,
`weights_dtype` (of the model and so of AdamW: float32 computes in bf16 by autocast, bfloat16 is bf16
throughout), `rows` (sequences per forward and backward pass), `clock`. A question has `lengths`, one for each
completion of the step in order. An answer has `seconds`, and the number of `tokens` generated.
"""

from __future__ import annotations

from typing import Any

from bench.peers import CLOCKS, Clock, Turns

TURNS = Turns()

import torch  # noqa: E402 (stdout is moved first)
from datasets import load_dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from bench.words import EOS, even_share  # noqa: E402


class Lengths(LogitsProcessor):
    """Makes the end token the `wanted[i]`-th token of row i, and never an earlier one."""

    def __init__(self, prompt_length: int, wanted: torch.Tensor) -> None:
        self._prompt_length = prompt_length
        self._wanted = wanted

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`."""
        last = input_ids.shape[1] - self._prompt_length == self._wanted - 1
        scores[:, EOS] = -torch.inf
        scores[last] = -torch.inf
        scores[last, EOS] = 0.0
        return scores


class GivenLengths(Qwen3ForCausalLM):
    """The model, with generated rows of the lengths `wanted`."""

    wanted: torch.Tensor

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """Generate rows of these lengths."""
        lengths = Lengths(options["input_ids"].shape[1], self.wanted)
        return super().generate(
            *arguments, **options, logits_processor=LogitsProcessorList([lengths])
        )


class TakeTurns(TrainerCallback):
    """Begins a step when it gets a question, and answers when the step is done."""

    def __init__(self, model: GivenLengths, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._start = 0.0

    def on_step_begin(self, *arguments: Any, **options: Any) -> None:
        """Wait for a question."""
        self._model.wanted = torch.tensor(TURNS.next()["lengths"])
        self._start = self._now()

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        """Answer the question."""
        seconds = self._now() - self._start
        TURNS.answer(seconds=seconds, tokens=int(self._model.wanted.sum()))

    def _now(self) -> float:
        """Return the clock's time once the device has finished its work."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._clock()


def grpo_config(settings: dict[str, Any], **others: Any) -> GRPOConfig:
    """Return TRL's settings of a step, and `others`."""
    sequences = settings["prompts_per_step"] * settings["samples"]
    return GRPOConfig(
        output_dir=settings["model"] + "-trl",
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=settings["rows"],
        gradient_accumulation_steps=sequences // settings["rows"],
        num_generations=settings["samples"],
        max_completion_length=settings["max_tokens"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        beta=0.0,
        num_iterations=1,
        shuffle_dataset=False,
        max_steps=1_000_000,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=settings["seed"],
        **others,
    )


def trainer(settings: dict[str, Any]) -> GRPOTrainer:
    model = GivenLengths.from_pretrained(
        settings["model"], dtype=getattr(torch, settings["weights_dtype"])
    )
    config = grpo_config(settings)
    return GRPOTrainer(
        model,
        even_share,
        config,
        train_dataset=load_dataset("json", data_files=settings["prompts"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[TakeTurns(model, CLOCKS[settings["clock"]])],
    )


if __name__ == "__main__":
    ready = trainer(TURNS.next())
    TURNS.answer(ready=True)
    ready.train()

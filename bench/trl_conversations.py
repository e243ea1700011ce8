"""The peer of `bench.conversations`: TRL's GRPOTrainer with `environment_factory`, one optimizer step per question. Runs under the peer's Python.

Settings are those of `bench.trl_grpo`, and `turns`, `turn_tokens`, and the tool's `answer`. An answer has `seconds`, and the number
of `tokens` that the model generated.
"""

from __future__ import annotations

from typing import Any

from bench.peers import CLOCKS, Turns

TURNS = Turns()

import torch  # noqa: E402 (stdout is moved first)
from datasets import load_dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoTokenizer,
    LogitsProcessorList,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOTrainer  # noqa: E402

from bench.trl_grpo import Lengths, grpo_config  # noqa: E402

CALL = {"type": "function", "function": {"name": "look", "arguments": {"place": "north"}}}
EVERYTHING_IS_A_CALL = {
    "defaults": {"role": "assistant", "tool_calls": [CALL]},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}
"""Reads any answer as a call of the tool, because untrained weights make none."""


class EqualLengths(Qwen3ForCausalLM):
    """The model, with turns of `turn_tokens` tokens."""

    turn_tokens: int
    rows: int = 0
    """Turns that were generated."""

    def generate(self, *arguments: Any, **options: Any) -> Any:
        """Generate a turn of each row."""
        rows, prompt_length = options["input_ids"].shape
        self.rows += rows
        lengths = Lengths(prompt_length, torch.full((rows,), self.turn_tokens))
        return super().generate(
            *arguments, **options, logits_processor=LogitsProcessorList([lengths])
        )


class TakeTurns(TrainerCallback):
    """Begins a step when it gets a question, and answers when the step is done."""

    def __init__(self, model: EqualLengths, clock: str) -> None:
        self._model = model
        self._clock = CLOCKS[clock]
        self._start = 0.0

    def on_step_begin(self, *arguments: Any, **options: Any) -> None:
        """Wait for a question."""
        TURNS.next()
        self._model.rows = 0
        self._start = self._clock()

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        """Answer the question."""
        seconds = self._clock() - self._start
        TURNS.answer(seconds=seconds, tokens=self._model.rows * self._model.turn_tokens)


def trainer(settings: dict[str, Any]) -> GRPOTrainer:
    """Make the trainer."""

    class Looking:
        def reset(self, **row: Any) -> None:
            self.places = 0

        def look(self, place: str) -> str:
            """Look at a place.

            Args:
                place: Where to look.
            """
            self.places += 1
            return str(settings["answer"])

    def varied(completions: list[Any], **columns: Any) -> list[float]:
        return [float(len(str(completion)) % 7) for completion in completions]

    model = EqualLengths.from_pretrained(
        settings["model"], dtype=getattr(torch, settings["weights_dtype"])
    )
    model.turn_tokens = settings["turn_tokens"]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.response_template = EVERYTHING_IS_A_CALL
    config = grpo_config(settings, max_tool_calling_iterations=settings["turns"] - 1)
    return GRPOTrainer(
        model,
        varied,
        config,
        train_dataset=load_dataset("json", data_files=settings["prompts"], split="train"),
        processing_class=tokenizer,
        environment_factory=Looking,
        callbacks=[TakeTurns(model, settings["clock"])],
    )


if __name__ == "__main__":
    ready = trainer(TURNS.next())
    TURNS.answer(ready=True)
    ready.train()

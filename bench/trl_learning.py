"""The peer of `bench.learning`: a whole run of TRL's GRPOTrainer. Runs under the peer's Python.

The first question is `{}`. The second has the settings: `model`, `train` (path of JSON Lines with `prompt` and `answer`),
`prompts`, `samples`, `max_tokens`, `lr`, `warmup`, `steps`, `seed`, `output` (a directory). Its answer has `rewards`, the mean
of each step.
"""

from __future__ import annotations

from typing import Any

from bench.peers import Turns

TURNS = Turns()

import torch  # noqa: E402 (stdout is moved first)
from datasets import load_dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


def exact_match(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Return 1 for each completion that is the answer, else 0."""
    return [float(c.strip() == a.strip()) for c, a in zip(completions, answer, strict=True)]


def learn(settings: dict[str, Any]) -> list[float]:
    """Train, and return the mean reward of every step."""
    config = GRPOConfig(
        output_dir=settings["output"],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=settings["prompts"] * settings["samples"],
        num_generations=settings["samples"],
        max_completion_length=settings["max_tokens"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings["warmup"],
        beta=0.0,
        max_steps=settings["steps"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=settings["seed"],
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        exact_match,
        config,
        train_dataset=load_dataset("json", data_files=settings["train"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
    )
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    TURNS.next()
    TURNS.answer(ready=True)
    TURNS.answer(rewards=learn(TURNS.next()))

"""A peer of `bench.sft`: transformers' own Trainer, which pads. Runs under TRL's Python.

Settings are those of `bench.trl_sft`, without `packing`.
"""

from __future__ import annotations

from typing import Any

from bench.peers import Turns

TURNS = Turns()

import torch  # noqa: E402 (stdout is moved first)
from datasets import load_dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

from bench.turns import TakeTurns, arguments  # noqa: E402


def trainer(settings: dict[str, Any]) -> Trainer:
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    texts = load_dataset("json", data_files=settings["texts"], split="train")
    rows = texts.map(
        lambda row: {"input_ids": [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]},
        remove_columns=["text"],
    )
    config = TrainingArguments(**arguments(settings))
    turns = TakeTurns(TURNS, settings["examples"])
    made = Trainer(
        Qwen3ForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["weights_dtype"])
        ),
        config,
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[turns],
    )
    turns.take_data(rows)
    return made


if __name__ == "__main__":
    ready = trainer(TURNS.next())
    TURNS.answer(ready=True)
    ready.train()

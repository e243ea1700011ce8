"""The peer of `bench.gpu` and `bench.sft`: TRL's SFTTrainer, one optimizer step per question. Runs under the peer's Python.

Settings: `model` and `texts` (paths), `examples` (sequences per step), `rows` (sequences per forward and backward
pass), `lr`, `seed`, `weights_dtype` (of the model and so of AdamW: float32 computes in bf16 by
autocast, bfloat16 is bf16 throughout), `packing` (None: a sequence is a text, padded to the longest of its pass;
else the maximum number of tokens of a packed sequence), `checkpointing` (of activations). An answer has `seconds`, and the number
of `tokens` trained on.
"""

from __future__ import annotations

from typing import Any

from bench.peers import Turns

TURNS = Turns()

import torch  # noqa: E402 (stdout is moved first)
from datasets import load_dataset  # noqa: E402
from transformers import AutoTokenizer, Qwen3ForCausalLM  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from bench.turns import TakeTurns, arguments  # noqa: E402


def trainer(settings: dict[str, Any]) -> SFTTrainer:
    config = SFTConfig(
        gradient_checkpointing=settings["checkpointing"],
        max_length=settings["packing"],
        packing=settings["packing"] is not None,
        **arguments(settings),
    )
    turns = TakeTurns(TURNS, settings["examples"])
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

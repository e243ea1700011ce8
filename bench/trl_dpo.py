"""The peer of `bench.preferences`: TRL's DPOTrainer, one optimizer step per question. Runs under the peer's Python.

Settings: `model` and `pairs` (paths), `examples` (pairs per step), `rows` (pairs per forward and backward pass), `lr`, `seed`,
`weights_dtype` (as for `bench.trl_sft`), `precompute` (whether the reference's log-probs are computed before training; else a second
model computes them in each step). An answer has `seconds`, `tokens` (the number of pairs) and `peak`, bytes of memory.
"""

from __future__ import annotations

from typing import Any

from bench.peers import Turns

TURNS = Turns()

import torch  # noqa: E402 (stdout is moved first)
from datasets import load_dataset  # noqa: E402
from transformers import AutoTokenizer, Qwen3ForCausalLM  # noqa: E402
from trl import DPOConfig, DPOTrainer  # noqa: E402

from bench.turns import TakeTurns, arguments  # noqa: E402


def trainer(settings: dict[str, Any]) -> DPOTrainer:
    config = DPOConfig(
        gradient_checkpointing=False,
        max_length=None,
        precompute_ref_log_probs=settings["precompute"],
        precompute_ref_batch_size=settings["rows"],
        **arguments(settings),
    )
    turns = TakeTurns(TURNS, settings["examples"])
    rows = load_dataset("json", data_files=settings["pairs"], split="train")
    dtype = getattr(torch, settings["weights_dtype"])
    model, reference = (
        Qwen3ForCausalLM.from_pretrained(settings["model"], dtype=dtype) for _ in "ab"
    )
    made = DPOTrainer(
        model,
        reference,
        config,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[turns],
    )
    turns.take_data([{"input_ids": [0]}] * len(rows))  # pairs are counted
    return made


if __name__ == "__main__":
    ready = trainer(TURNS.next())
    TURNS.answer(ready=True)
    ready.train()

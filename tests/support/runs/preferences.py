"""Pairs of answers, and DPO by plain torch: the paper's formula, autograd and AdamW."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.functional import log_softmax, logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.runs.training_files import SFT, done, make_files, write_rows

BETA, STEPS = 0.5, 4
SETTINGS: dict[str, Any] = {
    **SFT,
    "name": "run",
    "steps": STEPS,
    "data": {"train": ["pairs.jsonl"], "shuffle": False},
    "batch": {"examples": 4, "tokens_per_device": 24},
    "evaluation": {"every": 0},
    "checkpoint": {"model_dtype": "fp32"},
    "method": {"beta": BETA},
}
PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1) + "0" * (a % 3)}
    for a in range(4)
    for b in range(1, 5)
]


def log_likelihood(
    model: torch.nn.Module, tokenizer: Any, prompt: str, answer: str
) -> torch.Tensor:
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
    ids = torch.tensor([*before, *after, tokenizer.eos_token_id])
    logprobs = log_softmax(model(ids[None]).logits[0, :-1].float(), dim=-1)
    return logprobs.gather(1, ids[1:, None])[len(before) - 1 :].sum()


def trained_by_torch(
    start: Path, reference: Path | None = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and losses of the paper's formula, with torch's autograd and AdamW."""
    model, frozen = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (start, reference or start)
    )
    tokenizer = AutoTokenizer.from_pretrained(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss = torch.zeros(())
        for row in PAIRS[4 * step : 4 * step + 4]:
            answers = [(row["prompt"], row[column]) for column in ("chosen", "rejected")]
            with torch.no_grad():
                before = [log_likelihood(frozen, tokenizer, *each) for each in answers]
            now = [log_likelihood(model, tokenizer, *each) for each in answers]
            margin = BETA * ((now[0] - before[0]) - (now[1] - before[1]))
            loss = loss - logsigmoid(margin) / 4
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return dict(model.state_dict()), losses


def load_model(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    path = run / "checkpoints" / f"step-{step:08d}" / "model" / "model.safetensors"
    return {name: tensor.float() for name, tensor in load_file(path).items()}


def near(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float) -> None:
    for name, tensor in found.items():
        np.testing.assert_allclose(
            tensor.numpy(), wanted[name].numpy(), atol=tolerance, err_msg=name
        )


def begin_pairs(work: Path, file: str, **changes: Any) -> None:
    """Write pairs, a model to start from, and a configuration that trains it on them."""
    make_files(work)
    write_rows(work / "pairs.jsonl", PAIRS)
    start = done(work, "sft", "sft.yaml", "name=start", "steps=1", "optim.lr=0")
    model = {"path": f"{start}/checkpoints/step-00000001/model"}
    (work / file).write_text(json.dumps({**SETTINGS, "model": model, **changes}))

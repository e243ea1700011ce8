"""Every model type that the page lists as trained takes steps, and plain transformers and PEFT read what it saves."""

from __future__ import annotations

import json
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from support.models.listed import TRAINED, listed_config
from support.models.tokenizers import char_tokenizer, save_char_tokenizer
from support.runs.training_files import done, make_files, metrics, rollouts
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from burnish.check.small_model import shrink_model
from burnish.config.schema import EngineConfig

STEP = "checkpoints/step-00000001/model"
ONE_STEP = (
    "steps=1", "model.fresh=null", "model.tokenizer=null", "optim.lr=0.01",
    "tracking.trackers=[]", "tracking.report=false",
)  # fmt: skip
TOLERANCE = {"fp32": 2e-4, "bf16": 0.1}
"""Most difference of mean log-probs, in nats."""


def small(kind: str) -> PretrainedConfig:
    tokenizer = char_tokenizer()
    config = shrink_model(listed_config(kind), EngineConfig(), len(tokenizer))
    for each in (config, config.get_text_config()):
        each.eos_token_id, each.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return config


def save_small(kind: str, directory: Path) -> None:
    """A model of a listed type as plain transformers saves it, with its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(small(kind), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    save_char_tokenizer(directory)


def loaded(directory: Path, precision: str) -> PreTrainedModel:
    """The model as plain transformers reads it, which must miss nothing."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def token_logprobs(model: Any, prompt: str, completion: list[int]) -> np.ndarray:
    """Log-probs of a completion's tokens after a prompt, from one pass."""
    ids = char_tokenizer()(prompt, add_special_tokens=False)["input_ids"]
    row = torch.tensor([[*ids, *completion]])
    with torch.no_grad():
        logits = model(input_ids=row, use_cache=False).logits[0, len(ids) - 1 : -1]
    chosen = row[0, len(ids) :, None]
    return logits.float().log_softmax(-1).gather(1, chosen)[:, 0].numpy()


def tolerance_of(kind: str, precision: str) -> float:
    """transformers sets Youtu's embedding of the padding token to zero when it loads."""
    return max(TOLERANCE[precision], 2e-3 * (kind == "youtu"))


def validation_loss(model: Any, root: Path) -> float:
    """The mean loss of validation.jsonl's completions, each of which ends with the end of a turn."""
    tokenizer = char_tokenizer()
    rows = [json.loads(line) for line in (root / "validation.jsonl").read_text().splitlines()]
    said = [
        token_logprobs(
            model,
            row["prompt"],
            [
                *tokenizer(row["completion"], add_special_tokens=False)["input_ids"],
                tokenizer.eos_token_id,
            ],
        )
        for row in rows
    ]
    return -float(np.concatenate(said).mean())


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "precision"), [*product(TRAINED, ("fp32", "bf16"))])
def test_a_listed_type_is_trained_sampled_saved_and_read(
    kind: str, precision: str, tmp_path: Path
) -> None:
    make_files(tmp_path)
    save_small(kind, tmp_path / "start")
    how = (*ONE_STEP, f"engine.precision={precision}", f"checkpoint.model_dtype={precision}")

    tuned = done(tmp_path, "sft", "sft.yaml", *how, "model.path=start", "name=sft")
    model = loaded(tuned / STEP, precision)
    losses = [row["val/loss"] for row in metrics(tuned) if "val/loss" in row]
    assert losses[0] != losses[-1]
    assert abs(losses[-1] - validation_loss(model, tmp_path)) < tolerance_of(kind, precision)

    sampled = done(
        tmp_path, "rl", "rl.yaml", *how, f"model.path={tuned / STEP}", "name=rl",
        "rollout.max_response_length=12",
    )  # fmt: skip
    tokenizer = char_tokenizer()
    apart = []
    for row in rollouts(sampled, 1):
        if tokens := row.get("tokens"):
            ids = tokenizer.convert_tokens_to_ids(tokens["texts"])
            apart.append(token_logprobs(model, row["prompt"], ids) - np.array(tokens["logprobs"]))
    assert apart
    assert np.isfinite(metrics(sampled)[-1]["actor/grad_norm"])
    assert np.abs(np.concatenate(apart)).mean() < tolerance_of(kind, precision)
    loaded(sampled / STEP, precision)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", TRAINED)
def test_an_adapter_of_the_default_layers_is_trained_and_read_by_peft(
    kind: str, tmp_path: Path
) -> None:
    make_files(tmp_path)
    save_small(kind, tmp_path / "start")
    how = (
        "model.path=start",
        "model.lora.rank=2",
        "engine.precision=fp32",
        "checkpoint.model_dtype=fp32",
    )
    run = done(tmp_path, "sft", "sft.yaml", *ONE_STEP, *how, "name=lora")
    losses = [row["val/loss"] for row in metrics(run) if "val/loss" in row]
    assert losses[0] != losses[-1]
    base = loaded(tmp_path / "start", "fp32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT's, of layers that it knows no rule for
        adapted = peft.PeftModel.from_pretrained(base, run / STEP)
    assert abs(losses[-1] - validation_loss(adapted, tmp_path)) < tolerance_of(kind, "fp32")

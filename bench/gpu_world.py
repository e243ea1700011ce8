"""The work of `bench.gpu`: model shapes, the size of a step, and models and data on disk."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.words import model_config, sentence, write_prompts, write_tokenizer
from burnish.config.schema import RunConfig
from burnish.distributed.device import current_device

LR = 1e-5


@dataclass(frozen=True)
class SftWork:
    """Sequences of one length, packed into micro-batches of `packed` tokens."""

    size: str
    """The model's shape: a key of `bench.words.SIZES`."""
    sequence: int
    """Tokens per sequence."""
    packed: int
    """Tokens per micro-batch. Peers have as many, in rows of equal length, so that no side pads."""
    microbatches: int = 2
    """Micro-batches per step."""
    recomputes: bool = False
    """Whether all sides recompute the layers in the backward pass, to save memory."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of our engine."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence in a step."""
        return [self.sequence] * (self.rows * self.microbatches)

    @property
    def rows(self) -> int:
        """Sequences per forward and backward pass."""
        return self.packed // self.sequence


@dataclass(frozen=True)
class GrpoWork:
    """Prompts with samples of one length, and one update."""

    size: str
    """As in `SftWork`."""
    prompts: int
    """Prompts per step."""
    samples: int
    """Completions per prompt."""
    prompt: int
    """Tokens per prompt."""
    response: int
    """Tokens per completion."""
    rows: int
    """Sequences in one pass of the peer."""
    packed: int
    """Tokens in one of our passes."""

    @property
    def completions(self) -> int:
        """Completions per step."""
        return self.prompts * self.samples


def sft_config(directory: Path, work: SftWork, steps: int) -> RunConfig:
    """Write the model and texts for so many steps. Return the configuration of a run with them."""
    rows = directory / "rows.jsonl"
    rng = random.Random(0)
    texts = [{"text": sentence(rng, length - 1)} for length in steps * work.lengths]
    rows.write_text("".join(json.dumps(text) + "\n" for text in texts))
    engine = {"activation_checkpointing": "full" if work.recomputes else "none"}
    batch = {"examples": len(work.lengths), "tokens_per_device": work.packed}
    return _config(directory, work.size, rows, batch, engine | dict(work.engine))


def grpo_config(directory: Path, work: GrpoWork) -> RunConfig:
    """Write the model and prompts. Return the configuration of a run with them."""
    rows = directory / "rows.jsonl"
    write_prompts(rows, 64 * work.prompts, work.prompt)
    batch = {"prompts": work.prompts, "tokens_per_device": work.packed}
    more = {
        "rollout": {
            "n": work.samples,
            "max_response_length": work.response,
            "slots": work.completions,
        },
        "reward": {"functions": [{"function": "bench.words:even_share"}]},
    }
    return _config(directory, work.size, rows, batch, {}, more)


def _config(
    directory: Path,
    size: str,
    rows: Path,
    batch: Mapping[str, int],
    engine: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
) -> RunConfig:
    model = directory / size
    shape = model_config(size)
    if not model.exists():  # an earlier case may have written it
        torch.manual_seed(0)
        with current_device():  # an accelerator draws the weights faster
            Qwen3ForCausalLM(Qwen3Config(**shape)).bfloat16().save_pretrained(model)
        write_tokenizer(model, shape["vocab_size"])
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": [str(rows)]},
            "batch": batch,
            "engine": {"precision": "bf16", **engine},
            "optim": {"lr": LR},
            **(more or {}),
        }
    )

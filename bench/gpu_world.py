"""What `bench.gpu` runs: shapes of models, how much goes into a step, and both on disk."""

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
    """Sequences of one length, packed into micro-batches of so many tokens."""

    size: str
    """The model's shape, of `bench.words`."""
    sequence: int
    """Tokens of a sequence."""
    packed: int
    """Tokens of a micro-batch; peers have as many in rows of equal length, so that nobody pads."""
    microbatches: int = 2
    """In a step."""
    recomputes: bool = False
    """Whether the layers are computed again in the backward pass, on every side, for want of memory."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of ours."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence of a step."""
        return [self.sequence] * (self.rows * self.microbatches)

    @property
    def rows(self) -> int:
        """Sequences in a pass."""
        return self.packed // self.sequence


@dataclass(frozen=True)
class GrpoWork:
    """Prompts with samples of one length, and one update."""

    size: str
    """As in `SftWork`."""
    prompts: int
    """In a step."""
    samples: int
    """Completions of each."""
    prompt: int
    """Tokens of a prompt."""
    response: int
    """Tokens of a completion."""
    rows: int
    """Sequences in one pass of the peer's."""
    packed: int
    """Tokens in one pass of ours."""

    @property
    def completions(self) -> int:
        """In a step."""
        return self.prompts * self.samples


def sft_config(directory: Path, work: SftWork, steps: int) -> RunConfig:
    """Model and texts for so many steps on disk, and a run of them."""
    rows, rng = directory / "rows.jsonl", random.Random(0)
    texts = [{"text": sentence(rng, length - 1)} for length in steps * work.lengths]
    rows.write_text("".join(json.dumps(text) + "\n" for text in texts))
    engine = {"activation_checkpointing": "full" if work.recomputes else "none"}
    batch = {"examples": len(work.lengths), "tokens_per_device": work.packed}
    return _config(directory, work.size, rows, batch, engine | dict(work.engine))


def grpo_config(directory: Path, work: GrpoWork) -> RunConfig:
    """Model and prompts on disk, and a run of them."""
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
    model, shape = directory / size, model_config(size)
    if not model.exists():  # an earlier case's otherwise
        torch.manual_seed(0)
        with current_device():  # an accelerator draws them sooner
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

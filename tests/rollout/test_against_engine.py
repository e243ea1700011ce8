"""The generator's raw log-probs are those that the engine gives of the same sequences."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.engines import CPU, make_engine
from support.models.generators import differences, make_generator, require_close
from support.models.tiny import BOUNDED_STATES, FAMILIES, VOCAB, WITH_STATE, save_tiny, tiny_config
from support.nightly import by_day
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PretrainedConfig,
)

from burnish.distributed.processes import process_group
from burnish.errors import IncompatibleError


def differences_of(path: Path, config: PretrainedConfig, precision: str) -> Any:
    """Those of a generator and the engine whose weights it has, of the model at `path`."""
    with process_group(CPU, 60) as layout:
        engine = make_engine(layout, path, None, precision=precision)
        generator = make_generator(config, engine.layout, precision)
        generator.load_weights(engine.published(), version=0)
        return differences(engine, generator, config)


SOME = ("qwen3", "mixtral", "qwen3_5_moe_text", "granitemoehybrid")


@pytest.mark.parametrize(
    ("precision", "family"),
    by_day(
        product(("fp32", "bf16"), (*FAMILIES, *WITH_STATE, *BOUNDED_STATES)),
        [
            *(("fp32", family) for family in (*FAMILIES, *SOME, "falcon_h1")),
            *(("bf16", each) for each in (*SOME[:2], "mamba2")),
        ],
    ),
)
def test_raw_logprobs_are_those_of_the_engine(tmp_path: Path, family: str, precision: str) -> None:
    path, config = save_tiny(tmp_path / "m", family, torch.float32), tiny_config(family)
    require_close(differences_of(path, config, precision), precision)


def test_a_family_that_calls_its_parts_by_other_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=2, n_head=4)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "m")
    require_close(differences_of(tmp_path / "m", config, "fp32"), "fp32")


def tiny_of(family: str, path: Path) -> PretrainedConfig:
    """A model of a family that the other tests do not have, saved at `path`."""
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return config


def test_a_family_whose_layers_have_no_self_attn(tmp_path: Path) -> None:
    config = tiny_of("gpt_neox", tmp_path / "m")
    require_close(differences_of(tmp_path / "m", config, "fp32"), "fp32")


def test_layers_that_attend_twice_are_refused(tmp_path: Path) -> None:
    config = tiny_of("diffllama", tmp_path / "m")
    with pytest.raises(IncompatibleError):
        differences_of(tmp_path / "m", config, "fp32")

"""The experts that the generator notes are those that the engine finds on the same tokens, with the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from contracts.generator import make_requests
from support.models.engines import CPU, make_engine
from support.models.generators import make_generator, scored
from support.models.tiny import MIXTURES, save_tiny, tiny_config, tiny_model

from burnish.boxes.shards import Publication
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.errors import IncompatibleError
from burnish.models.names import model_shards
from burnish.rollout.base import Sampling
from burnish.rollout.builtin import decoding as builtin_decoding
from burnish.rollout.builtin.generator import BuiltinGenerator

ROUTED = Sampling(12, experts=True)


@pytest.mark.parametrize("family", [*MIXTURES, "gpt_oss", "qwen3_next"])
def test_the_engine_finds_the_same(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what was drawn is read a step later, and completions end at different steps."""
    monkeypatch.setattr(builtin_decoding, "steps_behind", lambda _: 1)
    monkeypatch.setattr(builtin_decoding, "_PREFILL_TOKENS", 24)
    path, config = save_tiny(tmp_path / "m", family, torch.float32), tiny_config(family)
    with process_group(CPU, 60) as layout:
        engine = make_engine(layout, path, None)
        generator = make_generator(config, layout, eos=(7, 8, 9, 10))
        generator.load_weights(engine.published(), version=0)
        found = scored(engine, generator, config, ROUTED, experts=True)
    assert len({len(each.completion.token_ids) for each in found}) > 2
    for each in found:
        noted = each.completion.experts
        assert noted is not None
        assert noted.dtype == np.uint8
        np.testing.assert_array_equal(noted, each.experts)


def test_nothing_is_noted_unless_asked_for() -> None:
    ((completion,),) = loaded("mixtral").generate(make_requests((5,), 1), Sampling(3))
    assert completion.experts is None


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(IncompatibleError):
        loaded("qwen3").generate(make_requests((5,), 1), ROUTED)


def loaded(family: str) -> BuiltinGenerator:
    """A generator with the tiny model of a family."""
    generator, model = make_generator(tiny_config(family), Layout()), tiny_model(family)
    generator.load_weights(Publication(model_shards(model)), version=0)
    return generator

"""The experts that the generator notes are those that the engine finds on the same tokens, with the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from contracts.generator import make_requests
from engines_for_tests import make_engine
from tiny import MIXTURES, save_tiny, tiny_config

from burnish.data.batching import make_batch
from burnish.errors import IncompatibleError
from burnish.models.counting import count_flops
from burnish.parallel.layout import Layout
from burnish.parallel.processes import process_group
from burnish.records import Completion, Example, Request
from burnish.rollout import decoding
from burnish.rollout.base import Sampling
from burnish.rollout.builtin import BuiltinGenerator
from burnish.rollout.held import HeldModel

CPU = torch.device("cpu")


def generator_of(path: Path, family: str, layout: Layout) -> BuiltinGenerator:
    generator = BuiltinGenerator(
        HeldModel(tiny_config(family), device=CPU, dtype=torch.float32),
        layout=layout,
        slots=4,
        eos_token_ids=(7, 8, 9, 10),
    )
    engine = make_engine(layout, path, None)
    generator.load_weights(engine.published(), version=0)
    return generator


def example_of(request: Request, completion: Completion) -> Example:
    tokens = np.concatenate([request.token_ids, completion.token_ids])
    return Example(tokens, np.arange(len(tokens)) >= len(request.token_ids))


@pytest.mark.parametrize("family", MIXTURES)
def test_the_engine_finds_the_same(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what was drawn is read a step later, and completions end at different steps."""
    monkeypatch.setattr(decoding, "steps_behind", lambda _: 1)
    monkeypatch.setattr(decoding, "_PREFILL_TOKENS", 24)
    path = save_tiny(tmp_path / "m", family, torch.float32)
    with process_group(CPU, 60) as layout:
        generator = generator_of(path, family, layout)
        requests = make_requests()
        groups = generator.generate(requests, Sampling(12, experts=True))
        pairs = [(r, c) for r, group in zip(requests, groups, strict=True) for c in group]
        assert len({len(completion.token_ids) for _, completion in pairs}) > 2
        engine = make_engine(layout, path, None)
        examples = [example_of(*pair) for pair in pairs]
        batch = make_batch(examples, layout, 128, count_flops(tiny_config(family)))
        outputs = engine.forward(batch, experts=True)
    for micro, numbers, output in zip(batch.microbatches, batch.examples, outputs, strict=True):
        parts = output.experts.split(micro.cu_seqlens.diff().tolist())
        for number, part in zip(numbers, parts, strict=True):
            found = pairs[number][1].experts
            assert found is not None
            assert found.dtype == np.uint8
            np.testing.assert_array_equal(found, part[:-1].numpy())


def test_nothing_is_noted_unless_asked_for(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "mixtral", torch.float32)
    with process_group(CPU, 60) as layout:
        generator = generator_of(path, "mixtral", layout)
        ((completion,),) = generator.generate(make_requests((5,), 1), Sampling(3))
    assert completion.experts is None


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    with process_group(CPU, 60) as layout:
        generator = generator_of(path, "qwen3", layout)
        with pytest.raises(IncompatibleError, match="no known routers"):
            generator.generate(make_requests((5,), 1), Sampling(3, experts=True))

"""The generator's raw log-probs are those that the engine gives of the same sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from adapters_for_tests import LORA, RandomAdapter
from contracts.generator import make_requests
from tiny import FAMILIES, save_tiny, tiny_config
from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig
from burnish.data.batching import make_batch
from burnish.engines.base import Part
from burnish.engines.torch_engine import TorchEngine
from burnish.models.counting import count_flops
from burnish.models.sources import SafetensorsSource
from burnish.parallel.layout import Layout
from burnish.parallel.processes import process_group
from burnish.records import Example
from burnish.rollout.base import Sampling
from burnish.rollout.builtin import BuiltinGenerator

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_raw_logprobs_are_those_of_the_engine(tmp_path: Path, family: str, precision: str) -> None:
    path, config = save_tiny(tmp_path / "m", family, torch.float32), tiny_config(family)
    with process_group(CPU, 60) as layout:
        engine = TorchEngine(config, _settings(precision), None, layout=layout, device=CPU)
        engine.load(SafetensorsSource(path), Part.WEIGHTS)
        _assert_close(_difference(engine, config, precision), precision)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_adapter_is_in_them(tmp_path: Path, family: str, precision: str) -> None:
    path, config = save_tiny(tmp_path / "m", family, torch.float32), tiny_config(family)
    with process_group(CPU, 60) as layout:
        engine = TorchEngine(
            config, _settings(precision), None, layout=layout, device=CPU, lora=LORA
        )
        engine.load(SafetensorsSource(path), Part.FROZEN)
        engine.load(RandomAdapter(), Part.WEIGHTS)
        _assert_close(_difference(engine, config, precision), precision)
        with pytest.raises(AssertionError):
            _assert_close(_difference(engine, config, precision, adapter=False), precision)


def _settings(precision: str) -> EngineConfig:
    return EngineConfig.model_validate({"precision": precision})


def _difference(
    engine: TorchEngine, config: PretrainedConfig, precision: str, **how: bool
) -> np.ndarray:
    """The engine's log-probs minus those that the generator, with its weights, drew by; one row per completion."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    generator = BuiltinGenerator(
        config, layout=engine.layout, device=CPU, dtype=dtype, slots=4, eos_token_ids=()
    )
    generator.load_weights(engine.published(), version=0)
    requests = make_requests()
    groups = generator.generate(requests, Sampling(12, temperature=0.7, top_p=0.9))
    pairs = [(r, c) for r, group in zip(requests, groups, strict=True) for c in group]
    examples = [_example(request.token_ids, c.token_ids) for request, c in pairs]
    batch = make_batch(examples, Layout(), 128, count_flops(config))
    found = dict[int, np.ndarray]()
    for numbers, micro, output in zip(
        batch.examples, batch.microbatches, engine.forward(batch, **how), strict=True
    ):
        parts = output.logprobs.numpy()[micro.loss_mask.numpy()].reshape(-1, 12)
        found |= dict(zip(numbers, parts, strict=True))
    return np.array([found[i] - c.logprobs for i, (_, c) in enumerate(pairs)])


def _assert_close(difference: np.ndarray, precision: str) -> None:
    assert np.abs(difference).max() < (1e-5 if precision == "fp32" else 0.3)
    assert np.abs(difference).mean() < (1e-6 if precision == "fp32" else 0.03)


def _example(prompt: np.ndarray, completion: np.ndarray) -> Example:
    length = len(prompt) + len(completion)
    return Example(np.concatenate([prompt, completion]), np.arange(length) >= len(prompt))

"""Trained by Megatron, published to the built-in generator: its log-probs and experts are those that the engine finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contracts.engine import LR, cut, loss, make_examples
from contracts.generator import make_requests
from distributed import run_ranks
from tiny import VOCAB, save_tiny
from transformers import AutoConfig

from burnish.config.schema import EngineConfig, OptimConfig
from burnish.data.batching import make_batch
from burnish.engines.base import Part
from burnish.engines.megatron.engine import MegatronEngine
from burnish.models.counting import count_flops
from burnish.models.flops import ModelFlops
from burnish.models.sources import SafetensorsSource
from burnish.parallel.layout import Layout
from burnish.records import Example
from burnish.rollout.base import Sampling
from burnish.rollout.builtin import BuiltinGenerator
from burnish.rollout.held import HeldModel

CPU = torch.device("cpu")
LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"expert_parallel": 2},
]


def test_the_generator_has_the_weights_that_were_trained(tmp_path: Path) -> None:
    """A mixture with tied embeddings, at layouts that cut it in each way."""
    path = save_tiny(tmp_path / "m", "qwen3_moe", torch.float32, tie_word_embeddings=True)
    run_ranks(published_rank, 2, path, LAYOUTS, timeout=280)


def published_rank(layout: Layout, path: Path, layouts: Sequence[Mapping[str, Any]]) -> None:
    hf_config = AutoConfig.from_pretrained(path)
    for settings in layouts:
        config = EngineConfig(kind="megatron", precision="fp32", **settings)
        engine = MegatronEngine(hf_config, config, OptimConfig(), layout=layout, device=CPU)
        engine.load(SafetensorsSource(path), Part.WEIGHTS)
        engine.forward_backward(cut(make_examples(VOCAB), engine.layout, 2), loss)
        engine.optim_step(LR)
        generator = BuiltinGenerator(
            HeldModel(hf_config, device=CPU, dtype=torch.float32),
            layout=layout,
            slots=4,
            eos_token_ids=(),
        )
        generator.load_weights(engine.published(), version=1)
        require_same(engine, generator, count_flops(hf_config), settings)
        engine.close()


def require_same(
    engine: MegatronEngine,
    generator: BuiltinGenerator,
    flops: ModelFlops,
    settings: Mapping[str, Any],
) -> None:
    requests = make_requests()
    groups = generator.generate(requests, Sampling(12, experts=True))
    pairs = [(r, c) for r, group in zip(requests, groups, strict=True) for c in group]
    examples = []
    for request, completion in pairs:
        tokens = np.concatenate([request.token_ids, completion.token_ids])
        examples.append(Example(tokens, np.arange(len(tokens)) >= len(request.token_ids)))
    batch = make_batch(examples, engine.layout, 128, flops)
    outputs = engine.forward(batch, experts=True)
    for micro, numbers, output in zip(batch.microbatches, batch.examples, outputs, strict=True):
        lengths = micro.cu_seqlens.diff().tolist()
        of_tokens = zip(
            numbers, output.logprobs.split(lengths), output.experts.split(lengths), strict=True
        )
        for number, logprobs, experts in of_tokens:
            if number < 0:
                continue
            completion = pairs[number][1]
            mine = logprobs[-len(completion.token_ids) :].numpy()
            np.testing.assert_allclose(mine, completion.logprobs, atol=1e-5, err_msg=str(settings))
            assert completion.experts is not None
            found = experts[:-1].numpy()
            np.testing.assert_array_equal(np.sort(found), np.sort(completion.experts))

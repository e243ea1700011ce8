"""Compiled layers: how often something is compiled, and what is said without a compiler. Numbers: `test_layouts`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contracts.engine import cut, loss, make_examples
from distributed import run_ranks
from tiny import VOCAB, save_tiny, tiny_config
from torch._dynamo.utils import counters
from transformers import AutoConfig

from burnish.config.schema import EngineConfig, OptimConfig
from burnish.engines.base import Part
from burnish.engines.compilation import compile_layers
from burnish.engines.parallelize import decoder_layers
from burnish.engines.torch_engine import TorchEngine
from burnish.errors import UsageError
from burnish.models.building import build_on_meta
from burnish.models.sources import SafetensorsSource
from burnish.parallel.layout import Layout

LENGTHS = ((9, 4, 12, 2, 7, 5), (3,), (40, 2), (8, 8, 8, 8), (17, 1, 30))
PIECES = 4
"""Of a layer: up to its attention, and what follows, each of them once in the layer and once in its attention."""


def count_rank(layout: Layout, path: Path) -> tuple[list[int], list[tuple[float, float]]]:
    """Graphs that there are after each batch, and the losses with and without compilation."""
    engines = []
    for compiled in (True, False):
        config = EngineConfig(precision="fp32", compile=compiled)
        hf_config, device = AutoConfig.from_pretrained(path), torch.device("cpu")
        engine = TorchEngine(hf_config, config, OptimConfig(lr=1e-3), layout=layout, device=device)
        engine.load(SafetensorsSource(path), Part.WEIGHTS)
        engines.append(engine)
    graphs, losses = [], []
    for number, lengths in enumerate(LENGTHS):
        batch = cut(make_examples(VOCAB, lengths, number), layout, 2)
        mine, plain = (e.forward_backward(batch, loss).values_by_name()["loss"] for e in engines)
        for engine in engines:
            engine.optim_step(1e-3)
        losses.append((mine, plain))
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs, losses


def test_layers_are_compiled_once_for_all_lengths(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    ((graphs, losses),) = run_ranks(count_rank, 1, path)
    assert 0 < graphs[0] <= PIECES + 1
    assert graphs[1] <= 2 * PIECES, "once more for lengths in general"
    assert set(graphs[1:]) == {graphs[1]}, "lengths make it compile again"
    for mine, plain in losses:
        assert mine == pytest.approx(plain, rel=1e-5)


def test_no_compiler_is_an_error_that_says_so() -> None:
    model = build_on_meta(tiny_config())
    with (
        torch._inductor.config.patch("cpp.cxx", ("no-such-compiler",)),
        pytest.raises(UsageError, match=r"engine\.compile needs a C\+\+ compiler") as refused,
    ):
        compile_layers(model, decoder_layers(model))
    assert "engine.compile=false" in str(refused.value)

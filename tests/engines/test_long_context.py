"""One sequence of 131,072 tokens on four processes, beside transformers and the plan."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.ranks.processes import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from bench.planning_meter import Meter
from burnish.algorithms.fine_tuning import sft_loss
from burnish.config.schema import EngineConfig, RunConfig
from burnish.data.batching import make_batch
from burnish.engines.base import Part
from burnish.engines.factory import make_engine
from burnish.engines.optim.optimizer import local
from burnish.families import ModelShape
from burnish.methods.table import METHODS
from burnish.models.loading import FreshSource
from burnish.models.meta_init import count_flops
from burnish.plan.devices import parse_devices
from burnish.plan.layout_search import Planner
from burnish.records import Example

TOKENS = 131072
RANKS = 4
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": TOKENS,
}


def settings(**engine):
    return RunConfig.model_validate(
        {
            "model": {"fresh": MODEL},
            "data": {"max_length": TOKENS},
            "batch": {"examples": 1, "tokens_per_device": TOKENS // RANKS},
            "engine": {"precision": "fp32", "sequence_parallel": RANKS, "logprob_chunk": 2048}
            | engine,
        }
    )


def tokens():
    return np.random.default_rng(0).integers(0, MODEL["vocab_size"], TOKENS)


def fresh_config():
    return AutoConfig.for_model(**MODEL)


def trained(layout, engine_settings):
    """Train a step; return the loss, the norm of its gradients and this rank's most bytes."""
    config = settings(**engine_settings)
    hf = fresh_config()
    meter = Meter()
    engine = make_engine(hf, config.engine, config.optim, layout=layout, device=torch.device("cpu"))
    engine.load(FreshSource(hf, 0), Part.WEIGHTS)
    example = Example(tokens(), np.arange(TOKENS) > 0)
    batch = make_batch([example], engine.layout, config.microbatch_tokens, count_flops(hf))
    with meter.phase("update"):
        stats = engine.forward_backward(batch, sft_loss())
        norm = engine.optim_step(1e-4)["grad_norm"].value()
    engine.close()
    return stats["loss"].value(), norm, meter.peaks["update"][0]


def loss_of_transformers(layout):
    """Return the mean loss of the fresh weights, from one plain forward pass."""
    hf = fresh_config()
    engine = make_engine(
        hf, EngineConfig(precision="fp32"), None, layout=layout, device=torch.device("cpu")
    )
    engine.load(FreshSource(hf, 0), Part.WEIGHTS)
    weights = {shard.spec.name: local(shard.tensor) for shard in engine.shards(Part.WEIGHTS)}
    model = AutoModelForCausalLM.from_config(hf, attn_implementation="sdpa")
    model.load_state_dict(weights)
    ids = torch.from_numpy(tokens())[None]
    with torch.no_grad():
        return float(model(ids, labels=ids, use_cache=False).loss)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    [
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full", "activation_offload": True},
    ],
    ids=["selective", "offload"],
)
def test_a_long_sequence_has_the_loss_of_transformers_and_the_planned_memory(more):
    results = run_ranks(trained, RANKS, more, timeout=480)
    config = settings(**more)
    devices = replace(parse_devices(f"{RANKS}xCPU"), shared_cache=True)
    plan, _ = Planner(ModelShape.of(MODEL), config, METHODS["sft"], devices).as_configured()
    planned = sum(plan.phases["update"].values()) - plan.phases["update"].get("host", 0.0)
    losses, norms, peaks = zip(*results, strict=True)
    assert planned == pytest.approx(max(peaks), rel=0.15)
    assert len({*losses}) == len({*norms}) == 1
    assert losses[0] == pytest.approx(run_ranks(loss_of_transformers, 1)[0], rel=1e-5)
    assert norms[0] > 0

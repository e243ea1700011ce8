"""What weight decay takes hold of."""

from __future__ import annotations

import pytest
import torch
from contracts.engine import cut, loss, make_examples
from support.models.tiny import VOCAB
from transformers import AutoConfig

from burnish.config.schema import EngineConfig, OptimConfig
from burnish.distributed.processes import process_group
from burnish.engines.base import Part
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.models.loading import FreshSource
from burnish.models.names import is_matrix

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_norms_of_two_dims_do_not_decay_and_matrices_do(kind: str) -> None:
    config = AutoConfig.for_model("cohere", **SHAPE, use_qk_norm=True)
    optim = OptimConfig(kind=kind, lr=1e-2, weight_decay=0.5)
    with process_group(CPU, 60) as layout:
        engine = TorchEngine(
            config, EngineConfig(precision="fp32"), optim, layout=layout, device=CPU
        )
        engine.load(FreshSource(config, 3), Part.WEIGHTS)
        before = weights_of(engine)
        engine.forward_backward(cut(make_examples(VOCAB), layout, 3), loss)
        for parameter in engine._scorer.parameters():
            parameter.grad.zero_()
        engine.optim_step(1e-2)
        after = weights_of(engine)
    two_dims = {name for name, weight in before.items() if "norm" in name and weight.ndim == 2}
    assert two_dims == {f"model.layers.0.self_attn.{each}_norm.weight" for each in "qk"}
    for name, weight in before.items():
        expected = weight if "norm" in name else weight * (1 - 1e-2 * 0.5)
        torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=0, msg=name)


def weights_of(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {s.spec.name: s.tensor.clone() for s in engine.shards(Part.WEIGHTS)}


@pytest.mark.parametrize(
    ("name", "dims", "expected"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", 3, True),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", 2, False),
        ("model.layers.0.self_attn.q_proj.bias", 1, False),
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", 2, True),
        ("model.norm.weight", 1, False),
        ("model.layers.0.mamba.A_log", 2, False),
        ("transformer.LayerNorm.weight", 2, False),
        ("model.embed_tokens.weight", 2, True),
        ("gain", 2, True),
    ],
)
def test_what_is_a_matrix(name: str, dims: int, expected: bool) -> None:
    assert is_matrix(name, dims) is expected

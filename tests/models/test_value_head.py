"""Models with a value head: transformers' token classification models, packed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.models.tiny import FAMILIES, VOCAB, save_tiny, tiny_config, tiny_model
from support.nightly import by_day
from torch import Tensor
from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel

from burnish.config.schema import EngineConfig, ModelConfig, OptimConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.engines.base import Part
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.errors import IncompatibleError
from burnish.methods.parts.critic import value_source
from burnish.models.heads import has_value_head
from burnish.models.loading import (
    FreshSource,
    SafetensorsSource,
    read_model_config,
    save_model_assets,
)
from burnish.models.meta_init import build_on_meta, materialize
from burnish.models.names import model_shards, tensor_specs
from burnish.models.value_head import state_values, value_class, value_config
from burnish.records import Batch, MicroBatch, TokenOutputs
from burnish.tracking.stats import Stats

CPU = torch.device("cpu")
KNOWN = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
"""Families of which transformers has token classification models itself."""


def tiny_value_model(family: str, labels: int = 1) -> PreTrainedModel:
    """A plain transformers model in fp32, in evaluation."""
    config = tiny_config(family)
    config = value_config(config)
    config.num_labels = labels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = value_class(config)._from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def batch_of(prefix: int = 0) -> Batch:
    """Four sequences in one micro-batch, which begin with so many equal tokens."""
    rng = np.random.default_rng(0)
    head = rng.integers(3, VOCAB, prefix)
    lengths = [9, 4, 12, 2]
    ids = [np.concatenate([head, rng.integers(3, VOCAB, length)]) for length in lengths]
    mask = np.concatenate([np.arange(len(each)) >= max(prefix, 1) for each in ids])
    tokens = int(mask.sum())
    micro = MicroBatch(
        input_ids=torch.from_numpy(np.concatenate(ids)),
        cu_seqlens=torch.tensor([0, *np.cumsum([len(each) for each in ids])], dtype=torch.int32),
        loss_mask=torch.from_numpy(mask),
        num_tokens=tokens,
        num_sequences=len(ids),
        old_values=torch.from_numpy(rng.normal(size=len(mask)).astype(np.float32)),
    )
    return Batch((micro,), (tuple(range(len(ids))),), tokens, len(ids), len(mask))


def loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
    assert micro.old_values is not None
    assert outputs.logprobs.shape == outputs.entropy.shape == (0,)
    return (outputs.values - micro.old_values).where(micro.loss_mask, 0.0).square().sum(), Stats()


def by_hand(model: PreTrainedModel, micro: MicroBatch) -> TokenOutputs:
    """Each sequence by itself: the value before a token is what is said of the token before it."""
    values = []
    for start, stop in zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True):
        said = model(input_ids=micro.input_ids[None, start:stop], use_cache=False).logits[0, :, 0]
        values.append(torch.cat([torch.zeros(1), said[:-1]]))
    return TokenOutputs(values=torch.cat(values).where(micro.loss_mask, 0.0))


@pytest.fixture(scope="module")
def alone() -> Iterator[Layout]:
    with process_group(CPU, 60.0) as layout:
        yield layout


def engine_of(directory: Path, layout: Layout, **settings: Any) -> TorchEngine:
    config = EngineConfig(**{"precision": "fp32", "max_grad_norm": 1e9, **settings})
    hf_config = read_model_config(ModelConfig(path=str(directory)))
    engine = TorchEngine(hf_config, config, OptimConfig(), layout=layout, device=CPU)
    engine.load(SafetensorsSource(directory), Part.WEIGHTS)
    return engine


WAYS = [(0, "none"), (11, "none"), (11, "full"), (0, "selective")]
"""Tokens that sequences share, and what is computed again."""


@pytest.mark.parametrize(
    ("family", "way"), by_day(product(FAMILIES, WAYS), [*zip(FAMILIES, cycle(WAYS), strict=False)])
)
def test_values_and_gradients_are_those_of_transformers(
    tmp_path: Path, alone: Layout, family: str, way: tuple[int, str]
) -> None:
    prefix, checkpointing = way
    model, batch = tiny_value_model(family), batch_of(prefix)
    model.save_pretrained(tmp_path)
    engine = engine_of(tmp_path, alone, activation_checkpointing=checkpointing)
    micro = batch.microbatches[0]
    wanted = by_hand(model, micro)
    value, _ = loss(wanted, micro)
    value.backward()  # type: ignore[no-untyped-call]
    found = engine.forward(batch)[0].values
    torch.testing.assert_close(found, wanted.values.detach(), rtol=1e-5, atol=1e-5)
    stats = engine.forward_backward(batch, loss).values_by_name()
    assert stats["loss"] == pytest.approx(float(value.detach()), rel=1e-5)
    engine.optim_step(0.0)
    held = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients = {s.spec.name: s.tensor for s in model_shards(model, held)}
    moments = {s.spec.name: s.tensor for s in engine.shards(Part.TRAINING)}
    assert {f"exp_avg/{name}" for name in gradients} <= moments.keys()
    assert {"score.weight", "score.bias"} <= gradients.keys()
    for name, gradient in gradients.items():
        scale = float(gradient.norm())
        error = float((moments[f"exp_avg/{name}"] / 0.1 - gradient).norm())
        assert error <= 2e-5 * max(scale, 1e-3), name


def test_bf16_values_are_rounded_once_at_the_states() -> None:
    states, head = torch.randn(50, 8).bfloat16(), torch.nn.Linear(8, 1).bfloat16()
    values = state_values(states, head)
    assert values.dtype == torch.float32
    exact = states.double() @ head.weight.double()[0] + head.bias.double()
    torch.testing.assert_close(values, exact.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", KNOWN)
def test_the_directory_is_one_of_transformers(tmp_path: Path, family: str) -> None:
    hf_config = value_config(tiny_config(family))
    model = build_on_meta(hf_config)
    materialize(model, CPU)
    FreshSource(hf_config, 1).fill(model_shards(model))
    save_model_assets(hf_config, None, tmp_path, torch.float32)
    state = {shard.spec.name: shard.tensor for shard in model_shards(model)}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, info = AutoModelForTokenClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (loaded.config.num_labels, loaded.score.out_features) == (1, 1)
    assert loaded.config.architectures == [type(loaded).__name__]
    assert not (tmp_path / "generation_config.json").exists()
    assert torch.equal(loaded.score.weight, state["score.weight"])


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "olmo2"])
def test_a_language_model_gives_the_backbone_and_the_head_is_fresh(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = ModelConfig(path=str(save_tiny(tmp_path / "m", family, torch.float32)))
    hf_config = value_config(read_model_config(config))
    found = filled(hf_config, value_source(config, hf_config, 5))
    language = filled(hf_config, SafetensorsSource(tmp_path / "m"), but="score.")
    fresh = filled(hf_config, FreshSource(hf_config, 5))
    for name, tensor in found.items():
        wanted = fresh if name.startswith("score.") else language
        assert torch.equal(tensor, wanted[name]), name
    assert {"score.weight", "score.bias"} <= found.keys()
    assert "has no use for" not in caplog.text


def filled(hf_config: PretrainedConfig, source: Any, but: str = "none") -> dict[str, Tensor]:
    """What a source gives of a value model, but for the names that begin so."""
    model = build_on_meta(hf_config)
    materialize(model, CPU)
    shards = [shard for shard in model_shards(model) if not shard.spec.name.startswith(but)]
    source.fill(shards)
    return {shard.spec.name: shard.tensor for shard in shards}


def test_a_critic_s_own_directory_gives_all_of_it(tmp_path: Path) -> None:
    model = tiny_value_model("llama")
    model.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    hf_config = value_config(read_model_config(config))
    assert has_value_head(hf_config)
    found = filled(hf_config, value_source(config, hf_config, 5))
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_a_classifier_of_tokens_is_no_critic(tmp_path: Path) -> None:
    tiny_value_model("llama", labels=2).save_pretrained(tmp_path)
    with pytest.raises(IncompatibleError) as caught:
        value_config(read_model_config(ModelConfig(path=str(tmp_path))))
    assert (caught.value.have, caught.value.exit_code) == ("2 labels", 4)


def test_a_model_that_is_no_language_model_of_transformers() -> None:
    with pytest.raises(IncompatibleError):
        value_config(PretrainedConfig())


def test_the_backbone_s_configuration_stays_as_it_is() -> None:
    config = tiny_model("llama").config
    labels = config.num_labels
    assert has_value_head(value_config(config))
    assert not has_value_head(config)
    assert config.num_labels == labels
    names = {spec.name for spec in tensor_specs(build_on_meta(value_config(config)))}
    assert "lm_head.weight" not in names

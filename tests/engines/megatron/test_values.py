"""Critics and reward models by Megatron at every layout, against transformers' classifiers in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from contracts.engine import CLIP, assert_relative, cut, make_examples
from support.models.adapters import adapter_tensor, saved_name
from support.models.engines import OPTIM, make_engine, make_frozen
from support.models.tiny import VOCAB, tiny_config
from support.nightly import by_day
from support.ranks.processes import run_ranks
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from burnish.check.comparison import step_of_engine
from burnish.config.schema import LoraConfig
from burnish.distributed.layout import Layout
from burnish.families import FAMILIES
from burnish.models.names import model_shards
from burnish.models.value_head import value_class, value_config
from burnish.records import Example, MicroBatch, TokenOutputs
from burnish.tracking.stats import Stats

LORA = LoraConfig(rank=3, alpha=5.0)
ADAPTED = LORA.model_copy(update={"modules_to_save": ["score"]})
LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel": 2},
    {"tensor_parallel": 2, "megatron_sequence_parallel": False},
    {"pipeline_parallel": 2, "activation_checkpointing": "full"},
    {"pipeline_parallel": 2, "virtual_stages": 2},
    {"sequence_parallel": 2},
]
"""Of a critic whose backbone's embeddings are tied, which it has no use for."""


def judge_config() -> PretrainedConfig:
    """A reward model's, whose head has no bias."""
    config = tiny_config("qwen3")
    config.num_labels, config.architectures = 1, ["Qwen3ForSequenceClassification"]
    return config


CONFIGS = {
    **{
        family: value_config(tiny_config(family))
        for family, each in FAMILIES.items()
        if each.has_llama_layers
    },
    "a judge": judge_config(),
    "a deep critic": value_config(tiny_config("qwen3", num_hidden_layers=4)),
}


def save_classifier(directory: Path, config: PretrainedConfig) -> PreTrainedModel:
    """A plain transformers model with random weights in fp32, in evaluation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = value_class(config)._from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model.eval()


def loss(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
    """Squares of the distances to something of each token."""
    assert outputs.logprobs.shape == outputs.entropy.shape == (0,)
    wanted = micro.input_ids / VOCAB
    terms = torch.where(micro.loss_mask, (outputs.values - wanted).square(), 0.0)
    return terms.sum() / micro.num_tokens, Stats()


def require_step(outcome: Any, wanted: Mapping[str, Any], case: str) -> None:
    """Loss, norm, values and gradients are those of a plain model."""
    assert outcome.loss == pytest.approx(wanted["loss"], rel=1e-5), case
    assert outcome.norm == pytest.approx(wanted["norm"], rel=1e-5), case
    for number, values in enumerate(wanted["values"]):
        mine = outcome.logprobs[f"sequence {number}"]
        assert_relative(mine, values, 1e-5, f"{case}: sequence {number}")
    assert outcome.gradients.keys() == wanted["gradients"].keys(), case
    for name, gradient in wanted["gradients"].items():
        assert_relative(outcome.gradients[name], gradient, 2e-5, f"{case}: {name}")


def by_hand(model: PreTrainedModel) -> dict[str, Any]:
    """What `step_by_hand` says, gradients by the names of the checkpoint."""
    found = step_by_hand(model)
    shards = model_shards(model, found["gradients"])
    return {**found, "gradients": {shard.spec.name: shard.tensor for shard in shards}}


def step_by_hand(model: PreTrainedModel) -> dict[str, Any]:
    """Each sequence by itself: the value before a token is what is said of the token before it."""
    values = [_values(model, example) for example in make_examples(VOCAB)]
    (whole,) = cut(make_examples(VOCAB), Layout(), 6).microbatches
    total, _ = loss(TokenOutputs(values=torch.cat(values)), whole)
    total.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        "values": [each.detach() for each in values],
        "loss": float(total.detach()),
        "norm": float(norm),
        "gradients": gradients,
    }


def _values(model: PreTrainedModel, example: Example) -> Tensor:
    ids = torch.from_numpy(example.token_ids)[None]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    said = model.score(hidden)[0, :-1, 0]
    mask = torch.from_numpy(example.loss_mask)
    return torch.where(mask, torch.cat([torch.zeros(1), said]), 0.0)


def adapted_by_hand(model: PreTrainedModel) -> dict[str, Any]:
    """What `step_by_hand` says of an adapter and a head that train on the model, by the names of PEFT's files."""
    config = peft.LoraConfig(
        r=LORA.rank,
        lora_alpha=LORA.scale_alpha,
        target_modules="all-linear",
        exclude_modules=["score"],
        modules_to_save=["score"],
        task_type="TOKEN_CLS",
    )
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(adapter_tensor(saved_name(name), tuple(parameter.shape)))
    found = step_by_hand(adapted.get_base_model())
    gradients = {
        saved_name(f"base_model.model.{name}"): gradient
        for name, gradient in found["gradients"].items()
    }
    return {**found, "gradients": gradients}


def adapted_rank(layout: Layout, path: Path, layouts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """At each layout a step of an adapter and a head."""
    found = []
    for settings in layouts:
        engine = make_engine(layout, path, lora=ADAPTED, **settings)
        batch = cut(make_examples(VOCAB), engine.layout, 2)
        found.append(step_of_engine(engine, batch, loss, OPTIM))
        engine.close()
    return found if layout.is_main else []


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2])
def test_values_and_gradients_of_an_adapter_are_pefts(tmp_path: Path, world: int) -> None:
    path = tmp_path / "critic"
    wanted = adapted_by_hand(save_classifier(path, CONFIGS["a deep critic"]))
    layouts = [{"kind": "torch"}] + [{"kind": "megatron", **each} for each in [{}, *LAYOUTS]]
    layouts += [{"kind": "torch", "tensor_parallel": 2}]
    told = layouts[:2] if world == 1 else layouts
    for settings, outcome in zip(told, run_ranks(adapted_rank, world, path, told)[0], strict=True):
        require_step(outcome, wanted, str(settings))


def valued_rank(
    layout: Layout, cases: Sequence[tuple[Path, Mapping[str, Any]]]
) -> list[tuple[Any, bool]]:
    """Of each case a step, and whether a frozen model beside it says the same before, and after it what it said."""
    found = []
    for path, settings in cases:
        engine = make_engine(layout, path, kind="megatron", **settings)
        frozen = make_frozen(layout, path, engine, kind="megatron", **settings)
        batch = cut(make_examples(VOCAB), engine.layout, 2)
        before = engine.forward(batch), frozen.forward(batch)
        step = step_of_engine(engine, batch, loss, OPTIM)
        three = zip(*before, frozen.forward(batch), strict=True)
        same = all(
            torch.equal(mine.values, theirs.values) and torch.equal(theirs.values, after.values)
            for mine, theirs, after in three
        )
        found.append((step, same))
        frozen.close()
        engine.close()
    return found if layout.is_main else []


@pytest.mark.parametrize(
    ("world", "families"),
    by_day([(1, ("qwen3", "a judge")), (1, (*CONFIGS,)), (2, ())], [(1, ("qwen3", "a judge"))]),
)
def test_values_and_gradients_are_those_of_transformers(
    tmp_path: Path, world: int, families: Sequence[str]
) -> None:
    """In one process of every family, on two processes of a critic in every layout."""
    deep = "a deep critic"
    cases: list[tuple[str, dict[str, Any]]] = (
        [(name, {}) for name in families if name != deep]
        if world == 1
        else [*((deep, layout) for layout in LAYOUTS), ("qwen3_moe", {"expert_parallel": 2})]
    )
    oracles = {
        name: by_hand(save_classifier(tmp_path / name, CONFIGS[name]))
        for name in dict.fromkeys(name for name, _ in cases)
    }
    told = [(tmp_path / name, settings) for name, settings in cases]
    outcomes = run_ranks(valued_rank, world, told)[0]
    for case, (outcome, same) in zip(cases, outcomes, strict=True):
        assert same, case
        require_step(outcome, oracles[case[0]], str(case))
        assert ("score.bias" in outcome.gradients) == (case[0] != "a judge")

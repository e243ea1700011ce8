"""Experts that ranks of the torch engine share, against one plain transformers model (and PEFT) in fp32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.engine import (
    LR,
    assert_relative,
    cut,
    examples_that_begin_alike,
    loss,
    make_examples,
    require_alike,
    train,
)
from engines.test_layouts import oracle
from support.models.adapted_training import require_like_peft, trained_by_peft
from support.models.adapters import EXPERTS
from support.models.engines import OPTIM, make_engine, make_frozen
from support.models.generators import make_generator, scored
from support.models.routers import CHOSEN, LAYERS, by_hand, with_experts
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from burnish.check.comparison import BatchOutcome, step_of_engine
from burnish.config.schema import EngineConfig, LoraConfig
from burnish.distributed.layout import Layout
from burnish.engines.factory import require_fitting
from burnish.engines.torch.expert_parallel import require_shareable
from burnish.errors import IncompatibleError, UsageError
from burnish.rollout.base import Sampling

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "ep 2": (2, {"expert_parallel": 2}),
    "ep 2 of sp 2": (2, {"expert_parallel": 2, "sequence_parallel": 2}),
    "fsdp 2 x ep 2": (4, {"expert_parallel": 2}),
    "ep 4": (4, {"expert_parallel": 4}),
    "hsdp 2 x ep 2": (4, {"expert_parallel": 2, "replicas": 2}),
    "ep 2 x sp 2": (4, {"expert_parallel": 2, "sequence_parallel": 2}),
    "ep 2 x tp 2": (4, {"expert_parallel": 2, "tensor_parallel": 2}),
}
"""Processes and settings."""
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")
ADAPTED = LoraConfig(rank=3, alpha=5.0, targets=["q_proj", *EXPERTS])
KINDS = (*FAMILIES, "adapter")
"""An adapter is one of the experts of the second family."""
SPARING: dict[str, dict[str, Any]] = {
    "nothing": {},
    "full checkpointing": {"activation_checkpointing": "full"},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "activations on the host": {"activation_offload": True},
    "weights and gradients kept whole": {
        "reshard_after_forward": False,
        "reduce_each_microbatch": False,
    },
    "optimizer on the host": {"optimizer_offload": True},
    "weights on the host": {"parameter_offload": True},
    "compiled": {"compile": True},
}
Case = tuple[str, str, str]
"""Layout, kind of model, what is spared."""
PER_MICRO = {2: 2, 4: 1}
"""Sequences in a micro-batch, by processes: with five sequences, some ranks have none in the last round."""


def is_possible(case: Case) -> bool:
    """transformers has no plan to cut gpt-oss, and what is on the host is neither cut nor an adapter."""
    name, kind, way = case
    is_cut = "tp" in name
    return not (kind == "gpt_oss" and is_cut) and not (
        way == "weights on the host" and (is_cut or kind == "adapter")
    )


ALL_CASES = [case for case in product(LAYOUTS, KINDS, SPARING) if is_possible(case)]
BY_DAY: list[Case] = [("ep 2", "mixtral", "full checkpointing")]
BY_NIGHT = [
    case
    for number, case in enumerate(case for case in ALL_CASES if case[2] != "compiled")
    if number % 5 == 0 and case not in BY_DAY
]


def train_rank(
    layout: Layout, cases: Sequence[tuple[Path, Mapping[str, Any], LoraConfig | None]]
) -> list[dict[str, Any]]:
    found = []
    for path, settings, lora in cases:
        engine = make_engine(layout, path, lora=lora, **settings)
        found.append(train(engine, examples_that_begin_alike(VOCAB), PER_MICRO[layout.world]))
        engine.close()
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {family: save_tiny(root / family, family, torch.float32) for family in FAMILIES}
    return made | {"adapter": made["qwen3_moe"]}


def check_cases(models: Mapping[str, Path], cases: Sequence[Case], timeout: float = 500) -> None:
    """Run cases of as many processes; loss, norm, log-probs, gradients and weights are the plain model's."""
    told = [
        (models[kind], LAYOUTS[name][1] | SPARING[way], ADAPTED if kind == "adapter" else None)
        for name, kind, way in cases
    ]
    ranks = run_ranks(train_rank, LAYOUTS[cases[0][0]][0], told, timeout=timeout)
    oracles: dict[str, Any] = {}
    for number, (name, kind, way) in enumerate(cases):
        found = [rank[number] for rank in ranks]
        if kind not in oracles:
            is_adapter = kind == "adapter"
            path = models[kind]
            oracles[kind] = trained_by_peft(path, ADAPTED) if is_adapter else oracle(path)
        if kind == "adapter":
            require_like_peft(found, oracles[kind], f"{name} {way}")
        else:
            require_alike(found, oracles[kind], ("gradients", "weights"), f"{name} {kind} {way}")


def of_world(cases: Sequence[Case], world: int) -> list[Case]:
    return [case for case in cases if LAYOUTS[case[0]][0] == world]


def test_shared_experts_train_like_one_plain_model(models: dict[str, Path]) -> None:
    check_cases(models, BY_DAY)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_trains_like_one_plain_model(models: dict[str, Path], world: int) -> None:
    check_cases(models, of_world(BY_NIGHT, world))


def test_what_runs_by_night_meets_every_layout_kind_and_way() -> None:
    ways = {way for way in SPARING if way != "compiled"}
    assert {name for name, *_ in BY_NIGHT} == set(LAYOUTS)
    assert {kind for _, kind, _ in BY_NIGHT} == set(KINDS)
    assert {way for *_, way in BY_NIGHT} == ways


@pytest.mark.contract
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_contract(models: dict[str, Path], name: str, kind: str) -> None:
    cases = [case for case in ALL_CASES if case[:2] == (name, kind)]
    if cases:
        check_cases(models, cases, timeout=3500)


def crowd() -> list[Tensor]:
    """By sequence, [T, L, k]: all tokens go to the first experts."""
    chosen = torch.arange(CHOSEN).expand(LAYERS, CHOSEN)
    return [chosen.repeat(len(e.token_ids), 1, 1) for e in examples_that_begin_alike(VOCAB)]


def crowded_rank(
    layout: Layout, path: Path, settings: Sequence[Mapping[str, Any]]
) -> list[BatchOutcome]:
    found = []
    for each in settings:
        engine = make_engine(layout, path, expert_parallel=2, **each)
        batch = cut(examples_that_begin_alike(VOCAB), engine.layout, PER_MICRO[layout.world])
        found.append(step_of_engine(engine, with_experts(batch, crowd()), loss, OPTIM))
    return found if layout.is_main else []


@pytest.mark.nightly
def test_a_rank_may_get_no_tokens(models: dict[str, Path]) -> None:
    wanted = by_hand(models["mixtral"], crowd())
    ways = [{"activation_checkpointing": "full"}]
    for found in run_ranks(crowded_rank, 2, models["mixtral"], ways)[0]:
        assert found.loss == pytest.approx(wanted["loss"], rel=1e-5)
        assert found.norm == pytest.approx(wanted["norm"], rel=1e-5)
        for number, logprobs in enumerate(wanted["logprobs"]):
            mine = found.logprobs[f"sequence {number}"]
            assert_relative(mine, logprobs, 1e-5, f"sequence {number}")


@pytest.mark.parametrize(("family", "parts"), [("mixtral", 3), ("qwen3", 2)])
def test_experts_that_cannot_be_divided_are_refused(family: str, parts: int) -> None:
    with pytest.raises(UsageError, match=r"engine\.expert_parallel"):
        require_fitting(tiny_config(family), EngineConfig(expert_parallel=parts))


def test_experts_that_are_no_rows_of_one_tensor_are_refused() -> None:
    with pytest.raises(IncompatibleError):
        require_shareable(torch.nn.Linear(2, 2))


def published_rank(layout: Layout, path: Path, settings: Mapping[str, Any]) -> None:
    hf_config = AutoConfig.from_pretrained(path)
    engine = make_engine(layout, path, **settings)
    engine.forward_backward(cut(make_examples(VOCAB), engine.layout, 2), loss)
    engine.optim_step(LR)
    frozen = make_frozen(layout, path, engine, **settings)
    assert frozen.mesh is engine.mesh
    generator = make_generator(hf_config, layout)
    with engine.offloaded():
        pass
    generator.load_weights(engine.published(), version=1)
    for each in scored(engine, generator, hf_config, Sampling(12, experts=True), experts=True):
        drawn = each.completion
        np.testing.assert_allclose(each.logprobs, drawn.logprobs, atol=1e-5)
        np.testing.assert_array_equal(np.sort(each.experts), np.sort(drawn.experts))


@pytest.mark.nightly
def test_the_generator_has_the_experts_that_were_trained(models: dict[str, Path]) -> None:
    """Also after they were on the host. A frozen copy shares the groups of processes."""
    run_ranks(published_rank, 2, models["qwen3_moe"], {"expert_parallel": 2})


class Collectives(TorchDispatchMode):
    """How often this rank starts each collective inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **kwargs or {})


def counted_rank(layout: Layout, path: Path, ways: Sequence[Mapping[str, Any]]) -> list[Any]:
    found = []
    for settings in ways:
        engine = make_engine(layout, path, expert_parallel=2, **settings)
        batch = cut(make_examples(VOCAB)[:4], engine.layout, 1)
        engine.forward_backward(batch, loss)
        with Collectives() as ran:
            engine.forward_backward(batch, loss)
        found.append((ran.counts["c10d::_allgather_base_"], ran.counts["c10d::alltoall_base_"]))
    return found


@pytest.mark.nightly
def test_weights_are_gathered_twice_and_tokens_travel_once_a_pass(models: dict[str, Path]) -> None:
    """In a micro-batch of two layers, which are gathered for each pass as their experts are. Output layer and norm are gathered once.

    Numbers, rows and outputs travel in the forward pass and when it is recomputed, rows and outputs in the backward pass. Numbers,
    rows and gradients of embeddings travel once.
    """
    ways = [{}, {"activation_checkpointing": "full"}]
    for found in run_ranks(counted_rank, 4, models["mixtral"], ways):
        assert found == [(2 * 2 * 2 + 2, 2 * (3 + 2) + 3), (2 * 2 * 2 + 2, 2 * (3 + 3 + 2) + 3)]

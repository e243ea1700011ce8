"""Every Megatron layout × kind of model × recomputation against one plain transformers process, in fp32.

`make test` runs some layouts (`BY_DAY`), `make nightly` every layout with most kinds of model; `make contract` runs all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import (
    make_examples,
    require_alike,
    require_same_when_sparse,
    train,
    train_by_hand,
)
from support.models.engines import make_engine
from support.models.tiny import VOCAB, save_tiny
from support.models.transformer_engine import use_stand_ins
from support.ranks.processes import PATIENCE_SECONDS, run_ranks
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from burnish.distributed.layout import Layout
from burnish.models.names import model_shards

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "dp 2": (2, {}),
    "tp 2": (2, {"tensor_parallel": 2, "megatron_sequence_parallel": False}),
    "tp 2 + sp": (2, {"tensor_parallel": 2}),
    "sequence 2": (2, {"sequence_parallel": 2}),
    "pp 2": (2, {"pipeline_parallel": 2}),
    "pp 2 uneven": (2, {"pipeline_parallel": 2}),
    "vpp": (2, {"pipeline_parallel": 2, "virtual_stages": 2}),
    "vpp uneven": (2, {"pipeline_parallel": 2, "virtual_stages": 2}),
    "ep 2": (2, {"expert_parallel": 2}),
    "etp 1 x tp 2": (2, {"tensor_parallel": 2, "expert_tensor_parallel": 1}),
    "etp 2": (2, {"expert_tensor_parallel": 2}),
    "tp 4": (4, {"tensor_parallel": 4}),  # twice as many as there are key heads
    "tp 2 x pp 2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "dp 2 x tp 2": (4, {"tensor_parallel": 2}),
    "dp 2 x pp 2": (4, {"pipeline_parallel": 2}),
    "sequence 2 x tp 2": (4, {"sequence_parallel": 2, "tensor_parallel": 2}),
    "ep 2 x etp 2": (4, {"tensor_parallel": 2, "expert_parallel": 2}),
    "ep 2 x tp 2": (4, {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}),
    "ep 2 x pp 2": (4, {"expert_parallel": 2, "pipeline_parallel": 2}),
    # Of parameters with the names of TransformerEngine's layers.
    "te": (1, {"layers": "transformer_engine"}),
    "te, tp 2": (2, {"layers": "transformer_engine", "tensor_parallel": 2}),
    "te, ep 2": (2, {"layers": "transformer_engine", "expert_parallel": 2}),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Of other seeds AdamW makes whole steps of gradients that are nearly 0, of which rounding decides.
    "dense": ("qwen2", {"tie_word_embeddings": False, "seed": 2}),
    "tied": ("qwen3", {}),
    "moe": ("qwen3_moe", {}),  # with a dense layer among those of experts
}
Shape = tuple[str, int]
"""Kind of model, number of its layers."""
EVEN, UNEVEN = 4, 5
RECOMPUTED = ("none", "full", "selective")
PER_MICRO = {1: 3, 2: 2, 4: 1}
"""Sequences in a micro-batch, by processes: some ranks have none in the last round, and rounds are filled up for virtual stages."""
Case = tuple[str, str, str]
"""Layout, kind of model, what is computed again."""


def shape_of(case: Case) -> Shape:
    """Of the model that a case is about."""
    name, kind, _ = case
    return kind, UNEVEN if "uneven" in name else EVEN


def has_meaning(name: str, kind: str) -> bool:
    """Whether Megatron cuts such a model so."""
    return name != "tp 2" if kind == "moe" else "ep" not in name and "etp" not in name


ALL_CASES: list[Case] = [
    case for case in product(LAYOUTS, MODELS, RECOMPUTED) if has_meaning(case[0], case[1])
]


KINDS_MET = {1: 3, 2: 2, 4: 2}
"""How many kinds of model a layout meets in `make nightly`, by its processes."""
BY_DAY: list[Case] = [
    ("1", "tied", "none"),
    ("te", "moe", "selective"),
    ("tp 2 + sp", "tied", "selective"),
    ("sequence 2", "dense", "none"),
    ("vpp uneven", "dense", "full"),
    ("ep 2", "moe", "selective"),
    ("etp 1 x tp 2", "moe", "full"),
]
"""What `make test` runs: every way to share the work on two processes, every kind of model, every way to recompute."""


def cases_of_the_night() -> list[Case]:
    """Every layout, with so many kinds of model, of those that have a meaning; each way to recompute in turn."""
    pairs = []
    for i, (name, (world, _)) in enumerate(LAYOUTS.items()):
        kinds = [kind for kind in MODELS if has_meaning(name, kind)]
        met = range(min(KINDS_MET[world], len(kinds)))
        pairs += [(name, kinds[(i + number) % len(kinds)]) for number in met]
    return [(*pair, RECOMPUTED[i % len(RECOMPUTED)]) for i, pair in enumerate(pairs)]


def train_rank(
    layout: Layout, cases: Sequence[tuple[Path, Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    use_stand_ins()
    found = []
    for path, settings in cases:
        engine = make_engine(layout, path, kind="megatron", **settings)
        found.append(train(engine, make_examples(VOCAB), PER_MICRO[layout.world]))
        engine.close()
    return found


def sparse_rank(layout: Layout, path: Path) -> None:
    use_stand_ins()
    for name in ("tp 2 + sp", "sequence 2", "vpp"):
        make = partial(make_engine, layout, path, kind="megatron", **LAYOUTS[name][1])
        require_same_when_sparse(make, PER_MICRO[layout.world])


@pytest.mark.nightly
def test_tokens_without_a_gradient_are_left_out(models: dict[Shape, Path]) -> None:
    run_ranks(sparse_rank, 2, models["tied", EVEN])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Shape, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        (kind, layers): save_tiny(
            root / f"{kind} {layers}", family, torch.float32, **changes, num_hidden_layers=layers
        )
        for kind, (family, changes) in MODELS.items()
        for layers in (EVEN, UNEVEN)
    }


@pytest.fixture(scope="module")
def oracles(models: dict[Shape, Path]) -> dict[Shape, dict[str, Any]]:
    """What comes of the same by plain transformers, tensors by canonical name."""
    found = {}
    for shape, path in models.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        wanted = train_by_hand(model, make_examples(VOCAB))
        moments: dict[str, Tensor] = {}
        for slot in ("exp_avg", "exp_avg_sq"):
            of_slot = {n: wanted["slots"][f"{slot}/{n}"] for n, _ in model.named_parameters()}
            moments |= canonical(model, of_slot, f"{slot}/")
        gradients = canonical(model, wanted["gradients"])
        found[shape] = {
            **wanted,
            "gradients": gradients,
            "weights": canonical(model),
            "slots": moments,
        }
    return found


def canonical(
    model: PreTrainedModel, of_parameters: Mapping[str, Tensor] | None = None, prefix: str = ""
) -> dict[str, Tensor]:
    """The model's weights, or what there is of each, by the names that checkpoints have for them."""
    return {s.spec.name: s.tensor for s in model_shards(model, of_parameters, prefix)}


def check_cases(
    models: Mapping[Shape, Path],
    oracles: Mapping[Shape, Any],
    cases: Sequence[Case],
    timeout: float = PATIENCE_SECONDS,
) -> None:
    """Run cases of as many processes and compare all that their steps leave."""
    told = [
        (models[shape_of(case)], LAYOUTS[case[0]][1] | {"activation_checkpointing": case[2]})
        for case in cases
    ]
    ranks = run_ranks(train_rank, LAYOUTS[cases[0][0]][0], told, timeout=timeout)
    for number, case in enumerate(cases):
        found, wanted = [rank[number] for rank in ranks], oracles[shape_of(case)]
        require_alike(found, wanted, ("gradients", "weights", "slots"), f"{case}")
        assert sum(each["predictions"] for each in found) == wanted["predictions"], case


@pytest.mark.parametrize("world", [1, 2])
def test_layouts_train_like_one_plain_model(
    models: dict[Shape, Path], oracles: dict[Shape, dict[str, Any]], world: int
) -> None:
    check_cases(models, oracles, [case for case in BY_DAY if LAYOUTS[case[0]][0] == world])


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_layout_trains_like_one_plain_model(
    models: dict[Shape, Path], oracles: dict[Shape, dict[str, Any]], world: int
) -> None:
    cases = [case for case in cases_of_the_night() if LAYOUTS[case[0]][0] == world]
    check_cases(models, oracles, cases)


def test_what_meets_in_what_the_suite_runs() -> None:
    """By day every kind of model and every way to recompute on two processes; by night every layout, and each pair of them."""
    by_night = cases_of_the_night()
    assert {*BY_DAY, *by_night} <= set(ALL_CASES)
    assert {case[1:] for case in by_night} == set(product(MODELS, RECOMPUTED))
    assert {name for name, *_ in by_night} == set(LAYOUTS)
    on_two = [case for case in BY_DAY if LAYOUTS[case[0]][0] == 2]
    for place, all_of_them in ((1, MODELS), (2, RECOMPUTED)):
        assert {case[place] for case in on_two} == set(all_of_them)
        met = {(LAYOUTS[case[0]][0], case[place]) for case in by_night}
        assert met >= set(product((2, 4), all_of_them))


@pytest.mark.contract
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_whole_contract(
    models: dict[Shape, Path], oracles: dict[Shape, dict[str, Any]], name: str, kind: str
) -> None:
    cases = [case for case in ALL_CASES if case[:2] == (name, kind)]
    if cases:
        check_cases(models, oracles, cases, timeout=3500)

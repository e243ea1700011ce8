"""Every layout × kind of model × way to spare memory or time against one plain transformers model, in fp32.

`make test` runs a part (`BY_DAY`), `make nightly` one in which most pairs of these meet (`some_cases`); `make contract` runs all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import (
    CLIP,
    LR,
    STEPS,
    cut,
    examples_that_begin_alike,
    loss,
    require_alike,
    require_same_when_sparse,
    train,
    train_by_hand,
)
from support.models.adapters import RandomAdapter
from support.models.engines import CPU, OPTIM, make_engine
from support.models.tiny import VOCAB, WITH_STATE, save_tiny, tiny_config
from support.ranks.processes import PATIENCE_SECONDS, run_ranks
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from burnish.config.schema import EngineConfig, LoraConfig
from burnish.distributed.layout import Layout
from burnish.engines.base import LossFn, Part
from burnish.engines.factory import require_fitting
from burnish.engines.torch.tensor_parallel import share_matrices
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.errors import IncompatibleError, UsageError
from burnish.families import SIZE_FIELDS
from burnish.models.loading import FreshSource
from burnish.models.lora.adapter import Adapter
from burnish.models.meta_init import build_on_meta
from burnish.models.names import model_shards, regions
from burnish.models.scorer import Scorer
from burnish.models.value_head import value_config
from burnish.records import MicroBatch, TokenOutputs
from burnish.tracking.stats import Stats

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "fsdp 2": (2, {}),
    "tp 2": (2, {"tensor_parallel": 2}),
    "sp 2": (2, {"sequence_parallel": 2}),
    "fsdp 4": (4, {}),
    "hsdp 2x2": (4, {"replicas": 2}),
    "fsdp 2 x tp 2": (4, {"tensor_parallel": 2}),
    "fsdp 2 x sp 2": (4, {"sequence_parallel": 2}),
    "sp 2 x tp 2": (4, {"sequence_parallel": 2, "tensor_parallel": 2}),
    "hsdp 2 x tp 2": (4, {"replicas": 2, "tensor_parallel": 2}),
    "hsdp 2 x sp 2": (4, {"replicas": 2, "sequence_parallel": 2}),
}
MODELS: dict[str, tuple[str, dict[str, bool]]] = {
    "dense": ("qwen3", {"tie_word_embeddings": False}),
    "tied": ("gemma3_text", {}),  # with sliding windows and soft-capped logits
    "moe": ("qwen3_moe", {}),  # with a dense layer among those of experts
    "mixtral": ("mixtral", {}),  # with sliding windows
}
ADAPTED = LoraConfig(rank=4)
"""The kind `adapter` is the dense model with it."""
KINDS = (*MODELS, "adapter")
SPARING: dict[str, dict[str, Any]] = {
    "nothing": {},
    "full checkpointing": {"activation_checkpointing": "full"},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "offload": {"activation_offload": True},
    "weights and gradients kept whole": {
        "reshard_after_forward": False,
        "reduce_each_microbatch": False,
    },
    "compiled": {"compile": True},
}
Case = tuple[str, str, str]
"""Layout, kind of model, what is spared."""
ALL_CASES: list[Case] = list(product(LAYOUTS, KINDS, SPARING))
PER_MICRO = {1: 3, 2: 2, 4: 1}
"""Sequences in a micro-batch, by processes: with five sequences, some ranks have none in the last round."""


def train_rank(
    layout: Layout, cases: Sequence[tuple[Path, Mapping[str, Any], LoraConfig | None]]
) -> list[dict[str, Any]]:
    found = []
    for path, settings, lora in cases:
        engine = make_engine(layout, path, lora=lora, **settings)
        found.append(train(engine, examples_that_begin_alike(VOCAB), PER_MICRO[layout.world]))
        engine.close()
    return found


def oracle(path: Path, lora: LoraConfig | None = None) -> dict[str, Any]:
    """What comes of the same by plain transformers (and PEFT), tensors by canonical name."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    parts = Adapter(model, lora).weights if lora else regions(model)
    if lora:
        RandomAdapter().fill(model_shards(model, parts=parts))
    wanted = train_by_hand(model, examples_that_begin_alike(VOCAB))
    return wanted | {
        kind: {s.spec.name: s.tensor for s in model_shards(model, tensors, parts=parts)}
        for kind, tensors in (("gradients", wanted["gradients"]), ("weights", None))
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {
        kind: save_tiny(root / kind, family, torch.float32, **changes)
        for kind, (family, changes) in MODELS.items()
    }
    return made | {"adapter": made["dense"]}


@pytest.fixture(scope="module")
def oracles(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    return {
        kind: oracle(path, ADAPTED if kind == "adapter" else None) for kind, path in models.items()
    }


KINDS_MET = {1: 5, 2: 2, 4: 1}
"""How many kinds of model a layout meets at least, by its processes."""
KINDS_MET_BY_NIGHT = {1: 5, 2: 5, 4: 2}
ON_FOUR_BY_DAY = ("hsdp 2x2", "fsdp 2 x tp 2", "hsdp 2 x sp 2")


def some_cases(kinds_met: Mapping[int, int]) -> list[Case]:
    """Every layout with some kinds of model; without compilation, which takes long (`test_compilation.py` has one case)."""
    ways = [way for way in SPARING if way != "compiled"]
    return [
        (name, kind, ways[(i + j + 2 * (i // len(ways))) % len(ways)])
        for i, name in enumerate(LAYOUTS)
        for j, kind in enumerate(KINDS)
        if (j - i) % len(KINDS) < kinds_met[LAYOUTS[name][0]]
    ]


def check_cases(
    models: Mapping[str, Path],
    oracles: Mapping[str, Any],
    cases: Sequence[Case],
    timeout: float = PATIENCE_SECONDS,
    parts: Sequence[str] = ("gradients", "weights"),
) -> None:
    """Run cases of as many processes, and compare loss, norm, log-probs, gradients and weights with the plain model's."""
    told = [
        (models[kind], LAYOUTS[name][1] | SPARING[way], ADAPTED if kind == "adapter" else None)
        for name, kind, way in cases
    ]
    ranks = run_ranks(train_rank, LAYOUTS[cases[0][0]][0], told, timeout=timeout)
    for number, case in enumerate(cases):
        found = [rank[number] for rank in ranks]
        require_alike(found, oracles[case[1]], parts, f"{case}")


BY_DAY = [
    case for case in some_cases(KINDS_MET) if LAYOUTS[case[0]][0] < 4 or case[0] in ON_FOUR_BY_DAY
]
"""What `make test` runs: every layout of fewer than four processes."""


CASES: list[Case] = [
    ("1", "gpt_oss", "selective checkpointing"),
    ("1", "gemma2", "full checkpointing"),
    ("fsdp 2", "gpt_oss", "nothing"),
    ("fsdp 2", "mimo_v2_flash", "offload"),
    ("sp 2", "gpt_oss", "full checkpointing"),
    ("sp 2", "gemma2", "nothing"),
    ("tp 2", "gemma2", "selective checkpointing"),
    ("tp 2", "granite_swa", "nothing"),
]
"""Of families with sinks or soft caps; transformers has no plan to cut gpt-oss."""


@pytest.mark.parametrize("world", [1, 2, 4])
def test_layouts_train_like_one_plain_model(
    models: dict[str, Path], oracles: dict[str, dict[str, Any]], world: int
) -> None:
    check_cases(models, oracles, [case for case in BY_DAY if LAYOUTS[case[0]][0] == world])


@pytest.mark.parametrize(
    "cases",
    [
        CASES[4::2],
        *(
            pytest.param(cases, marks=pytest.mark.nightly)
            for cases in (CASES[:2], [*CASES[2:4], *CASES[5::2]])
        ),
    ],
    ids=len,
)
def test_sinks_and_soft_caps(tmp_path: Path, cases: Sequence[Case]) -> None:
    families = {family for _, family, _ in cases}
    paths = {family: save_tiny(tmp_path / family, family, torch.float32) for family in families}
    check_cases(paths, {family: oracle(path) for family, path in paths.items()}, cases)


STATE_CASES: dict[int, list[tuple[str, str]]] = {
    1: [("1", "nothing"), ("1", "selective checkpointing")],
    2: [("fsdp 2", "full checkpointing"), ("sp 2", "offload")],
    4: [("fsdp 2 x sp 2", "nothing"), ("hsdp 2 x sp 2", "weights and gradients kept whole")],
}
"""Layouts, by processes, at which layers with state are trained, each with a way to spare memory."""


@pytest.mark.parametrize(
    ("world", "families"),
    [
        (2, ("qwen3_5_moe_text", "granitemoehybrid")),
        *(
            pytest.param(world, families, marks=pytest.mark.nightly)
            for world, families in (
                (1, tuple(WITH_STATE)),
                (2, ("qwen3_5_text", "qwen3_next", "lfm2")),
                (4, tuple(WITH_STATE)),
            )
        ),
    ],
)
def test_layers_with_state_train_like_one_plain_model(
    tmp_path: Path, world: int, families: Sequence[str]
) -> None:
    models = {family: save_tiny(tmp_path / family, family, torch.float32) for family in families}
    oracles = {family: oracle(path) for family, path in models.items()}
    cases = [(name, family, way) for name, way in STATE_CASES[world] for family in families]
    # Not weights: gradients of decays are so near 0 that AdamW makes steps of their rounding.
    check_cases(models, oracles, cases, parts=("gradients",))


@pytest.mark.parametrize("family", WITH_STATE)
def test_layers_with_state_are_not_cut(family: str) -> None:
    with pytest.raises(UsageError):
        require_fitting(tiny_config(family), EngineConfig(tensor_parallel=2))


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_trains_like_one_plain_model(
    models: dict[str, Path], oracles: dict[str, dict[str, Any]], world: int
) -> None:
    cases = [each for each in some_cases(KINDS_MET_BY_NIGHT) if each not in BY_DAY]
    check_cases(models, oracles, [case for case in cases if LAYOUTS[case[0]][0] == world])


@pytest.mark.contract
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_contract(
    models: dict[str, Path], oracles: dict[str, dict[str, Any]], name: str, kind: str
) -> None:
    check_cases(models, oracles, [(name, kind, way) for way in SPARING], timeout=3500)


def test_what_meets_in_what_the_suite_runs() -> None:
    """But for compilation: by day every kind of model on several processes, and every way to spare on two; by night every layout and every pair of kind and way, on four every way."""
    ways = {way for way in SPARING if way != "compiled"}
    by_night = some_cases(KINDS_MET_BY_NIGHT)
    assert set(BY_DAY) <= set(by_night)
    assert {name for name, *_ in by_night} == set(LAYOUTS)
    assert {kind for name, kind, _ in BY_DAY if LAYOUTS[name][0] > 1} == set(KINDS)
    assert {way for name, _, way in BY_DAY if LAYOUTS[name][0] == 2} == ways
    assert {(LAYOUTS[name][0], way) for name, _, way in by_night} == set(product(KINDS_MET, ways))
    assert {case[1:] for case in by_night} == set(product(KINDS, ways))
    on_four = Counter(kind for name, kind, _ in by_night if LAYOUTS[name][0] == 4)
    assert min(on_four[kind] for kind in KINDS) == 2


def sparse_rank(layout: Layout, path: Path, names: Sequence[str]) -> None:
    for name in names:
        make = partial(make_engine, layout, path, **LAYOUTS[name][1])
        require_same_when_sparse(make, PER_MICRO[layout.world])


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_tokens_without_a_gradient_are_left_out(models: dict[str, Path], world: int) -> None:
    names = [name for name, (processes, _) in LAYOUTS.items() if processes == world]
    run_ranks(sparse_rank, world, models["dense"], names)


def poisoned(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
    """A loss that is not finite where there is something to train on."""
    value, stats = loss(outputs, micro)
    return value * (float("nan") if bool(micro.loss_mask.any()) else 1.0), stats


def idle_rank(
    layout: Layout, cases: Sequence[tuple[Path, Mapping[str, Any], LoraConfig | None]]
) -> list[tuple[float, float, float, int]]:
    """With one sequence for all ranks: loss, norm, whether a poisoned step is skipped, and the steps taken."""
    found = []
    for path, settings, lora in cases:
        engine = make_engine(layout, path, lora=lora, **settings)
        batch = cut(examples_that_begin_alike(VOCAB)[:1], engine.layout, 1)
        value = engine.forward_backward(batch, loss).values_by_name()["loss"]
        norm = engine.optim_step(LR).values_by_name()["grad_norm"]
        engine.forward_backward(batch, poisoned)
        skipped = engine.optim_step(LR).values_by_name()["skipped"]
        found.append((value, norm, skipped, engine.steps))
    return found


IDLE: dict[str, dict[str, float]] = {
    "dense": {},
    "mixtral": {"router_aux_loss": 0.1},
    "adapter": {},
}
"""Kinds of model that some ranks have no data for, with settings."""


def require_idle(models: Mapping[str, Path], cases: Sequence[tuple[str, str]]) -> None:
    """At these layouts of four processes with these kinds of model all is as on one process."""

    def told(kind: str, layout: Mapping[str, int]) -> tuple[Path, Any, LoraConfig | None]:
        return models[kind], IDLE[kind] | layout, ADAPTED if kind == "adapter" else None

    (alone,) = run_ranks(idle_rank, 1, [told(kind, {}) for kind in IDLE])
    wanted = {kind: (value, norm) for kind, (value, norm, *_) in zip(IDLE, alone, strict=True)}
    for rank in run_ranks(idle_rank, 4, [told(kind, LAYOUTS[name][1]) for name, kind in cases]):
        for (name, kind), found in zip(cases, rank, strict=True):
            assert found[:2] == pytest.approx(wanted[kind], rel=1e-5), (name, kind)
            assert found[2:] == (1.0, 1), (name, kind)


ON_FOUR = [name for name, (world, _) in LAYOUTS.items() if world == 4]


def test_ranks_without_data_and_a_nan_on_one_share(models: dict[str, Path]) -> None:
    require_idle(models, list(zip(ON_FOUR_BY_DAY, IDLE, strict=True)))


@pytest.mark.nightly
def test_ranks_without_data_and_a_nan_at_every_layout(models: dict[str, Path]) -> None:
    require_idle(models, list(product(ON_FOUR, IDLE)))


@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("qwen3", {"sequence_parallel": 3}, "engine.sequence_parallel: 3, 4 "),
        ("qwen3", {"tensor_parallel": 4}, "engine.tensor_parallel: 4, 2 "),
        (
            "qwen3",
            {"tensor_parallel": 2, "sequence_parallel": 4},
            "engine.sequence_parallel: 4, 2 .* 2 tensor ranks",
        ),
        ("olmo2", {"tensor_parallel": 2}, r"olmo2(.|\n)*colwise_gather_output"),
    ],
)
def test_what_cannot_be_shared_is_refused(family: str, settings: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        require_fitting(tiny_config(family), EngineConfig(**settings))


def test_a_bias_behind_a_sum_over_ranks_is_refused() -> None:
    scorer = Scorer(build_on_meta(tiny_config("llama", attention_bias=True)))
    with pytest.raises(IncompatibleError, match=r"layers\.0\.self_attn\.o_proj\.bias"):
        share_matrices(scorer, FakeGroup())


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {"attention_bias": True}), ("cohere", {"use_qk_norm": True})]
)
def test_what_tensor_parallelism_cannot_cut_is_refused_before_a_run(
    family: str, changes: dict[str, bool]
) -> None:
    fields = {name: tiny_config("llama").to_dict()[name] for name in SIZE_FIELDS[:4]}
    config = AutoConfig.for_model(family, **fields, **changes)
    with pytest.raises(IncompatibleError):
        require_fitting(config, EngineConfig(tensor_parallel=2))


def rank_with_ends(layout: Layout, paths: Sequence[Path]) -> list[list[bool]]:
    """Of each model, whether the embeddings and the output layer are sharded apart."""
    apart = []
    for path in paths:
        engine = make_engine(layout, path)
        model = engine._scorer.model
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        apart.append([isinstance(each, FSDPModule) for each in ends])
        engine.close()
    return apart


def test_embeddings_and_output_layer_are_sharded_apart_unless_they_are_one(tmp_path: Path) -> None:
    paths = [
        save_tiny(tmp_path / str(tied), "qwen3", torch.float32, tie_word_embeddings=tied)
        for tied in (False, True)
    ]
    assert run_ranks(rank_with_ends, 1, paths) == [[[True, True], [False, False]]]


def test_a_family_without_a_plan_is_refused() -> None:
    config = tiny_config("llama")
    config.base_model_tp_plan = None
    with pytest.raises(UsageError):
        require_fitting(config, EngineConfig(tensor_parallel=2))


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (
            ".mlp.",
            r"model\.layers\.0\.mlp",
        ),  # would compute on the tokens of its own rank
        ("down_proj", r"mlp\.down_proj\.weight"),  # every rank would add all of it to a sum
    ],
)
def test_a_plan_that_leaves_a_part_whole_is_refused(left: str, said: str) -> None:
    config = tiny_config("llama")
    plan = config.base_model_tp_plan
    config.base_model_tp_plan = {name: s for name, s in plan.items() if left not in name}
    scorer = Scorer(build_on_meta(config))
    with pytest.raises(IncompatibleError, match=said):
        share_matrices(scorer, FakeGroup())


def other_config(family: str) -> PretrainedConfig:
    """As tiny as the others, of any family with a Llama's fields."""
    fields = tiny_config("llama").to_dict()
    return AutoConfig.for_model(family, **{k: v for k, v in fields.items() if k != "model_type"})


class FakeGroup:
    """As much of a process group as says which rank this is."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def numbers_of(engine: TorchEngine, loss_of: LossFn) -> list[float]:
    batch = cut(examples_that_begin_alike(VOCAB), engine.layout, 2)
    numbers = []
    for _ in range(STEPS):
        numbers.append(engine.forward_backward(batch, loss_of).values_by_name()["loss"])
        numbers.append(engine.optim_step(LR).values_by_name()["grad_norm"])
    return numbers


def squared(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
    """The mean square of the values that are trained on."""
    values = torch.where(micro.loss_mask, outputs.values - 0.5, 0.0)
    return values.square().sum() / micro.num_tokens, Stats()


def other_families_rank(layout: Layout, settings: Mapping[str, int]) -> list[list[float]]:
    """Losses and gradient norms of families that nothing is written for; seed_oss has dropout outside of attention, which is not computed."""
    found = []
    for family in ("granite", "smollm3", "seed_oss"):
        hf_config = other_config(family)
        config = EngineConfig(precision="fp32", max_grad_norm=CLIP, **settings)
        engine = TorchEngine(hf_config, config, OPTIM, layout=layout, device=CPU)
        engine.load(FreshSource(hf_config, 3), Part.WEIGHTS)
        found.append(numbers_of(engine, loss))
    return found


@pytest.mark.nightly
def test_other_families_follow_their_plan() -> None:
    (wanted,) = run_ranks(other_families_rank, 1, {})
    for rank in run_ranks(other_families_rank, 2, {"tensor_parallel": 2}):
        for numbers, expected in zip(rank, wanted, strict=True):
            assert numbers == pytest.approx(expected, rel=1e-5)


def value_rank(layout: Layout, layouts: Sequence[Mapping[str, int]]) -> list[list[float]]:
    """Losses and gradient norms of a model with a value head."""
    hf_config = value_config(tiny_config("qwen3"))
    found = []
    for settings in layouts:
        config = EngineConfig(precision="fp32", max_grad_norm=CLIP, **settings)
        engine = TorchEngine(hf_config, config, OPTIM, layout=layout, device=CPU)
        engine.load(FreshSource(hf_config, 3), Part.WEIGHTS)
        found.append(numbers_of(engine, squared))
    return found


def test_values_are_those_of_one_process() -> None:
    layouts = [settings for ranks, settings in LAYOUTS.values() if ranks == 2]
    (wanted,) = run_ranks(value_rank, 1, [{}])[0]
    for rank in run_ranks(value_rank, 2, layouts):
        for numbers in rank:
            assert numbers == pytest.approx(wanted, rel=1e-5)

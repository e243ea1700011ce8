"""`burnish check` passes what is right, and finds and names planted faults, at every kind of layout.

Cases of as many processes share one launch of them, because launching is most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.faulty_engines import ENGINES, OneGradient
from support.models.tiny import FAMILIES, save_tiny, tiny_config
from support.models.tokenizers import char_tokenizer
from support.ranks.processes import run_ranks
from support.runs.training_files import RL, SFT, burnish, done, make_files

from burnish.check import family_proof
from burnish.check.comparison import TOLERANCE, require_equal
from burnish.check.family_proof import small_material
from burnish.config.schema import CriticConfig, RunConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.engines.base import Engine
from burnish.engines.factory import require_fitting
from burnish.engines.megatron.megatron_engine import MegatronEngine
from burnish.errors import BurnishError
from burnish.methods.layout_check import checked_models, compare_model
from burnish.runs.setup import lay_foundation

CPU = torch.device("cpu")


def faulty_maker(kind: str) -> Any:
    """What makes an engine with a fault, in place of `make_engine`."""
    of_megatron = issubclass(ENGINES[kind], MegatronEngine)

    def make(*settings: Any, beside: None, lora: Any, **options: Any) -> Engine:
        return ENGINES[kind](*settings, **options, **({} if of_megatron else {"lora": lora}))

    return make


def config_of(root: Path, settings: dict[str, Any], **changes: Any) -> RunConfig:
    data = {"train": [str(root / "train.jsonl")]}
    model = {"tokenizer": str(root / "tokenizer"), "fresh": settings["model"]["fresh"]}
    reward = {"functions": [{"function": "exact_match"}]} if "reward" in settings else {}
    return RunConfig.model_validate(
        settings | {"data": data, "model": model, "reward": reward} | changes
    )


def of_family(
    root: Path,
    family: str,
    settings: dict[str, Any],
    shape: dict[str, Any] | None = None,
    **changes: Any,
) -> RunConfig:
    """A configuration of another family's model."""
    fresh = tiny_config(family, **(shape or {})).to_diff_dict()
    model = {"tokenizer": str(root / "tokenizer")}
    model["fresh"] = {**fresh, "vocab_size": len(char_tokenizer())}
    return config_of(root, settings, model=model, **changes)


@dataclass(frozen=True)
class Case:
    """An engine that is checked."""

    config: RunConfig
    kind: str = "right"
    """Of `ENGINES`, or the one that the configuration names."""
    critic: bool = False


@dataclass(frozen=True)
class Checked:
    """What came of it."""

    refusal: str
    """Empty where nothing differs."""
    compared: tuple[str, ...]
    worst: float
    """The largest difference."""
    wrong: tuple[str, ...]
    """What differs by more than is allowed."""

    @property
    def kinds(self) -> list[str]:
        return [what.split(" ")[0] for what in self.compared]


def check_ranks(layout: Layout, cases: Sequence[Case]) -> list[Checked]:
    return [check_rank(layout, case) for case in cases]


def check_rank(layout: Layout, case: Case) -> Checked:
    foundation = checked_models(lay_foundation(case.config))["critic" if case.critic else "policy"]
    with pytest.MonkeyPatch.context() as patch:
        if case.kind != "right":
            patch.setattr(family_proof, "make_engine", faulty_maker(case.kind))
        differences = compare_model(foundation, layout, CPU)
    refusal = ""
    try:
        require_equal(differences, layout)
    except BurnishError as error:
        refusal = str(error)
    compared_things = tuple(d.what for d in differences)
    wrong = tuple(d.what for d in differences if d.error > TOLERANCE)
    return Checked(refusal, compared_things, max(d.error for d in differences), wrong)


def checked(world: int, *cases: Case) -> list[Checked]:
    """What every rank finds of the cases; a single rank in this process."""
    if world == 1:
        with process_group(CPU, 60.0) as layout:
            return check_ranks(layout, cases)
    first, *others = run_ranks(check_ranks, world, cases)
    assert all(rank == first for rank in others)
    return list(first)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("check"))


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_right_layouts_pass(root: Path, world: int) -> None:
    for found in checked(world, *(Case(config_of(root, each)) for each in (SFT, RL))):
        assert found.refusal == ""
        assert 0 < found.worst < 1e-5
        order = ["log-probs", "entropies", "loss", "gradient", "weight"]
        assert found.kinds == sorted(found.kinds, key=order.index)
        assert set(found.kinds) == set(order)


@pytest.mark.nightly
def test_layouts_that_share_a_micro_batch_or_the_weights_pass(root: Path) -> None:
    cases = [
        Case(config_of(root, RL, engine={"precision": "fp32", shared: 2}))
        for shared in ("sequence_parallel", "tensor_parallel", "replicas")
    ]
    sequence, tensor, replicas = checked(2, *cases)
    assert (sequence.refusal, tensor.refusal, replicas.refusal) == ("", "", "")
    assert max(sequence.worst, tensor.worst, replicas.worst) < 1e-5
    copies = [each.kinds.count("copies") for each in (sequence, tensor, replicas)]
    names = sum(each.startswith("weight ") for each in replicas.compared)
    norms = sum("norm" in each for each in replicas.compared if each.startswith("weight "))
    assert copies == [0, 3 * norms, 3 * names]  # with two moments of each


@pytest.mark.parametrize(
    "families",
    [("mixtral", "qwen3"), pytest.param(sorted(FAMILIES), marks=pytest.mark.nightly)],
    ids=len,
)
def test_every_family_passes(root: Path, families: Sequence[str]) -> None:
    cases = [Case(of_family(root, family, SFT)) for family in families]
    for family, found in zip(families, checked(1, *cases), strict=True):
        assert (found.refusal, found.worst < 1e-5) == ("", True), family


FAULTS = {
    "WithoutSync": "gradient norm",
    "WithoutTensorSum": "gradient norm",
    "Averaging": "gradient norm",
    "ScaledLoss": "loss",
    "OffByOne": "loss",
    "ShiftedColumn": "loss",
}
"""And what differs first."""
DEGREES = ({}, {"sequence_parallel": 2}, {"tensor_parallel": 2}, {"replicas": 2})


def sharing(root: Path, degrees: dict[str, int]) -> RunConfig:
    """A layout of the torch engine, with gradients that are clipped a lot."""
    return config_of(root, SFT, engine={"precision": "fp32", "max_grad_norm": 0.01} | degrees)


@pytest.mark.parametrize(
    "layouts", [DEGREES[:1], pytest.param(DEGREES[1:], marks=pytest.mark.nightly)], ids=len
)
def test_planted_faults_are_found_and_named_at_every_layout(
    root: Path, layouts: Sequence[dict[str, int]]
) -> None:
    missing = {True: "WithoutSync", False: "WithoutTensorSum"}  # by what a layout does not have
    cases = [
        Case(sharing(root, degrees), fault)
        for degrees in layouts
        for fault in FAULTS
        if fault != missing["tensor_parallel" in degrees]
    ]
    for case, found in zip(cases, checked(2, *cases), strict=True):
        layout = (case.config.engine, case.kind)
        first, *_ = found.refusal.splitlines()
        assert f": {FAULTS[case.kind]} " in first, layout
        wrong = [each for each in found.wrong if each.startswith("gradient of ")]
        assert first.endswith(wrong[0]), layout
        if case.kind == "WithoutTensorSum":  # the norms are what tensor ranks have whole
            gradients = [each for each in found.compared if each.startswith("gradient of ")]
            assert wrong == [each for each in gradients if each.endswith("norm.weight")], layout


@pytest.mark.parametrize(
    "layouts", [DEGREES[2:3], pytest.param(DEGREES, marks=pytest.mark.nightly)], ids=len
)
def test_a_fault_in_one_gradient_is_found_in_that_alone_at_every_layout(
    root: Path, layouts: Sequence[dict[str, int]]
) -> None:
    cases = [Case(sharing(root, degrees), "OneGradient") for degrees in layouts]
    at_fault = f"gradient of {OneGradient.parameter}"
    for case, found in zip(cases, checked(2, *cases), strict=True):
        assert found.wrong == ("gradient norm", at_fault), case.config.engine
        assert found.refusal.splitlines()[0].endswith(at_fault)
        assert " 1.0e-01; 2 of " in found.refusal


@pytest.mark.nightly
def test_a_wrong_balance_is_found_and_named(root: Path) -> None:
    balanced = evened(root, "mixtral", SFT)
    faults = {"WrongBalance": "load-balancing loss", "WrongBalanceGradient": "gradient of"}
    cases = [Case(balanced, fault) for fault in faults]
    for (fault, first), found in zip(faults.items(), checked(2, *cases), strict=True):
        assert f": {first} " in found.refusal, fault


def test_a_copy_that_is_not_the_others_is_found_and_named(root: Path) -> None:
    cases = [
        Case(config_of(root, SFT, engine={"precision": "fp32", shared: 2}), "Drifting")
        for shared in ("replicas", "tensor_parallel")
    ]
    whole, shared = checked(2, *cases)
    assert ": copies of model.embed_tokens.weight " in whole.refusal
    assert ": weight model.embed_tokens.weight " in shared.refusal
    named = {each for each in shared.compared if each.startswith("copies of model")}
    assert "copies of model.norm.weight" in named


def test_a_temperature_that_is_left_out_is_found(root: Path) -> None:
    for found in checked(1, *(Case(config_of(root, each), "AtOne") for each in (SFT, RL))):
        assert ": log-probs of sequence 0 " in found.refusal


@pytest.mark.nightly
def test_an_adapter_is_compared(root: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "qwen3", vocab_size=len(char_tokenizer()))
    model = {
        "path": str(tmp_path / "base"),
        "tokenizer": str(root / "tokenizer"),
        "lora": {"rank": 3},
    }
    config = config_of(root, RL, model=model)
    right, wrong = checked(2, Case(config), Case(config, "Averaging"))
    assert right.refusal == ""
    assert ": gradient norm " in wrong.refusal
    for found in (right, wrong):
        gradients = {each for each in found.compared if each.startswith("gradient of")}
        assert len(gradients) == 2 * 2 * 7
        assert all("base_model.model." in each for each in gradients)


def megatron(
    root: Path, family: str, settings: dict[str, Any], layers: int, **degrees: Any
) -> RunConfig:
    engine = {"kind": "megatron", "precision": "fp32"} | degrees
    return of_family(root, family, settings, {"num_hidden_layers": layers}, engine=engine)


UNEVEN = {"pipeline_model_parallel_layout": "Et|t*11L"}
"""Of a model that has more layers than the small one."""


@pytest.mark.nightly
def test_layouts_of_the_megatron_engine_pass(root: Path) -> None:
    cases = [
        Case(megatron(root, "qwen3", RL, 4, tensor_parallel=2)),
        Case(megatron(root, "llama", SFT, 4, pipeline_parallel=2, virtual_stages=2)),
        Case(megatron(root, "qwen3_moe", RL, 4, expert_parallel=2)),
        Case(megatron(root, "llama", SFT, 12, pipeline_parallel=2, megatron=UNEVEN)),
    ]
    for found in checked(2, *cases):
        assert (found.refusal, found.worst < 1e-5) == ("", True)
        kinds = {"log-probs", "entropies", "loss", "gradient", "weight"}
        assert set(found.kinds) - {"copies"} == kinds


MEGATRON_FAULTS = {
    "MegatronWithoutSync": "gradient norm",
    "MegatronScaledLoss": "loss",
    "MegatronOffByOne": "loss",
}
"""And what differs first."""
MEGATRON_DEGREES = (
    {},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"sequence_parallel": 2},
    {"expert_parallel": 2},
)


@pytest.mark.nightly
def test_faults_of_the_megatron_engine_are_found_and_named_at_every_layout(root: Path) -> None:
    cases = [
        Case(
            megatron(
                root, "qwen3_moe" if "expert_parallel" in degrees else "qwen3", SFT, 2, **degrees
            ),
            fault,
        )
        for degrees in MEGATRON_DEGREES
        for fault in MEGATRON_FAULTS
    ]
    for case, found in zip(cases, checked(2, *cases), strict=True):
        first = MEGATRON_FAULTS[case.kind]
        assert f": {first} " in found.refusal, (case.config.engine, case.kind)


def evened(root: Path, family: str, settings: dict[str, Any], **engine: Any) -> RunConfig:
    """A configuration of a mixture with a load-balancing loss."""
    engine = settings["engine"] | {"precision": "fp32", "router_aux_loss": 0.01} | engine
    return of_family(root, family, settings, engine=engine)


@pytest.mark.nightly
def test_the_balance_of_experts_is_compared(root: Path) -> None:
    configs = [
        evened(root, "mixtral", RL),
        evened(root, "qwen3_moe", RL, sequence_parallel=2, activation_checkpointing="full"),
        evened(root, "qwen3_moe", RL, tensor_parallel=2),
        evened(root, "qwen3_moe", RL, kind="megatron", expert_parallel=2),
        evened(root, "glm4_moe", RL),
        evened(root, "glm4_moe", RL, kind="megatron", pipeline_parallel=2),
        evened(root, "gpt_oss", RL, kind="megatron", tensor_parallel=2),
        evened(root, "ernie4_5_moe", RL, router_bias_update_rate=0.01),
        evened(
            root,
            "ernie4_5_moe",
            RL,
            kind="megatron",
            expert_parallel=2,
            router_bias_update_rate=0.01,
        ),
    ]
    for config, found in zip(configs, checked(2, *map(Case, configs)), strict=True):
        assert found.refusal == "", config.engine
        assert found.compared[16:19] == ("load-balancing loss", "loss", "gradient norm")


CRITICS: list[dict[str, Any]] = [
    {},
    {"sequence_parallel": 2},
    {"tensor_parallel": 2},
    {"activation_checkpointing": "full", "replicas": 2},
    {"kind": "megatron", "pipeline_parallel": 2},
]


@pytest.mark.parametrize(
    "layouts", [CRITICS[:1], pytest.param(CRITICS[1:], marks=pytest.mark.nightly)], ids=len
)
def test_a_critic_is_compared(root: Path, layouts: list[dict[str, Any]]) -> None:
    gae = {"advantage": "gae"}
    configs = [
        config_of(root, RL, algorithm=gae, engine=RL["engine"] | layout) for layout in layouts
    ]
    cases = [Case(config, critic=True) for config in configs]
    *right, wrong = checked(2, *cases, Case(configs[0], "OffByOne", critic=True))
    assert [found.refusal for found in right] == [""] * len(layouts)
    assert ": loss " in wrong.refusal
    for found in (*right, wrong):
        assert {"gradient of score.weight", "weight score.bias"} <= set(found.compared)
        assert found.kinds.count("values") == 8


@pytest.mark.nightly
def test_the_experts_of_a_critic_are_evened_out_where_it_has_some(
    root: Path, tmp_path: Path
) -> None:
    path = save_tiny(tmp_path / "dense", "qwen3", vocab_size=len(char_tokenizer()))
    mixture = evened(root, "mixtral", RL | {"algorithm": {"advantage": "gae"}})
    dense = mixture.model_copy(update={"critic": CriticConfig(path=str(path))})
    found = checked(2, Case(mixture, critic=True), Case(dense, critic=True))
    assert [each.refusal for each in found] == ["", ""]
    assert [each.compared.count("load-balancing loss") for each in found] == [1, 0]


@pytest.mark.parametrize(
    ("family", "degrees"),
    [
        ("qwen3", {"pipeline_parallel": 3, "virtual_stages": 2}),
        ("llama", {"tensor_parallel": 3, "pipeline_parallel": 2}),
        ("qwen3_moe", {"expert_parallel": 6, "expert_tensor_parallel": 3}),
    ],
    ids=str,
)
@pytest.mark.nightly
def test_a_shrunken_model_can_be_cut_as_the_whole_one(
    root: Path, family: str, degrees: dict[str, int]
) -> None:
    sizes = {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 6}
    sizes |= {"hidden_size": 96}
    sizes |= {"num_experts": 12, "moe_intermediate_size": 96} if "moe" in family else {}
    whole = tiny_config(family, intermediate_size=384, **sizes)
    fresh = {**whole.to_diff_dict(), "vocab_size": len(char_tokenizer())}
    model = {"tokenizer": str(root / "tokenizer"), "fresh": fresh}
    config = config_of(root, SFT, engine={"kind": "megatron"} | degrees, model=model)
    hf_config = lay_foundation(config).hf_config
    require_fitting(small_material(hf_config, config.engine, None).hf_config, config.engine)


@pytest.mark.nightly
def test_as_a_command(root: Path) -> None:
    done(root, "check", "sft.yaml", world=2)
    code, output = burnish(root, "check", "rl.yaml", "--processes", "2", "engine.replicas=2")
    assert code == 0, output
    assert "2 processes compute what one plain process does" in output
    code, output = burnish(root, "check", "sft.yaml", "--processes", "3", "engine.replicas=2")
    assert code == 2
    assert "engine.replicas: 2, 3 processes" in output
    code, output = burnish(root, "check", "sft.yaml", "--processes", "0")
    assert code == 2
    assert "--processes" in output

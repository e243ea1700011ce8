"""Each loss of preferences and its gradient against TRL's own trainers, in fp32: the same rows, model and reference."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.models.engines import CPU, make_engine, make_frozen
from support.models.tiny import save_base, save_classifier
from support.runs.training_files import write_rows

from burnish.config.schema import OptimConfig, RunConfig
from burnish.data.preferences import PreferenceDataset
from burnish.data.sources import load_rows
from burnish.data.tokenizer import load_tokenizer
from burnish.distributed.processes import process_group
from burnish.engines.base import Engine, Part
from burnish.methods.dpo import DPO
from burnish.methods.pairs import PairMethod
from burnish.methods.parts.offline_training import Models
from burnish.methods.parts.references import ReferencedItems, reference_logprobs
from burnish.methods.reward_modeling import RewardModeling
from burnish.models.loading import read_model_config
from burnish.models.meta_init import count_flops

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),  # of TRL's own
    pytest.mark.skipif(find_spec("trl") is None, reason="make nightly-environments installs TRL"),
]
BETA = 0.5
PAIRS = [
    {"prompt": "1+1=", "chosen": "2", "rejected": "11, of course"},
    {"prompt": "Name a fruit: ", "chosen": "a ripe pear", "rejected": "a stone"},
    {"prompt": "7-3=", "chosen": "four, or 4", "rejected": "5"},
    {"prompt": "Say: ", "chosen": "yes", "rejected": "no, I will not"},
]
KEEPS_FIRST_MOMENT = 0.5
Found = tuple[float, dict[str, np.ndarray]]
"""A loss, and gradients by name."""

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({}, {"loss_type": ["sigmoid"]}),
    "ipo": ({"loss": {"ipo": 1.0}}, {"loss_type": ["ipo"]}),
    "hinge": ({"loss": {"hinge": 1.0}}, {"loss_type": ["hinge"]}),
    "apo_zero": ({"loss": {"apo_zero": 1.0}}, {"loss_type": ["apo_zero"]}),
    "apo_down": ({"loss": {"apo_down": 1.0}}, {"loss_type": ["apo_down"]}),
    "robust": (
        {"loss": {"robust": 1.0}, "label_smoothing": 0.2},
        {"loss_type": ["robust"], "label_smoothing": 0.2},
    ),
    "normalized": ({"length_normalized": True}, {"loss_type": ["sigmoid_norm"]}),
    "sum": (
        {"loss": {"sigmoid": 0.8, "apo_zero": 0.3, "ipo": 0.1}},
        {"loss_type": ["sigmoid", "apo_zero", "ipo"], "loss_weights": [0.8, 0.3, 0.1]},
    ),
}
"""By name, our settings and TRL's arguments."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("trl")
    for seed, name in enumerate(("policy", "reference")):
        save_base(work / name, seed)
    save_classifier(work / "judge")
    return work


def arguments(work: Path, **changes: Any) -> dict[str, Any]:
    size = len(PAIRS)
    common = {"output_dir": str(work / "out"), "use_cpu": True, "bf16": False, "report_to": []}
    return {
        **common,
        "per_device_train_batch_size": size,
        "max_length": 64,
        "gradient_checkpointing": False,
        **changes,
    }


def gradients(model: Any) -> dict[str, np.ndarray]:
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return {name: gradient.numpy().copy() for name, gradient in named}


def by_trl(trainer: Any) -> Found:
    """The loss and the gradient of all rows, as one step takes them."""
    model = trainer.model
    model.train()
    (inputs,) = trainer.get_train_dataloader()
    loss = trainer.compute_loss(model, trainer._prepare_inputs(inputs))
    loss.backward()
    return float(loss.detach()), gradients(model)


def of_dpo(work: Path, rows: list[dict[str, Any]], changes: dict[str, Any]) -> Found:
    from trl import DPOConfig, DPOTrainer

    policy, reference = (load_plain(work / name) for name in ("policy", "reference"))
    config = DPOConfig(**arguments(work, beta=BETA, **changes))
    return by_trl(DPOTrainer(policy, reference, config, **data_of(work, rows)))


def data_of(work: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    from datasets import Dataset

    tokenizer = load_tokenizer(str(work / "policy"))
    return {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}


def load_plain(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def gradients_of(engine: Engine) -> dict[str, np.ndarray]:
    """AdamW's first moment after one step is this part of the gradient."""
    return {
        shard.spec.name.removeprefix("exp_avg/"): shard.tensor.numpy() / (1 - KEEPS_FIRST_MOMENT)
        for shard in engine.shards(Part.TRAINING)
        if shard.spec.name.startswith("exp_avg/")
    }


def by_us(
    work: Path,
    given: list[dict[str, Any]],
    *,
    models: tuple[str, str] = ("policy", "reference"),
    method: PairMethod | None = None,
    **settings: Any,
) -> Found:
    """The same by the method's own steps."""
    write_rows(work / "rows.jsonl", given)
    policy, reference = (work / name for name in models)
    method = method or DPO()
    is_judged = method.is_judged
    chosen = {
        "model": {"path": str(policy)},
        "data": {"train": [str(work / "rows.jsonl")]},
        "batch": {"examples": len(given), "tokens_per_device": 160 if is_judged else 48},
        "method": settings if is_judged else {"beta": BETA, **settings},
    }
    config = RunConfig.model_validate(chosen)
    tokenizer = load_tokenizer(str(policy))
    rows = load_rows(config.data.train, "data.train")
    eos = [int(tokenizer.eos_token_id)]
    read = method.settings(config)
    data = PreferenceDataset(
        rows, tokenizer, config.data, read, 96, eos_token_ids=eos, is_judged=is_judged
    )
    costs = count_flops(read_model_config(config.model))
    foundation: Any = SimpleNamespace(config=config, costs=costs, device=CPU)
    optim = OptimConfig(betas=(KEEPS_FIRST_MOMENT, 0.9), weight_decay=0.0)
    with process_group(CPU, 60) as layout:
        engine = make_engine(layout, policy, optim, max_grad_norm=1e9)
        items: Any = data
        if not is_judged and settings.get("reference") != "none":
            frozen = make_frozen(layout, reference, engine)
            part = reference_logprobs(frozen, data.items(range(len(data))), foundation)
            items = ReferencedItems(data, None, [part])
        batch = method.batch(items, range(len(data)), foundation, layout)
        assert len(batch.microbatches) > 1
        batch, _ = method.prepare(Models(foundation, engine), batch)
        found = engine.forward_backward(batch, method.loss(config)).values_by_name()["loss"]
        engine.optim_step(0.0)
        return found, gradients_of(engine)


def same(ours: Found, theirs: Found) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    size = max(float(np.abs(each).max()) for each in theirs[1].values())
    assert size > 1e-3
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        np.testing.assert_allclose(ours[1][name], gradient, rtol=0, atol=1e-5 * size, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_dpo_is_trls(work: Path, name: str) -> None:
    ours, theirs = CASES[name]
    same(by_us(work, PAIRS, **ours), of_dpo(work, PAIRS, theirs))


def test_fine_tuning_is_trls_where_answers_have_one_length(work: Path) -> None:
    """TRL divides by the tokens of a batch, so long answers weigh more. RPO's formula divides each answer's by its own."""
    rows = [{**row, "chosen": row["chosen"][:1]} for row in PAIRS]
    found = by_us(work, rows, loss={"sigmoid": 1.0, "nll": 0.3})
    same(found, of_dpo(work, rows, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}))
    theirs, ours = (
        of_dpo(work, PAIRS, {"loss_type": ["sft"]}),
        by_us(work, PAIRS, loss={"nll": 1.0}),
    )
    assert ours[0] != pytest.approx(theirs[0], rel=1e-3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo_is_trls(work: Path, smoothing: float) -> None:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    alike = {"simpo_gamma": 0.7, "label_smoothing": smoothing, "beta": 2.0}
    config = CPOConfig(**arguments(work, loss_type="simpo", cpo_alpha=0.0, **alike))
    theirs = by_trl(CPOTrainer(load_plain(work / "policy"), config, **data_of(work, PAIRS)))
    same(by_us(work, PAIRS, loss={"simpo": 1.0}, reference="none", **alike), theirs)


def test_orpo_is_trls(work: Path) -> None:
    """TRL adds the likelihood of prompt and answer, which is no part of `orpo`. So a difference of two weights is compared."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    found = []
    for weight in (1.0, 0.0):
        config = ORPOConfig(**arguments(work, beta=weight))
        found.append(
            by_trl(ORPOTrainer(load_plain(work / "policy"), config, **data_of(work, PAIRS)))
        )
    (one, gradients_of_one), (none, gradients_of_none) = found
    theirs = {name: each - gradients_of_none[name] for name, each in gradients_of_one.items()}
    same(by_us(work, PAIRS, loss={"orpo": 1.0}, reference="none"), (one - none, theirs))


ANSWERS = [
    {"prompt": row["prompt"], "completion": row[column], "label": column == "chosen"}
    for row, column in zip(PAIRS, ("chosen", "rejected", "chosen", "chosen"), strict=True)
]


@pytest.mark.parametrize("models", [("policy", "reference"), ("reference", "policy")])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 1.3)])
def test_kto_is_trls(work: Path, models: tuple[str, str], weights: tuple[float, float]) -> None:
    from trl import KTOConfig, KTOTrainer

    alike = dict(zip(("desirable_weight", "undesirable_weight"), weights, strict=True))
    policy, reference = (load_plain(work / name) for name in models)
    config = KTOConfig(**arguments(work, beta=BETA, **alike))
    trainer = KTOTrainer(policy, reference, config, **data_of(work, ANSWERS))
    theirs = by_trl(trainer)
    kl = trainer._metrics["train"]["kl"][0]
    assert (kl > 0) == (models[0] == "reference")  # otherwise it counts as 0
    same(by_us(work, ANSWERS, models=models, loss={"kto": 1.0}, **alike), theirs)


@pytest.mark.parametrize("center", [0.0, 0.3])
@pytest.mark.parametrize("margins", [(), (0.5, 0.0, 2.0, 1.25)])
def test_reward_modeling_is_trls(work: Path, center: float, margins: tuple[float, ...]) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    rows: list[dict[str, Any]] = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{
                side: [{"role": "assistant", "content": row[side]}]
                for side in ("chosen", "rejected")
            },
        }
        for row in PAIRS
    ]
    if margins:
        rows = [{**row, "margin": m} for row, m in zip(rows, margins, strict=True)]
    path = work / "judge"
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    config = RewardConfig(**arguments(work, center_rewards_coefficient=center, max_length=None))
    theirs = by_trl(RewardTrainer(model, config, **data_of(work, rows)))
    same(
        by_us(work, rows, models=("judge", "judge"), method=RewardModeling(), center=center), theirs
    )

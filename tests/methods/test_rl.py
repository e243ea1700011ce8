"""What reaches the trainer from generators and rewards of every temper, in this process."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.states import committed
from support.nightly import by_day
from support.runs.training_files import RL, metrics, rollouts, weights

from burnish.algorithms.schedule import learning_rate
from burnish.api import run_method
from burnish.config.schema import RunConfig
from burnish.engines.base import Part
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.errors import StoppedError, UsageError
from burnish.methods.parts.policy_update import PolicyUpdate, StepAdvantages
from burnish.methods.table import METHODS
from burnish.records import Batch, Completion, Request, TokenOutputs
from burnish.rollout.base import Sampling, Watch
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.runs.setup import lay_foundation
from burnish.tracking.stats import Stats

UNGUARDED = {**RL["rollout"], "max_disagreement": None}
"""Generators and engines are called for training alone."""


class Mute(BuiltinGenerator):
    """A generator whose every completion is empty."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[list[Completion]]:
        nothing = np.zeros(0, np.float32)
        empty = Completion(np.zeros(0, np.int64), nothing, nothing, "stop", weights_version=0)
        return [[empty] * request.samples for request in requests]


EVERYTHING = {
    "plain": {},
    "kl_in_loss": {"algorithm": {"kl": {"coef": 0.1}}},
    "kl_in_reward": {"algorithm": {"kl": {"coef": 0.1, "place": "reward"}}},
    "dynamic": {"algorithm": {"dynamic_sampling": {"enabled": True}}},
    "critic": {"algorithm": {"advantage": "gae", "kl": {"coef": 0.1, "place": "reward"}}},
    "minibatches": {"batch": {**RL["batch"], "minibatches": 2}},
}


@pytest.mark.parametrize("case", by_day(EVERYTHING, ("dynamic", "critic")))
def test_a_run_whose_completions_are_all_empty(
    work: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setattr("burnish.rollout.builtin.generator.BuiltinGenerator", Mute)
    settings: dict[str, Any] = {
        "name": f"empty_{case}",
        "steps": 2,
        "checkpoint": {"save_every": 1},
    }
    run_method(METHODS["rl"], RunConfig.model_validate({**RL, **settings, **EVERYTHING[case]}))
    run = work / "runs" / f"empty_{case}"
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["response_length/max"] == 0
        assert row["reward/zero_std_frac"] == 1
        assert all(math.isfinite(value) for value in row.values())
        assert not any("grad_norm" in name for name in row)  # there is nothing to learn from
    assert all(row["length"] == 0 for row in rollouts(run, 1))
    saved = weights(run)
    slots = [tensor for name, tensor in saved.items() if "training/exp_avg" in name]
    assert slots
    assert not any(tensor.any() for tensor in slots)  # no step was made
    assert all(torch.isfinite(tensor.float()).all() for tensor in saved.values())


@pytest.mark.nightly
def test_parked_models_leave_the_device_to_the_generator_and_learn_the_same(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy, critic and reference, in rollouts and in validations."""
    monkeypatch.chdir(work)
    engines: list[TorchEngine] = []
    held: list[int] = []

    class Listed(TorchEngine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            engines.append(self)

    class Looking(BuiltinGenerator):
        def generate(self, *args: Any, **kwargs: Any) -> list[list[Completion]]:
            parts = [(e, Part.WEIGHTS) for e in engines]
            shards = [shard for engine, part in parts for shard in engine.shards(part)]
            held.append(sum(shard.tensor.untyped_storage().nbytes() for shard in shards))
            return super().generate(*args, **kwargs)

    # Its proof is kept, so that the runs below make no engine and no generator but their own.
    first = {"name": "proved", "steps": 1, "rollout": UNGUARDED, **EVERYTHING["critic"]}
    run_method(METHODS["rl"], RunConfig.model_validate({**RL, **first}))
    monkeypatch.setattr("burnish.engines.torch.torch_engine.TorchEngine", Listed)
    monkeypatch.setattr("burnish.rollout.builtin.generator.BuiltinGenerator", Looking)
    found = []
    for park in (False, True):
        engines.clear()
        held.clear()
        settings: dict[str, Any] = {
            "name": f"park_{park}",
            "steps": 2,
            "engine": {**RL.get("engine", {}), "offload_during_rollout": park},
            "rollout": UNGUARDED,
            **EVERYTHING["critic"],
        }
        run_method(METHODS["rl"], RunConfig.model_validate({**RL, **settings}))
        assert len(engines) == 3
        assert len(held) >= 2
        assert all((size == 0) == park for size in held)
        found.append(weights(work / "runs" / f"park_{park}"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_kl_in_the_reward_scores_the_policy_once(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log-probs of the penalty are those that the updates are measured against."""
    monkeypatch.chdir(work)
    passes: list[int] = []
    plain = TorchEngine.forward

    def forward(engine: TorchEngine, batch: Batch, **how: Any) -> list[TokenOutputs]:
        if engine._optimizer is not None:
            passes.append(batch.num_sequences)
        return plain(engine, batch, **how)

    monkeypatch.setattr(TorchEngine, "forward", forward)
    settings = {
        "name": "once",
        "rollout": UNGUARDED,
        "steps": 2,
        "batch": {**RL["batch"], "minibatches": 2},
        "algorithm": {"kl": {"coef": 0.1, "place": "reward"}},
        "evaluation": {"every": 0},
    }
    run_method(METHODS["rl"], RunConfig.model_validate({**RL, **settings}))
    assert len(passes) == 2 * 2
    assert sum(passes) == 2 * RL["batch"]["prompts"] * RL["rollout"]["n"]


@pytest.mark.parametrize(("precision", "warnings"), by_day([("bf16", 1), ("fp32", 0)], []))
def test_a_processor_without_products_in_bf16_is_named_once(
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    precision: str,
    warnings: int,
) -> None:
    """However many models a run has."""
    monkeypatch.chdir(work)
    monkeypatch.setattr("burnish.runs.setup.has_bf16_products", lambda device: False)
    settings: dict[str, Any] = {
        "name": f"slow_{precision}",
        "steps": 1,
        "engine": {**RL.get("engine", {}), "precision": precision},
        **EVERYTHING["critic"],
    }
    run_method(METHODS["rl"], RunConfig.model_validate({**RL, **settings}))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("set engine.precision=fp32" in each for each in said) == warnings


@pytest.mark.nightly
def test_while_the_critic_learns_alone_the_policy_is_not_scored_and_its_schedule_waits(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    scored: list[bool] = []

    def forward(engine: TorchEngine, *args: Any, **how: Any) -> list[TokenOutputs]:
        outputs = plain(engine, *args, **how)
        if outputs[0].logprobs.numel():  # policy and reference: a critic has values
            scored.append(engine._optimizer is not None)
        return outputs

    plain = TorchEngine.forward
    monkeypatch.setattr(TorchEngine, "forward", forward)
    settings: dict[str, Any] = {
        "name": "waits",
        "rollout": UNGUARDED,
        "steps": 4,
        "critic": {"lr": 0.02, "warmup_steps": 2},
        "optim": {"lr": 0.01, "schedule": "linear"},
        "batch": {**RL["batch"], "minibatches": 2},
        "algorithm": {"advantage": "gae", "kl": {"coef": 0.1}},
    }
    config = RunConfig.model_validate({**RL, **settings})
    run_method(METHODS["rl"], config)
    assert scored == 2 * [*2 * [True], *2 * [False]]  # in the last two steps
    rows = metrics(work / "runs/waits")[1:]
    policy = [row["actor/lr"] for row in rows if "actor/lr" in row]
    assert policy == [learning_rate(step, 2, config.optim) for step in range(2)]
    critic = [row["critic/lr"] for row in rows]
    optim = config.optim.model_copy(update={"lr": 0.02})
    assert critic == [learning_rate(step, 4, optim) for step in range(4)]


@pytest.mark.nightly
def test_the_reference_is_kept_in_the_dtype_of_computing_and_says_the_same(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    dtypes: list[set[torch.dtype]] = []

    def forward(engine: TorchEngine, *args: Any, **how: Any) -> list[TokenOutputs]:
        if "adapter" in how:  # the reference alone is asked about adapters
            dtypes.append({shard.tensor.dtype for shard in engine.shards(Part.WEIGHTS)})
        return plain(engine, *args, **how)

    plain = TorchEngine.forward
    monkeypatch.setattr(TorchEngine, "forward", forward)
    settings = {"name": "half", "steps": 1, "engine": {"precision": "bf16"}}
    run_method(
        METHODS["rl"], RunConfig.model_validate({**RL, **settings, **EVERYTHING["kl_in_loss"]})
    )
    assert dtypes == [{torch.bfloat16}]
    assert metrics(work / "runs/half")[-1]["actor/kl_loss"] == 0


class Off(BuiltinGenerator):
    """A generator that says of every log-prob that it was lower by 0.5."""

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Completion]]:
        return [
            [replace(each, sampled_logprobs=each.sampled_logprobs - 0.5) for each in group]
            for group in super().generate(*args, **kwargs)
        ]


@pytest.mark.nightly
def test_the_generator_is_held_to_the_engine_and_its_mismatch_corrected(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever pass has the unchanged policy's log-probs, and at the temperature of the draws."""
    monkeypatch.chdir(work)

    def row(name: str, **algorithm: Any) -> dict[str, Any]:
        settings = {"name": name, "steps": 1, "rollout": {**RL["rollout"], "temperature": 0.7}}
        settings["batch"] = {**RL["batch"], "minibatches": 2 if name == "two" else 1}
        settings["engine"] = {**RL["engine"], "max_grad_norm": 100.0}
        run_method(
            METHODS["rl"], RunConfig.model_validate({**RL, **settings, "algorithm": algorithm})
        )
        return metrics(work / "runs" / name)[-1]

    plain = row("one")
    for each in (plain, row("two")):
        assert 0 <= each["rollout/mismatch_kl"] < 1e-9
        assert 0 < each["rollout/mismatch_max"] < 1e-4
        assert "rollout/mismatch_capped" not in each
    monkeypatch.setattr("burnish.rollout.builtin.generator.BuiltinGenerator", Off)
    shifted = row("shifted", mismatch_cap=1.2)
    assert shifted["rollout/mismatch_kl"] == pytest.approx(math.expm1(0.5) - 0.5, rel=1e-3)
    assert shifted["rollout/mismatch_max"] == pytest.approx(0.5, rel=1e-3)
    assert shifted["rollout/mismatch_capped"] == 1
    assert shifted["actor/grad_norm"] == pytest.approx(1.2 * plain["actor/grad_norm"], rel=1e-4)


@pytest.mark.nightly
def test_several_epochs_learn_from_the_same_mini_batches_and_resume_exactly(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    learned: list[Batch] = []

    def forward_backward(engine: TorchEngine, batch: Batch, *args: Any) -> Stats:
        learned.append(batch)
        return plain(engine, batch, *args)

    plain = TorchEngine.forward_backward
    settings: dict[str, Any] = {
        "batch": {**RL["batch"], "minibatches": 2, "epochs": 3},
        "optim": {"lr": 0.01, "schedule": "linear", "warmup_steps": 2},
    }

    def run(name: str, steps: int) -> Path:
        run_method(
            METHODS["rl"],
            RunConfig.model_validate({**RL, **settings, "name": name, "steps": steps}),
        )
        return work / "runs" / name

    run("proven", 2)  # keeps its proof, so that the next run computes nothing else
    monkeypatch.setattr(TorchEngine, "forward_backward", forward_backward)
    whole = run("epochs", 3)
    assert len(learned) == 3 * 3 * 2
    for start in range(0, len(learned), 6):
        one, two = learned[start : start + 2]
        for epoch in range(start, start + 6, 2):
            parts_learned = {id(each.microbatches) for each in learned[epoch : epoch + 2]}
            assert parts_learned == {id(one.microbatches), id(two.microbatches)}
        assert all(micro.old_logprobs is not None for micro in one.microbatches)
    rows = metrics(whole)[1:]
    assert [row["actor/lr"] for row in rows] == [0.0, 0.005, 0.01]
    assert rows[-1]["actor/ppo_kl"] != 0
    run("parts", 2)
    parts = run("parts", 3)
    found, wanted = weights(parts), weights(whole)
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())


def test_a_signal_after_the_rollouts_stops_before_the_update(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    assigned = PolicyUpdate.assign_credit

    def interrupted(*args: Any) -> StepAdvantages:
        signal.raise_signal(signal.SIGTERM)
        return assigned(*args)

    monkeypatch.setattr(PolicyUpdate, "assign_credit", interrupted)
    monkeypatch.setattr(TorchEngine, "forward_backward", None)
    with pytest.raises(StoppedError, match=r"(?s)SIGTERM.*step 0"):
        run_method(METHODS["rl"], RunConfig.model_validate({**RL, "name": "before_the_update"}))
    (step,) = committed(work / "runs/before_the_update/checkpoints")
    assert step.state["cursor"] == 0


def test_a_stop_token_of_the_configuration_ends_completions(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens of the vocabulary are, so every completion is one token long."""
    monkeypatch.chdir(work)
    whole = list(range(RL["model"]["fresh"]["vocab_size"]))
    settings = {"name": "stops", "steps": 1, "rollout": {**RL["rollout"], "stop_token_ids": whole}}
    run_method(METHODS["rl"], RunConfig.model_validate({**RL, **settings}))
    row = metrics(work / "runs/stops")[-1]
    assert row["response_length/max"] == row["response_length/mean"] == 1
    assert row["response_length/clip_ratio"] == 0
    rollout = {**RL["rollout"], "stop_token_ids": [3, len(whole)]}
    with pytest.raises(UsageError, match=f"have: {len(whole)}\n.* {len(whole)}"):
        lay_foundation(RunConfig.model_validate({**RL, "rollout": rollout}))


@pytest.mark.nightly
def test_rewards_see_a_stop_text_that_is_a_special_token(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    rollout = {**RL["rollout"], "n": 16, "max_response_length": 40, "stop": ["<|im_start|>"]}
    settings = {"name": "marked", "steps": 1, "rollout": rollout, "tracking": {"rollouts_every": 1}}
    run_method(METHODS["rl"], RunConfig.model_validate({**RL, **settings}))
    ended = [
        row["completion"].endswith("<|im_start|>") for row in rollouts(work / "runs/marked", 1)
    ]
    assert any(ended)
    assert not all(ended)


def test_an_advantage_of_one_s_own_is_imported_once_and_before_the_model_is_loaded(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it may keep a state, and a change of its file changes no running formula."""
    monkeypatch.chdir(work)
    log, own = tmp_path / "log", tmp_path / "own.py"
    own.write_text(
        f"def tell(said):\n    with open({str(log)!r}, 'a') as file:\n        file.write(said)\n\n"
        "tell('import ')\n\ndef counted(rollouts):\n    tell('call ')\n    return rollouts.rewards\n"
    )
    algorithm = {"advantage": f"{own}:counted"}
    settings = {**RL, "name": "counted", "steps": 2, "algorithm": algorithm}
    run_method(METHODS["rl"], RunConfig.model_validate(settings))
    assert log.read_text() == "import call call call "  # the first one is on made-up rollouts
    own.write_text("def counted(rollouts):\n    return rollouts.nothing\n")
    monkeypatch.setattr("burnish.methods.parts.online_training.lay_foundation", None)
    with pytest.raises(UsageError, match=r"algorithm\.advantage"):
        run_method(METHODS["rl"], RunConfig.model_validate({**settings, "name": "refused"}))

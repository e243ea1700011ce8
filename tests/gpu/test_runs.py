"""`burnish sft` and `burnish rl` on one device, and what they come to when they are killed on the way."""

from __future__ import annotations

import json
import math
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.models.tiny import save_base, save_classifier
from support.ranks.devices import CUDA, DEVICES, on_gpu
from support.runs.device_runs import finish_run, start_run
from support.runs.training_files import MIXTURE, make_files, metrics, weights

from burnish.config.load import read_config
from burnish.distributed.device import device_name
from burnish.methods.table import METHODS
from burnish.tracking.trackers import read_metrics

STEPS = 6
KINDS = {"sft": ("train/loss", "val/loss"), "rl": ("reward/mean", "val/mean@1")}
COMMON = ["engine.precision=bf16", f"steps={STEPS}", "checkpoint.save_every=1"]
KILLED = "burnish.engines.torch.torch_engine:TorchEngine.optim_step", 3, signal.SIGKILL, 0.0
"""Where a run kills itself: in its third step."""
PARTS = {
    "plain": [],
    "activations": ["engine.activation_checkpointing=full", "engine.activation_offload=true"],
    "offload": ["engine.optimizer_offload=true", "optim.moments=bf16", "optim.betas=[0.9,0.95]"],
    "compile": ["engine.compile=true"],
    "muon": ["optim.kind=muon", "checkpoint.background=true"],
    "lora": ["model.path=model", "model.fresh=null", "model.lora.rank=4"],
    "megatron": ["engine.kind=megatron"],
    "experts": [f"model.fresh={json.dumps(MIXTURE)}", "engine.router_aux_loss=0.1"],
    "profile": ["tracking.torch_profiler=true", "tracking.profile_steps=[2]"],
}
"""Settings of parts of a run that a device has to do with, for both kinds of runs."""
RL_PARTS = {
    "adapter": [*PARTS["lora"], "model.lora.publish=adapter", "algorithm.kl.coef=0.1"],
    "ppo": ["algorithm.advantage=gae", "engine.offload_during_rollout=true", "algorithm.kl.place=reward", "algorithm.kl.coef=0.1"],
    "judge": ["reward.models=[{path: judge}]", "algorithm.kl.coef=0.1"],
    "replay": [*PARTS["experts"], "algorithm.router_replay=rollout"],
    "megatron_replay": [*PARTS["megatron"], *PARTS["experts"], "algorithm.router_replay=recompute"],
    "megatron_ppo": [*PARTS["megatron"], "algorithm.advantage=gae"],
    "ahead": ["rollout.ahead=1", "rollout.place=child", "algorithm.mismatch_cap=2"],
    "in_flight": ["rollout.ahead=2", "rollout.place=child", "rollout.in_flight=true", "algorithm.mismatch_cap=2"],
    "sequence": ["algorithm.policy_loss=gspo", "algorithm.mismatch_cap=2", "algorithm.mismatch_level=sequence", "algorithm.mismatch_reject=sequence"],
    "entropy": ["algorithm.policy_loss=kl_cov", "algorithm.entropy_coef=0.01"],
    "clip_cov": ["algorithm.policy_loss=clip_cov", "algorithm.dynamic_sampling.enabled=true"],
    "sapo": ["algorithm.policy_loss=sapo", "algorithm.advantage=gdpo", "algorithm.aggregation=sequence_sum"],
    "samples": ["rollout.n=8", "rollout.slots=auto", "algorithm.advantage=remax", "algorithm.old_logprobs=rollout"],
    "checked": ["rollout.check_every=1", "batch.epochs=2", "algorithm.top_entropy=0.5"],
}  # fmt: skip
"""More of them, for reinforcement learning."""
CASES = [f"sft-{part}" for part in PARTS] + [f"rl-{part}" for part in [*PARTS, *RL_PARTS]]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_files(tmp_path_factory.mktemp("device"))
    save_base(root / "model", 0)
    save_classifier(root / "judge")
    return root


def start(
    work: Path,
    kind: str,
    name: str,
    device: torch.device,
    at: tuple[str, int, int, float] | None = None,
    settings: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    argv = [kind, f"{kind}.yaml", f"name={name}", *COMMON, *settings]
    return start_run(work, name, device, argv, at)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_the_same_killed_and_resumed(work: Path, kind: str, device: torch.device) -> None:
    peaceful, killed = f"{kind}_{device.type}", f"{kind}_{device.type}_killed"
    finish_run(start(work, kind, peaceful, device), work, peaceful)
    run = work / "runs" / peaceful
    rows, names = read_metrics(run / "metrics.jsonl"), KINDS[kind]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for name in (*names, "perf/tokens_per_s", "perf/mfu"):
        assert all(math.isfinite(row[name]) for row in rows if name in row)
        assert any(name in row for row in rows), name
    surroundings = json.loads((run / "environment.json").read_text())
    assert surroundings["device"] == device_name(device)

    finish_run(start(work, kind, killed, device, KILLED), work, killed, -signal.SIGKILL)
    finish_run(start(work, kind, killed, device), work, killed)
    resumed = work / "runs" / killed
    assert "resuming step" in (work / f"{killed}.txt").read_text()
    assert [row["step"] for row in metrics(resumed)] == list(range(STEPS + 1))
    if device.type == "cpu":
        assert metrics(resumed) == metrics(run)
    elif kind == "sft":  # a GPU adds gradients up in any order; sampled tokens may then differ
        for mine, theirs in zip(metrics(resumed), metrics(run), strict=True):
            assert mine == pytest.approx(theirs, rel=2e-2, abs=1e-3)
    mine, theirs = weights(resumed), weights(run)
    assert mine.keys() == theirs.keys()
    if device.type == "cpu":
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def settings_of(case: str) -> tuple[str, list[str]]:
    kind, _, part = case.partition("-")
    return kind, {**PARTS, **RL_PARTS}[part]


@pytest.mark.parametrize("case", CASES)
def test_each_part_of_a_run_has_valid_settings(work: Path, case: str) -> None:
    kind, settings = settings_of(case)
    METHODS[kind].check(read_config(work / f"{kind}.yaml", [*COMMON, *settings]))


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param(CUDA, id="cuda", marks=on_gpu)])
@pytest.mark.parametrize("case", CASES)
def test_each_part_of_a_run_learns(work: Path, case: str, device: torch.device) -> None:
    """On CPUs other tests have these settings."""
    kind, settings = settings_of(case)
    finish_run(start(work, kind, case, device, settings=settings), work, case)
    run = work / "runs" / case
    rows = read_metrics(run / "metrics.jsonl")
    assert rows[-1]["step"] == STEPS
    names = ("train/grad_norm", "actor/grad_norm")
    norms = [row[each] for row in rows for each in names if each in row]
    assert len(norms) == STEPS
    assert all(math.isfinite(norm) and norm > 0 for norm in norms)

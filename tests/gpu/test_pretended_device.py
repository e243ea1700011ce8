"""Whole runs on a device whose memory the host cannot touch: no operation mixes devices, and all numbers are the CPU's.

The device of `support/pretend/device.cpp` has the name of Ascend's, so runs have a process group, and no fp64.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.models.tiny import save_base, save_classifier
from support.pretend.commands import exit_code, output, start
from support.pretend.install import compiler, install
from support.ranks.ports import free_port
from support.runs.preferences import PAIRS
from support.runs.same_runs import sampled
from support.runs.training_files import (
    MIXTURE,
    SFT,
    STATE,
    make_files,
    metrics,
    weights,
    write_rows,
)

from burnish.config.document import recorded
from burnish.config.schema import AUTO_TOKENS

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.skipif(
        compiler() is None or sys.platform != "linux",
        reason="the pretended device needs Linux and a C++ compiler",
    ),
]

SECONDS = 540
LORA = ["model.path=model", "model.fresh=null", "model.lora.rank=4"]
EXPERTS = [f"model.fresh={json.dumps(MIXTURE)}"]
OFFLOADED = ["engine.activation_checkpointing=full", "engine.activation_offload=true"]
CASES = {
    "sft-plain": [],
    "sft-offload": [*OFFLOADED, "engine.optimizer_offload=true", "checkpoint.background=true"],
    "sft-parameters": ["engine.parameter_offload=true"],
    "sft-lora": LORA,
    "sft-experts": [*EXPERTS, "engine.router_aux_loss=0.1"],
    "sft-state": [f"model.fresh={json.dumps(STATE)}"],
    "dpo-plain": ["model.path=model", "model.fresh=null"],
    "rl-plain": [],
    "rl-offload": [*OFFLOADED, "engine.optimizer_offload=true"],
    "rl-lora": [*LORA, "model.lora.publish=adapter", "algorithm.kl.coef=0.1"],
    "rl-replay": [*EXPERTS, "algorithm.router_replay=rollout"],
    "rl-critic": ["algorithm.advantage=gae", "engine.offload_during_rollout=true", "algorithm.kl.coef=0.1"],
    "rl-judge": ["reward.models=[{path: judge}]"],
    "rl-mismatch": ["algorithm.mismatch_cap=2", "algorithm.mismatch_reject=sequence", "batch.minibatches=2"],
}  # fmt: skip
COMMON = ["steps=3", "checkpoint.model_dtype=fp32"]
RESUMED = {
    "before": ["rl", "rl.yaml", "name=rl-resumed", *COMMON, "steps=2"],
    "after": ["rl", "rl.yaml", "name=rl-resumed", *COMMON],
}
ON_TWO = {
    "sft-two": ["sft", "sft.yaml", "name=sft-two", *COMMON, "engine.sequence_parallel=2"],
    "rl-two": ["rl", "rl.yaml", "name=rl-two", *COMMON],
}
COUNTED = {
    f"count-{kind}": ["doctor", "--count", f"{kind}.yaml", "--json"] for kind in ("sft", "rl")
}
MIXING = """\
import torch
from burnish.algorithms.policy_loss import ppo
from burnish.config.algorithm import PPOSettings

def mixing(logprobs, micro_batch, algorithm):
    return ppo(logprobs * torch.ones(len(logprobs)), micro_batch, algorithm, PPOSettings())
"""


def commands(kind: str) -> dict[str, list[str]]:
    """Every case on `kind`, by the name of its run."""
    settings = {f"{case}-{kind}": [*COMMON, *CASES[case]] for case in CASES}
    settings[f"rl-mixing-{kind}"] = [*COMMON, "algorithm.policy_loss=formulas.py:mixing"]
    methods = {name: name.partition("-")[0] for name in settings}
    return {
        name: [methods[name], f"{methods[name]}.yaml", f"name={name}", *settings[name]]
        for name in settings
    }


def two_ranks() -> list[dict[str, str]]:
    """What the environment tells the ranks of a run on two devices."""
    port = str(free_port())
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**shared, **meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]


def wait_for(*processes: subprocess.Popen[bytes]) -> None:
    try:
        for process in processes:
            process.wait(SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def work(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all runs, after their ends."""
    root = make_files(tmp_path_factory.mktemp("runs"))
    save_base(root / "model", 0)
    save_classifier(root / "judge")
    (root / "formulas.py").write_text(MIXING)
    write_rows(root / "pairs.jsonl", PAIRS)
    dpo = {**SFT, "data": {"train": ["pairs.jsonl"]}, "evaluation": {"every": 0}}
    (root / "dpo.yaml").write_text(json.dumps(dpo))
    on_cpu = start(root, "cpu", commands("cpu"))
    wait_for(on_cpu, start(root, "npu", commands("npu") | RESUMED | COUNTED, site))
    for name, asked in ON_TWO.items():
        wait_for(*(start(root, name, {name: asked}, site, rank) for rank in two_ranks()))
    return root


def run_of(work: Path, name: str) -> Path:
    assert exit_code(work, name) == 0, output(work, name)
    return work / "runs" / name


def settled(run: Path) -> list[dict[str, float]]:
    """A run's numbers, without what rounding alone decides: DPO begins with two equal models, for which no answer is the likelier one."""
    rows = metrics(run)
    return [
        {k: v for k, v in row.items() if (row["step"], k) != (1, "train/accuracy")} for row in rows
    ]


def assert_same_numbers(run: Path, other: Path) -> None:
    """Equal up to the order of sums, which AdamW makes more of for weights whose gradients are nearly 0."""
    for mine, theirs in zip(settled(run), settled(other), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6, nan_ok=True)
    found, wanted = weights(run), weights(other)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        apart = ~torch.isclose(found[name], tensor, rtol=1e-4, atol=5e-5)
        assert float(apart.double().mean()) < 1e-3, name
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-3)
    for mine, theirs in zip(sampled(run), sampled(other), strict=True):
        assert mine[:-1] == theirs[:-1]
        assert mine[-1] == pytest.approx(theirs[-1], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_a_device_has_the_numbers_of_the_cpu(work: Path, case: str) -> None:
    run = run_of(work, f"{case}-npu")
    surroundings = json.loads((run / "environment.json").read_text())
    assert surroundings["device"] == "Pretended device"
    assert_same_numbers(run, run_of(work, f"{case}-cpu"))


def test_a_run_that_goes_on_has_the_bits_of_one_that_never_ended(work: Path) -> None:
    for command in RESUMED:
        assert exit_code(work, command) == 0, output(work, command)
    resumed = weights(work / "runs" / "rl-resumed")
    whole = weights(run_of(work, "rl-plain-npu"))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_two_devices_have_the_numbers_of_one_cpu(work: Path, kind: str) -> None:
    assert_same_numbers(run_of(work, f"{kind}-two"), run_of(work, f"{kind}-plain-cpu"))


@pytest.mark.parametrize("command", COUNTED)
def test_the_host_copies_and_reads_rarely(work: Path, command: str) -> None:
    """Attention in blocks, which CUDA does not need, has four more copies with shared prompts."""
    assert exit_code(work, command) == 0, output(work, command)
    found = json.JSONDecoder().raw_decode(output(work, command))[0]
    counts = found["microbatch"]
    assert found["device"] == "npu"
    assert min(sum(counts["forward"].values()), sum(counts["backward"].values())) > 100
    assert counts["copies"] <= (6 if command == "count-rl" else 2)
    assert counts["reads"] == 0


def test_a_run_ends_where_a_formula_mixes_devices(work: Path) -> None:
    run_of(work, "rl-mixing-cpu")
    assert exit_code(work, "rl-mixing-npu") == 1
    assert "RuntimeError" in output(work, "rl-mixing-npu")


def test_tokens_are_chosen_where_the_planner_knows_the_device(site: Path, tmp_path: Path) -> None:
    """Ranks choose the same, and a run goes on with what it chose."""
    known = tmp_path / "known"
    shutil.copytree(site, known)
    module = known / "pretended_npu/__init__.py"
    module.write_text(module.read_text().replace("Pretended device", "Ascend910B2"))
    make_files(tmp_path)
    mixture = json.dumps({**MIXTURE, "num_experts": 128, "num_experts_per_tok": 1})
    more = ["batch.tokens_per_device=auto", "batch.examples=4096", "data.max_length=64"]
    more += [f"model.fresh={mixture}", "data.validation=[]", "evaluation.every=0"]
    for steps in (1, 2):
        name = f"steps-{steps}"
        asked = {name: ["sft", "sft.yaml", "name=run", *more, f"steps={steps}"]}
        wait_for(*(start(tmp_path, name, asked, known, rank) for rank in two_ranks()))
        assert exit_code(tmp_path, name) == 0, output(tmp_path, name)
        batch = recorded(tmp_path / "runs/run/config.yaml").batch
        assert batch.is_auto
        assert batch.tokens > AUTO_TOKENS


REFUSED = {
    "there + torch.ones(4)": "RuntimeError",
    "there + torch.ones(4, device='npu:1')": "RuntimeError",
    "torch.cat([there, torch.ones(4)])": "RuntimeError",
    "there[torch.tensor([0])]": "RuntimeError",
    "torch.where(there > 0, there, torch.ones(4))": "RuntimeError",
    "torch.ones(()).add_(there[0])": "RuntimeError",
    "torch.nn.functional.embedding(torch.tensor([0]), there[:, None])": "RuntimeError",
    "there.normal_(generator=torch.Generator())": "RuntimeError",
    "there.numpy()": "TypeError",
    "there.double()": "TypeError",
}
ALLOWED = {
    "there + torch.tensor(1.0)": [2.0] * 4,
    "there.cpu() + torch.ones(4)": [2.0] * 4,
    "torch.ones(4).copy_(there + 1)": [2.0] * 4,
    "there.view(2, 2).T.add(1).reshape(-1)": [2.0] * 4,
    "torch.arange(4, out=torch.empty(0, device='npu'))": [0, 1, 2, 3],
    "torch.empty(0, device='npu').set_(there[1:3])": [1.0] * 2,
    "torch.empty(4, device='npu').isnan()": [True] * 4,
}
PROGRAM = """\
import json, sys, torch
there = torch.ones(4, device="npu")
def answer(expression):
    try:
        return eval(expression).tolist()
    except Exception as error:
        return type(error).__name__
print(json.dumps({each: answer(each) for each in json.load(sys.stdin)}))
"""


def on_device(site: Path, program: str, given: str = "") -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, input=given, env=environ, capture_output=True, text=True)


def test_the_device_refuses_what_cuda_refuses(site: Path) -> None:
    answered = on_device(site, PROGRAM, json.dumps([*REFUSED, *ALLOWED]))
    assert json.loads(answered.stdout) == REFUSED | ALLOWED, answered.stderr


def test_a_host_that_reads_the_devices_memory_is_killed(site: Path) -> None:
    program = "import ctypes, torch; ctypes.string_at(torch.ones(4, device='npu').data_ptr(), 4)"
    assert on_device(site, program).returncode == -signal.SIGSEGV

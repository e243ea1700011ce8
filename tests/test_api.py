"""The Python API, as a script uses it."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.runs.training_files import RL, SFT, make_files
from transformers import AutoModelForCausalLM

import burnish
import burnish.api
from burnish.config.load import load_settings
from burnish.config.schema import (
    DistributedConfig,
    RewardConfig,
    RewardFunctionConfig,
    RunConfig,
)
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch, process_group
from burnish.errors import BurnishError, MissingError, UsageError
from burnish.rewards.pool import RewardPool

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "python" / "sums.py"


def python(place: Path, *arguments: str) -> str:
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_files(tmp_path))
    # A run measures its processor for half a second, which no test is about.
    monkeypatch.setattr("burnish.distributed.device._MATMUL_SIZES", (8,))
    return tmp_path


def test_importing_it_loads_no_torch_and_every_name_is_there(tmp_path: Path) -> None:
    program = (
        "import sys, burnish; print(sorted(m for m in sys.modules if m.startswith('burnish.')), 'torch' in sys.modules);"
        "burnish.load_config({'steps': 3}); print('torch' in sys.modules);"
        "print([n for n in burnish.__all__ if getattr(burnish, n) is None])"
    )
    assert python(tmp_path, "-c", program).splitlines() == [
        "['burnish.version'] False",
        "False",
        "[]",
    ]
    assert (ROOT / "burnish" / "py.typed").exists()
    with pytest.raises(AttributeError):
        burnish.no_such_name  # noqa: B018


def test_a_configuration_may_be_a_file_a_mapping_or_loaded(place: Path) -> None:
    (place / "c.yaml").write_text("name: a\noptim: {lr: 1.0}\n")
    given: list[Any] = ["c.yaml", place / "c.yaml", {"name": "a", "optim": {"lr": 1.0}}]
    given.append(burnish.load_config("c.yaml"))
    for source in given:
        config = burnish.load_config(source, steps=3, optim={"eps": 1e-6}, **{"rollout.n": 2})
        assert (config.name, config.steps, config.optim.lr) == ("a", 3, 1.0)
        assert (config.optim.eps, config.rollout.n) == (1e-6, 2)
    data = burnish.load_config({}, data={"train": (place / "train.jsonl",)}).data
    assert data.train == [str(place / "train.jsonl")]
    assert load_settings(RunConfig(), {}) == RunConfig()


def test_values_of_python_are_settings(tmp_path: Path) -> None:
    numbers = {"steps": np.int64(4), "data": {"weights": np.array([1, 2]), "shuffle": np.False_}}
    tracking = {"trackers": [Noted]}
    config = burnish.load_config({"algorithm": {"advantage": noted}}, tracking=tracking, **numbers)
    assert config.algorithm.advantage.name == f"{__name__}:noted"
    assert config.tracking.trackers == [f"{__name__}:Noted"]
    assert (config.steps, config.data.weights, config.data.shuffle) == (4, [1, 2], False)
    result = burnish.Result(tmp_path)
    assert burnish.load_config({}, model={"path": result}).model.path == str(tmp_path)


class Noted: ...


def noted(rollouts: Any) -> None: ...


def test_a_reward_has_its_weight_and_its_arguments(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    monkeypatch.setattr(burnish.api, "run_method", lambda method, config: given.append(config))
    weighed = {"function": noted, "weight": 0.5}
    for reward in ([partial(noted, k=2), weighed, "numeric"], noted, "numeric"):
        burnish.rl(RL, reward=reward)
    name = f"{__name__}:noted"
    functions = [[(f.function, f.weight, f.kwargs) for f in c.reward.functions] for c in given]
    partly = [(name, 1.0, {"k": 2}), (name, 0.5, {}), ("numeric", 1.0, {})]
    assert functions == [partly, [(name, 1.0, {})], [("numeric", 1.0, {})]]


@pytest.mark.parametrize(
    ("source", "settings", "named"),
    [
        ({"rolout": {}}, {}, "rolout"),
        ({}, {"stepps": 1}, "stepps"),
        ({"steps": "x"}, {}, "steps"),
        ([1], {}, "list"),
    ],
)
def test_what_cannot_be_is_refused(source: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        burnish.load_config(source, **settings)
    with pytest.raises(MissingError):
        burnish.load_config("none.yaml")
    with pytest.raises(MissingError, match="no run, no model"):
        burnish.evaluate("runs/none")


def test_a_program_that_has_a_process_group_keeps_it(place: Path) -> None:
    with process_group(torch.device("cpu"), 60.0):
        with pytest.raises(UsageError, match="destroy_process_group"):
            burnish.sft(SFT, resume="fresh")
        assert dist.is_initialized()
    assert not (place / "runs").exists()


def test_a_second_thread_waits_its_turn(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it starts before the first has opened its process group."""
    entered, leave = Event(), Event()

    def prepare(*_: object) -> None:
        waits = not entered.is_set()
        entered.set()
        if waits:
            leave.wait(60)
        raise MissingError("as far as this test goes")

    def run() -> None:
        with pytest.raises(MissingError):
            burnish.sft(SFT)

    monkeypatch.setattr(burnish.api, "prepare", prepare)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run)
        entered.wait(60)
        for command in (burnish.sft, burnish.rl, burnish.evaluate):
            with pytest.raises(UsageError, match="one run at a time"):
                command(SFT)
        leave.set()
        first.result()
    run()


@pytest.mark.nightly
def test_a_run_leaves_no_descriptors_and_frees_those_of_a_failed_one(place: Path) -> None:
    """Also if Python collects no cycles by itself."""
    burnish.sft("sft.yaml", name="ended", steps=1)
    ended = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        with pytest.raises(BurnishError):
            burnish.sft("sft.yaml", name="failed", optim={"lr": 1e30})
        for _ in range(2):
            burnish.evaluate("runs/ended")
            assert len(os.listdir("/proc/self/fd")) == ended
    finally:
        gc.enable()


def test_a_run_computes_alike_in_any_mode_of_its_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def learn(layout: Layout, device: torch.device) -> Any:
        x = torch.ones(2, 2, requires_grad=True)
        (x @ x).sum().backward()
        return x.grad, x.device, (x @ x).dtype

    monkeypatch.setattr("burnish.distributed.device._MATMUL_SIZES", (8,))
    hook = sys.excepthook
    for mode in (torch.no_grad(), torch.inference_mode(), torch.device("meta")):
        with mode, torch.autocast("cpu", torch.bfloat16):
            grad, device, dtype = launch(learn, DistributedConfig())
        assert (grad.tolist(), device.type, dtype) == ([[4.0, 4.0]] * 2, "cpu", torch.float32)
    assert sys.excepthook is hook


def test_an_adapter_alone_is_not_evaluated(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError) as caught:
        burnish.evaluate(str(tmp_path))
    assert "model.lora.path" in str(caught.value)


def test_pairs_train_a_policy_and_a_reward_model(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []
    monkeypatch.setattr(burnish.api, "run_method", lambda method, config: begun.append(method.name))
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 4
    settings = {key: value for key, value in SFT.items() if key != "data"}
    for function in (burnish.dpo, burnish.rm):
        result = function(settings, data=pairs, steps=1, name=function.__name__)
        assert result.directory == place / "runs" / function.__name__
    assert begun == ["dpo", "rm"]
    with pytest.raises(UsageError, match="betta"):
        burnish.dpo(settings, data=pairs, method={"betta": 0.2})


def test_sft_then_evaluation_of_its_model(place: Path) -> None:
    result = burnish.sft(SFT, name="api", steps=2, evaluation={"every": 0})
    assert result.directory == place / "runs" / "api"
    assert [row["step"] for row in result.metrics] == [0, 1, 2]
    assert result.model is not None
    AutoModelForCausalLM.from_pretrained(result.model)
    measured = burnish.evaluate(result)
    assert measured["val/loss"] == pytest.approx(result.metrics[0]["val/loss"], abs=1)
    settings = {"data.validation": ["validation.jsonl"], "engine": {"precision": "fp32"}}
    for model in (result.model, result.model.parent, result.model.parents[1] / "latest"):
        alone = burnish.evaluate(model, **settings)  # in bf16
        assert alone == pytest.approx(measured, rel=1e-3)


def test_a_reward_needs_a_name_that_other_processes_can_import(place: Path) -> None:
    for function in (lambda completions: [0.0], place.exists):
        with pytest.raises(BurnishError):
            burnish.rl(RL, reward=function)


def test_a_reward_may_be_named(place: Path) -> None:
    for reward in ("none.py:score", ["none.py:score"]):
        with pytest.raises(MissingError, match=r"none\.py"):
            burnish.rl(RL, reward=reward)


def test_the_reward_section_may_be_given_as_a_mapping(place: Path) -> None:
    with pytest.raises(UsageError, match=r"reward\.functions"):
        burnish.rl(RL, reward={"functions": []})


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model to begin with."""
    monkeypatch.chdir(make_files(tmp_path))
    settings = {"name": "start", "steps": 1, "evaluation": {"every": 0, "before": False}}
    model = burnish.sft(SFT, **settings).model
    assert model is not None
    return tmp_path / model


def test_the_example(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    result = importlib.import_module(EXAMPLE.stem).main(str(start), engine={"precision": "fp32"})
    assert len(result.metrics) == 4


@pytest.mark.nightly
def test_the_example_under_torchrun(start: Path, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    said = python(tmp_path / "two", *run, str(start))
    assert said.count("rewards:") == 1
    assert "step-00000004" in said


def test_a_script_that_trains_when_it_is_imported_is_told_so(place: Path) -> None:
    text = "import burnish\ndef score(completions, **columns): ...\nburnish.rl('rl.yaml', reward=score)\n"
    (place / "unguarded.py").write_text(text)
    function = RewardFunctionConfig(function="unguarded.py:score")
    with pytest.raises(UsageError, match="__main__"):
        RewardPool(RewardConfig(functions=[function]))


def test_completion_and_help_show_what_there_is(tmp_path: Path) -> None:
    assert set(burnish.__all__) == set(dir(burnish))
    text = python(
        tmp_path, "-c", "import burnish, pydoc; print(pydoc.plain(pydoc.render_doc(burnish)))"
    )
    for name in ("sft(config", "rl(config", "evaluate(config", "class Result", "burnish.rl(model="):
        assert name in text

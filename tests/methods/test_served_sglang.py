"""Runs whose completions SGLang's stand-in draws (tests/support/services/fake_sglang): those of the built-in generator, to the byte.

Only the log-probs that are shown may differ, by a last decimal.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.states import committed
from support.models.tiny import save_base
from support.runs.served import Servers
from support.runs.training_files import FRESH, RL, burnish, done, rollouts

from burnish.config.schema import RunConfig
from burnish.errors import UsageError
from burnish.methods.parts.serve import visible_devices
from burnish.methods.table import METHODS

TESTS = Path(__file__).parents[1]
ENVIRON = {
    "PYTHONPATH": os.pathsep.join(map(str, (TESTS / "support/services/fake_sglang", TESTS.parent)))
}
WIDE = {**FRESH, "hidden_size": 64, "head_dim": 32}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tied": (1, "child", {"ahead": 1}),
    "untied": (1, "servers", {"tied": False}),
    "ranks": (2, "child", {}),
    "shared": (2, "child", {"tensor_parallel": 2}),
    "merged": (1, "child", {"model": {"path": "base", "lora": {"rank": 4}}}),
}
"""Processes, who generates, and settings."""


def digest(run: Path) -> str:
    newest = committed(run / "checkpoints")[-1].path
    files = sorted((newest / "model").glob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_sglang_draws_what_the_built_in_generator_draws(work: Path, case: str) -> None:
    world, place, settings = CASES[case]
    fresh = {**WIDE, "tie_word_embeddings": settings.get("tied", True)}
    save_base(work / "base", 0, **WIDE)
    given = {**RL, "model": {**RL["model"], "fresh": fresh}, "steps": 3}
    given |= {"evaluation": {"before": False, "every": 0}}
    given |= {"model": settings["model"]} if "model" in settings else {}
    found: list[Any] = []
    logprobs: list[Any] = []
    for engine, where in (("builtin", "inside"), ("sglang", place)):
        name = f"{case}_{engine}"
        how = {**RL["rollout"], "ahead": settings.get("ahead", 0), "engine": engine, "place": where}
        if engine == "sglang":
            how["tensor_parallel"] = settings.get("tensor_parallel", 1)
        config = work / f"{name}.yaml"
        config.write_text(json.dumps({**given, "name": name, "rollout": how}))
        with Servers(work, str(config), int(where == "servers"), ENVIRON):
            run = done(work, "rl", str(config), f"name={name}", world=world, environ=ENVIRON)
        rows = [row for step in range(1, 4) for row in rollouts(run, step)]
        shown = [row["tokens"].pop("logprobs") for row in rows]  # rounded to four decimals
        found.append((rows, digest(run)))
        logprobs.append(np.concatenate(shown))
    assert found[0] == found[1]
    np.testing.assert_allclose(*logprobs, atol=1.5e-4)


def test_a_run_without_sglang_is_refused_before_anything(work: Path) -> None:
    code, output = burnish(
        work, "rl", "rl.yaml", "rollout.engine=sglang", "rollout.place=child", "name=missing"
    )
    assert code != 0
    assert "rollout.engine: sglang" in output
    assert "[sglang]" in output


def test_as_many_processes_as_share_a_generator_are_needed() -> None:
    how = {**RL["rollout"], "engine": "sglang", "place": "child", "tensor_parallel": 2}
    config = RunConfig.model_validate({**RL, "rollout": how})
    METHODS["rl"].check(config, 4)
    with pytest.raises(UsageError, match=r"rollout\.tensor_parallel"):
        METHODS["rl"].check(config, 3)


def test_a_generator_sees_the_devices_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    third = torch.device("cuda", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert visible_devices(third, 2) == "6,7"
    with pytest.raises(UsageError, match="tensor_parallel"):
        visible_devices(third, 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_devices(third, 1) == "2"
    assert visible_devices(torch.device("cpu"), 2) is None

"""What a person is told when a device has no memory left."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models.known_sizes import QWEN3_8B

from burnish.config.schema import RunConfig
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.methods.table import METHODS
from burnish.runs.session import Session, open_run

CPU = torch.device("cpu")


@contextmanager
def run(
    directory: Path, trainer: str = "sft", *, sections: Mapping[str, Any] = {}, **model: object
) -> Iterator[Session]:
    """A run in `directory`, as it is opened."""
    values = {
        "output_dir": str(directory),
        "model": {"fresh": QWEN3_8B | model, "tokenizer": "t"},
        "batch": {"tokens_per_device": 65536, "prompts": 64},
        "data": {"max_prompt_length": 512},
        **sections,
    }
    with open_run(RunConfig.model_validate(values), METHODS[trainer], Layout(), CPU) as session:
        yield session


@pytest.mark.parametrize(
    ("phase", "remedy"),
    [
        ("update", "engine.activation_checkpointing=full"),
        ("save", "model.lora.rank=16"),
        ("rollout", "rollout.slots="),
    ],
)
def test_the_setting_that_would_have_helped(phase: str, remedy: str, tmp_path: Path) -> None:
    trainer, model = ("rl", {"num_hidden_layers": 4}) if phase == "rollout" else ("sft", {})
    with (
        pytest.raises(BurnishError) as raised,
        run(tmp_path, trainer, **model) as session,
        session.spans(phase),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    error = raised.value
    assert "rank 0 " in error.problem
    assert phase in error.problem
    assert "Tried to allocate 20.00 GiB" in str(error.have)
    assert remedy in str(error.do)
    assert list(tmp_path.glob("*/*.pickle")) == []  # a snapshot is CUDA's only


def test_reward_models_are_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    judged = {"reward": {"models": [{"path": str(tmp_path)}]}}
    with (
        pytest.raises(BurnishError, match=r"reward\.models"),
        run(tmp_path, "rl", sections=judged, num_hidden_layers=4) as session,
        session.spans("publish"),
    ):
        raise torch.OutOfMemoryError("no memory")


def test_the_allocator_of_a_cpu_says_it_otherwise(tmp_path: Path) -> None:
    with pytest.raises(BurnishError), run(tmp_path):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_any_other_error_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^shapes do not fit$"), run(tmp_path):
        raise RuntimeError("shapes do not fit")


class Recorder:
    """Stands for the memory of a backend that records as torch's do."""

    def __init__(self, full: bool = False) -> None:
        self.recording, self.full = False, full

    def _record_memory_history(self, *told: object, **settings: object) -> None:
        for real in (torch.cuda.memory, torch.xpu.memory):
            inspect.signature(real._record_memory_history).bind(*told, **settings)
        self.recording = told[0] is not None

    def _dump_snapshot(self, filename: str) -> None:
        if self.full:
            raise OSError("no space left")
        Path(filename).write_text("recorded" if self.recording else "sizes")


@pytest.mark.parametrize(
    ("records", "full", "content", "said"),
    [
        (False, False, "sizes", r"tracking\.allocations=true.*rank0\.pickle"),
        (True, False, "recorded", r"rank0\.pickle"),
        (True, True, None, "no space left"),
    ],
)
def test_a_backend_that_can_leaves_a_snapshot(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    records: bool,
    full: bool,
    content: str | None,
    said: str,
) -> None:
    recorder = Recorder(full)
    backend = SimpleNamespace(memory=recorder)
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    tracking = {"tracking": {"allocations": records}}
    with pytest.raises(BurnishError, match=said), run(tmp_path, sections=tracking):
        raise torch.OutOfMemoryError("no memory")
    assert not recorder.recording
    found = [file.read_text() for file in tmp_path.glob("*/*.pickle")]
    assert found == ([content] if content else [])

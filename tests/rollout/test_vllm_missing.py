"""What vLLM's generator says where there is no vLLM that it can use. Needs none."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from support.models.tiny import tiny_config

from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError, MissingError
from burnish.rollout.vllm.vllm_generator import VllmGenerator


def make() -> None:
    VllmGenerator(
        tiny_config(),
        layout=Layout(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        slots=4,
        eos_token_ids=(),
        decode=None,
    )


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the generator leaves in the environment does not outlive the test."""
    for name in ("ENABLE_V1_MULTIPROCESSING", "CPU_OMP_THREADS_BIND", "NO_USAGE_STATS"):
        monkeypatch.setenv(f"VLLM_{name}", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingError, match=r"\[vllm\]"):
        make()


def test_an_old_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.27.3"))
    with pytest.raises(IncompatibleError, match=r"(?s)0\.27\.3.*0\.28"):
        make()


def test_a_vllm_for_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(current_platform=SimpleNamespace(device_type="cuda"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0+cpu"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", cuda)
    with pytest.raises(IncompatibleError, match=r"(?s)cuda.*cpu"):
        make()

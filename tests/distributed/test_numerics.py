"""`burnish.distributed.numerics`: torch's modes in a run, and after it."""

import os

import pytest
import torch
from torch.nn.attention import _registry, current_flash_attention_impl

from burnish.config.schema import EngineConfig
from burnish.distributed.numerics import grow_segments, numerics
from burnish.errors import UsageError


def modes():
    return (
        torch.get_float32_matmul_precision() == "high",
        torch.are_deterministic_algorithms_enabled(),
    )


@pytest.fixture(params=["high", "highest"])
def before(request):
    torch.set_float32_matmul_precision(request.param)
    yield modes()
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_modes_are_those_of_the_settings_and_then_those_of_before(
    monkeypatch, before, tf32, deterministic
):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with numerics(EngineConfig(tf32=tf32, deterministic=deterministic)):
        assert modes() == (tf32, deterministic)
        # torch refuses products on CUDA without it.
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == deterministic
    assert modes() == before


def test_a_program_may_have_set_the_precision_by_its_newer_name():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with numerics(EngineConfig()):
        assert modes()[0] is False
    assert modes()[0] is True
    torch.set_float32_matmul_precision("highest")


def test_an_error_leaves_no_mode_behind(before):
    with pytest.raises(KeyError), numerics(EngineConfig(deterministic=True)):
        raise KeyError
    assert modes() == before


def test_attention_has_the_kernels_of_choice(monkeypatch):
    class Handle:
        removed = False

        def remove(self):
            self.removed = True

    handle = Handle()
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", lambda: handle)
    with numerics(EngineConfig(flash_attention="FA3")):
        assert current_flash_attention_impl() == "FA3"
        assert not handle.removed
    assert current_flash_attention_impl() is None
    assert handle.removed


@pytest.mark.parametrize("kernels", ["FA3", "FA4"])
def test_kernels_that_are_not_installed_are_refused(kernels, before):
    with pytest.raises(UsageError), numerics(EngineConfig(flash_attention=kernels)):
        raise AssertionError
    assert modes() == before


def test_the_allocator_grows_its_segments(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    try:
        grow_segments()
        assert "expandable_segments:True" in torch._C._accelerator_getAllocatorSettings()
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_the_allocator_keeps_what_the_environment_says(monkeypatch):
    before = torch._C._accelerator_getAllocatorSettings()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    grow_segments()
    assert torch._C._accelerator_getAllocatorSettings() == before

"""How CUDA computes and allocates: torch's global modes, set for a run and put back after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from burnish.config.schema import EngineConfig
from burnish.errors import refusing

# cuBLAS repeats its sums only with a workspace of this kind (NVIDIA's cuBLAS guide, section 2.1.4). It reads this at its first call.
_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_PACKAGES = {"FA3": "flash_attn_3", "FA4": "flash-attn-4"}
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@contextmanager
def numerics(config: EngineConfig) -> Iterator[None]:
    """Compute as the settings of `engine` say inside the block, whatever modes the program had before.

    Raises `UsageError` for kernels of attention that are not installed.
    """
    # torch's newer name for the precision can always be read, but a program that sets it keeps torch from reading the older one.
    was_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        _set_tf32(config.tf32)
        if config.deterministic:
            os.environ.setdefault(*_WORKSPACE)
            torch.use_deterministic_algorithms(True)
        if config.flash_attention != "FA2":
            with refusing(
                f"engine.flash_attention={config.flash_attention} cannot be used",
                want=f"a device for it, and the package {_PACKAGES[config.flash_attention]}",
                do="install it as github.com/Dao-AILab/flash-attention says, or leave engine.flash_attention out",
            ):
                activate_flash_attention_impl(config.flash_attention)
        yield
    finally:
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
        _set_tf32(was_tf32)
        torch.use_deterministic_algorithms(was_deterministic)


def _set_tf32(on: bool) -> None:
    torch.set_float32_matmul_precision("high" if on else "highest")


def grow_segments() -> None:
    """Let CUDA's allocator grow its segments: micro-batches of all sizes leave gaps between fixed ones.

    Keep what the environment says. Child processes do not inherit it: vLLM's allocator does not work with it.
    """
    if not any(name in os.environ for name in _ALLOCATOR):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")

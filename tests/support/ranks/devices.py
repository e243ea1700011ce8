"""For `tests/gpu`: the CPU, which proves a test itself by night, and one GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from burnish.distributed.device import has_matrix_units

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)

on_gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
)
"""The marks of what only a GPU can run."""

DEVICES = [
    pytest.param(CPU, id="cpu", marks=pytest.mark.nightly),
    pytest.param(CUDA, id="cuda", marks=on_gpu),
]

ROUNDED_FACTORS_ERROR = 0.008
"""What attention in bf16 may differ from fp64, relative to the norm, where products round their factors to bf16."""
BF16_ATTENTION_ERROR = ROUNDED_FACTORS_ERROR if has_matrix_units(CPU) else 0.004
"""The same of `burnish.models.kernels.span_attention`, whose products do so where the processor has units for it."""

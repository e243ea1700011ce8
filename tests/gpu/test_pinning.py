"""Host memory that CUDA is asked to register, and what a refusal leaves behind."""

from __future__ import annotations

import pytest
import torch
from support.ranks.devices import CUDA, on_gpu

from burnish.distributed.host_memory import page_lock, page_unlock


@pytest.mark.parametrize("device", [pytest.param(CUDA, id="cuda", marks=on_gpu)])
def test_a_refusal_is_not_raised_by_what_comes_next(device: torch.device) -> None:
    memory, there = torch.zeros(1 << 20), torch.zeros(4, device=device)
    for _ in range(2):
        assert page_lock(memory, device)
        assert not page_lock(memory, device), "it is registered already"
        assert there.fill_(2.0).sum().item() == 8.0
        page_unlock(memory, device)

"""Refusals to pin, as CUDA's runtime gives them; what becomes of its last error only CUDA shows (`tests/gpu`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burnish.distributed import pinning
from burnish.distributed.pinning import pin


class Runtime:
    """Answers with what it is given."""

    def __init__(self, answer: int) -> None:
        self.answer = answer

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return self.answer


@pytest.mark.parametrize(("answer", "forgotten"), [(0, 0), (712, 1)])
def test_the_error_of_a_refusal_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, answer: int, forgotten: int
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(pinning, "_runtime", lambda: Runtime(answer))
    monkeypatch.setattr(pinning, "_forget_error", lambda: calls.append(None))
    assert pin(torch.zeros(8)) is (answer == 0)
    assert len(calls) == forgotten
    assert not pin(torch.zeros(0))
    assert len(calls) == forgotten

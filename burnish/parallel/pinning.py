"""Host memory that the system keeps in place, so that CUDA copies to and from it while everything else goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pin(memory: Tensor) -> bool:
    """Register with CUDA; False where that is refused: then copies are slower and as right."""
    size = memory.nbytes
    return size > 0 and int(_runtime().cudaHostRegister(memory.data_ptr(), size, 0)) == 0


def unpin(memory: Tensor) -> None:
    """Undo `pin`. No copy may be under way."""
    _runtime().cudaHostUnregister(memory.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

"""Host memory that the system keeps in place, so that CUDA copies to and from it while everything else goes on."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def pin(memory: Tensor) -> bool:
    """Register with CUDA; False where that is refused: then copies are slower and as right."""
    size = memory.nbytes
    if size == 0:
        return False
    if int(_runtime().cudaHostRegister(memory.data_ptr(), size, 0)) == 0:
        return True
    _forget_error()
    return False


def unpin(memory: Tensor) -> None:
    """Undo `pin`. No copy may be under way."""
    _runtime().cudaHostUnregister(memory.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error() -> None:
    """Clear this thread's last error, which the next kernel launch would raise as its own.

    torch has no binding for that, so the function is found by way of the library that is linked to
    the runtime that torch uses: there may be others in the process, each with an error of its own.
    """
    kind = "hip" if torch.version.hip else "cuda"
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / f"libc10_{kind}.so"))
    library[f"{kind}GetLastError"]()

"""`torch.npu` of the pretended device: what torch, FSDP2 and Burnish ask of it.

torch calls `register` as it is imported, just as it calls Ascend's torch_npu. Random numbers are the CPU's.
"""

from __future__ import annotations

import ctypes
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAME = "npu"


def register() -> None:
    """Make the device torch's accelerator. Gloo does its collectives under the name of HCCL."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    dist.Backend.register_backend("hccl", _group, devices=NAME)


def _group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(__file__).with_name("device.so")))
    for name in ("bytes", "peak", "total"):
        getattr(library, f"pretended_{name}").restype = ctypes.c_size_t
    return library


_LIBRARY = _library()


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return _LIBRARY.pretended_devices()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(device)


def device(device: Any) -> Any:
    return torch.accelerator.device_index(torch.device(device).index)


def get_device_name(device: Any = None) -> str:
    return "Pretended device"


def Stream(device: Any = NAME, priority: int = 0) -> torch.Stream:
    return torch.Stream(device, priority=priority)


def Event(**_: bool) -> torch.Event:
    return torch.Event(NAME)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def stream(stream: torch.Stream) -> torch.Stream:
    return stream


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(device)


def empty_cache() -> None: ...


def memory_allocated(device: Any = None) -> int:
    return _LIBRARY.pretended_bytes()


memory_reserved = memory_allocated


def max_memory_allocated(device: Any = None) -> int:
    return _LIBRARY.pretended_peak()


def reset_peak_memory_stats(device: Any = None) -> None:
    _LIBRARY.pretended_reset_peak()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total = _LIBRARY.pretended_total()
    return total - memory_allocated(), total


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16]


def manual_seed_all(seed: int) -> None: ...


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)

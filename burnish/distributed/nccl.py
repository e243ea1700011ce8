"""Broadcast by NCCL itself, without torch's process group, which ends a process whose peer dies.

The functions are those of NCCL's header `nccl.h`, which RCCL has too.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

cuda: Any = torch.cuda  # its streams and events have no types
# Results that are no error: ncclSuccess and ncclInProgress. The type ncclUint8.
_FINE = (0, 7)
_UINT8 = 1
# Seconds that ending a communicator may take from its caller.
_ABORT_SECONDS = 5.0
# Settings that NCCL does not compare between processes. With unequal ones it can hang.
_SETTINGS = (
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_NET_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
)


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Nccl:
    """The library that torch has loaded."""

    def __init__(self, library: Any = None) -> None:
        """Open it, or take `library` instead. Raises `OSError` if there is none."""
        name = "librccl.so.1" if torch.version.hip else "libnccl.so.2"
        self._library = library or ctypes.CDLL(name)
        pointer = ctypes.c_void_p
        number = ctypes.c_int
        size = ctypes.c_size_t
        for function, types in {
            "ncclGetVersion": [pointer],
            "ncclGetUniqueId": [pointer],
            "ncclCommInitRank": [pointer, number, _UniqueId, number],
            "ncclBroadcast": [pointer, pointer, size, number, number, pointer, pointer],
            "ncclCommGetAsyncError": [pointer, pointer],
            "ncclCommAbort": [pointer],
        }.items():
            getattr(self._library, function).argtypes = types
        self._library.ncclGetErrorString.argtypes = [number]
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def facts(self) -> dict[str, Any]:
        """Return what has to be equal in all processes of a communicator: version and settings."""
        version = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        settings = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
        return {"NCCL": version.value} | settings

    def new_id(self) -> bytes:
        """Return an id for a new communicator. This process has to live until all have joined it."""
        unique = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique))
        return bytes(unique)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function. Raises `RuntimeError` with NCCL's own words."""
        result = getattr(self._library, function)(*arguments)
        if result not in _FINE:
            text: bytes = self._library.ncclGetErrorString(result)
            raise RuntimeError(f"{function}: {text.decode()}")


class Communicator:
    """A communicator on one device, in which rank 0 sends."""

    def __init__(self, nccl: Nccl, unique: bytes, rank: int, size: int, device: torch.device):
        """Join, with as many processes as `size` says. Blocks until all have come. Raises `RuntimeError`."""
        self._nccl = nccl
        self._device = device
        self._lock = threading.Lock()
        handle = ctypes.c_void_p()
        # A stream of its own, so that a broadcast to a process that has died holds nothing else up.
        self._stream: Any = cuda.Stream(device)
        nccl.call(
            "ncclCommInitRank",
            ctypes.byref(handle),
            size,
            _UniqueId.from_buffer_copy(unique),
            rank,
        )
        self._handle: ctypes.c_void_p | None = handle

    def broadcast(self, buffer: Tensor) -> Callable[[], bool]:
        """Begin to broadcast rank 0's bytes. Return a function that tells whether they are through, or raises `RuntimeError`."""
        self._stream.wait_stream(cuda.current_stream(self._device))
        with self._lock:
            self._nccl.call(
                "ncclBroadcast",
                buffer.data_ptr(),
                buffer.data_ptr(),
                buffer.nbytes,
                _UINT8,
                0,
                self._open_handle(),
                self._stream.cuda_stream,
            )
            through = cuda.Event()
            through.record(self._stream)
        buffer.record_stream(self._stream)
        return partial(self._is_through, through)

    def _is_through(self, through: Any) -> bool:
        error = ctypes.c_int()
        with self._lock:
            self._nccl.call("ncclCommGetAsyncError", self._open_handle(), ctypes.byref(error))
        if error.value not in _FINE:
            raise RuntimeError(f"NCCL's connection is broken (error {error.value})")
        return bool(through.query())

    def _open_handle(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise RuntimeError("NCCL's communicator has ended")
        return self._handle

    def abort(self) -> None:
        """End the communicator and its running broadcasts, from any thread, without the others."""
        # A broadcast that waits for a dead process to connect keeps the lock, and only the abort ends it.
        locked = self._lock.acquire(timeout=1.0)
        handle, self._handle = self._handle, None
        if locked:
            self._lock.release()
        if handle is not None:
            work = threading.Thread(target=self._end, args=(handle,), daemon=True)
            work.start()
            work.join(_ABORT_SECONDS)

    def _end(self, handle: ctypes.c_void_p) -> None:
        with cuda.device(self._device):
            self._nccl.call("ncclCommAbort", handle)

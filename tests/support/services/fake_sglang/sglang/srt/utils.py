"""What carries tensors to a worker."""

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.multiprocessing  # noqa: F401 - which teaches the pickler to share memory

# Code is not unpickled.
ALLOWED = ("builtins", "collections", "multiprocessing.resource_sharer", "torch")


class MultiprocessingSerializer:
    @staticmethod
    def serialize(obj: Any, output_str: bool = False) -> bytes:
        assert not output_str
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(obj)
        return buffer.getvalue()

    @staticmethod
    def deserialize(data: bytes) -> Any:
        return _SafeUnpickler(io.BytesIO(data)).load()


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith(ALLOWED):
            raise RuntimeError(f"{module}.{name} is not allowed")
        return super().find_class(module, name)

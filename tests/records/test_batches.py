from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from burnish.records import to_device


def test_a_copy_to_any_accelerator_is_from_pinned_memory() -> None:
    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func not in (Tensor.pin_memory, Tensor.to):
                return func(*args, **kwargs or {})
            made.append(func.__name__)
            return args[0]

    for device in "cuda", "xpu", "hpu":
        made: list[str] = []
        with Calls():
            to_device(torch.ones(2), torch.device(device, 0))
        assert made == ["pin_memory", "to"]
    for device in "cpu", "meta":
        assert to_device(torch.ones(2), torch.device(device)).device.type == device

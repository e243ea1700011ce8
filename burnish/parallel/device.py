"""One device layer over CPU, CUDA, ROCm, XPU and Ascend NPU, on `torch.accelerator`."""

from __future__ import annotations

import torch


def pick_device(local_rank: int) -> torch.device:
    """The device of this rank: the accelerator with its index, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, local_rank)


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on the device has run; nothing to do on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

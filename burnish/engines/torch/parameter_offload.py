"""Keep weights and gradients on the host during training, by FSDP2's CPUOffloadPolicy: a layer's weights come to the device for its passes."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from burnish.models.meta_init import materialize

_HOST = torch.device("cpu")


def host_policy(device_type: str) -> CPUOffloadPolicy:
    """Return the policy of FSDP2. Copies from pinned memory overlap with compute."""
    return CPUOffloadPolicy(pin_memory=device_type != "cpu")


def materialize_on_host(root: nn.Module, device: torch.device) -> None:
    """Allocate a sharded meta model's weights on the host, and its buffers on `device`."""
    materialize(root, _HOST)
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))

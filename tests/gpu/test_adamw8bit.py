"""AdamW in 8 bits takes the same steps on every device."""

from __future__ import annotations

import pytest
import torch
from devices import CPU, DEVICES

from burnish.config.schema import OptimConfig
from burnish.engines.optim.adamw8bit import AdamW8bit


def stepped(device: torch.device) -> tuple[AdamW8bit, torch.Tensor]:
    """Three steps of a matrix whose rows are no whole blocks."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 300, generator=generator).to(device)
    adamw = AdamW8bit({"w": weight}, OptimConfig(kind="adamw8bit", weight_decay=0.1))
    for step in range(1, 4):
        gradient = torch.randn(6, 300, generator=generator).to(device)
        adamw.step(1e-2, step, {"w": gradient})
    return adamw, weight.cpu()


@pytest.mark.parametrize("device", DEVICES)
def test_the_steps_are_those_of_a_cpu(device: torch.device) -> None:
    adamw, weight = stepped(device)
    wanted, weights = stepped(CPU)
    torch.testing.assert_close(weight, weights, rtol=1e-4, atol=1e-5)
    for found, codes in zip(adamw.slots().values(), wanted.slots().values(), strict=True):
        assert found["w"].device.type == device.type
        assert int((found["w"].cpu().int() - codes["w"].int()).abs().max()) <= 1

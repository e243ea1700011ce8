"""Every device that this machine has, one after the other, and this process alone on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.ranks.devices import DEVICES

from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return request.param


@pytest.fixture
def alone(device: torch.device) -> Iterator[Layout]:
    with process_group(device, 60.0) as layout:
        yield layout

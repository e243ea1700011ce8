"""Decide on a run's accelerators what its configuration leaves to them. A run on CPUs does not load this."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from burnish.config.schema import RunConfig
from burnish.distributed.accelerators import accelerator_named
from burnish.distributed.collectives import agree, from_main, gather_objects
from burnish.distributed.device import device_name, total_memory
from burnish.distributed.layout import Layout
from burnish.launch.elastic import planned_tokens
from burnish.plan.devices import Devices, devices_here
from burnish.plan.layout_search import Planner
from burnish.tracking.rundir import RunDirectory

Settings = TypeVar("Settings", bound=RunConfig)
_log = logging.getLogger("burnish")
# The driver counts a little more than a program gets; a part of a device (MIG) is much less than the whole.
_WHOLE = 0.95


def decided(
    with_tokens: Callable[[int], Settings],
    planner: Callable[[Devices], Planner],
    run: RunDirectory | None,
    layout: Layout,
    device: torch.device,
) -> Settings:
    """Return settings `with_tokens` as `planned_tokens` says for the device with least memory, the same on all ranks. Collective."""
    memory = min(gather_objects(total_memory(device), layout))
    chosen = (with_tokens(0), "")
    with agree(layout):
        if layout.is_main:
            devices = _devices(layout, device_name(device), float(memory))
            tokens, why = planned_tokens(planner, devices, run)
            chosen = (with_tokens(tokens), why)
    settings, why = from_main(chosen, layout)
    if layout.is_main:
        text = "a micro-batch has at most %d tokens on each device (auto: %s)"
        _log.info(text, settings.batch.tokens, why)
    return settings


def _devices(layout: Layout, name: str, memory: float) -> Devices | None:
    """Return the run's devices as `burnish plan` describes them, or by what torch says of them."""
    here = devices_here(layout.world, layout.local_world)
    if here is not None and not here.cpu and memory >= _WHOLE * here.memory:
        return replace(here, name=name)
    kind = accelerator_named(name)
    return None if kind is None else Devices(layout.world, name, memory, kind)

"""`burnish doctor --count`: count what a run asks of its devices, beside what the planner predicts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from burnish.check.call_counter import (
    SEQUENCES,
    TOKENS,
    CallCounts,
    TokenCounts,
    count_microbatch,
    count_token,
    narrow_model,
)
from burnish.cli.output import print_text
from burnish.cli.plan import duration_text
from burnish.config.load import read_config
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.errors import BurnishError, bytes_text, count_text, table
from burnish.launch.elastic import planner_of
from burnish.methods.table import method_meant_by
from burnish.models.loading import read_model_config
from burnish.plan.devices import Devices, devices_here
from burnish.plan.layout_search import Planner
from burnish.runs.download_inputs import local_inputs

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class _Counted:
    model: str
    """The type."""
    layers: int
    device: str
    processes: int
    microbatch: CallCounts
    token: TokenCounts | None
    """None if the built-in generator draws none."""


def count_calls(path: str, overrides: Sequence[str], *, as_json: bool) -> None:
    """Print the counts of a configuration at its layout. Raises `BurnishError` if it is wrong."""
    config = read_config(path, overrides)
    method = method_meant_by(config)
    config = method.named(config)

    def run(layout: Layout, device: torch.device) -> None:
        method.check(config, layout.world)
        _, local = local_inputs(config, device, layout, only_small=True)
        hf_config = read_model_config(local.model)
        text = hf_config.get_text_config()
        narrow = narrow_model(hf_config, local.engine)
        microbatch = count_microbatch(
            narrow,
            local.engine,
            lora=local.model.adapter,
            layout=layout,
            device=device,
            is_group=method.generates,
        )
        token = None
        if method.generates and local.rollout.engine == "builtin":
            token = count_token(narrow, local.engine, device)
        counted = _Counted(
            text.model_type, text.num_hidden_layers, device.type, layout.world, microbatch, token
        )
        if layout.is_main:
            planned = dict(_planned(partial(planner_of, local, method), layout))
            if as_json:
                print_text(
                    json.dumps(
                        _fields(counted) | {"microbatch": _fields(microbatch), "planned": planned}
                    )
                )
            else:
                print_text("\n".join(_lines(counted, planned)))

    launch(run, config.distributed, config.engine)


def _fields(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as they are. (`asdict` cannot copy counters.)"""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _lines(counted: _Counted, planned: dict[str, str]) -> Iterator[str]:
    processes = "one process" if counted.processes == 1 else f"{counted.processes} processes"
    yield (
        f"Counted for {processes} on {counted.device}: a narrow {counted.model} with all {counted.layers} layers, "
        f"and {SEQUENCES} sequences of {TOKENS} tokens in a micro-batch\n"
    )
    yield from table([*_rows(counted), *planned.items()])
    yield ""
    if counted.device == "cpu":
        yield "These are the CPU's calls. An accelerator has other kernels: count there."
    else:
        yield "A call launches a kernel, or a few. Triton's kernels, and those that CUDA replays from a graph, are not calls."


def _rows(counted: _Counted) -> Iterator[tuple[str, str]]:
    micro = counted.microbatch
    for name, counts in (("forward", micro.forward), ("backward", micro.backward)):
        yield name, f"{count_text(counts.total(), 'call')} of torch: {_most(counts)}"
    if counted.device != "cpu":
        yield "host", f"copies to the device: {micro.copies}; reads by the host: {micro.reads}"
    yield "collectives", _most(micro.collectives) or "none"
    if counted.token is not None:
        calls, reads = counted.token
        read = "" if counted.device == "cpu" else f", {reads:g} reads by the host"
        yield "a token", f"{calls:g} calls of torch{read}, for {SEQUENCES} completions at a time"


def _most(counts: Counter[str]) -> str:
    """Name the commonest operators."""
    named = [
        f"{times} {name.split('::')[-1].split('.')[0]}"
        for name, times in counts.most_common(_MOST_NAMED)
    ]
    others = counts.total() - sum(times for _, times in counts.most_common(_MOST_NAMED))
    return ", ".join(named) + (f", {others} others" if others else "")


def _planned(plan_for: Callable[[Devices], Planner], layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield what the planner says of the whole model on this machine's devices."""
    devices = devices_here(layout.world, layout.local_world)
    if devices is None:
        yield "planned", "not planned: this machine's accelerator is not known"
        return
    try:
        planner = plan_for(devices)
        plan, refused = planner.as_configured()
    except BurnishError as error:
        plan = None
        refused = error
    if plan is None:
        why = refused.problem if refused else "it cannot run"
        yield "planned", f"not planned: {why}"
        return
    need = f"{bytes_text(plan.need)} of {bytes_text(devices.usable)} on each of {devices}"
    yield "memory", f"{need}, most in {plan.fullest}{'' if plan.fits else ': it does not fit'}"
    updates = planner.work.updates * planner.work.epochs
    seconds = plan.seconds["update"] / (updates * plan.microbatches)
    yield (
        "time",
        (
            f"{duration_text(plan.step_seconds)} a step, {duration_text(seconds)} a micro-batch of at most "
            f"{plan.tokens} tokens, by work divided by speed"
        ),
    )
    exchanged = planner.fsdp_bytes(plan)
    if exchanged is not None and exchanged[0]:
        gathered, reduced = map(bytes_text, exchanged)
        yield "exchanged", f"{gathered} of weights and {reduced} of gradients for a micro-batch"

"""`burnish plan`: memory and time of a run, and the layouts that fit. Needs a model's config.json, and torch for few types alone."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from burnish.cli.output import print_text
from burnish.config.constraints import check_engine
from burnish.config.load import read_config
from burnish.config.schema import EngineConfig
from burnish.distributed.environment import place_of
from burnish.errors import (
    BurnishError,
    IncompatibleError,
    UsageError,
    bytes_text,
    count_text,
    table,
)
from burnish.launch.elastic import planner_of
from burnish.method import Method
from burnish.methods.table import method_meant_by
from burnish.runs.preflight import require_unquantized

if TYPE_CHECKING:
    from burnish.plan.devices import Devices
    from burnish.plan.layout_search import Plan, Planner

_BAR = 32
_ALTERNATIVES = 6
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_ACCURACY = {
    "torch": "Measured runs of small models, and of layers of full size, were within 15 % of the planned memory.",
    "megatron": "Measured runs of small models on CPUs were within 15 % of the planned memory; none on GPUs was compared.",
}

_Configured = tuple["Plan | None", BurnishError | None]
"""The plan of the settings as they are, and why they cannot run or do not fit."""


def run_plan(args: Namespace) -> None:
    """Plan a configuration. Raises `UsageError` if no layout fits."""
    config = read_config(args.config, args.overrides)
    check_engine(config)
    devices = devices_of(args.devices, args.device_memory, args.device_tflops)
    if devices is None:
        raise UsageError(
            "this machine's accelerator is not known",
            want="one whose memory and speed are in the table",
            do="give --devices; with --device-memory and --device-tflops for one that is not in the table",
        )
    method = method_meant_by(config)
    planner = planner_of(method.named(config), method, devices)
    plans = planner.all_plans()
    configured = planner.as_configured()
    if args.json:
        print_text(json.dumps(_as_json(plans, configured, devices)))
    else:
        lines = [*_lines(plans, configured, planner, method), "", _ACCURACY[config.engine.kind]]
        lines += _remarks(config.model.path)
        print_text("\n".join(lines))
    if not plans:
        raise UsageError(
            f"no layout divides this run among {devices}",
            have=f"{planner.work.sequences} sequences a step, in {planner.work.updates} updates",
            want="a sequence for every data-parallel rank, room for the longest in a micro-batch, and degrees that divide the heads and experts of a layer",
            do="raise batch.examples, or batch.prompts or rollout.n, or a number in batch.tokens_per_device, or take fewer devices",
        )
    if not plans[0].fits:
        raise planner.refusal(plans[0])


def _remarks(path: str | None) -> list[str]:
    """Return what has to be done before a quantized model can be trained as planned."""
    try:
        remark = require_unquantized(path, "model.path") if path else ""
    except IncompatibleError as error:
        return ["", f"note: {error.problem}; this plan is for full precision: {error.do}"]
    except BurnishError:  # the plan itself needs no more than it had
        return []
    return ["", f"note: {remark}"] if remark else []


def fit(
    plan_for: Callable[..., Planner], devices: Devices | None, row_lengths: Sequence[int] = ()
) -> Iterator[tuple[str, str]]:
    """Yield a dry run's rows about memory and time: for the first rows' mean and longest length, and for the limits.

    Raises `UsageError` if the run cannot be divided or does not fit.
    """
    if devices is None:
        yield "memory", "not planned: this machine's accelerator is not known"
        return
    try:
        planner = plan_for(devices)
    except UsageError as error:  # a family that the planner does not know may still be trained
        yield "memory", f"not planned: {error.problem}"
        return
    plan, refused = planner.as_configured()
    if refused is not None or plan is None:
        why = refused or UsageError("this run cannot be planned")
        do = "; ".join(filter(None, [why.do, "burnish plan CONFIG --devices shows what fits"]))
        raise type(why)(why.problem, have=why.have, want=why.want, do=do)
    if row_lengths:
        mean = round(sum(row_lengths) / len(row_lengths))
        rows = f"the first {count_text(len(row_lengths), 'row')}, of {mean} tokens on average, at most {max(row_lengths)}"
        typical = plan_for(devices, mean)
        shown, _ = typical.as_configured()
        if shown is not None:
            seconds = duration_text(shown.step_seconds)
            yield (
                "as rows are",
                f"{bytes_text(shown.need)}; {seconds} a step of {_sequences(typical)}; {rows}",
            )
    yield (
        "at most",
        f"{bytes_text(plan.need)} of {bytes_text(devices.usable)} on each of {devices}, most in "
        f"{plan.fullest}; {duration_text(plan.step_seconds)} a step of {_sequences(planner)}",
    )
    if larger := _larger(planner, plan):
        yield "quicker", larger


def devices_of(
    named: str | None, memory: float | None = None, teraflops: float | None = None
) -> Devices | None:
    """Return the devices that are named, or this machine's; None for an accelerator that is not known."""
    from burnish.plan.devices import devices_here, parse_devices

    if named is not None:
        return parse_devices(named, memory, teraflops)
    if memory is not None or teraflops is not None:
        raise UsageError(
            "--device-memory and --device-tflops are for --devices",
            want="--devices COUNTxNAME beside them",
            do="add it, or leave them out for this machine's devices",
        )
    layout = place_of(os.environ).layout
    return devices_here(layout.world, layout.local_world)


def _as_json(plans: Sequence[Plan], configured: _Configured, devices: Devices) -> dict[str, Any]:
    from burnish.plan.devices import ASSUMPTIONS

    plan, refused = configured
    return {
        "devices": asdict(devices),
        "usable_bytes": devices.usable,
        "configured": {"plan": plan and _fields(plan), "refusal": refused and refused.parts()},
        "plans": [_fields(each) for each in plans],
        "assumptions": list(ASSUMPTIONS),
    }


def _fields(plan: Plan) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "replicas": plan.engine.replicas,
        "shards": plan.shards,
        "sequence": plan.engine.sequence_parallel,
        "tensor": plan.engine.tensor_parallel,
        "pipeline": plan.engine.pipeline_parallel,
        "overrides": plan.overrides(),
        "bytes": plan.phases,
        "host_bytes": plan.host,
        "flops": plan.operations,
        "seconds": plan.seconds,
        "microbatches": plan.microbatches,
        "tokens_per_device": plan.tokens,
    }


def _lines(
    plans: Sequence[Plan], configured: _Configured, planner: Planner, method: Method
) -> Iterator[str]:
    """Yield the best plan in full, the settings as they are, the next plans, and why others do not fit."""
    from burnish.plan.devices import ASSUMPTIONS
    from burnish.plan.layout_search import why_not

    devices = planner.devices
    count = planner.model.elements
    size = f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
    yield f"{size} parameters on {devices}"
    yield f"{method.title}: {_sequences(planner)} a step"
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        best = fitting[0]
        yield f"\nRecommended: {_layout(best)}\n"
        yield from _phases(best)
        yield f"\nSettings:\n\n  {' '.join(best.overrides())}"
        if planner.config.batch.is_auto:
            yield f"\nMicro-batches: at most {best.tokens} tokens on each device (auto)"
        if larger := _larger(planner, best):
            yield f"\nLarger micro-batches take less time: {larger}"
    yield from _as_configured(configured, fitting[0] if fitting else None)
    if len(fitting) > 1:
        yield f"\n{len(fitting)} of {len(plans)} layouts fit; after the recommended one:\n"
        rows = [["a step", "memory", "fullest", "layout"]]
        for plan in fitting[1 : 1 + _ALTERNATIVES]:
            time = duration_text(plan.step_seconds)
            rows.append([time, bytes_text(plan.need), plan.fullest, _layout(plan)])
        yield from (f"  {line}" for line in table(rows, right=2))
    if reasons := why_not(plans):
        others = count_text(len(plans) - len(fitting), "layout")
        yield f"\n{others} do not fit in {bytes_text(devices.usable)}:\n"
        yield from (f"  {reason}" for reason in reasons)
    yield "\nAssumed:\n"
    yield from (f"  {each}" for each in ASSUMPTIONS)


def _as_configured(configured: _Configured, best: Plan | None) -> Iterator[str]:
    plan, refused = configured
    if plan is None:
        yield f"\nAs configured it cannot run: {refused}"
        return
    need = f"{bytes_text(plan.need)} of {bytes_text(plan.devices.usable)} on each device, most in {plan.fullest}"
    if best is not None and plan.overrides() == best.overrides():
        yield f"\nAs configured it fits: as recommended; {need}"
        return
    if refused is None:
        time = duration_text(plan.step_seconds)
        yield f"\nAs configured it fits: {_layout(plan)}; {need}; {time} a step"
    else:
        yield f"\nAs configured it does not fit: {_layout(plan)}; {need}; {refused.do}"
    default = replace(plan, engine=EngineConfig(kind=plan.engine.kind))
    if plan.overrides() != default.overrides():
        yield ""
        yield from _phases(plan)


def _larger(planner: Planner, plan: Plan) -> str:
    """Return the setting of larger micro-batches that take less time, with their needs; "" if there are none."""
    if planner.config.batch.is_auto:
        return ""
    larger = planner.larger_microbatch(plan)
    if larger is None:
        return ""
    took, takes = (duration_text(each.step_seconds) for each in (plan, larger))
    need = bytes_text(larger.need)
    setting = f"batch.tokens_per_device={larger.tokens}"
    return f"with {setting} a step takes {takes} instead of {took}, and {need}"


def _sequences(planner: Planner) -> str:
    return f"{count_text(planner.work.sequences, 'sequence')} of {planner.work.length} tokens"


def _phases(plan: Plan) -> Iterator[str]:
    """Yield a row per phase and one per part of it, with bars in the scale of a device's memory."""
    usable = plan.devices.usable
    rows = [("phase", "memory", f"{'compute':>12}  time")]
    for phase, parts in plan.phases.items():
        count = _operations(plan.operations.get(phase, 0.0))
        time = "once" if phase == "start" else duration_text(plan.seconds[phase])
        rows.append((phase, bytes_text(plan.total(phase)), f"{count:>12}  {time}"))
        for name, size in sorted(parts.items(), key=lambda item: -item[1]):
            if size >= plan.total(phase) / 1000:
                bar = "█" * max(1, round(min(size / usable, 1.0) * _BAR))
                rows.append((f"  {name}", bytes_text(size), bar))
    rows.append(("a device has", bytes_text(usable), "░" * _BAR))
    rows += [(f"host, {name}", bytes_text(size), "") for name, size in plan.host.items()]
    width = max(len(row[0]) for row in rows)
    for name, text, more in rows:
        yield f"  {name:<{width}}  {text:>9}  {more}".rstrip()


def _layout(plan: Plan) -> str:
    engine = plan.engine
    copies = "1 copy" if engine.replicas == 1 else f"{engine.replicas} copies"
    degrees = {
        "tokens shared by {}": engine.sequence_parallel,
        "matrices by {}": engine.tensor_parallel,
        "layers by {}": engine.pipeline_parallel,
        "{} stages each": engine.virtual_stages,
        "experts by {}": engine.expert_parallel,
    }
    parts = [f"{copies} over {count_text(plan.shards, 'process')}"]
    parts += [text.format(degree) for text, degree in degrees.items() if degree > 1]
    parts += [f"checkpointing {engine.activation_checkpointing}"]
    parts += [] if engine.reshard_after_forward else ["weights kept gathered"]
    return ", ".join(parts)


def _operations(count: float) -> str:
    power = min((len(str(int(count))) - 1) // 3, len(_PREFIXES) - 1)
    return f"{count / 1000**power:.1f} {_PREFIXES[power]}FLOP" if count else ""


def duration_text(seconds: float) -> str:
    """Format seconds, as 250 ms, 12.3 s, 4.5 min, 2.1 h."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1000:.0f} ms"

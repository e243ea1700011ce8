"""A plan as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from burnish.cli.columns import bytes_text, count_text, table
from burnish.plan.accuracy import measured_table
from burnish.plan.advice import Configured
from burnish.plan.devices import Devices
from burnish.plan.layouts import Plan, Planner, why_not
from burnish.plan.timing import ASSUMPTIONS

_BAR = 32
_ALTERNATIVES = 6
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def plan_text(plans: Sequence[Plan], given: Configured, planner: Planner, devices: Devices) -> str:
    """The best plan in full, what `given` has of the settings as they are, the next plans in a line each, why the others do not fit, and what all rests on."""
    return "\n".join(_lines(plans, given, planner, devices))


def in_short(plan: Plan, planner: Planner, devices: Devices) -> str:
    """One line: the fullest phase, what there is, and the time of a step whose sequences are as long as they may be."""
    return (
        f"{bytes_text(plan.need)} of {bytes_text(plan.usable)} on each of {devices}, "
        f"most in {plan.fullest}; {_duration(plan.step_seconds)} a step of {_sequences(planner)}"
    )


def as_json(plans: Sequence[Plan], given: Configured, devices: Devices) -> dict[str, Any]:
    """All plans with their bytes and seconds, that of the settings as they are or why there is none, and how far the planner has been from measurements."""
    return {
        "devices": asdict(devices),
        "usable_bytes": devices.usable,
        "configured": {
            "plan": given.plan and _fields(given.plan),
            "refusal": given.refusal and given.refusal.parts(),
        },
        "plans": [_fields(plan) for plan in plans],
        "assumptions": list(ASSUMPTIONS),
        "largest_error": max(abs(row.error) for row in measured_table()),
    }


def _fields(plan: Plan) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "replicas": plan.layout.replicas,
        "shards": plan.layout.shards,
        "sequence": plan.layout.sequence,
        "tensor": plan.layout.tensor,
        "pipeline": plan.layout.pipeline,
        "overrides": plan.overrides(),
        "bytes": plan.phases,
        "host_bytes": plan.host,
        "flops": plan.operations,
        "seconds": plan.seconds,
        "microbatches": plan.microbatches,
    }


def _lines(
    plans: Sequence[Plan], given: Configured, planner: Planner, devices: Devices
) -> Iterator[str]:
    kind = "reinforcement learning" if planner.work.slots else "supervised fine-tuning"
    yield f"{_parameters(planner.shape.elements)} parameters on {devices}"
    yield f"{kind}: {_sequences(planner)} a step"
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        best = fitting[0]
        yield f"\nRecommended: {_layout(best)}\n"
        yield from _phases(best)
        yield "\nSettings:\n"
        yield f"  {' '.join(best.overrides())}"
    yield from _as_configured(given, fitting[0] if fitting else None)
    if len(fitting) > 1:
        yield f"\n{len(fitting)} of {len(plans)} layouts fit; after the recommended one:\n"
        yield from _alternatives(fitting[1 : 1 + _ALTERNATIVES])
    if reasons := why_not(plans):
        yield f"\n{count_text(len(plans) - len(fitting), 'layout')} do not fit in {bytes_text(devices.usable)}:\n"
        yield from (f"  {reason}" for reason in reasons)
    yield "\nAssumed:\n"
    yield from (f"  {each}" for each in ASSUMPTIONS)
    yield f"\n{_accuracy()}"


def _as_configured(given: Configured, best: Plan | None) -> Iterator[str]:
    """Whether it can run so; with a table of its own where its layout was chosen and is not the best one."""
    plan, refusal = given.plan, given.refusal
    if plan is None:
        yield f"\nAs configured it cannot run: {refusal}"
        return
    need = f"{bytes_text(plan.need)} of {bytes_text(plan.usable)} on each device, most in {plan.fullest}"
    if best is not None and plan.divides_like(best):
        yield f"\nAs configured it fits: as recommended; {need}"
        return
    if refusal is None:
        time = _duration(plan.step_seconds)
        yield f"\nAs configured it fits: {_layout(plan)}; {need}; {time} a step"
    else:
        yield f"\nAs configured it does not fit: {_layout(plan)}; {need}; {refusal.do}"
    if plan.chosen:
        yield ""
        yield from _phases(plan)


def _sequences(planner: Planner) -> str:
    return f"{count_text(planner.work.sequences, 'sequence')} of {planner.work.length} tokens"


def _phases(plan: Plan) -> Iterator[str]:
    """A row per phase, with what a device computes, and one per part of it, with bars in the scale of a device's memory."""
    rows = [("phase", "memory", f"{'compute':>12}  time")]
    for phase, parts in plan.phases.items():
        computed = _operations(plan.operations.get(phase, 0.0))
        time = f"{computed:>12}  {_duration(plan.seconds[phase])}"
        rows.append((phase, bytes_text(plan.total(phase)), time))
        for name, size in sorted(parts.items(), key=lambda item: -item[1]):
            if size >= plan.total(phase) / 1000:
                rows.append((f"  {name}", bytes_text(size), _bar(size / plan.usable)))
    width = max(*(len(row[0]) for row in rows), *(len(f"host, {name}") for name in plan.host))
    for name, text, more in rows:
        yield f"  {name:<{width}}  {text:>9}  {more}".rstrip()
    yield f"  {'a device has':<{width}}  {bytes_text(plan.usable):>9}  {'░' * _BAR}"
    for name, size in plan.host.items():
        yield f"  {f'host, {name}':<{width}}  {bytes_text(size):>9}"


def _alternatives(plans: Sequence[Plan]) -> Iterator[str]:
    rows = [["a step", "memory", "fullest", "layout"]]
    rows += [[_duration(p.step_seconds), bytes_text(p.need), p.fullest, _layout(p)] for p in plans]
    yield from (f"  {line}" for line in table(rows, right=2))


def _layout(plan: Plan) -> str:
    layout, engine = plan.layout, plan.engine
    parts = [
        f"{count_text(layout.replicas, 'copy') if layout.replicas == 1 else f'{layout.replicas} copies'} over {count_text(layout.shards, 'process')}"
    ]
    parts += [f"tokens shared by {layout.sequence}"] if layout.sequence > 1 else []
    parts += [f"matrices by {layout.tensor}"] if layout.tensor > 1 else []
    parts += [f"layers by {layout.pipeline}"] if layout.pipeline > 1 else []
    parts += [f"{engine.virtual_stages} stages each"] if engine.virtual_stages > 1 else []
    parts += [f"experts by {engine.expert_parallel}"] if engine.expert_parallel > 1 else []
    parts += [f"checkpointing {engine.activation_checkpointing}"]
    parts += [] if engine.reshard_after_forward else ["weights kept gathered"]
    return ", ".join(parts)


def _parameters(count: int) -> str:
    """As 8.2 billion, 12.3 million."""
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def _bar(share: float) -> str:
    return "█" * max(1, round(min(share, 1.0) * _BAR))


def _operations(count: float) -> str:
    """Floating-point operations, as 12.3 TFLOP; nothing for none."""
    power = min((len(str(int(count))) - 1) // 3, len(_PREFIXES) - 1)
    return f"{count / 1000**power:.1f} {_PREFIXES[power]}FLOP" if count else ""


def _duration(seconds: float) -> str:
    """As 250 ms, 12.3 s, 4.5 min, 2.1 h."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1000:.0f} ms"


def _accuracy() -> str:
    rows = measured_table()
    worst = max(rows, key=lambda row: abs(row.error))
    runs = len({row.case for row in rows})
    return (
        f"In {runs} runs, of small models on a CPU and of some layers of full size on fake tensors, the planned peaks were within {abs(worst.error):.0%} of the "
        f"measured ones; the largest error: {worst.error:+.1%}, {worst.phase}, {worst.case}."
    )

"""Fit a run to a number of processes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from burnish.config.document import recorded
from burnish.config.schema import AUTO_TOKENS, EngineConfig, ModelConfig, RunConfig
from burnish.distributed.accelerators import Accelerator
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, bytes_text, of_setting
from burnish.files.safetensors import ADAPTER_CONFIG
from burnish.method import Method
from burnish.models.lora.adapter_config import with_adapter
from burnish.plan.devices import Devices, devices_here
from burnish.plan.layout_search import Planner
from burnish.plan.model import PlannedBeside
from burnish.plan.shapes import model_shape
from burnish.runs.hub_revisions import at_newest_steps
from burnish.runs.preflight import model_fields, small_file
from burnish.tracking.rundir import RunDirectory

log = logging.getLogger("burnish")

_DEGREES = (
    "replicas",
    "sequence_parallel",
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_stages",
    "expert_parallel",
    "expert_tensor_parallel",
)


def fitted_engine(
    planner: Callable[[Devices], Planner], engine: EngineConfig, layout: Layout
) -> EngineConfig:
    """Return settings for the layout's processes: the run's own if they fit, else the planner's quickest.

    A model that the planner does not know gets FSDP alone. Ranks with equal devices choose the same.
    """
    try:
        planned = planner(_devices(layout.world, layout.local_world))
    except BurnishError:
        copy = layout.world // (engine.replicas * engine.pipeline_parallel)
        fits = layout.world % (engine.sharing * engine.replicas) == 0
        fits &= copy % engine.expert_sharing == 0
        changes = {} if fits else EngineConfig().model_dump(include={*_DEGREES})
    else:
        _, refused = planned.as_configured()
        best = next(iter(planned.all_plans()), None) if refused else None
        changes = best.engine.model_dump(exclude={"precision"}) if best and best.fits else {}
    if not changes:
        return engine
    chosen = engine.model_copy(update=changes)
    if layout.is_main:
        degrees = {name: getattr(chosen, name) for name in _DEGREES}
        shown = ", ".join(f"{name} {value}" for name, value in degrees.items() if value)
        log.warning("the run's layout does not fit %d processes; using %s", layout.world, shown)
    return chosen


def has_layout(planner: Callable[[Devices], Planner], world: int) -> bool:
    """Return whether `world` processes can divide the run, whatever their memory."""
    try:
        return bool(planner(_devices(world, None)).all_plans())
    except BurnishError:
        return True  # the planner does not know the model; the ranks will find out


def planned_tokens(
    planner: Callable[[Devices], Planner], devices: Devices | None, run: RunDirectory | None = None
) -> tuple[int, str]:
    """Return the tokens per device that `batch.tokens_per_device: auto` is, 0 for the least, and why. Without `devices`, they are not known.

    A `run` that goes on with as many equal devices has recorded it.
    """
    if devices is None:
        return 0, "this accelerator's memory and speed are not known"
    if devices.cpu:
        return 0, "larger ones gain nothing on CPUs"
    if run is not None and (tokens := _recorded_tokens(run, devices)):
        return tokens, "as the run began"
    try:
        plan, refused = planner(devices).as_configured()
    # A model that the planner reads wrongly may still be trained, with the least.
    except (BurnishError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return 0, f"not planned: {getattr(error, 'problem', repr(error))}"
    if plan is None or refused is not None:
        return 0, f"not planned: {refused.problem if refused else 'it cannot run'}"
    need = f"{bytes_text(plan.need)} of {bytes_text(devices.usable)}"
    return plan.tokens, f"planned with {need}; larger ones may not fit, or are not quicker"


def _recorded_tokens(run: RunDirectory, devices: Devices) -> int:
    """Return what auto was, or the former default, when the run began on as many equal devices; else 0."""
    facts = run.read_environment()
    here = (devices.name, devices.count)
    if not run.config.is_file() or (facts.get("device"), facts.get("processes")) != here:
        return 0
    batch = recorded(run.config).batch
    is_decided = batch.is_decided if batch.is_auto else batch.tokens == AUTO_TOKENS
    return batch.tokens if is_decided else 0


def _devices(world: int, here: int | None) -> Devices:
    """Return this machine's devices; made-up ones of unlimited memory if unknown or without `here`."""
    devices = None if here is None else devices_here(world, here)
    return devices or Devices(world, "CPU", math.inf, Accelerator(1e12, math.inf, 1e12, 1e12))


def planner_of(
    config: RunConfig, method: Method, devices: Devices, row_tokens: int | None = None
) -> Planner:
    """Make the planner of a configuration, for rows of so many tokens or as long as allowed. Raises `UsageError` for a model that it does not know."""
    config = at_newest_steps(config.model_dump(), config.directory, method.frozen)
    if (adapter := config.model.lora.path) is not None:
        with of_setting("model.lora.path"):
            model = with_adapter(config.model, small_file(adapter, ADAPTER_CONFIG))
        config = config.model_copy(update={"model": model})
    if config.engine.precision == "auto":
        precision = "fp32" if devices.cpu else "bf16"
        engine = config.engine.model_copy(update={"precision": precision})
        config = config.model_copy(update={"engine": engine})
    beside = []
    for frozen in method.frozen(config):
        if frozen.gives == "weights":  # of a model that is planned as a trained one
            continue
        with of_setting(frozen.setting):
            fields = model_fields(ModelConfig(path=frozen.path))
            beside.append(PlannedBeside.of(frozen, model_shape(fields, config.engine.kind)))
    fields = model_fields(config.model)
    return Planner(
        model_shape(fields, config.engine.kind),
        config,
        method,
        devices,
        beside,
        positions=fields.get("max_position_embeddings") or None,
        row_tokens=row_tokens,
        longest=method.longest(config),
    )

"""`burnish plan`: what a run needs of memory and time, which layouts fit, and what a dry run says of it.

Neither torch nor any weights: the model's config.json is enough. Left out: the arithmetic (`burnish.plan`) and
how it is printed (`burnish.cli.plan_table`).
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from burnish.cli.output import print_text
from burnish.config.check import check_kind
from burnish.config.load import load_config
from burnish.config.schema import ModelConfig, RunConfig
from burnish.distributed.environment import place_of
from burnish.errors import BurnishError, MissingError, UsageError
from burnish.files.remote import Remote
from burnish.files.urls import is_url
from burnish.models.lora.adapter_config import ADAPTER_CONFIG, with_adapter

if TYPE_CHECKING:
    from burnish.plan.devices import Devices
    from burnish.plan.layouts import Planner

_CONFIG_LIMIT = 1 << 24


def run_plan(arguments: Namespace) -> None:
    """Plan a configuration for SFT or, where it has rewards, for RL.

    Raises `UsageError` where no layout fits; of that of the settings as they are it only says whether it does.
    """
    config = load_config(arguments.config, arguments.overrides).config
    check_kind(config)
    command: Literal["sft", "rl"] = "rl" if config.reward.given else "sft"
    devices = devices_of(arguments.devices, arguments.device_memory, arguments.device_tflops)
    if devices is None:
        raise UsageError(
            "this machine's accelerator is not known",
            want="one whose memory and speed are in the table",
            do="give --devices, or --device-memory and --device-tflops with it",
        )
    planner = planner_of(config, command, devices)
    from burnish.cli.plan_table import as_json, plan_text
    from burnish.plan.advice import configured, refuse

    plans = planner.all_plans()
    given = configured(planner, config, command, devices)
    if arguments.json:
        print_text(json.dumps(as_json(plans, given, devices)))
    else:
        print_text(plan_text(plans, given, planner, devices))
    if not plans:
        raise UsageError(
            f"no layout shares this run out among {devices}",
            have=f"{planner.work.sequences} sequences a step, in {planner.work.updates} updates",
            want="a sequence for every data-parallel rank, room for the longest in a micro-batch, and degrees that divide the heads and experts of a layer",
            do="raise batch.examples, or batch.prompts or rollout.n, or batch.tokens_per_device, or take fewer devices",
        )
    if not plans[0].fits:
        raise refuse(plans[0], config, devices)


def fit(config: RunConfig, command: Literal["sft", "rl"], devices: Devices | None) -> str:
    """What a dry run says of memory. Raises `UsageError` where the settings cannot cut the model, or it cannot fit on the devices."""
    if devices is None:
        return "not planned: this machine's accelerator is not known"
    try:
        planner = planner_of(config, command, devices)
    except UsageError as error:  # a family that the planner does not know may still be trained
        return f"not planned: {error.problem}"
    from burnish.cli.plan_table import in_short
    from burnish.plan.advice import configured

    given = configured(planner, config, command, devices)
    if given.refusal is not None:
        raise _pointing_to_plan(given.refusal)
    assert given.plan is not None
    return in_short(given.plan, planner, devices)


def _pointing_to_plan(error: BurnishError) -> BurnishError:
    """The same, with the command that lists what is possible."""
    plan = "burnish plan CONFIG --devices shows what fits"
    do = f"{error.do}; {plan}" if error.do else plan
    return type(error)(error.problem, have=error.have, want=error.want, do=do)


def planner_of(config: RunConfig, command: Literal["sft", "rl"], devices: Devices) -> Planner:
    """The planner of a configuration. Raises `UsageError` for a model that it does not know."""
    from burnish.plan.layouts import Planner
    from burnish.plan.shape import PlannedModel
    from burnish.plan.workload import Workload

    if (adapter := config.model.lora.path) is not None:
        model = with_adapter(config.model, _content(f"{adapter.rstrip('/')}/{ADAPTER_CONFIG}"))
        config = config.model_copy(update={"model": model})
    shape = PlannedModel.of(model_fields(config.model))
    judges = [
        PlannedModel.of(model_fields(ModelConfig(path=judge.path)))
        for judge in (config.reward.models if command == "rl" else ())
    ]
    return Planner(shape, config, Workload.of(config, command), devices, judges)


def model_fields(model: ModelConfig) -> dict[str, Any]:
    """The content of the model's config.json. Raises `MissingError` or `UsageError` where there is none."""
    if isinstance(model.fresh, dict):
        return model.fresh
    place = model.fresh or (model.path and f"{model.path.rstrip('/')}/config.json")
    if not place:
        raise UsageError("no model is given", do="set model.path or model.fresh")
    try:
        fields = json.loads(_content(place))
    except ValueError as error:
        raise UsageError(f"{place} is not JSON", have=error, do="correct the file") from error
    if not isinstance(fields, dict):
        raise UsageError(f"{place} is not a JSON object", have=type(fields).__name__)
    return fields


def _content(place: str) -> bytes:
    """A small file, here or behind a URL."""
    if is_url(place):
        remote = Remote(place)
        return remote.parent().read(remote.url.name, _CONFIG_LIMIT)
    path = Path(place).expanduser()
    if not path.is_file():
        raise MissingError(
            f"there is no file {path}",
            want=f"a file {path.name}; weights are not needed",
            do="set model.path, model.lora.path and reward.models to directories that have theirs, or model.fresh to the file",
        )
    return path.read_bytes()


def devices_of(
    named: str | None, memory: float | None = None, teraflops: float | None = None
) -> Devices | None:
    """The devices that are named, or this machine's; None where its accelerator is not known."""
    from burnish.plan.devices import devices_here, parse_devices

    if named is not None:
        return parse_devices(named, memory, teraflops)
    layout = place_of(os.environ).layout
    return devices_here(layout.world, layout.local_world)

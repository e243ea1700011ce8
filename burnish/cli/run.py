"""`burnish sft`, `rl`, `eval`, `submit` and `serve`: call `burnish.api`, or with `--dry-run` print what it would do."""

from __future__ import annotations

import json
import os
import shlex
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from importlib import import_module

from burnish.api import config_at, prepare, run_command
from burnish.cli.output import print_text
from burnish.cli.plan import devices_of, fit
from burnish.config.constraints import Command, check
from burnish.config.load import load_config
from burnish.distributed.environment import place_of
from burnish.distributed.layout import Layout
from burnish.errors import UsageError, install, refusing, table
from burnish.launch.elastic import has_layout, planner_of
from burnish.launch.local import LocalLauncher
from burnish.launch.supervisor import Launcher, Supervisor
from burnish.runs.summary import summary
from burnish.tracking.trackers import json_numbers


def run(given: Namespace) -> None:
    """Run a command with a configuration; with `dry_run` only print what it would do on `devices`."""
    command: Command = given.command
    file, overrides, run_dir = given.config, given.overrides, None
    if file and command == "eval":
        file, run_dir = config_at(file)
        overrides = overrides if file else [f"model.path={json.dumps(given.config)}", *overrides]
    config = load_config(file, overrides)
    layout = place_of(os.environ).layout
    devices, as_json = getattr(given, "devices", None), getattr(given, "json", False)
    if devices is not None and not given.dry_run:
        raise UsageError("--devices is for --dry-run", do="leave it out, or add --dry-run")
    if as_json and given.dry_run:
        raise UsageError("a dry run measures nothing that --json could print", do="leave one out")
    if getattr(given, "processes", None) is not None or getattr(given, "ray", None) is not None:
        _supervise(given)
        return
    if not given.dry_run:
        numbers = run_command(command, config, run_dir=run_dir)
        if numbers and layout.is_main:
            lines = table([(name, f"{value:.6g}") for name, value in sorted(numbers.items())])
            print_text(json.dumps(json_numbers(numbers)) if as_json else "\n".join(lines))
        return
    target = devices_of(devices)
    world = layout.world if target is None else target.count
    config, said = prepare(config, command, world, run_dir)
    from burnish.runs.dry_run import set_up

    found = set_up(config, command, run_dir)
    if devices is None:
        config = config.model_copy(update={"engine": found.engine})
    if layout.is_main:
        memory = None if command == "eval" else fit(config, command, target)
        paragraphs = (
            f"burnish {command} is ready to run",
            summary(config, command, world, run_dir, memory),
            *(f"note: {notice}" for notice in said),
            "No weights were loaded, and nothing was written to the run's directory. To run it:",
            _started([command, *filter(None, [given.config]), *given.overrides], world),
        )
        print_text("\n\n".join(paragraphs))


def _supervise(given: Namespace) -> None:
    """Start the command on several processes, here or on a Ray cluster. Start all again when one dies."""
    command, world = given.command, given.processes
    if given.dry_run:
        raise UsageError("a dry run starts no processes", do="give --devices 8xNAME instead")
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        raise UsageError(
            "torchrun has started this process, so it cannot start the run's processes",
            do="leave out torchrun, or --processes and --ray",
        )
    config = load_config(given.config, given.overrides)
    argv = [command, *filter(None, [given.config]), *given.overrides]
    rollout = config.rollout
    servers = rollout.servers if command == "rl" and rollout.place == "servers" else 0
    with closing(launcher_of(given.ray, argv, servers, rollout.tensor_parallel)) as launcher:
        world = launcher.processes() if world is None else world
        check(config, command, world)
        is_possible = partial(has_layout, partial(planner_of, config, command))
        raise SystemExit(Supervisor(launcher, config.distributed, world, is_possible).run())


def launcher_of(
    address: str | None, argv: Sequence[str], servers: int = 0, devices: int = 1
) -> Launcher:
    """Return the launcher of this machine, or of the Ray cluster at an address."""
    if address is None:
        return LocalLauncher(argv)
    with refusing("Ray is not installed", do=install("ray")):
        ray_cluster = import_module("burnish.launch.ray_cluster")
    return ray_cluster.RayLauncher(address, argv, servers, devices)


def submit(given: Namespace) -> None:
    """Submit a run to a Ray cluster as a job, and follow it."""
    config = load_config(given.config, given.overrides)
    check(config, given.kind, given.processes)
    with refusing("Ray is not installed", do=install("ray")):
        jobs = import_module("burnish.launch.ray_jobs")
    argv = [given.kind, *filter(None, [given.config]), *given.overrides, "--ray", "auto"]
    argv += [] if given.processes is None else ["--processes", str(given.processes)]
    raise SystemExit(jobs.submit(given.address, argv))


def serve_run(given: Namespace) -> None:
    """Generate completions for the run that a configuration names until ctrl-C."""
    config = load_config(given.config, given.overrides)
    check(config, "rl", None)
    from burnish.distributed.device import pick_device
    from burnish.methods.parts.serve import serve_at
    from burnish.runs.download_inputs import local_inputs
    from burnish.runs.setup import lay_foundation

    device = pick_device(local_rank=0)
    _, local = local_inputs(config, device, trains=False)
    serve_at(lay_foundation(local, Layout(), device), given.host, given.port)


def _started(arguments: Sequence[str], world: int) -> str:
    if world == 1:
        return f"  {shlex.join(['burnish', *arguments])}"
    from burnish.plan.devices import PER_MACHINE

    machines = world // PER_MACHINE if world % PER_MACHINE == 0 else 1
    each = ["--nproc-per-node", str(world // machines)]
    if machines == 1:
        return f"  {shlex.join(['torchrun', *each, '-m', 'burnish', *arguments])}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:PORT"]
    words = ["torchrun", "--nnodes", str(machines), *each, *meeting, "-m", "burnish", *arguments]
    return f"  {shlex.join(words)}\n\non each of {machines} machines, where HOST is one of them"

"""Several processes of a command, here or on a Ray cluster; `burnish submit` and `serve`."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from burnish.api import named_run
from burnish.config.environment import EnvironmentConfig
from burnish.config.load import read_config
from burnish.distributed.layout import Layout
from burnish.errors import UsageError, install, refusing
from burnish.launch.elastic import has_layout, planner_of
from burnish.launch.local import LocalLauncher
from burnish.launch.supervisor import Launcher, Supervisor
from burnish.method import Method
from burnish.methods.table import load_method, method_meant_by


def supervise(args: Namespace, method: Method) -> None:
    """Start the command on several processes, here or on a Ray cluster. Start all again when one dies."""
    world = args.processes
    if args.dry_run:
        raise UsageError(
            "a dry run starts no processes",
            do="name the devices instead, such as --devices 2xCPU or --devices 8xH100-80G",
        )
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        raise UsageError(
            "torchrun has started this process, so it cannot start the run's processes",
            do="leave out torchrun, or --processes and --ray",
        )
    own = method.Settings.model_fields
    config = method.named(read_config(args.config, args.overrides, own))
    argv = [*method.command, *filter(None, [args.config]), *args.overrides]
    rollout = config.rollout
    servers = rollout.servers if method.generates and rollout.place == "servers" else 0
    with closing(launcher_of(args.ray, argv, servers, rollout.tensor_parallel)) as launcher:
        world = launcher.processes() if world is None else world
        method.check(config, world)
        is_possible = partial(has_layout, partial(planner_of, config, method))
        raise SystemExit(Supervisor(launcher, config.distributed, world, is_possible).run())


def launcher_of(
    address: str | None, argv: Sequence[str], servers: int = 0, devices: int = 1
) -> Launcher:
    """Return the launcher of this machine, or of the Ray cluster at an address."""
    if address is None:
        return LocalLauncher(argv)
    with refusing("Ray is not installed", do=install("ray")):
        from burnish.launch.ray_cluster import RayLauncher
    return RayLauncher(address, argv, servers, devices)


def submit_run(args: Namespace) -> None:
    """Submit a run to a Ray cluster as a job, and follow it."""
    method = load_method(args.kind)
    own = method.Settings.model_fields
    method.check(read_config(args.config, args.overrides, own), args.processes)
    with refusing("Ray is not installed", do=install("ray")):
        from burnish.launch import ray_jobs
    argv = [*method.command, *filter(None, [args.config]), *args.overrides, "--ray", "auto"]
    argv += [] if args.processes is None else ["--processes", str(args.processes)]
    raise SystemExit(ray_jobs.submit(args.address, argv))


def serve_run(args: Namespace) -> None:
    """Generate completions for the run that a configuration names until ctrl-C."""
    config = read_config(args.config, args.overrides)
    # The run's own processes alone read the settings of a method of one's own.
    config = config.model_copy(update={"method": {}})
    method = method_meant_by(config)
    if not method.generates:
        raise UsageError(
            "this run needs no completions",
            have=f"a configuration for burnish {method.name}",
            want="a run that generates, with rollout.place=servers",
            do="set reward.functions and rollout.place=servers",
        )
    method.check(config, None)
    config = named_run(method, config)
    from burnish.distributed.device import pick_device
    from burnish.methods.parts.serve import serve_at
    from burnish.runs.download_inputs import local_inputs
    from burnish.runs.setup import lay_foundation

    device = pick_device(local_rank=0)
    # The run plays the environment. Here nobody needs its rows.
    rollout = config.rollout.model_copy(update={"environment": EnvironmentConfig()})
    config = config.model_copy(update={"rollout": rollout})
    _, local = local_inputs(config, device)
    serve_at(lay_foundation(local, Layout(), device), args.host, args.port)

"""`--dry-run` of `burnish sft`, `rl` and `eval`: print what the command would do."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from burnish.api import prepare
from burnish.cli.output import print_text
from burnish.cli.plan import devices_of, fit
from burnish.config.schema import RunConfig
from burnish.distributed.environment import place_of
from burnish.launch.elastic import planned_tokens, planner_of
from burnish.method import Method
from burnish.runs.summary import summary
from burnish.tracking.rundir import RunDirectory


def dry_run(args: Namespace, method: Method, config: RunConfig, run_dir: Path | None) -> None:
    """Print what a method would do on the devices that are named, or on this machine's."""
    devices = getattr(args, "devices", None)
    layout = place_of(os.environ).layout
    target = devices_of(devices)
    world = layout.world if target is None else target.count
    config, notices = prepare(config, method, world, run_dir)
    if method.trains and not config.batch.is_decided:
        run = None if config.resume == "fresh" else RunDirectory(config.directory)
        tokens, _ = planned_tokens(partial(planner_of, config, method), target, run)
        config = method.with_tokens(config, tokens)
    from burnish.runs.dry_run import set_up

    setup, row_lengths, adapted = set_up(config, method, run_dir)
    if devices is None:
        config = config.model_copy(update={"engine": setup.engine})
    if layout.is_main:
        plan_for = partial(planner_of, config, method)
        memory = list(fit(plan_for, target, row_lengths)) if method.trains else []
        paragraphs = (
            f"burnish {' '.join(method.command)} is ready to run",
            summary(config, method, world, run_dir, memory, adapted=adapted),
            *(f"note: {notice}" for notice in notices),
            "No weights were loaded, and nothing was written to the run's directory. To run it:",
            _started([*method.command, *filter(None, [args.config]), *args.overrides], world),
        )
        print_text("\n\n".join(paragraphs))


def _started(arguments: Sequence[str], world: int) -> str:
    if world == 1:
        return f"  {shlex.join(['burnish', *arguments])}"
    from burnish.plan.devices import PER_MACHINE

    machines = world // PER_MACHINE if world % PER_MACHINE == 0 else 1
    local = ["--nproc-per-node", str(world // machines)]
    if machines == 1:
        return f"  {shlex.join(['torchrun', *local, '-m', 'burnish', *arguments])}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:PORT"]
    words = ["torchrun", "--nnodes", str(machines), *local, *meeting, "-m", "burnish", *arguments]
    return f"  {shlex.join(words)}\n\non each of {machines} machines, where HOST is one of them"

"""`burnish sft`, `rl` and `eval`: check everything that can be checked, then start the trainer.

torch is imported after the checks, so that a mistake shows at once.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from burnish.cli.contents import require_contents
from burnish.cli.output import print_text
from burnish.cli.plan import devices_of, fit
from burnish.cli.summary import summary
from burnish.config.constraints import Command, check, notices
from burnish.config.load import load_config
from burnish.config.resume import require_may_resume, require_same_run
from burnish.config.schema import RunConfig
from burnish.distributed.environment import place_of
from burnish.errors import MissingError, UsageError
from burnish.files.remote import Remote
from burnish.plan.devices import PER_MACHINE
from burnish.tracking.rundir import RunDirectory
from burnish.tracking.trackers import json_numbers
from burnish.train.preflight import committed_steps, recorded_config, require_inputs

log = logging.getLogger("burnish")


def run(
    command: Command,
    path: str,
    overrides: Sequence[str],
    *,
    dry_run: bool,
    devices: str | None = None,
    as_json: bool = False,
) -> None:
    """Run `command` with the configuration at `path`; with `dry_run` only say what it would do.

    `path` is a file; for eval it may be a run's directory, whose newest checkpoint is evaluated. A dry run is for `devices`
    (`burnish plan`), by default this machine's, and refuses what does not fit. An evaluation prints a table, or JSON with `as_json`.
    """
    run_dir = Path(path) if command == "eval" and Path(path).is_dir() else None
    config = load_config(_config_file(command, path, run_dir), overrides).config
    layout = place_of(os.environ).layout
    if devices is not None and not dry_run:
        raise UsageError("--devices is for --dry-run", do="leave it out, or add --dry-run")
    if as_json and dry_run:
        raise UsageError("a dry run measures nothing that --json could print", do="leave one out")
    target = devices_of(devices) if dry_run else None
    world = layout.world if target is None else target.count
    check(config, command, world)
    require_inputs(config, command, run_dir)
    if dry_run:
        require_contents(config, command, run_dir)
    if command != "eval":
        _require_own_directory(config)
    said = list(notices(config, command)) if layout.is_main else []
    if not dry_run:
        model = run_dir or config.model.path or "a new model"
        place = "" if command == "eval" else f" in {config.directory}"
        processes = "one process" if world == 1 else f"{world} processes"
        log.info("%s of %s%s, on %s", command, model, place, processes)
        for notice in said:
            log.warning("%s", notice)
        numbers = _start(config, command, run_dir)
        if numbers and layout.is_main:
            print_text(json.dumps(json_numbers(numbers)) if as_json else _table(numbers))
    elif layout.is_main:
        memory = None if command == "eval" else fit(config, command, target)
        paragraphs = (
            f"burnish {command} is ready to run",
            summary(config, command, world, run_dir, memory),
            *(f"note: {notice}" for notice in said),
            f"Nothing was loaded or written. To run it:\n\n{_started([command, path, *overrides], world)}",
        )
        print_text("\n\n".join(paragraphs))


def _started(arguments: Sequence[str], world: int) -> str:
    """What starts so many processes of a command, as it is typed."""
    if world == 1:
        return f"  {shlex.join(['burnish', *arguments])}"
    machines = world // PER_MACHINE if world % PER_MACHINE == 0 else 1
    each = ["--nproc-per-node", str(world // machines)]
    if machines == 1:
        return f"  {shlex.join(['torchrun', *each, '-m', 'burnish', *arguments])}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:PORT"]
    words = ["torchrun", "--nnodes", str(machines), *each, *meeting, "-m", "burnish", *arguments]
    return f"  {shlex.join(words)}\n\non each of {machines} machines, HOST being one of them"


def _config_file(command: Command, path: str, run_dir: Path | None) -> Path:
    if run_dir is None:
        if "=" in path and not Path(path).exists():
            raise UsageError(
                "the configuration file is missing",
                have=f"{path}, an override, in its place",
                want="CONFIG [key=value ...]",
                do="give the configuration file before the overrides",
            )
        if command == "eval" and not Path(path).exists():
            raise MissingError(
                f"there is no run and no configuration file {path}",
                have=f"nothing at {Path(path).absolute()}",
                want="a run's directory, or a YAML file",
                do="give runs/NAME or CONFIG first, then key=value overrides",
            )
        return Path(path)
    return recorded_config(run_dir)


def _require_own_directory(config: RunConfig) -> None:
    """What opening the run refuses too, here without torch."""
    url = config.mirror_url
    if url is not None:
        Remote(url).connect(write=True)
    directory = RunDirectory(config.directory)
    steps = [path.name for path in committed_steps(directory.root)]
    if (steps or directory.begun) and directory.config.is_file():
        require_same_run(directory.root, load_config(directory.config).config, config)
    require_may_resume(directory.root, steps, config)


def _start(config: RunConfig, command: Command, run_dir: Path | None) -> Mapping[str, float]:
    """Run the trainer; returns what an evaluation measured, by name."""
    if command == "sft":
        from burnish.train import sft

        sft.train(config)
    elif command == "rl":
        from burnish.train import rl

        rl.train(config)
    else:
        from burnish.train import evaluate

        return evaluate.evaluate(config, run_dir)
    return {}


def _table(numbers: Mapping[str, float]) -> str:
    width = max(map(len, numbers), default=0)
    return "\n".join(f"{name:<{width}}  {value:.6g}" for name, value in sorted(numbers.items()))

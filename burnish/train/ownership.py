"""Ownership of a run's directory and of its mirror: both belong to this run, or are refused unchanged.

environment.json names the owner on either side: `run` is the run's id for life, `start` the id of one start.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from burnish.checkpoint.manager import Destination, Resumed
from burnish.checkpoint.steps import step_name
from burnish.config.load import dump_yaml
from burnish.config.schema import CheckpointConfig, RunConfig
from burnish.distributed.collectives import agree
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError
from burnish.files.durable import naming_failures
from burnish.functions import load_function
from burnish.tracking.progress import Bar
from burnish.tracking.rundir import RUN, TRAINER, RunDirectory

_MIRROR = "burnish.checkpoint.destinations.run_mirror:open_mirror"


def mirror_of(
    url: str | None, settings: CheckpointConfig, directory: Path, layout: Layout
) -> Destination | None:
    """Return the mirror at a URL. Raises if the URL is wrong or its client is not installed. Collective."""
    if url is None:
        return None
    open_mirror = load_function(_MIRROR, "checkpoint.mirror")
    mirror: Destination = open_mirror(url, settings, directory, layout)
    return mirror


def claim(
    directory: RunDirectory,
    mirror: Destination | None,
    config: RunConfig,
    environment: Mapping[str, Any],
) -> None:
    """Make the directory, whose lease this process holds, and its mirror this run's. Call it on rank 0.

    Writes to the mirror before anything expensive begins. Raises `IncompatibleError` for another run's mirror, and `UsageError`
    if it holds steps and `resume` is never. Both stay unchanged.
    """
    identity = {RUN: directory.read_environment().get(RUN) or uuid.uuid4().hex}
    if mirror is not None:
        identity |= mirror.require_own(directory, config, environment[TRAINER])
    directory.create()
    directory.write_config(dump_yaml(config))
    directory.write_environment({**identity, **environment})
    if mirror is not None:
        mirror.claim(directory)


def bring_back(
    mirror: Destination | None, directory: RunDirectory, resumed: Resumed | None, layout: Layout
) -> None:
    """After resuming from the mirror, fetch metrics and pins that are not here. Collective."""
    if mirror is None or resumed is None or isinstance(resumed.step.path, Path):
        return
    with agree(layout), naming_failures(f"{directory.root} cannot be written"):
        if layout.is_main:
            mirror.bring_back(directory)


def step_place(step: int, directory: RunDirectory, mirror: Destination | None) -> PurePath:
    """Return the directory of a committed step, here or on the mirror."""
    path = directory.checkpoints / step_name(step)
    return path if mirror is None or path.is_dir() else mirror.root / step_name(step)


def behind(
    mirror: Destination | None, directory: RunDirectory, why: BurnishError, *, meets: bool
) -> BurnishError:
    """Return the error of a finished run whose mirror lacks some of it."""
    again = f"keep {directory.root}; the same command again copies the rest"
    return BurnishError(
        f"the run is done, but {mirror and mirror.url} has not all of it",
        have=why,
        do="start the same command again: it continues from the newest step there"
        if meets
        else again,
    )


def percent_on(bar: Bar) -> Callable[[float], None]:
    """Draw a sync on a bar of a hundred; a sync that begins again does not move it back."""
    shown = 0.0

    def show(part: float) -> None:
        nonlocal shown
        bar.advance(max(0.0, 100 * part - shown))
        shown = max(shown, 100 * part)

    return show

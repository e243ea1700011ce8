"""Own a run's directory and mirror, or refuse them, unchanged, if another run owns them.

environment.json names the owner: `run` is the run's lifelong id, `start` the id of one start.
"""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from burnish.checkpoint.manager import Checkpoints, Destination
from burnish.checkpoint.retention import Retention
from burnish.config.document import dump_yaml
from burnish.config.resume import RunIdentity
from burnish.config.schema import RunConfig
from burnish.distributed.collectives import agree, same_on_all_ranks
from burnish.distributed.device import device_name, peak_memory, reset_peak_memory, synchronize
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.extend import ENGINES, GENERATORS
from burnish.method import Method
from burnish.runs.run_directory import require_own_directory
from burnish.runs.signals import Stopper, catch_signals
from burnish.runs.verify_inputs import Intact
from burnish.tracking.progress import Progress
from burnish.tracking.rundir import (
    RUN,
    STEPS,
    TRAINER,
    RunDirectory,
    environment,
    git_diff,
    write_atomically,
)
from burnish.tracking.spans import Spans
from burnish.tracking.trackers import load_tracker

_log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Session:
    """A run's directory while the processes of the run own it."""

    config: RunConfig
    method: Method
    layout: Layout
    device: torch.device
    directory: RunDirectory
    checkpoints: Checkpoints
    mirror: Destination | None
    stopper: Stopper
    spans: Spans
    progress: Progress
    intact: Intact
    """Checks models in steps of other runs before they are loaded."""


@contextmanager
def open_run(
    config: RunConfig, method: Method, layout: Layout, device: torch.device
) -> Iterator[Session]:
    """Own the run that `config` names inside the block; explain an out-of-memory error. Collective.

    First refuses a directory that another process uses or another run owns, and ranks with different configurations.
    """
    directory = RunDirectory(config.directory)
    settings = config.checkpoint
    spans = Spans(
        settle=partial(synchronize, device),
        reset_peak=partial(reset_peak_memory, device),
        peak=partial(peak_memory, device),
    )
    progress = Progress(config.tracking.progress and layout.is_main, moved=spans.move)
    checkpoints = Checkpoints(
        directory.checkpoints,
        layout,
        retention=Retention.of(settings, config.mirror_url),
        reserve_bytes=int(settings.reserve_gb * 1e9),
        background_timeout=config.distributed.timeout_seconds if settings.background else None,
    )
    with catch_signals(layout) as stopper, ExitStack() as stack:
        # Ranks with different settings would soon wait in different collectives, and for ever.
        same_on_all_ranks(repr(config), "the configuration", layout)
        stack.enter_context(checkpoints)
        mirror: Destination | None = None
        if config.mirror_url is not None:
            from burnish.checkpoint.destinations import run_mirror

            mirror = run_mirror.open_mirror(config.mirror_url, settings, directory.root, layout)
        checkpoints.mirror_to(mirror)
        session = Session(
            config,
            method,
            layout,
            device,
            directory,
            checkpoints,
            mirror,
            stopper,
            spans,
            progress,
            Intact(layout, progress),
        )
        # The lease is taken, so nobody else changes the directory meanwhile. The claim, which writes into it, comes last.
        with agree(layout):
            require_own_directory(directory, RunIdentity(method.name, config))
            if layout.is_main:
                _require_extensions(config)
                with _explaining_full_disk(directory):
                    _claim(session)
                stopper.insisted = partial(_note_stop, directory)
        _open_records(session, stack)
        with _explaining_out_of_memory(session):
            yield session


@contextmanager
def _explaining_full_disk(directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise UsageError(
            f"there is no room for the run's files in {directory.root}",
            have=error,
            do="free some space there, and start the same command again: it continues from the newest checkpoint",
        ) from error


def _note_stop(directory: RunDirectory) -> None:
    directory.write_status(directory.read_status().get(STEPS), "stopped")


def _open_records(session: Session, stack: ExitStack) -> None:
    """Open this rank's log and what its settings ask for: profiles, and the history of allocations."""
    from burnish.tracking import logs

    directory = session.directory
    rank = session.layout.rank
    settings = session.config.tracking
    log_path = directory.logs / f"rank-{rank}.log"
    stack.enter_context(logs.rank_log(log_path, rank, session.spans, settings.log_format))
    if session.device.type == "cuda" and session.layout.is_main:
        from burnish.models.kernels.missing import missing_kernels

        for missing in missing_kernels(session.device):
            _log.warning("%s: %s. To install them: %s", *missing)
    if settings.profile_steps or session.device.type == "cuda":
        from burnish.tracking.profiles import profiling

        stack.enter_context(
            profiling(
                directory.profiles,
                rank,
                session.spans,
                settings.profile_steps,
                with_torch=settings.torch_profiler,
            )
        )
    if settings.allocations:
        from burnish.runs import out_of_memory

        stack.enter_context(out_of_memory.recording_allocations(session.device))


@contextmanager
def _explaining_out_of_memory(session: Session) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        from burnish.runs.out_of_memory import explained

        better = explained(error, session)
        if better is None:
            raise
        raise better from error


def _require_extensions(config: RunConfig) -> None:
    """Raise `UsageError` for a class of the user's that lacks something, before models are loaded."""
    ENGINES.load(config.engine.kind, "engine.kind", ["lora"] if config.model.adapter else [])
    if config.scores and config.rollout.place != "servers":
        GENERATORS.load(config.rollout.engine, "rollout.engine", config.generator_options)
    for name in config.tracking.trackers:
        load_tracker(name)


def _claim(session: Session) -> None:
    """Name this run as owner of directory and mirror, before anything expensive. For rank 0.

    Raises `IncompatibleError` for another run's mirror, and `UsageError` if it holds steps and `resume` is never.
    """
    directory = session.directory
    mirror = session.mirror
    identity = {RUN: directory.read_environment().get(RUN) or uuid.uuid4().hex}
    if mirror is not None:
        identity |= mirror.require_own(directory, RunIdentity(session.method.name, session.config))
    facts = environment(device_name(session.device), session.layout.world)
    write_atomically(directory.config, dump_yaml(session.config))
    directory.diff.unlink(missing_ok=True)
    if diff := git_diff():
        write_atomically(directory.diff, diff)
    directory.write_environment({**identity, TRAINER: session.method.name, **facts})
    directory.write_status(None, "running")
    if mirror is not None:
        mirror.claim(directory)

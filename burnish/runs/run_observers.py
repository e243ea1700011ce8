"""Tell a run's trackers, rollout files and report what happens. Rank 0 has them; a failure to write ends all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING

from burnish.checkpoint.steps import step_name
from burnish.config.document import dotted
from burnish.distributed.collectives import agree
from burnish.errors import BurnishError
from burnish.files.durable import naming_failures
from burnish.records.rollout_table import RolloutTable
from burnish.records.samples import Floats
from burnish.runs.rollout_transfer import arrays_on_main, arriving
from burnish.runs.session import Session
from burnish.tracking.observers import Observers, rollouts_interval, wanted_rollouts
from burnish.tracking.rundir import CHECKPOINTS
from burnish.tracking.trackers import State, logged_values

if TYPE_CHECKING:
    from burnish.runs.hub_push import HubPusher

log = logging.getLogger("burnish")


class RunObservers:
    """The `Observers` of a run, for all of its ranks."""

    def __init__(self, session: Session, total_steps: int) -> None:
        """They are open between `open` and `close`, and told nothing before and after."""
        self._session = session
        self._total_steps = total_steps
        self._main: Observers | None = None
        self._hub: HubPusher | None = None

    def open(
        self, step: int, *, is_logged: bool, decode: Callable[[list[int]], str]
    ) -> dict[str, float]:
        """Open them for a run that goes on after `step`. Return what the step's line of metrics has on rank 0. Collective."""
        session = self._session
        logged: dict[str, float] = {}
        with agree(session.layout), self.writing():
            if session.layout.is_main:
                # Read first: opening removes the line of a step whose log was interrupted.
                logged = logged_values(session.directory.metrics, step)
                self._main = Observers(
                    session.directory,
                    session.config.tracking,
                    step=step,
                    total_steps=self._total_steps,
                    is_logged=is_logged,
                    decode=decode,
                    given=dict(dotted(session.config.model_dump(mode="json"))),
                )
                every = rollouts_interval(session.config.tracking, self._total_steps)
                if session.method.generates and every > 1:
                    when = f"at step 1, every {every} steps and at the last"
                    log.info("rollouts are written %s; tracking.rollouts_every=1: all", when)
                if session.config.checkpoint.push_to_hub:
                    from burnish.runs.hub_push import HubPusher

                    repo = session.config.checkpoint.push_to_hub
                    self._hub = HubPusher(session.directory.root, repo)
                    if step:
                        self._push(step)
        return logged

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step's line. Not collective: a step does not wait for rank 0's files."""
        with self.writing():
            if self._main is not None:
                self._main.step_finished(step, values)

    def write_rollouts(
        self,
        step: int,
        table: RolloutTable,
        advantages: Floats | None = None,
        by_token: Mapping[str, Mapping[int, Floats]] = MappingProxyType({}),
    ) -> None:
        """Write rollouts if due. A validation has no `advantages`. Collective."""
        settings = self._session.config.tracking
        layout = self._session.layout
        wanted = wanted_rollouts(settings, step, self._total_steps, table, advantages is None)
        if wanted is None:
            return
        order, whole = wanted
        by_token = arrays_on_main(by_token, whole, layout)
        rollouts = arriving(table, order, whole, layout)
        with agree(layout), self.writing(), rollouts as incoming:
            if self._main is not None:
                means = None if advantages is None else advantages.tolist()
                self._main.rollouts_scored(step, table, means, by_token, incoming, whole)

    def committed(self, step: int) -> None:
        """Say where a step is committed."""
        if self._main is not None:
            mirror = self._session.mirror
            root = self._session.directory.root
            place = str(root.absolute()) if mirror is None else mirror.url.rstrip("/")
            self._main.checkpoint_committed(f"{place}/{CHECKPOINTS}/{step_name(step)}")
            self._push(step)

    def _push(self, step: int, *, is_last: bool = False) -> None:
        """Send a step's model to the hub if configured."""
        path = self._session.directory.checkpoints / step_name(step)
        is_wanted = is_last or self._session.config.checkpoint.hub_strategy == "every_save"
        if self._hub is None or not is_wanted:
            return
        if path.is_dir():
            self._hub.begin(path)
        else:
            log.warning("%s is not on this machine, so it is not sent to the hub", path)

    def settle_hub(self, step: int) -> None:
        """Wait until the last step's model is on the hub, or a signal comes. Raise `BurnishError` if it is not. Collective."""
        session = self._session
        if session.config.checkpoint.push_to_hub is None:
            return
        self._push(step, is_last=True)
        with session.progress.phase("hub", lines=False):
            # Only rank 0 has a model to wait for. The others wait for its flag.
            while not session.stopper.check_all(self._hub is not None and self._hub.wait(1.0)):
                session.spans.move()
        with agree(session.layout):
            if self._hub is not None and self._hub.problem is not None:
                raise BurnishError(
                    f"the run is done, but {session.config.checkpoint.push_to_hub} lacks its model",
                    have=self._hub.problem.problem,
                    do="start the same command again, which sends it",
                )

    def sync(self) -> None:
        """Make all records survive a power loss. Collective."""
        self._tell(Observers.sync)

    def report(self, state: State) -> None:
        """Write the report, and the state of the run. Collective."""
        self._tell(lambda main: main.report(state))

    def report_failure(self, error: Exception) -> None:
        """Write the report of a run that an error ends. Not collective: other ranks may be anywhere."""
        if self._main is not None:
            from burnish.runs.ending import reason_of

            try:
                self._main.report("failed", reason_of(error))
            except OSError as error:
                log.warning("report.html is not written: %s", error)

    def writing(self) -> AbstractContextManager[None]:
        """Explain failures to write into the run's directory."""
        return naming_failures(f"{self._session.directory.root} cannot be written")

    def close(self) -> None:
        """Close them on this rank."""
        if self._main is not None:
            self._main.close()

    def _tell(self, say: Callable[[Observers], None]) -> None:
        with agree(self._session.layout), self.writing():
            if self._main is not None:
                say(self._main)

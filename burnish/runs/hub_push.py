"""Send the models of a run's steps to a repository of the Hugging Face Hub, in a thread of rank 0 beside training."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

from burnish.checkpoint.steps import open_step, step_number
from burnish.checkpoint.write_plan import MODEL
from burnish.errors import BurnishError, refusing
from burnish.files.hub_files import push
from burnish.files.strict_json import parse_object
from burnish.tracking.rundir import write_atomically
from burnish.version import __version__

_PREFIX = ".push-"
"""Of directories whose files are those of a step's model. Retention may remove the step meanwhile."""

log = logging.getLogger("burnish")


class Pushed(NamedTuple):
    """The step whose model the repository has."""

    repo: str
    step: int


class HubPusher:
    """Sends one model at a time. Of those that wait, only the newest is sent."""

    def __init__(self, directory: Path, repo: str) -> None:
        """`directory` is the run's, which remembers in hub.json what was sent. Removes what a killed run left."""
        self._directory = directory
        self._repo = repo
        self._record = directory / "hub.json"
        self._lock = threading.Lock()
        self._waiting: Path | None = None
        self._begun: int | None = None
        """The newest step, until sending it fails."""
        self._thread: threading.Thread | None = None
        self._problem: BurnishError | None = None
        for left in directory.glob(f"{_PREFIX}*"):
            shutil.rmtree(left, ignore_errors=True)

    def begin(self, step: Path) -> None:
        """Send a step's model, unless it was sent or is not healthy. Does not wait."""
        number = step_number(step.name) or 0
        if number == self._begun or self._sent() == Pushed(self._repo, number):
            return
        if not open_step(step).healthy:
            log.warning("%s is not healthy, so it is not sent to %s", step, self._repo)
            return
        folder = self._directory / f"{_PREFIX}{number}"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(step / MODEL, folder, copy_function=_link)
        with self._lock:
            if self._waiting is not None:
                shutil.rmtree(self._waiting, ignore_errors=True)
            self._waiting = folder
            self._begun = number
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_all, name="hub", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Return whether nothing is left to send, after at most these seconds."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    @property
    def problem(self) -> BurnishError | None:
        """Why the last model was not sent; None if it was."""
        return self._problem

    def _sent(self) -> Pushed | None:
        try:
            record = parse_object(self._record.read_bytes(), str(self._record))
            return Pushed(str(record["repo"]), int(record["step"]))
        except (OSError, BurnishError, LookupError, TypeError, ValueError):
            return None

    def _send_all(self) -> None:
        while True:
            with self._lock:
                folder = self._waiting
                self._waiting = None
                if folder is None:
                    self._thread = None
                    return
            self._problem = self._send(folder)
            shutil.rmtree(folder, ignore_errors=True)

    def _send(self, folder: Path) -> BurnishError | None:
        number = int(folder.name.removeprefix(_PREFIX))
        message = f"Step {number}, trained with Burnish {__version__}"
        try:
            # The hub's client may raise anything, and nobody else hears a thread.
            problem = f"step {number} could not be sent to {self._repo}"
            with refusing(problem, BurnishError, do="start the same command again"):
                address = push(folder, self._repo, message, private=True, shown=False)
                write_atomically(self._record, f'{{"repo": "{self._repo}", "step": {number}}}\n')
        except BurnishError as error:
            if self._begun == number:
                self._begun = None
            log.error("STEP %d IS NOT ON THE HUB; the run goes on. %s", number, error)
            return error
        log.info("step %d is sent: %s", number, address)
        return None


def _link(source: str, target: str) -> str:
    """Give a file a second name, or copy it where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return target

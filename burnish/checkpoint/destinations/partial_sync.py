"""Make one step on the mirror of the parts on several disks.

The process beside each disk's leader sends its files, reads them back, and then puts a small object that names them,
`portions/step-N/UUID.DISK`. When the first disk's process finds all files of the manifest named and there, it puts manifest and
COMMIT. The others wait for COMMIT; then each removes its part and its object. While an object of a step is there, the mirror's
retention keeps the step. UUIDs tell attempts apart. Nobody waits before all other work is done. No torch here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from burnish.checkpoint.destinations.mirror import Mirror
from burnish.checkpoint.destinations.partial_checkpoints import Portion, open_portion, portion_paths
from burnish.checkpoint.destinations.remote_steps import PORTIONS
from burnish.checkpoint.destinations.upload import Moved, seal, send_files
from burnish.checkpoint.manifest import COMMIT, COMMIT_LIMIT, MANIFEST, MANIFEST_LIMIT
from burnish.checkpoint.steps import TRASH
from burnish.errors import BurnishError, CorruptError, MissingError, few
from burnish.files.durable import discard, naming_failures
from burnish.files.remote import Remote
from burnish.files.storage import LocalStorage
from burnish.files.strict_json import encode_json, parse_json
from burnish.tracking.rundir import CHECKPOINTS

LOOK_SECONDS = 1.0
"""Between two looks at what the other disks have done."""

_log = logging.getLogger(__name__)

Pause = Callable[[float], bool]
"""Waits so many seconds; whether to wait no longer, for something else is to be done."""


class PortionSync:
    """Brings one disk's portions to the mirror, once. Raises `BurnishError`."""

    def __init__(self, mirror: Mirror, moved: Moved) -> None:
        self._mirror = mirror
        self._moved = moved
        self._storage = LocalStorage()
        self._steps = mirror.remote.below(CHECKPOINTS)
        self._words = self._steps.below(PORTIONS)
        self._read: dict[str, frozenset[str]] = {}
        self._portions, self._failed = self._open()

    def size(self) -> int:
        """Bytes to be moved at most: each is sent and read back."""
        return 2 * sum(portion.size for portion in self._portions)

    def run(self, pause: Pause) -> list[int]:
        """Send the parts, newest first, wait for other disks', and return the steps that the mirror then has.

        What is missing when `pause` says so is left for the next time. A damaged part holds back no other; damage is raised at the end.
        """
        waiting = [portion for portion in self._portions if self._is_sent(portion)]
        done: list[int] = []
        while waiting:
            for portion in [each for each in waiting if self._is_whole(each)]:
                waiting.remove(portion)
                done.append(portion.step.step)
                self._remove(portion)
            if waiting and pause(LOOK_SECONDS):
                break
        if self._failed is not None:
            raise self._failed
        return done

    def _open(self) -> tuple[list[Portion], CorruptError | None]:
        """Return the parts here, newest first, and the first error of those that cannot be used."""
        found, failed = [], None
        for path in reversed(portion_paths(self._mirror.root, self._storage)):
            try:
                with naming_failures(f"{path} cannot be read"):
                    found.append(open_portion(path, self._storage))
            except CorruptError as error:
                if self._storage.kind(path) is not None:
                    failed = failed or error
        return found, failed

    def _is_sent(self, portion: Portion) -> bool:
        """Send a part's files and say so; return False if it is damaged, removed meanwhile, or the next process's to send."""
        mirror, path = self._mirror, portion.step.path
        word = self._word(portion)
        if self._words.stat(word) is not None:
            self._moved(2 * portion.size)
            return True
        try:
            with naming_failures(f"{path} cannot be read"):
                there = self._steps.below(portion.name)
                if not send_files(
                    portion.step, portion.files, portion.commit, there, mirror.check, self._moved
                ):
                    return True
        except CorruptError as error:
            self._failed = self._failed or error
            return False
        except BurnishError:
            if self._storage.kind(path) is not None:
                raise
            _log.warning("%s is not on the mirror: its save has failed meanwhile", path)
            return False
        if (
            mirror.remote.may_change_late
        ):  # the process after this one says so, over which nothing can come
            return False
        mirror.check()
        self._words.put(word, encode_json({"files": list(portion.files)}))
        return True

    def _is_whole(self, portion: Portion) -> bool:
        """Return whether the step is on the mirror; the first disk commits it once all files are there."""
        there = self._steps.below(portion.name)
        is_sealed = False
        with suppress(MissingError):
            is_sealed = there.read(COMMIT, COMMIT_LIMIT) == portion.commit
        if is_sealed or self._mirror.disk:
            return is_sealed
        if not self._named(portion) >= portion.step.manifest.files.keys():
            return False
        self._require_all(portion, there)
        seal(there, portion.manifest, portion.commit, self._mirror.check)
        return True

    def _require_all(self, portion: Portion, there: Remote) -> None:
        """Raise `BurnishError` if a sent file is gone; then all are looked at again."""
        found = {file.name: file.size for file in there.files()}
        files = portion.step.manifest.files
        gone = [name for name, record in files.items() if found.get(name) != record.size]
        if gone:
            self._mirror.check()
            self._words.remove_below(portion.name)
            raise BurnishError(
                f"{there} is not what the disks have sent",
                have=f"without, or in another size: {few(gone)}",
                want=f"the {len(files)} files of {MANIFEST}",
                do="see that nobody else removes or writes files there; they are sent again",
            )

    def _word(self, portion: Portion) -> str:
        """The object by which this disk says that all of its portion was sent."""
        return f"{portion.name}/{portion.step.commit.uuid}.{self._mirror.disk or 0}"

    def _named(self, portion: Portion) -> set[str]:
        """The files that the disks say they have sent of this writing of a step."""
        found: set[str] = set()
        for file in self._words.files(portion.name):
            if file.name.startswith(f"{portion.name}/{portion.step.commit.uuid}."):
                if file.name not in self._read:
                    text = self._words.read(file.name, MANIFEST_LIMIT)
                    told = parse_json(text, f"{self._words.url.below(file.name)}")
                    self._read[file.name] = frozenset(told["files"])
                found |= self._read[file.name]
        return found

    def _remove(self, portion: Portion) -> None:
        """The portion is on the mirror, and makes room here; after that nobody needs its word."""
        path = self._mirror.root / portion.step.path.name
        with naming_failures(f"{path} cannot be removed"):
            discard(self._storage, path, self._mirror.root / TRASH)
        self._words.remove(self._word(portion))

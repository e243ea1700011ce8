"""Copy the shown files of runs behind a URL to this machine, repeatedly."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from typing import Self

from burnish.errors import BurnishError, MissingError
from burnish.files.cache import cache_root
from burnish.files.hub import HubPlace
from burnish.files.hub_files import HubFiles
from burnish.files.remote import Remote, RetryPolicy
from burnish.tracking.rundir import write_atomically

_WANTED = re.compile(
    r"(?:[^\0\n]+/)?(?:config\.yaml|environment\.json|status\.json|metrics\.jsonl|git\.diff|(?:logs|profiles|rollouts|traces)/[^/\0\n]+)"
)
_LARGE = re.compile(r"(?:rollouts|traces)/")
_SECONDS = 15.0  # between two copies
_LIMIT = 1 << 31  # most bytes of a file
_POLICY = RetryPolicy(tries=4, seconds=20.0)

_log = logging.getLogger("burnish")


class RunCopies:
    """Copies the shown files of runs below a URL to `root` in the block: first all but rollouts and traces, then all, by a thread."""

    def __init__(self, url: str) -> None:
        self.root = (cache_root() / "view" / sha256(url.encode()).hexdigest()[:24]).absolute()
        self._known = self.root / ".versions.json"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._versions: Callable[[], dict[str, tuple[str, float | None]]]
        self._content: Callable[[str], bytes]
        hub = HubPlace.of(url, "dataset") if url.startswith("hf://") else None
        if hub is not None:
            files = HubFiles.of(hub)
            below = f"{hub.path}/" if hub.path else ""
            self._versions = lambda: {
                name.removeprefix(below): (str(size), None)
                for name, size in files.files().items()
                if name.startswith(below)
            }
            self._content = lambda name: files.file(name).read_bytes()
        else:
            remote = Remote(url, _POLICY)
            self._versions = lambda: {
                each.name: (f"{each.size} {each.version}", each.modified) for each in remote.files()
            }
            self._content = lambda name: remote.read(name, _LIMIT)

    def __enter__(self) -> Self:
        self.root.mkdir(parents=True, exist_ok=True)
        self._copy(rollouts=False)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            pause = _SECONDS
            try:
                self._copy(rollouts=True)
            except (BurnishError, OSError) as error:
                _log.warning("%s", error)

    def _copy(self, *, rollouts: bool) -> None:
        listed = {
            name: version
            for name, version in self._versions().items()
            if _WANTED.fullmatch(name) and ".." not in name.split("/")
        }
        versions = {name: version for name, (version, _) in listed.items()}
        have = json.loads(self._known.read_text()) if self._known.exists() else {}
        for name in have.keys() - versions.keys():
            (self.root / name).unlink(missing_ok=True)
            del have[name]
        small = sorted(name for name in versions if not _LARGE.search(name))
        large = sorted((versions.keys() - set(small)) if rollouts else (), reverse=True)
        try:
            for name in (*small, *large):
                if have.get(name) != versions[name] and not self._stop.is_set():
                    with suppress(MissingError):  # the file was removed meanwhile
                        write_atomically(self.root / name, self._content(name))
                        if (changed := listed[name][1]) is not None:
                            # A copy that nobody writes is told by its age.
                            os.utime(self.root / name, (changed, changed))
                        have[name] = versions[name]
        finally:
            write_atomically(self._known, json.dumps(have))

"""A partial checkpoint: one disk's files of a step, in a directory `.portion-N.UUID`.

The step is committed when the mirror has the parts of all disks; until then no reader sees it. What a killed run leaves goes at
the next start. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from burnish.checkpoint.manifest import (
    COMMIT_LIMIT,
    MANIFEST,
    MANIFEST_LIMIT,
    FileRecord,
    parse_commit,
    parse_manifest,
)
from burnish.checkpoint.steps import PORTION, Committed, files_below, read_small, step_name
from burnish.errors import CorruptError
from burnish.files.storage import Storage

SEAL = "SEAL"
"""A portion's copy of the COMMIT that the step will have, under a name that makes no step of it."""


@dataclass(frozen=True, slots=True)
class Portion:
    """A portion that was read and checked."""

    step: Committed
    """The step: its `path` is the portion's, its manifest that of the whole step."""
    files: Mapping[str, FileRecord]
    """The files that lie here."""
    commit: bytes
    """The step's COMMIT."""
    manifest: bytes
    """Its manifest."""

    @property
    def name(self) -> str:
        """What the step is called on the mirror."""
        return step_name(self.step.step)

    @property
    def size(self) -> int:
        """Bytes of the files that lie here."""
        return sum(record.size for record in self.files.values())


def portion_paths(root: Path, storage: Storage) -> dict[Path, int]:
    """The portions below `root` with their steps, oldest first."""
    names = [entry.name for entry in storage.entries(root) if entry.name.startswith(PORTION)]
    steps = {root / name: name.removeprefix(PORTION).partition(".")[0] for name in names}
    found = {path: int(step) for path, step in steps.items() if step.isdecimal()}
    return dict(sorted(found.items(), key=lambda each: each[1]))


def open_portion(path: Path, storage: Storage) -> Portion:
    """The portion at `path`. Raises `CorruptError` where seal, manifest or names are not in order."""
    seal = read_small(path, SEAL, COMMIT_LIMIT, storage)
    manifest = read_small(path, MANIFEST, MANIFEST_LIMIT, storage)
    commit = parse_commit(seal, f"{path / SEAL}")
    whole = parse_manifest(manifest, commit, f"{path / MANIFEST}")
    names = {name for name, _ in files_below(path, "", storage)} - {SEAL, MANIFEST}
    if alien := names - whole.files.keys():
        raise CorruptError(
            f"{path / min(alien)} is in no manifest",
            have="a file that was not saved with the step",
            want="files of the manifest",
            do="move it away",
        )
    files = {name: whole.files[name] for name in sorted(names)}
    return Portion(Committed(path, commit, whole, {}), files, seal, manifest)

"""Check weights that a run reads from another run's step against the hashes in its manifest.

It skips plain Hugging Face directories, which have no hashes, and copies from a URL.
"""

from __future__ import annotations

from pathlib import Path

from burnish.checkpoint.manifest import COMMIT
from burnish.checkpoint.steps import (
    CommittedStep,
    open_step,
    require_healthy,
    step_number,
    verify_files,
)
from burnish.distributed.collectives import agree, same_on_all_ranks
from burnish.distributed.layout import Layout
from burnish.files.durable import naming_failures
from burnish.tracking.progress import Progress

_MEGA = 1e6


class Intact:
    """Checks each model once in this process."""

    def __init__(self, layout: Layout, progress: Progress) -> None:
        self._layout = layout
        self._progress = progress
        self._seen: set[str] = set()

    def require(self, *places: str | None) -> None:
        """Verify each model that lies in a committed step. Collective.

        A machine's processes divide the files. Raises `CorruptError` naming file and tensors if a hash differs or the step
        is unhealthy, and `BurnishError` if machines hold different steps.
        """
        for place in places:
            if place is None or place in self._seen:
                continue
            unreadable = f"{place} cannot be read"
            with agree(self._layout), naming_failures(unreadable):
                step = _step_of(Path(place).expanduser().resolve())
            seal = b"" if step is None else step.commit.encode()
            same_on_all_ranks(seal, f"the step that {place} lies in", self._layout)
            if step is not None:
                with agree(self._layout), naming_failures(unreadable):
                    _read_share(step, self._layout, self._progress)
            self._seen.add(place)


def _step_of(directory: Path) -> CommittedStep | None:
    """Return the step whose `model/` or `ROLE/model/` is `directory`, with only those files."""
    for path in directory.parents[:2]:
        if step_number(path.name) is not None and (path / COMMIT).is_file():
            below = f"{directory.relative_to(path).as_posix()}/"
            step = open_step(path, below=below)
            require_healthy(step)
            return step
    return None


def _read_share(step: CommittedStep, layout: Layout, progress: Progress) -> None:
    names = sorted(step.manifest.files)[layout.local_rank :: layout.local_world]
    sizes = {name: step.manifest.files[name].size / _MEGA for name in names}
    with progress.phase("check the model", sum(sizes.values())) as bar:
        for name, size in sizes.items():
            for damage in verify_files(step, [name]):
                raise damage
            bar.advance(size)

"""Whether the weights that a run reads are what was committed, where they lie in a step of another run.

A Hugging Face directory has no hashes; the `model/` of a step has them in the manifest beside it. Left
out: copies of what is behind a URL, of which only the model is here, and the step that a run resumes from, which is checked as it is read.
"""

from __future__ import annotations

from pathlib import Path

from burnish.checkpoint.manifest import COMMIT
from burnish.checkpoint.steps import Committed, open_part, require_healthy, step_number
from burnish.checkpoint.verify import verify_files
from burnish.distributed.collectives import agree, same_on_all_ranks
from burnish.distributed.layout import Layout
from burnish.files.durable import naming_failures
from burnish.files.storage import LocalStorage
from burnish.tracking.progress import Progress

_MEGA = 1e6


class Intact:
    """The models that this process has seen to be what was committed: each is read once, whoever needs it."""

    def __init__(self, layout: Layout, progress: Progress) -> None:
        self._layout = layout
        self._progress = progress
        self._seen: set[str] = set()

    def require(self, *places: str | None) -> None:
        """Read the files of each model that lies in a committed step, whole on each machine; any other place passes. Collective.

        Links are followed. What lies beside the model, or in it without having been committed, is not
        looked at. Raises `CorruptError` naming file and tensors where one is not what was committed, and where the
        step is unhealthy, and `BurnishError` where the machines do not have the same step there.
        """
        for place in places:
            if place is not None and place not in self._seen:
                self._require(place)
                self._seen.add(place)

    def _require(self, place: str) -> None:
        unreadable = f"{place} cannot be read"
        with agree(self._layout), naming_failures(unreadable):
            step = _step_of(Path(place).expanduser().resolve())
        seal = b"" if step is None else step.commit.encode()
        same_on_all_ranks(seal, f"the step that {place} lies in", self._layout)
        if step is not None:
            with agree(self._layout), naming_failures(unreadable):
                _read_share(step, self._layout, self._progress)


def _step_of(directory: Path) -> Committed | None:
    """The step that this is the `model/` of, or the `ROLE/model/`, with the files of that; None for any other place."""
    for path in directory.parents[:2]:
        if step_number(path.name) is not None and (path / COMMIT).is_file():
            below = f"{directory.relative_to(path).as_posix()}/"
            step = open_part(path, below, LocalStorage())
            require_healthy(step)
            return step
    return None


def _read_share(step: Committed, layout: Layout, progress: Progress) -> None:
    """Check what falls to this rank; those of one machine have all files together, for others may have other disks."""
    names = sorted(step.manifest.files)[layout.local_rank :: layout.local_world]
    sizes = {name: step.manifest.files[name].size / _MEGA for name in names}
    with progress.phase("check the model", sum(sizes.values())) as bar:
        for name, size in sizes.items():
            for damage in verify_files(step, [name]):
                raise damage
            bar.advance(size)

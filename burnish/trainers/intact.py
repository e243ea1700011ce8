"""Whether the weights that a run begins from are what was committed, where they lie in a step of another run.

A Hugging Face directory has no hashes; the `model/` of a step has them in the manifest beside it. Left
out: copies of what is behind a URL, of which only the model is here.
"""

from __future__ import annotations

from pathlib import Path

from burnish.checkpoint.committed import open_step, step_number
from burnish.checkpoint.manifest import COMMIT
from burnish.checkpoint.verify import verify_files
from burnish.files.durable import naming_failures
from burnish.files.storage import LocalStorage
from burnish.parallel.collectives import agree
from burnish.parallel.layout import Layout
from burnish.tracking.progress import Progress

_MEGA = 1e6


def require_intact(place: str | None, layout: Layout, progress: Progress) -> None:
    """Read the files of a model that lies in a committed step, each by one rank; any other place passes. Collective.

    Raises `CorruptError` naming file and tensors where one is not what was committed.
    """
    with agree(layout), naming_failures(f"{place} cannot be read"):
        directory = Path(place or "").expanduser().absolute()
        path = _step_of(directory)
        if path is None:
            return
        step = open_step(path, LocalStorage())
        below = f"{directory.relative_to(path).as_posix()}/"
        names = sorted(name for name in step.manifest.files if name.startswith(below))
        mine = {name: step.manifest.files[name].size for name in names[layout.rank :: layout.world]}
        with progress.phase("check the model", sum(mine.values()) / _MEGA) as bar:
            for name, size in mine.items():
                for damage in verify_files(step, [name]):
                    raise damage
                bar.advance(size / _MEGA)


def _step_of(directory: Path) -> Path | None:
    """The step that this is the `model/` of, or the `ROLE/model/`."""
    for place in directory.parents[:2]:
        if step_number(place.name) is not None and (place / COMMIT).is_file():
            return place
    return None

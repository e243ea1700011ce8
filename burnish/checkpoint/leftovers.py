"""What killed processes leave in `checkpoints/`: directories half written or half removed, and portions that got no further."""

from __future__ import annotations

from pathlib import Path

from burnish.checkpoint.steps import INFLIGHT, PORTION, TRASH
from burnish.files.durable import discard
from burnish.files.removals import Removals
from burnish.files.storage import Storage


def leftovers(root: Path, storage: Storage) -> list[Path]:
    """What lies below `root` that no step is made of; being written or removed, where somebody holds its lease."""
    trash = [root / TRASH / entry.name for entry in storage.entries(root / TRASH)]
    names = [entry.name for entry in storage.entries(root)]
    return trash + [root / name for name in names if name.startswith((INFLIGHT, PORTION))]


def clear(root: Path, storage: Storage, removals: Removals) -> None:
    """Remove them, for one who holds the lease; `removals` has what the disk did not let go of."""
    for path in leftovers(root, storage):
        with removals.trying():
            if path.parent.name == TRASH:
                storage.remove(path)
            else:
                discard(storage, path, root / TRASH)

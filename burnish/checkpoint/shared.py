"""Whether all ranks see one disk, asked before a run does anything that it would lose.

Where they do not, each machine would get a part of a step. The lease that rank 0 has taken is what
the others look for, each at its own path: no other holder has its number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from burnish.checkpoint.resuming import OnDisk
from burnish.errors import UsageError
from burnish.files.lease import Token
from burnish.parallel.collectives import agree, gather_objects
from burnish.parallel.layout import Layout

_PAUSES = (0.0, 0.1, 0.3, 1.0)
# In seconds, before each look.
_PAUSES_BETWEEN_MACHINES = (*_PAUSES, 3.0, 10.0, 20.0, 40.0)
# An NFS client may take what it once found missing to be so for 60 seconds.


def require_shared(lease: Path, held: Token | None, layout: Layout) -> None:
    """Raise `UsageError` on every rank where one does not see at `lease` what rank 0, which has `held`, wrote there. Collective."""
    token = gather_objects(held, layout)[0]
    with agree(layout):
        is_one_machine = layout.local_world == layout.world
        pauses = _PAUSES if is_one_machine else _PAUSES_BETWEEN_MACHINES
        if token is not None and not _is_seen(replace(token, path=lease), pauses):
            raise UsageError(
                f"{lease.parent} is not one directory for all ranks",
                have=f"rank {layout.rank} does not see there what rank 0 has written",
                want="checkpoints that all ranks share",
                do=OnDisk.sharing,
            )


def _is_seen(token: Token, pauses: Sequence[float]) -> bool:
    for pause in pauses:
        time.sleep(pause)
        for directory in reversed(token.path.parents[:3]):
            with suppress(OSError):  # has a network mount look again at what names there are
                os.listdir(directory)
        if token.current() == token.number:
            return True
    return False

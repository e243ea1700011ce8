"""Whether all ranks see one disk, asked before a run does anything that it would lose.

Where they do not, each machine would get a part of a step. The lease that rank 0 has taken is what
the others look for, each at its own path: no other holder has its number.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from burnish.checkpoint.resuming import OnDisk
from burnish.errors import UsageError
from burnish.files.lease import Token
from burnish.parallel.collectives import agree, gather_objects
from burnish.parallel.layout import Layout

_PAUSES = (0.0, 0.1, 0.3, 1.0, 3.0)
# In seconds, before each look: a network mount may show what is new to it a little later.


def require_shared(lease: Path, held: Token | None, layout: Layout) -> None:
    """Raise `UsageError` on every rank where one does not see at `lease` what rank 0, which has `held`, wrote there. Collective."""
    token = gather_objects(held, layout)[0]
    with agree(layout):
        if token is not None and not _is_seen(replace(token, path=lease)):
            raise UsageError(
                f"{lease.parent} is not one directory for all ranks",
                have=f"rank {layout.rank} does not see there what rank 0 has written",
                want="checkpoints that all ranks share",
                do=OnDisk.sharing,
            )


def _is_seen(token: Token) -> bool:
    for pause in _PAUSES:
        time.sleep(pause)
        with suppress(OSError):  # has a network mount look again at what names there are
            os.listdir(token.path.parent)
        if token.current() == token.number:
            return True
    return False

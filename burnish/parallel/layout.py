"""Who holds what: the position of this process among all processes of the run.

A layout is a plain value, passed to whoever needs it; there is no current layout. Left out: the
process groups themselves (`burnish.parallel.processes`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """One process's place. All sizes count processes.

    Data-parallel ranks see different micro-batches; with fully sharded data parallelism (the only
    axis of the torch engine so far) every process is one.
    """

    rank: int = 0
    """This process, 0-based, over the whole run."""
    world: int = 1
    """Processes in the run."""
    local_rank: int = 0
    """This process, 0-based, on its machine."""
    local_world: int = 1
    """Processes of the run on this machine."""

    @property
    def data_rank(self) -> int:
        """Which share of the batch this process runs."""
        return self.rank

    @property
    def data_size(self) -> int:
        """Into how many shares the batch is cut."""
        return self.world

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's logs."""
        return self.rank == 0

"""Who holds what: the position of this process among all processes of the run.

A layout is a plain value, passed to whoever needs it; there is no current layout. Left out: the
process groups themselves (`burnish.distributed.processes`, `burnish.distributed.mesh`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """One process's place. All sizes count processes.

    Processes form a grid of pipeline × data × sequence × tensor, the last running fastest: those that
    differ in data alone work on different micro-batches, all others on the same.
    """

    rank: int = 0
    """This process, 0-based, over the whole run."""
    world: int = 1
    """Processes in the run."""
    local_rank: int = 0
    """This process, 0-based, on its machine."""
    local_world: int = 1
    """Processes of the run on this machine."""
    sequence: int = 1
    """Processes that share the tokens of a micro-batch."""
    tensor: int = 1
    """Processes that share the matrices of a layer."""
    pipeline: int = 1
    """Groups of processes that share the layers of the model, which micro-batches pass one after the other."""

    @property
    def sharing(self) -> int:
        """Processes that work on the same micro-batch."""
        return self.sequence * self.tensor * self.pipeline

    @property
    def data_rank(self) -> int:
        """Which share of the batch this process runs."""
        return self.rank // (self.sequence * self.tensor) % self.data_size

    @property
    def data_size(self) -> int:
        """Into how many shares the batch is cut."""
        return self.world // self.sharing

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's logs."""
        return self.rank == 0

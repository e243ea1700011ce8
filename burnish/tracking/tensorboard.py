"""TensorBoard event files: scalars only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker:
    """Writes scalars under `directory`.

    Resuming from step N tells TensorBoard to forget later steps of earlier files; N = None forgets all.
    """

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        purge = 0 if resume_step is None else resume_step + 1
        self._writer: SummaryWriter | None = SummaryWriter(str(directory), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write every value as a scalar of its name."""
        if self._writer is None:
            raise ValueError("log after close")
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def sync(self) -> None:
        """Nothing is made from it."""

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

"""A batch that was drawn and not yet trained on, and the queue that holds such batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from burnish.records import Completion
from burnish.records.rollout_table import RolloutTable

if TYPE_CHECKING:
    from burnish.rollout.in_flight import SampleKey


@dataclass(frozen=True, slots=True, eq=False)
class DrawnBatch:
    """The scored groups of a step, not yet trained on."""

    step: int
    """The step that trains on it, 0-based."""
    groups: RolloutTable
    left_out: RolloutTable
    """Groups that dynamic sampling replaced."""


class BatchQueue(Protocol):
    """Holds what was generated ahead of training, for saves."""

    def pending(self) -> Sequence[DrawnBatch]:
        """Return the batches that were drawn and not trained on."""

    def partial(self) -> Mapping[SampleKey, Completion]:
        """Return the completions that were begun for later batches."""

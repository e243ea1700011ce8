"""For tests of batches that are made up: what stands for the collector of their rollouts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from burnish.distributed.layout import Layout
from burnish.tracking.progress import Progress


@dataclass
class Collected:
    """A `Collector` around a made-up generator."""

    generator: Any = None
    layout: Layout = field(default_factory=Layout)
    progress: Any = field(default_factory=lambda: Progress(False))
    check: Any = field(default=lambda: None)
    partial: Any = None
    stragglers: Any = None
    conversations: Any = None
    groups: Any = ()
    """What it collects, whatever it is asked for."""
    offloaded = nullcontext

    @property
    def on_main(self) -> Collected:
        return self

    def judged(self, table: Any) -> Any:
        return table

    def collect(self, *asked: Any) -> Any:
        return self.groups

"""Record the kernels of a decoding step with CUDA, and launch them all by one call.

A step of n rows runs once as it is, so that libraries set themselves up, is recorded at its second time, and replayed from then on.
Graphs share memory for what they compute, because the device runs one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Result = tuple[Tensor, Tensor | None]
_log = logging.getLogger(__name__)


class GraphedSteps:
    """The graphs of a step, one for each number of rows. The step reads and writes tensors at fixed addresses only."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._graphs: dict[int, tuple[Any, Result]] = {}
        self._pool: Any = None
        self._is_off = False

    def __call__(self, compute: Callable[[int], Result], rows: int) -> Result:
        """Compute a step, always by the same function. The next one may overwrite the result on the device."""
        if rows not in self._graphs:
            if self._is_off or rows not in self._seen:
                self._seen.add(rows)
                return compute(rows)
            self._record(compute, rows)
            if self._is_off:
                return compute(rows)
        graph, result = self._graphs[rows]
        graph.replay()
        return result

    def _record(self, compute: Callable[[int], Result], rows: int) -> None:
        """Record, without computing. If the model cannot be recorded, say so, and record no more."""
        graph: Any = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as NCCL's, may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = compute(rows)
        except RuntimeError as error:
            self._is_off = True
            reason = str(error).partition("\n")[0]
            _log.warning("decoding launches each kernel by itself, without CUDA graphs: %s", reason)
            return
        self._pool = self._pool or graph.pool()
        self._graphs[rows] = graph, result

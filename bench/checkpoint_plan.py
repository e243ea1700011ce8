"""Time and memory of planning a save of very many ranks, without the ranks.

Every rank plans by itself, from the descriptions of all ranks' pieces. So one process can do the work of one rank
of a thousand. Left out: gathering the descriptions, which are some megabytes.
"""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter

import numpy as np
import torch

from burnish.boxes.pieces import PieceTable
from burnish.boxes.shards import TensorSpec
from burnish.boxes.table import BoxTable
from burnish.checkpoint.write_plan import MAIN, WritePlan
from burnish.distributed.device import peak_memory, reset_peak_memory, used_memory
from burnish.distributed.layout import Layout

ROWS = 4100
COLUMNS = 4096
"""Shape of each tensor: 67 MB of fp32, cut by rows. Few numbers of ranks divide the rows evenly."""
CPU = torch.device("cpu")


def tables(ranks: int, tensors: int) -> list[PieceTable]:
    """Return the pieces of all ranks: each has a part of every tensor's rows."""
    described = tuple(
        TensorSpec(f"exp_avg/layers.{number}.weight", (ROWS, COLUMNS), torch.float32)
        for number in range(tensors)
    )
    edges = np.linspace(0, ROWS, ranks + 1).astype(np.int64)
    numbers = np.arange(tensors)
    found = []
    for start, stop in pairwise(edges.tolist()):
        offsets = np.tile(np.array([start, 0]), (tensors, 1))
        sizes = np.tile(np.array([stop - start, COLUMNS]), (tensors, 1))
        found.append(PieceTable(described, BoxTable(numbers, offsets, sizes), numbers))
    return found


def plan(ranks: int, tensors: int) -> tuple[float, int]:
    """Make the first rank's plan. Return the seconds, and the peak of memory beyond that held before."""
    have = tables(ranks, tensors)
    reset_peak_memory(CPU)
    before = used_memory(CPU)
    begun = perf_counter()
    WritePlan.of(have, [MAIN], Layout(0, ranks))
    return perf_counter() - begun, peak_memory(CPU) - before

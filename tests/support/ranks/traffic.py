"""For tests of what is sent: bytes that this rank sends and receives, counted where torch dispatches collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burnish.distributed.layout import Layout

EXCHANGE = "c10d::alltoall_base_"
"""What waves of a transfer travel by."""


class Traffic(TorchDispatchMode):
    """By collective that this rank starts inside the block, the bytes of each that leave it for others."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.sent: list[tuple[str, int]] = []
        self.received = 0
        """Bytes, by exchanges, gatherings and sums over gloo."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name == EXCHANGE:
            got, given, _, came, sizes, *_ = args
            even = len(given) // self.layout.world
            own = sizes[self.layout.rank] if sizes else even
            self.sent.append((name, given.nbytes - own * given.itemsize))
            self.received += got.nbytes - (came[self.layout.rank] if came else even) * got.itemsize
        elif name.startswith("c10d::"):
            # The last list of tensors, or tensor, is what this rank puts in.
            given = [each for each in args if isinstance(each, Tensor | list)][-1]
            size = sum(t.nbytes for t in tree_leaves(given))
            self.sent.append((name, size))
            self.received += size * (self.layout.world - 1) if "allgather" in name else 0
            self.received += 2 * size if "allreduce" in name else 0
        return func(*args, **kwargs or {})

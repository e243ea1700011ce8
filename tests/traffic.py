"""What this rank sends to others, counted where torch dispatches the collectives that it starts."""

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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name == EXCHANGE:
            _, given, _, _, sizes, *_ = args
            self.sent.append((name, given.nbytes - sizes[self.layout.rank] * given.itemsize))
        elif name.startswith("c10d::"):
            # The last list of tensors, or tensor, is what this rank puts in.
            given = [each for each in args if isinstance(each, Tensor | list)][-1]
            self.sent.append((name, sum(t.nbytes for t in tree_leaves(given))))
        return func(*args, **kwargs or {})

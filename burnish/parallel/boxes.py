"""Pure arithmetic on n-dimensional boxes: intersect, subtract, cover, flat ranges."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangular part of a tensor: per dim, an offset and a size, in elements."""

    offsets: tuple[int, ...]
    """First index per dim; () for a scalar."""
    sizes: tuple[int, ...]
    """Extent per dim; () for a scalar."""

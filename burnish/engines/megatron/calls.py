"""Call Megatron: through the host layer without CUDA, and without warnings about its own packages, names and settings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from burnish.engines.megatron.host import on_host


@contextmanager
def megatron_called() -> Iterator[None]:
    """Every call of Megatron is made inside such a block; one may be inside another."""
    with warnings.catch_warnings(), on_host():
        warnings.simplefilter("ignore")
        yield

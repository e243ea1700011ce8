"""How Megatron is called: through the host layer where there is no CUDA, and without its warnings.

It warns of each optional package that is missing, of its own old names, and of settings that are
chosen here on purpose; none of that is for the person who trains.
"""

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

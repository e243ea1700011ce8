"""Move the trained models to the host while completions are generated (`engine.park`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from burnish.engines.base import Engine


@dataclass(frozen=True, slots=True)
class Parking:
    """The engines that rest."""

    engines: Sequence[Engine]
    """None of them where nothing is to be parked."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside the block they are off the device."""
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.parked())
            yield

    def around(
        self, validate: Callable[[], dict[str, float]] | None
    ) -> Callable[[], dict[str, float]] | None:
        """A validation that generates, during which they are off the device."""
        if validate is None:
            return None

        def validating() -> dict[str, float]:
            with self():
                return validate()

        return validating

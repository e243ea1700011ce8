"""What is used in a `with` block and closed where that ends: the protocol, and the two methods that are always the same."""

from __future__ import annotations

from typing import Protocol, Self


class Closing(Protocol):
    """A context manager that is itself; classes inherit from it and say what closing means."""

    def close(self) -> None:
        """Let go of what it holds."""

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

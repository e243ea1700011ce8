"""Where processes come from."""

from burnish.launch.entry import run

__all__ = ["run"]

"""What runs with conversations need."""

from support.runs.fixtures import known_speed, work

__all__ = ["known_speed", "work"]

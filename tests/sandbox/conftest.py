"""What a run needs."""

from support.runs.fixtures import work

__all__ = ["work"]

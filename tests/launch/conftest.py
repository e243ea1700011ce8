from support.runs.fixtures import work

__all__ = ["work"]

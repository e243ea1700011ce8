"""Rows that an environment brings, where a configuration names none."""

from __future__ import annotations

from typing import Any

from burnish.config.environment import EnvironmentConfig
from burnish.config.schema import DataConfig
from burnish.data.in_memory import stored
from burnish.environments.pool import EnvironmentPool
from burnish.errors import UsageError


def bring_rows(values: dict[str, Any], environment: EnvironmentConfig, *, trains: bool) -> None:
    """Let the rows that an environment brings stand for `data.train`, or `data.validation` of an evaluation, if that is not given."""
    held_out = DataConfig.model_validate(values["data"]).held_out
    name, purpose = ("train", "train") if trains or held_out else ("validation", "evaluate")
    if values["data"][name]:
        return
    with EnvironmentPool(environment, asks_rows=True) as pool:
        rows = pool.described.rows
    if not rows:
        raise UsageError(
            f"there is nothing to {purpose} on",
            have=f"data.{name}: [], and {environment.target} brings no rows",
            want="at least one row",
            do=f"set data.{name}=FILE, or let the class have a classmethod `rows`",
        )
    values["data"][name] = [stored(rows, "rollout.environment")]

"""The formulas of post-training: advantages, losses, KL, aggregation, schedules. Pure functions.

`ADVANTAGES` and `POLICY_LOSSES` are the built-ins of `algorithm.advantage` and `algorithm.policy_loss`. A user's function is
named there as `file.py:function` or `module:function`, and loaded and called as these are.
"""

from typing import get_args

from burnish.config.schema import AdvantageName, PolicyLossName
from burnish.functions import Registry

ADVANTAGES: Registry = {
    name: f"burnish.algorithms.advantages:{name}"
    for name in get_args(AdvantageName)
    if name != "gae"  # takes a critic's values
}
"""Estimators by name."""

POLICY_LOSSES: Registry = {
    name: f"burnish.algorithms.policy_loss:{name}" for name in get_args(PolicyLossName)
}
"""Policy losses by name."""

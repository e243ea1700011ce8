"""The formulas of post-training as pure functions: advantages, losses, KL, aggregation, schedules.

`ADVANTAGES` and `POLICY_LOSSES` are the built-ins of `algorithm.advantage` and
`algorithm.policy_loss`. A user's function, named `file.py:function` or `module:function`, is loaded
and called alike.
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

"""The formulas of post-training: advantages, losses, KL, aggregation, schedules. Pure functions.

`ADVANTAGES` and `POLICY_LOSSES` are the built-ins of `algorithm.advantage` and `algorithm.policy_loss`. A user's function is
named there as `file.py:function` or `module:function`, and loaded and called as these are.
"""

from burnish.functions import Registry

_ADVANTAGES = "burnish.algorithms.advantages"
_LOSSES = "burnish.algorithms.policy_loss"

ADVANTAGES: Registry = {
    "grpo": f"{_ADVANTAGES}:grpo",
    "dr_grpo": f"{_ADVANTAGES}:dr_grpo",
    "grpo_batch_std": f"{_ADVANTAGES}:grpo_batch_std",
    "rloo": f"{_ADVANTAGES}:rloo",
    "opo": f"{_ADVANTAGES}:opo",
    "gpg": f"{_ADVANTAGES}:gpg",
    "pass_at_k": f"{_ADVANTAGES}:pass_at_k",
    "gdpo": f"{_ADVANTAGES}:gdpo",
    "remax": f"{_ADVANTAGES}:remax",
    "reinforce_plus_plus": f"{_ADVANTAGES}:reinforce_plus_plus",
    "reinforce_plus_plus_baseline": f"{_ADVANTAGES}:reinforce_plus_plus_baseline",
}
"""Estimators by name. `gae` is not among them: it needs a critic (`burnish.algorithms.gae`)."""

POLICY_LOSSES: Registry = {
    "ppo": f"{_LOSSES}:ppo",
    "gspo": f"{_LOSSES}:gspo",
    "cispo": f"{_LOSSES}:cispo",
    "sapo": f"{_LOSSES}:sapo",
    "gmpo": f"{_LOSSES}:gmpo",
    "dppo_tv": f"{_LOSSES}:dppo_tv",
    "dppo_kl": f"{_LOSSES}:dppo_kl",
    "clip_cov": f"{_LOSSES}:clip_cov",
    "kl_cov": f"{_LOSSES}:kl_cov",
}
"""Policy losses by name."""

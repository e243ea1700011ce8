"""What is said of a run as its settings are: whether it can be divided so, whether it fits, and which settings need less memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from burnish.config.check import check_layout
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError, UsageError
from burnish.plan.devices import Devices
from burnish.plan.layouts import Plan, Planner, gigabytes

_PLAIN = {
    "reward models": "a smaller model in reward.models",
    "host": "no engine.activation_offload, optimizer_offload and park, which save nothing on a CPU",
    "staging": "checkpoint.background=false",
    "generator": "a smaller model: each device has a whole copy to generate with",
}
"""For parts of which only one thing can be said."""


def advice(plan: Plan, config: RunConfig) -> str:
    """The settings that would help most where a plan does not fit, the best first; what alone is too large comes alone."""
    parts = plan.phases[plan.fullest]
    if parts.get("generator", 0.0) > plan.usable:
        return _PLAIN["generator"]
    found: list[str] = []
    for part in sorted(parts, key=lambda name: (name == "generator", -parts[name])):
        found += [each for each in _remedies(part, plan, config) if each not in found]
    return ", or ".join(found[:3])


def _remedies(part: str, plan: Plan, config: RunConfig) -> list[str]:
    """What makes one part smaller."""
    batch, engine = config.batch, plan.engine
    if part in _PLAIN:
        return [_PLAIN[part]]
    away = _away(part, plan, config) if plan.apart else []
    fewer_copies = ["engine.replicas=1"] if engine.replicas > 1 else []
    tokens = f"batch.tokens_per_device={max(2, batch.tokens_per_device // 2)}"
    if part == "activations" and plan.fullest != "rollout":
        full = ["engine.activation_checkpointing=full"]
        return [*(full if engine.activation_checkpointing != "full" else []), *away, tokens]
    if part == "logits":
        if plan.fullest == "rollout":
            return [_fewer_slots(plan, config)]
        return [f"engine.logprob_chunk={max(1, engine.logprob_rows(plan.vocabulary) // 4)}"]
    if part in ("kv cache", "activations"):
        return [_fewer_slots(plan, config), "a shorter rollout.max_response_length"]
    waiting = not engine.reduce_each_microbatch and plan.microbatches > 1 < plan.layout.shards
    if part == "gradients" and waiting:
        return ["engine.reduce_each_microbatch=true", *fewer_copies]
    if part == "critic":
        return [*away, "algorithm.advantage=grpo, which has no critic"]
    if part == "reference":
        return [*away, "algorithm.kl.coef=0"]
    if part == "gathered" and not engine.reshard_after_forward:
        return ["engine.reshard_after_forward=true"]
    megatron = engine.kind == "megatron"
    return [
        *away,
        *fewer_copies,
        *([f"engine.pipeline_parallel={2 * engine.pipeline_parallel}"] if megatron else []),
        "more devices",
        *([] if config.model.adapter or megatron else ["model.lora.rank=16"]),
    ]


def _fewer_slots(plan: Plan, config: RunConfig) -> str:
    """Half as many as are in use, or as few as fit: each has keys, values and logits of its own."""
    rollout, parts = config.rollout, plan.phases[plan.fullest]
    mine = -(-config.batch.prompts * rollout.n // plan.layout.world)
    slots = min(rollout.slots, mine)
    each = (parts["kv cache"] + parts["logits"]) / slots
    fitting = slots - math.ceil((plan.need - plan.usable) / each)
    return f"rollout.slots={max(1, min(slots // 2, fitting))}"


def _away(part: str, plan: Plan, config: RunConfig) -> list[str]:
    """The setting that takes a part to the host, if there is one and it is not set."""
    engine, trained = plan.engine, ("weights", "gradients", "optimizer", "critic", "reference")
    if part in trained and plan.fullest == "rollout":
        return [] if engine.park else ["engine.park=true"]
    if part == "activations":
        known = engine.activation_offload or engine.activation_checkpointing == "selective"
        known = known or engine.kind == "megatron"  # which leaves them on the device
        return [] if known else ["engine.activation_offload=true"]
    if part in ("optimizer", "critic"):
        known = engine.optimizer_offload or config.optim.kind == "adamw8bit"
        return [] if known else ["engine.optimizer_offload=true"]
    return []


def refuse(plan: Plan, config: RunConfig, devices: Devices) -> UsageError:
    """What is said of a run that cannot fit."""
    parts = sorted(plan.phases[plan.fullest].items(), key=lambda item: -item[1])
    most = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts[:4])
    return UsageError(
        f"this run does not fit on {devices}",
        have=f"{gigabytes(plan.need)} GB in {plan.fullest} ({most})",
        want=f"at most {gigabytes(plan.usable)} GB on each device",
        do=f"try {advice(plan, config)}",
    )


@dataclass(frozen=True, slots=True)
class Configured:
    """A run as its settings are."""

    plan: Plan | None
    """What it needs; None where processes or model cannot be divided so."""
    refusal: BurnishError | None
    """Why it cannot run so, or does not fit."""


def configured(
    planner: Planner, config: RunConfig, command: Literal["sft", "rl"], devices: Devices
) -> Configured:
    """What there is to say of the settings as they are, as a dry run has it."""
    try:
        check_layout(config, command, devices.count)
        planner.require_cut()
    except BurnishError as error:
        return Configured(None, error)
    plan = planner.as_configured()
    return Configured(plan, None if plan.fits else refuse(plan, config, devices))

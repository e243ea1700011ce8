"""Settings that need less memory, for the planner's refusal and for a run that is out of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from burnish.config.schema import RunConfig


def remedies(
    config: RunConfig,
    trainer: Literal["sft", "rl"],
    phase: str,
    parts: Sequence[str] = (),
    *,
    on_cpu: bool,
) -> list[str]:
    """Return settings that need less memory in a phase of a step, the most helpful first.

    `parts` are the phase's parts as the planner names them, the largest first. `on_cpu`: there is no
    host memory beside the device's.
    """
    order = {part: number for number, part in enumerate(parts)}
    table = _table(config, trainer == "rl", phase, on_cpu)
    found = [(part, setting) for applies, some, setting in table if applies for part in some]
    found.sort(key=lambda each: order.get(each[0], len(order)))
    return list(dict.fromkeys(setting for _, setting in found))


_STATE = ("optimizer", "weights", "gradients")


def _table(
    config: RunConfig, is_rl: bool, phase: str, on_cpu: bool
) -> list[tuple[bool, tuple[str, ...], str]]:
    """Return rows of condition, parts that get smaller, and setting."""
    engine, rollout, updates = config.engine, config.rollout, phase == "update"
    generates = is_rl and phase in ("rollout", "validate")
    trains = phase in ("update", "advantages", "setting up", "save")
    computes = phase in ("update", "advantages", "log-probs", "validate")
    offloads = engine.activation_offload or engine.optimizer_offload or engine.park
    is_torch, chunk = engine.kind == "torch", engine.logprob_chunk or 0
    deeper = f"engine.pipeline_parallel={2 * engine.pipeline_parallel}"
    shorter = f"batch.tokens_per_device={max(2, config.batch.tokens_per_device // 2)}"
    cache = ("kv cache", "activations", "logits")
    return [
        (generates, cache, f"rollout.slots={max(1, rollout.slots // 2)}"),
        (generates, cache, "a shorter rollout.max_response_length"),
        (
            is_rl and not (on_cpu or engine.park or trains),
            (*_STATE, "critic", "reference"),
            "engine.park=true",
        ),
        (
            phase == "save" and config.checkpoint.background,
            ("staging",),
            "checkpoint.background=false",
        ),
        (
            updates and engine.activation_checkpointing != "full",
            ("activations",),
            "engine.activation_checkpointing=full",
        ),
        (
            updates and is_torch and not engine.reshard_after_forward,
            ("gathered",),
            "engine.reshard_after_forward=true",
        ),
        (
            updates and not engine.reduce_each_microbatch,
            ("gradients",),
            "engine.reduce_each_microbatch=true",
        ),
        (updates and chunk > 1, ("logits",), f"engine.logprob_chunk={max(1, chunk // 4)}"),
        (computes, ("activations", "logits"), shorter),
        (on_cpu and offloads, ("host",), "no offloading and parking, which save nothing on a CPU"),
        (
            trains and not on_cpu and not engine.optimizer_offload,
            ("optimizer", "critic"),
            "engine.optimizer_offload=true",
        ),
        (
            is_rl and bool(config.reward.models),
            ("reward models",),
            "a smaller model in reward.models",
        ),
        (is_rl and config.algorithm.kl.coef > 0, ("reference",), "algorithm.kl.coef=0"),
        (engine.replicas > 1, _STATE, "engine.replicas=1"),
        (not is_torch, _STATE, deeper),
        (is_torch and config.model.adapter is None, (*_STATE, "gathered"), "model.lora.rank=16"),
        (True, (*_STATE, "gathered"), "more devices"),
        (is_rl, ("generator",), "a smaller model: each device has a whole copy to generate with"),
    ]

"""Settings that need less memory."""

from __future__ import annotations

from collections.abc import Sequence

from burnish.config.frozen_models import FrozenModel
from burnish.config.schema import AUTO_TOKENS, MOST_SLOTS, RunConfig

HEADS = "kept output layers"
"""The planner's name of output layers of teachers that each device holds whole."""
_STATE = ("optimizer", "weights", "gradients")


def remedies(
    config: RunConfig,
    generates: bool,
    phase: str,
    parts: Sequence[str] = (),
    beside: Sequence[FrozenModel] = (),
    *,
    on_cpu: bool,
    longest: int = 0,
) -> list[str]:
    """Return settings that need less memory in a phase of a step, the most helpful first.

    `generates`: whether the method draws completions. `parts` are the planner's names, the largest first. `beside` are the frozen
    models. `on_cpu`: host memory is all there is. `longest`: see `burnish.method.Method.longest`.
    """
    engine = config.engine
    rollout = config.rollout
    torch = engine.kind == "torch"
    update = phase == "update"
    chunk = engine.logprob_chunk or 0
    while_generating = generates and phase in ("rollout", "validate")
    trains = phase in ("update", "advantages", "setting up", "save")
    computes = phase in ("update", "advantages", "log-probs", "validate")
    during_rollout = generates and not (on_cpu or engine.offload_during_rollout or trains)
    keeps_all = update and engine.activation_checkpointing != "full"
    stays_whole = update and torch and not engine.reshard_after_forward
    sums_whole = update and not engine.reduce_each_microbatch
    on_device = trains and not (on_cpu or engine.optimizer_offload or engine.parameter_offload)
    # What `engine.parameter_offload` needs.
    is_plain = config.optim.kind == "adamw" and engine.tensor_parallel == 1
    may_leave = on_device and torch and is_plain and not config.model.adapter
    offloads = (
        engine.activation_offload
        or engine.optimizer_offload
        or engine.parameter_offload
        or engine.offload_during_rollout
    )
    stages = f"engine.pipeline_parallel={2 * engine.pipeline_parallel}"
    fewer = max(2, config.batch.tokens // 2)
    # As auto, so that rows without a limit stay as long as they are; not where auto would be more again.
    is_more = fewer >= AUTO_TOKENS and fewer * engine.sequence_parallel >= longest
    budget = f"batch.tokens_per_device={'auto:' if config.batch.is_auto and is_more else ''}{fewer}"
    cache = ("kv cache", "activations", "logits")
    held = [each for each in beside if each.phase != "start"]
    is_auto = rollout.slots == "auto"  # the planner then takes as many slots as fit
    slots = MOST_SLOTS if rollout.slots == "auto" else rollout.slots
    table: list[tuple[bool, tuple[str, ...], str]] = [  # whether it helps, which parts, the setting
        (
            while_generating and not (is_auto and parts),
            cache,
            f"rollout.slots={max(1, slots // 2)}",
        ),
        (while_generating, cache, "a shorter rollout.max_response_length"),
        (during_rollout, (*_STATE, "critic", "reference"), "engine.offload_during_rollout=true"),
        (
            phase == "save" and config.checkpoint.background,
            ("staging",),
            "checkpoint.background=false",
        ),
        (keeps_all, ("activations",), "engine.activation_checkpointing=full"),
        (stays_whole, ("gathered",), "engine.reshard_after_forward=true"),
        (sums_whole, ("gradients",), "engine.reduce_each_microbatch=true"),
        (update and chunk > 1, ("logits",), f"engine.logprob_chunk={max(1, chunk // 4)}"),
        (computes, ("activations", "logits"), budget),
        (on_cpu and offloads, ("host",), "no offloading, which saves nothing on a CPU"),
        (on_device, ("optimizer", "critic"), "engine.optimizer_offload=true"),
        *((True, (each.role, HEADS), f"a smaller model in {each.setting}") for each in held),
        (generates and config.algorithm.kl.coef > 0, ("reference",), "algorithm.kl.coef=0"),
        (engine.replicas > 1, _STATE, "engine.replicas=1"),
        (not torch, _STATE, stages),
        (may_leave, ("weights", "gradients"), "engine.parameter_offload=true"),
        (torch and not config.model.adapter, (*_STATE, "gathered"), "model.lora.rank=16"),
        (True, (*_STATE, "gathered"), "more devices"),
        (
            generates,
            ("generator",),
            "a smaller model: each device has a whole copy to generate with",
        ),
    ]
    order = {part: number for number, part in enumerate(parts)}
    hints = [(part, setting) for applies, freed, setting in table if applies for part in freed]
    hints.sort(key=lambda hint: order.get(hint[0], len(order)))
    return list(dict.fromkeys(setting for _, setting in hints))

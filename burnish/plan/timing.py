"""Estimate a step's time: work divided by speed, under assumptions that `burnish plan` prints.

It ranks layouts and tells minutes from hours. An update takes the longer of its arithmetic and its
communication. A critic counts as the policy's model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

from burnish.config.schema import EngineConfig, RunConfig
from burnish.models.flops import Passed
from burnish.plan.devices import NETWORK, PER_MACHINE, Devices
from burnish.plan.model import FP32, PlannedModel, product_bytes, shards_of

Command = Literal["sft", "rl"]
_ASSUMED_PROMPT = 512
_EFFICIENCY = 0.4
_BANDWIDTH = 0.6
_LINKS = 0.7
_DISK = 2e9
_RECOMPUTED = {"none": 0.0, "selective": 0.1, "full": 1.0}
# Forward passes that the backward pass computes again.
ASSUMPTIONS = (
    "every sequence as long as it may be: without data.max_length a whole batch.tokens_per_device, "
    f"without data.max_prompt_length {_ASSUMED_PROMPT} tokens and the completion's; no two sequences share a prompt",
    f"matrix products at {_EFFICIENCY:.0%} of the device's peak, decoding at {_BANDWIDTH:.0%} of its memory's speed",
    f"links at {_LINKS:.0%} of theirs, {NETWORK / 1e9:.0f} GB/s between machines of {PER_MACHINE} devices, "
    "communication hidden behind arithmetic where that takes longer",
    f"checkpoints at {_DISK / 1e9:.0f} GB/s for each machine",
    "a pipeline is idle while its stages wait for the first and the last micro-batch, and tokens fall on experts evenly",
    "what leaves the device for the host and comes back takes no time",
)
"""What the times rest on, for people."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The sequences of a step, each as long as it may be."""

    sequences: int
    """Sequences over all devices."""
    prompt: int
    """Tokens of a prompt; 0 in supervised fine-tuning."""
    trained: int
    """Tokens of each sequence that are trained on."""
    updates: int = 1
    """Optimizer steps in one epoch."""
    epochs: int = 1
    """Times that the sequences are learned from."""
    scorings: int = 0
    """Forward passes of policy and reference before the updates."""
    has_reference: bool = False
    """Whether a frozen reference scores the sequences."""
    has_critic: bool = False
    """Whether a second model learns values."""
    slots: int = 0
    """Most sequences that a device generates at one time; 0: none are generated."""
    is_nucleus: bool = False
    """Whether sampling sorts the vocabulary."""
    samples: int = 1
    """Sequences of each prompt."""
    is_replayed: bool = False
    """Whether the updates know which experts tokens go to."""

    @classmethod
    def of(cls, config: RunConfig, command: Command) -> Self:
        """Read the settings."""
        if command == "sft":
            length = config.data.max_length or config.batch.tokens_per_device
            return cls(config.batch.examples, 0, length)
        algorithm, rollout = config.algorithm, config.rollout
        several = config.batch.minibatches * config.batch.epochs > 1
        replay = algorithm.router_replay
        recomputes = several and "recompute" in (algorithm.old_logprobs, replay)
        compared = 0 if algorithm.kl.coef == 0 else 2 if algorithm.kl.place == "reward" else 1
        return cls(
            sequences=config.batch.prompts * rollout.n,
            prompt=config.data.max_prompt_length or _ASSUMED_PROMPT,
            trained=rollout.max_response_length,
            updates=config.batch.minibatches,
            epochs=config.batch.epochs,
            scorings=int(recomputes) + compared,
            has_reference=compared > 0,
            has_critic=algorithm.advantage == "gae",
            slots=rollout.slots,
            is_nucleus=rollout.top_p < 1,
            samples=rollout.n,
            is_replayed=replay == "rollout" or (replay == "recompute" and several),
        )

    @property
    def alone(self) -> Self:
        """The work of a critic or a reward model."""
        return replace(self, has_critic=False, has_reference=False, slots=0)

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.trained

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Clock:
    """Operations and seconds of each phase, on the device with most sequences."""

    model: PlannedModel
    work: Workload
    devices: Devices
    judges: Sequence[PlannedModel] = ()
    """The models of `reward.models`."""

    def operations(self, engine: EngineConfig) -> dict[str, float]:
        """Return floating-point operations by phase; publishing and saving compute nothing."""
        work, forward = self.work, self._mine(engine) * self._sequence
        found = dict[str, float]()
        if work.slots:
            found["rollout"] = self._generated() + self._mine(engine) * self._judged
        if scorings := work.scorings + work.has_critic:
            found["log-probs"] = scorings * forward
        critic = self._passes(engine, critic=True) if work.has_critic else 0.0
        found["update"] = work.epochs * (self._passes(engine) + critic) * forward
        return found

    def seconds(
        self,
        engine: EngineConfig,
        microbatches: int,
        operations: Mapping[str, float],
    ) -> dict[str, float]:
        """Return seconds by phase; `microbatches` are those of an optimizer step."""
        work = self.work
        found = {name: count / self._speed for name, count in operations.items()}
        if work.slots:
            judging = self._mine(engine) * self._judged / self._speed
            found["rollout"] = self._rollout(engine) + judging
        update = self._by_megatron if engine.kind == "megatron" else self._by_torch
        trained = [False, True] if work.has_critic else [False]
        each = [update(engine, microbatches, critic) for critic in trained]
        found["update"] = work.epochs * sum(each)
        if work.slots:
            ranks = shards_of(engine, self.devices.count)
            if engine.kind == "megatron":
                ranks = engine.tensor_parallel * engine.pipeline_parallel
            published = self.model.published_adapter or self.model.elements
            found["publish"] = self._travel(product_bytes(engine) * published, ranks)
        saved = (self.model.adapter or self.model.elements) + self.model.elements * work.has_critic
        found["save"] = 3 * FP32 * saved / (_DISK * -(-self.devices.count // PER_MACHINE))
        return found

    def _passes(self, engine: EngineConfig, *, critic: bool = False) -> float:
        """Cost of learning, in forward passes: gradients, layers run again, experts counted."""
        learning = 3.0
        if self.model.adapter and not critic:
            every = Passed.all_of([self.work.length])
            learning = self.model.flops.training(every, frozen=True) / self._sequence
        return (
            learning + _RECOMPUTED[engine.activation_checkpointing] + self._counts(engine, critic)
        )

    def _counts(self, engine: EngineConfig, critic: bool) -> int:
        """Forward passes that count experts' tokens, for the load-balancing loss."""
        return int(engine.router_aux_loss > 0 and (critic or not self.work.is_replayed))

    def _mine(self, engine: EngineConfig) -> float:
        """A device's share of sequences that several devices work on together."""
        return -(-self.work.sequences // (self.devices.count // engine.sharing)) / engine.sharing

    def _generated(self) -> float:
        mine = -(-self.work.sequences // self.devices.count)
        prompt = self.model.flops.forward([self.work.prompt])
        return mine * (self._sequence - prompt) + -(-mine // self.work.samples) * prompt

    @cached_property
    def _sequence(self) -> float:
        return self.model.flops.forward([self.work.length])

    @cached_property
    def _heads(self) -> int:
        return sum(2 * (each.query + each.key) for each in self.model.shape.layers)

    @cached_property
    def _judged(self) -> float:
        return sum(judge.flops.forward([self.work.length]) for judge in self.judges)

    @property
    def _speed(self) -> float:
        return self.devices.flops * _EFFICIENCY

    def _by_torch(self, engine: EngineConfig, microbatches: int, critic: bool) -> float:
        """Seconds of an epoch: FSDP gathers weights and reduces gradients per micro-batch."""
        updates, counts = self.work.updates, self._counts(engine, critic)
        passes, elements = (
            self._passes(engine, critic=critic),
            self.model.elements / engine.tensor_parallel,
        )
        shards = shards_of(engine, self.devices.count)
        gathers = updates * microbatches * (1 + engine.reshard_after_forward + counts)
        moved = gathers * self._travel(product_bytes(engine) * elements, shards)
        trained = (0 if critic else self.model.adapter) or elements
        reductions = updates * (microbatches if engine.reduce_each_microbatch else 1)
        moved += reductions * self._travel(FP32 * trained, shards)
        if engine.replicas > 1:
            moved += updates * self._travel(2 * FP32 * trained / shards, self.devices.count)
        arithmetic = passes * self._mine(engine) * self._sequence / self._speed
        again = _RECOMPUTED[engine.activation_checkpointing] + counts
        return max(arithmetic, moved) + self._exchanged(engine, 3 + again)

    def _by_megatron(self, engine: EngineConfig, microbatches: int, critic: bool) -> float:
        """Seconds of an epoch: weights move once a step; stages wait for each other at its ends."""
        passes, stages = self._passes(engine, critic=critic), engine.pipeline_parallel
        idle = (stages - 1) / (engine.virtual_stages * microbatches)
        arithmetic = passes * self._mine(engine) * self._sequence / self._speed * (1 + idle)
        elements = self.model.elements / (engine.tensor_parallel * stages)
        shards = shards_of(engine, self.devices.count)
        moved = self.work.updates * self._travel((FP32 + product_bytes(engine)) * elements, shards)
        mine = self._numbers(engine)
        chosen = sum(each.experts_per_token for each in self.model.shape.layers)
        sent = 4 * chosen * self.model.shape.hidden * mine * passes / stages
        between = 2 * engine.virtual_stages * mine * self.model.shape.hidden
        exchanged = self._exchanged(engine, passes) / stages
        exchanged += self._travel(sent, engine.expert_parallel) + self._travel(between, stages)
        return max(arithmetic, moved) + exchanged

    def _exchanged(self, engine: EngineConfig, passes: float) -> float:
        """Seconds of exchanges inside layers, which nothing hides.

        Ulysses exchanges queries, keys, values and outputs; tensor parallelism gathers the hidden
        state twice and sums it twice.
        """
        shape = self.model.shape
        mine = self._numbers(engine) * passes
        exchanged = self._travel(
            self._heads * mine / engine.tensor_parallel, engine.sequence_parallel
        )
        return exchanged + self._travel(
            4 * shape.hidden * shape.depth * mine, engine.tensor_parallel
        )

    def _numbers(self, engine: EngineConfig) -> float:
        ranks = engine.replicas * shards_of(engine, self.devices.count)
        return self.work.tokens / ranks * product_bytes(engine)

    def _rollout(self, engine: EngineConfig) -> float:
        """Seconds to read the prompts, then per token to pass over weights and cache."""
        work, model, flops = self.work, self.model, self.model.flops.per_token
        mine = -(-work.sequences // self.devices.count)
        slots = min(work.slots, mine)
        cache = 2 * product_bytes(engine) * sum(each.key for each in model.shape.layers)
        weights = product_bytes(engine) * (model.elements + model.published_adapter)
        read = weights + slots * cache * (work.prompt + work.trained / 2)
        token = max(read / (self.devices.bandwidth * _BANDWIDTH), slots * flops / self._speed)
        reading = -(-mine // work.samples) * flops * work.prompt / self._speed
        return token * work.trained * -(-mine // slots) + reading

    def _travel(self, size: float, ranks: int) -> float:
        """Seconds until all of `ranks` have all bytes, of which each has a part."""
        link = self.devices.link if ranks <= PER_MACHINE else min(self.devices.link, NETWORK)
        return size * (ranks - 1) / ranks / (link * _LINKS)

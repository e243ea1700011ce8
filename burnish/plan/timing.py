"""How long the phases of a step will take: work over speed, under assumptions that are said.

A rough estimate, meant to rank layouts and to tell minutes from hours. What overlaps counts once: an update takes
as long as its arithmetic or its communication, whichever is longer. A critic counts as the policy's model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from burnish.config.schema import EngineConfig
from burnish.plan.devices import NETWORK, PER_MACHINE, Devices
from burnish.plan.operations import Operations
from burnish.plan.shape import PlannedModel
from burnish.plan.share import PlannedLayout
from burnish.plan.workload import ASSUMED_PROMPT, Workload

_FP32 = 4
_EFFICIENCY = 0.4
_BANDWIDTH = 0.6
_LINKS = 0.7
_DISK = 2e9
ASSUMPTIONS = (
    "every sequence as long as it may be: without data.max_length a whole batch.tokens_per_device, "
    f"without data.max_prompt_length {ASSUMED_PROMPT} tokens and the completion's; no two sequences share a prompt",
    f"matrix products at {_EFFICIENCY:.0%} of the device's peak, decoding at {_BANDWIDTH:.0%} of its memory's speed",
    f"links at {_LINKS:.0%} of theirs, {NETWORK / 1e9:.0f} GB/s between machines of {PER_MACHINE} devices, "
    "communication hidden behind arithmetic where that takes longer",
    f"checkpoints at {_DISK / 1e9:.0f} GB/s for each machine",
    "a pipeline is idle while its stages wait for the first and the last micro-batch, and tokens fall on experts evenly",
    "what leaves the device for the host and comes back takes no time",
)
"""What the times rest on."""


@dataclass(frozen=True)
class Clock:
    """What times are computed from."""

    shape: PlannedModel
    """The model."""
    work: Workload
    """A step's sequences."""
    devices: Devices
    """Where it runs."""
    width: int
    """Bytes of an element of what matrix products take."""
    operations: Operations
    """What a step computes."""
    adapter: int = 0
    """Elements of the adapter that is trained in the model's place; 0: it is the model."""
    beside: int = 0
    """Those of it that generators hold beside the model; 0: all of the model is published."""

    def before(self, layout: PlannedLayout) -> dict[str, float]:
        """Seconds of the phases before the update."""
        found, operations = dict[str, float](), self.operations
        if self.work.slots:
            judging = operations.judging(layout) / self._speed
            found["rollout"] = self._rollout(layout) + judging
        if self.work.scores:
            scoring = operations.scorings * operations.forward(layout)
            found["log-probs"] = scoring / self._speed
        return found

    def update(self, layout: PlannedLayout, engine: EngineConfig, microbatches: int) -> float:
        """Seconds of the update."""
        update = self._megatron_update if engine.kind == "megatron" else self._update
        found = update(layout, engine, microbatches)
        if self.work.critic:
            found += update(layout, engine, microbatches, critic=True)
        return found * self.work.epochs

    def after(self, layout: PlannedLayout, engine: EngineConfig) -> dict[str, float]:
        """Seconds of the phases after the update, whatever is checkpointed in it."""
        found = dict[str, float]()
        if self.work.slots:
            cut = layout.shards if engine.kind == "torch" else layout.tensor * layout.pipeline
            published = self.beside or self.shape.elements
            found["publish"] = self._travel(self.width * published, cut)
        machines = -(-layout.world // PER_MACHINE)
        saved = self.adapter or self.shape.elements
        saved += self.shape.elements if self.work.critic else 0
        found["save"] = 3 * _FP32 * saved / (_DISK * machines)
        return found

    def _update(
        self,
        layout: PlannedLayout,
        engine: EngineConfig,
        microbatches: int,
        *,
        critic: bool = False,
    ) -> float:
        """Of the policy, or of its critic, all of which is trained."""
        operations, updates = self.operations, self.work.updates
        passes = operations.passes(engine, critic=critic)
        before = operations.counting(engine, critic=critic)
        each = (2 if engine.reshard_after_forward else 1) + before
        elements = self.shape.elements / layout.tensor
        moved = updates * microbatches * each * self._travel(self.width * elements, layout.shards)
        trained = (0 if critic else self.adapter) or elements
        reductions = microbatches if engine.reduce_each_microbatch else 1
        moved += updates * reductions * self._travel(_FP32 * trained, layout.shards)
        if layout.replicas > 1:
            summed = 2 * _FP32 * trained / layout.shards
            moved += updates * self._travel(summed, layout.world)
        told = self._exchanged(layout, 3 + operations.again(engine) + before)
        return max(passes * operations.forward(layout) / self._speed, moved) + told

    def _megatron_update(
        self,
        layout: PlannedLayout,
        engine: EngineConfig,
        microbatches: int,
        *,
        critic: bool = False,
    ) -> float:
        """Of Megatron's engine: weights are gathered and gradients added up once a step; stages wait for each other at its ends."""
        passes = self.operations.passes(engine, critic=critic)
        idle = (layout.pipeline - 1) / (engine.virtual_stages * microbatches)
        arithmetic = passes * self.operations.forward(layout) / self._speed * (1 + idle)
        elements = self.shape.elements / (layout.tensor * layout.pipeline)
        moved = self.work.updates * self._travel((_FP32 + self.width) * elements, layout.shards)
        told = self._exchanged(layout, passes) / layout.pipeline
        mine = self.work.tokens / layout.token_ranks * self.width
        told += self._travel(self._sent * mine * passes / layout.pipeline, engine.expert_parallel)
        between = 2 * engine.virtual_stages * mine * self.shape.hidden
        told += self._travel(between, layout.pipeline)
        return max(arithmetic, moved) + told

    def _exchanged(self, layout: PlannedLayout, passes: float) -> float:
        """What ranks that share a micro-batch tell each other in every layer, which nothing hides.

        Ulysses exchanges queries, keys, values and outputs; tensor parallelism gathers the hidden state
        twice and sums it twice.
        """
        states = 4 * self.shape.hidden * self.shape.depth
        mine = self.work.tokens / layout.token_ranks * self.width * passes
        exchanged = self._travel(self._heads * mine / layout.tensor, layout.sequence)
        return exchanged + self._travel(states * mine, layout.tensor)

    @cached_property
    def _heads(self) -> int:
        """Elements of a token's queries, keys, values and outputs."""
        return sum(2 * (layer.query + layer.key) * n for layer, n in self.shape.layers)

    @cached_property
    def _sent(self) -> int:
        """Elements of a token that go to experts and come back, forward and backward."""
        return 4 * sum(layer.chosen * layer.hidden * n for layer, n in self.shape.layers)

    @cached_property
    def _speed(self) -> float:
        """Operations of matrix products per second."""
        return self.devices.flops * _EFFICIENCY

    def _rollout(self, layout: PlannedLayout) -> float:
        """Reading the prompts, then one pass over weights and cache for every token."""
        work, bandwidth = self.work, self.devices.bandwidth * _BANDWIDTH
        mine = -(-work.sequences // layout.world)
        slots = min(work.slots, mine)
        cache = sum(2 * layer.key * self.width * n for layer, n in self.shape.layers)
        bytes_read = self.width * (self.shape.elements + self.beside) + slots * cache * (
            work.prompt + work.trained / 2
        )
        flops = slots * self.shape.flops.per_token
        token = max(bytes_read / bandwidth, flops / self._speed)
        reading = -(-mine // work.samples) * self.shape.flops.per_token * work.prompt
        decoding = token * work.trained * -(-mine // slots)
        return decoding + reading / self._speed

    def _travel(self, size: float, ranks: int) -> float:
        """Seconds until every one of so many neighbours has all of something, of which each has a part."""
        if ranks == 1:
            return 0.0
        speed = self.devices.link if ranks <= PER_MACHINE else min(self.devices.link, NETWORK)
        return size * (ranks - 1) / ranks / (speed * _LINKS)

"""How long the phases of a step will take: work over speed, under assumptions that are said.

A rough estimate, meant to rank layouts and to tell minutes from hours. What overlaps counts once: an update takes
as long as its arithmetic or its communication, whichever is longer. A critic counts as the policy's model.
"""

from __future__ import annotations

from dataclasses import dataclass

from burnish.config.schema import EngineConfig
from burnish.planning.devices import NETWORK, PER_MACHINE, Devices
from burnish.planning.shape import ModelShape
from burnish.planning.share import Layout
from burnish.planning.workload import Workload

_FP32 = 4
_EFFICIENCY = 0.4
_BANDWIDTH = 0.6
_LINKS = 0.7
_DISK = 2e9
_RECOMPUTED = {"none": 0.0, "selective": 0.1, "full": 1.0}
"""Forward passes that are run again."""

ASSUMPTIONS = (
    "every sequence as long as it may be; no two sequences share a prompt",
    f"matrix products at {_EFFICIENCY:.0%} of the device's peak, decoding at {_BANDWIDTH:.0%} of its memory's speed",
    f"links at {_LINKS:.0%} of theirs, {NETWORK / 1e9:.0f} GB/s between machines of {PER_MACHINE} devices, "
    "communication hidden behind arithmetic where that takes longer",
    f"checkpoints at {_DISK / 1e9:.0f} GB/s for each machine",
    "a pipeline is idle while its stages wait for the first and the last micro-batch, and tokens fall on experts evenly",
    "what leaves the device for the host and comes back takes no time",
)
"""What the times rest on."""


@dataclass(frozen=True, slots=True)
class Clock:
    """What times are computed from."""

    shape: ModelShape
    """The model."""
    work: Workload
    """A step's sequences."""
    devices: Devices
    """Where it runs."""
    width: int
    """Bytes of an element of what matrix products take."""
    adapter: int = 0
    """Elements of the adapter that is trained in the model's place; 0: it is the model."""
    judges: tuple[ModelShape, ...] = ()
    """Reward models."""

    def seconds(self, layout: Layout, engine: EngineConfig, microbatches: int) -> dict[str, float]:
        """Of each phase of a step."""
        found: dict[str, float] = {}
        if self.work.slots:
            judging = sum(self._arithmetic(layout, judge) for judge in self.judges)
            found["rollout"] = self._rollout(layout) + judging
        if self.work.scores:
            passes = self.work.scorings + int(self.work.critic)
            found["log-probs"] = passes * self._arithmetic(layout, self.shape)
        counted = not self.work.replayed
        if engine.kind == "megatron":
            found["update"] = self._megatron_update(layout, engine, microbatches, counted)
        else:
            found["update"] = self._update(layout, engine, microbatches, self.adapter, counted)
        if self.work.critic:
            found["update"] += self._update(layout, engine, microbatches, 0, True)
        if self.work.slots:
            cut = layout.shards if engine.kind == "torch" else layout.tensor * layout.pipeline
            found["publish"] = self._travel(self.width * self.shape.elements, cut)
        machines = -(-layout.world // PER_MACHINE)
        saved = self.adapter or self.shape.elements
        saved += self.shape.elements if self.work.critic else 0
        found["save"] = 3 * _FP32 * saved / (_DISK * machines)
        return found

    def _arithmetic(self, layout: Layout, shape: ModelShape) -> float:
        """One forward pass of a model over the step's sequences."""
        sharing = layout.sequence * layout.tensor * layout.pipeline
        rounds = -(-self.work.sequences // (layout.world // sharing))  # the most that one share has
        flops = rounds * float(shape.flops.each([self.work.length])[0]) / sharing
        return flops / (self.devices.flops * _EFFICIENCY)

    def _update(
        self,
        layout: Layout,
        engine: EngineConfig,
        microbatches: int,
        adapter: int,
        counted: bool,
    ) -> float:
        """Of the model, or of an adapter, which spares the products that are the gradients of matrices.

        Where experts are evened out they have to be `counted` by a forward pass, unless they are known.
        """
        again, flops = _RECOMPUTED[engine.activation_checkpointing], self.shape.flops
        before = int(counted and engine.router_aux_loss > 0)
        length = [self.work.length]
        passes = flops.training(length, frozen=adapter > 0) / flops.forward(length) + again
        arithmetic = (passes + before) * self._arithmetic(layout, self.shape)
        each = (2 if engine.reshard_after_forward else 1) + before
        gathers = microbatches * each * self.work.updates
        elements = self.shape.elements / layout.tensor
        moved = gathers * self._travel(self.width * elements, layout.shards)
        trained = adapter or elements
        moved += self.work.updates * self._travel(_FP32 * trained, layout.shards)
        if layout.replicas > 1:
            summed = 2 * _FP32 * trained / layout.shards
            moved += self.work.updates * self._travel(summed, layout.world)
        return max(arithmetic, moved) + self._exchanged(layout, 3 + again + before)

    def _megatron_update(
        self, layout: Layout, engine: EngineConfig, microbatches: int, counted: bool
    ) -> float:
        """Of Megatron's engine: weights are gathered and gradients added up once a step; stages wait for each other at its ends.

        `counted` as for the other engine.
        """
        again = _RECOMPUTED[engine.activation_checkpointing]
        again += int(counted and engine.router_aux_loss > 0)
        flops, length = self.shape.flops, [self.work.length]
        passes = flops.training(length) / flops.forward(length) + again
        idle = (layout.pipeline - 1) / (engine.virtual_stages * microbatches)
        arithmetic = passes * self._arithmetic(layout, self.shape) * (1 + idle)
        elements = self.shape.elements / (layout.tensor * layout.pipeline)
        moved = self.work.updates * self._travel((_FP32 + self.width) * elements, layout.shards)
        told = self._exchanged(layout, 3 + again) / layout.pipeline
        mine = self.work.tokens / layout.token_ranks * self.width
        sent = 4 * sum(layer.chosen * layer.hidden * n for layer, n in self.shape.layers)
        told += self._travel(sent * mine * (3 + again) / layout.pipeline, engine.expert_parallel)
        between = 2 * engine.virtual_stages * mine * self.shape.hidden
        told += self._travel(between, layout.pipeline)
        return max(arithmetic, moved) + told

    def _exchanged(self, layout: Layout, passes: float) -> float:
        """What ranks that share a micro-batch tell each other in every layer, which nothing hides.

        Ulysses exchanges queries, keys, values and outputs; tensor parallelism gathers the hidden state
        twice and sums it twice.
        """
        heads = sum(2 * (layer.query + layer.key) * n for layer, n in self.shape.layers)
        states = 4 * self.shape.hidden * self.shape.depth
        mine = self.work.tokens / layout.token_ranks * self.width * passes
        exchanged = self._travel(heads * mine / layout.tensor, layout.sequence)
        return exchanged + self._travel(states * mine, layout.tensor)

    def _rollout(self, layout: Layout) -> float:
        """Reading the prompts, then one pass over weights and cache for every token."""
        work, bandwidth = self.work, self.devices.bandwidth * _BANDWIDTH
        mine = -(-work.sequences // layout.world)
        slots = min(work.slots, mine)
        cache = sum(2 * layer.key * self.width * n for layer, n in self.shape.layers)
        bytes_read = self.width * self.shape.elements + slots * cache * (
            work.prompt + work.trained / 2
        )
        flops = slots * self.shape.flops.per_token
        token = max(bytes_read / bandwidth, flops / (self.devices.flops * _EFFICIENCY))
        reading = -(-mine // work.samples) * self.shape.flops.per_token * work.prompt
        decoding = token * work.trained * -(-mine // slots)
        return decoding + reading / (self.devices.flops * _EFFICIENCY)

    def _travel(self, size: float, ranks: int) -> float:
        """Seconds until every one of so many neighbours has all of something, of which each has a part."""
        if ranks == 1:
            return 0.0
        speed = self.devices.link if ranks <= PER_MACHINE else min(self.devices.link, NETWORK)
        return size * (ranks - 1) / ranks / (speed * _LINKS)

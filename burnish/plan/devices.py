"""Describe devices, and estimate a step's time on them: work divided by speed.

An update takes the longer of its arithmetic and its communication.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from burnish.config.schema import AUTO_TOKENS, EngineConfig
from burnish.distributed.accelerators import (
    ACCELERATORS,
    Accelerator,
    accelerator_named,
    nvidia_smi,
)
from burnish.errors import UsageError
from burnish.files.strict_json import clipped
from burnish.models.flops import Passed
from burnish.plan.model import (
    ASSUMED_PROMPT,
    FP32,
    PlannedBeside,
    PlannedModel,
    Workload,
    product_bytes,
    shards_of,
)

GIB = float(1 << 30)
# Each divisor of the count may give a layout.
_MOST_DEVICES = 1_000_000
PER_MACHINE = 8
"""Devices of a machine."""
_NETWORK = 50e9
"""Bytes per second from one device to other machines."""
_CPU = Accelerator(flops=1e12, memory_gib=16, bandwidth=30e9, link=5e9)
# Share of an accelerator's memory that a run can use. Driver, communication and fragmentation take the rest.
_USABLE = 0.94
_SPEC = re.compile(r"(\d+)x([A-Za-z].*?)(?:-(\d+(?:\.\d+)?)G(?:i?B)?)?", re.IGNORECASE)
_EFFICIENCY = 0.4
_BANDWIDTH = 0.6
_LINKS = 0.7
_DISK = 2e9
# Share of the forward pass that the backward pass recomputes.
_RECOMPUTED = {"none": 0.0, "selective": 0.1, "full": 1.0}
ASSUMPTIONS = (
    f"every sequence is as long as allowed: without data.max_length {AUTO_TOKENS} tokens, or as a number in batch.tokens_per_device, "
    f"without data.max_prompt_length {ASSUMED_PROMPT} tokens and the completion; no two sequences share a prompt",
    f"matrix products at {_EFFICIENCY:.0%} of the device's peak, decoding at {_BANDWIDTH:.0%} of its memory's speed",
    f"links at {_LINKS:.0%} of their peak, {_NETWORK / 1e9:.0f} GB/s between machines of {PER_MACHINE} devices, "
    "communication hidden behind arithmetic where that takes longer",
    f"checkpoints at {_DISK / 1e9:.0f} GB/s for each machine",
    "a pipeline is idle while its stages wait for the first and the last micro-batch, and tokens fall on experts evenly",
    "offloading to the host and back takes no time",
)
"""The assumptions behind the times, as text for users."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Equal devices, with one process each."""

    count: int
    """How many."""
    name: str
    """The model, such as `H100`; `CPU` for a process on a CPU."""
    memory: float
    """Bytes of each."""
    kind: Accelerator
    """Speeds and kernels of each."""
    shared_cache: bool = False
    """Whether the generator stores each prompt once and in fp32, as on this machine's CPU."""

    @property
    def cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return self.name == "CPU"

    @property
    def usable(self) -> float:
        """Bytes of each that a run can use."""
        return self.memory * (1.0 if self.cpu else _USABLE)

    def __str__(self) -> str:
        return f"{self.count} × {self.name} with {self.memory / GIB:.4g} GiB"


def parse_devices(
    text: str, memory_gib: float | None = None, teraflops: float | None = None
) -> Devices:
    """Read `64xH100-80G` or `2xCPU-24G`. The other arguments override memory and speed.

    Raises `UsageError` for another form, or an unknown device without both.
    """
    match = _SPEC.fullmatch(text.strip())
    digits = match[1].lstrip("0") if match else ""
    if (
        match is None
        or not digits
        or len(digits) > len(str(_MOST_DEVICES))
        or int(digits) > _MOST_DEVICES
    ):
        raise UsageError(
            "--devices has another form than COUNTxNAME-MEMORY",
            have=clipped(text),
            want=f"COUNTxNAME-MEMORY, as 64xH100-80G or 2xCPU-24G, with a count from 1 to {_MOST_DEVICES:,}",
            do="correct --devices",
        )
    name = "CPU" if match[2].upper() == "CPU" else match[2]
    known = {_plain(key): value for key, value in ACCELERATORS.items()} | {"cpu": _CPU}
    device = known.get(_plain(name))
    if memory_gib is None and match[3]:
        memory_gib = float(match[3])
    for number in (memory_gib, teraflops):
        if number is not None and not 0 < number < math.inf:
            raise UsageError(
                "the devices' memory or speed is not a positive number",
                have=f"{number:g}",
                want="a number above 0",
                do="correct --devices, --device-memory or --device-tflops",
            )
    if device is None:
        if memory_gib is None or teraflops is None:
            raise UsageError(
                f"there is no device {name} in the table",
                have=text,
                want=f"one of {', '.join(ACCELERATORS)}, CPU",
                do="give --device-memory GIB and --device-tflops N beside --devices",
            )
        device = Accelerator(teraflops * 1e12, memory_gib, 2e12, 64e9)
    memory = device.memory_gib if memory_gib is None else memory_gib
    if teraflops is not None:
        device = replace(device, flops=teraflops * 1e12)
    return _devices(int(digits), name, memory * GIB, device)


def devices_here(processes: int, local_processes: int) -> Devices | None:
    """Return this machine's device per process; None for an accelerator that is not in the table.

    Without accelerators, processes share the machine's memory.
    """
    if (accelerator := _nvidia()) is not None:
        name, memory = accelerator
        known = accelerator_named(name)
        if known is None:
            return None
        return _devices(processes, name, memory, known)
    if any(Path(node).exists() for node in ("/dev/kfd", "/dev/davinci0", "/dev/accel/accel0")):
        return None
    return _devices(processes, "CPU", _host_memory() / local_processes, _CPU)


def _devices(count: int, name: str, memory: float, kind: Accelerator) -> Devices:
    cpuinfo = Path("/proc/cpuinfo")
    # As `burnish.distributed.device.has_matrix_units`, without torch.
    has_units = cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text(errors="replace").split()
    shared = name == "CPU" and not has_units
    return Devices(count, name, memory, kind, shared)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _nvidia() -> tuple[str, float] | None:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    name, _, mebibytes = nvidia_smi("name,memory.total").rpartition(", ")
    return (name, float(mebibytes) * (1 << 20)) if mebibytes.isdecimal() else None


def _host_memory() -> float:
    """Return the bytes of the machine or its control group."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, float(text))


@dataclass(frozen=True)
class Clock:
    """Operations and seconds of each phase, on the busiest device."""

    model: PlannedModel
    work: Workload
    devices: Devices
    beside: Sequence[PlannedBeside] = ()
    """The frozen models beside it."""

    def operations(self, engine: EngineConfig) -> dict[str, float]:
        """Return floating-point operations by phase."""
        work = self.work
        forward = self._local_sequences(engine) * self._sequence
        by_phase = dict[str, float]()
        if work.slots:
            by_phase["rollout"] = self._generated() + self._local_sequences(engine) * self._judged
        taught = self._local_sequences(engine) * (self._forward_in("log-probs") + self._ranked)
        if scored := (work.scorings + work.has_critic) * forward + taught:
            by_phase["log-probs"] = scored
        critic = self._passes(engine, critic=True) if work.has_critic else 0.0
        passes = (self._passes(engine) + critic) * forward
        by_phase["update"] = work.epochs * (passes + self._local_sequences(engine) * self._compared)
        return by_phase

    def seconds(
        self,
        engine: EngineConfig,
        microbatches: int,
        operations: Mapping[str, float],
        slots: int,
    ) -> dict[str, float]:
        """Return seconds by phase, for an optimizer step's `microbatches` and `slots` sequences generated at once."""
        work = self.work
        by_phase = {name: count / self._speed for name, count in operations.items()}
        if work.slots:
            judging = self._local_sequences(engine) * self._judged / self._speed
            by_phase["rollout"] = self._rollout(engine, slots) + judging
        update = self._by_megatron if engine.kind == "megatron" else self._by_torch
        trained = [False, True] if work.has_critic else [False]
        updates = [update(engine, microbatches, critic) for critic in trained]
        by_phase["update"] = work.epochs * sum(updates)
        if work.slots:
            ranks = shards_of(engine, self.devices.count)
            if engine.kind == "megatron":
                ranks = engine.tensor_parallel * engine.pipeline_parallel
            published = self.model.published_adapter or self.model.elements
            by_phase["publish"] = self._travel(product_bytes(engine) * published, ranks)
        saved = (self.model.adapter or self.model.elements) + self.model.elements * work.has_critic
        by_phase["save"] = 3 * FP32 * saved / (_DISK * -(-self.devices.count // PER_MACHINE))
        return by_phase

    def _passes(self, engine: EngineConfig, *, critic: bool = False) -> float:
        """Return the cost of training in forward passes: gradients, recomputed layers, counts of experts' tokens."""
        learning = 3.0
        if self.model.adapter and not critic:
            every = Passed.all_of([self.work.length])
            learning = self.model.flops.training(every, frozen=True) / self._sequence
        return (
            learning + _RECOMPUTED[engine.activation_checkpointing] + self._counts(engine, critic)
        )

    def _counts(self, engine: EngineConfig, critic: bool) -> int:
        """Return how many forward passes count experts' tokens."""
        return int(engine.router_aux_loss > 0 and (critic or not self.work.is_replayed))

    def _local_sequences(self, engine: EngineConfig) -> float:
        return -(-self.work.sequences // (self.devices.count // engine.sharing)) / engine.sharing

    def _generated(self) -> float:
        sequences = -(-self.work.sequences // self.devices.count)
        prompt = self.model.flops.forward([self.work.prompt])
        return sequences * (self._sequence - prompt) + -(-sequences // self.work.samples) * prompt

    @cached_property
    def _sequence(self) -> float:
        return self.model.flops.forward([self.work.length])

    @cached_property
    def _heads(self) -> int:
        return 2 * (self.model.shape.query + self.model.shape.key) * self.model.shape.depth

    @cached_property
    def _judged(self) -> float:
        return self._forward_in("rollout")

    def _forward_in(self, phase: str) -> float:
        models = [each.model for each in self.beside if each.said.phase == phase]
        return sum(model.flops.forward([self.work.length]) for model in models)

    @cached_property
    def _teachers(self) -> list[PlannedModel]:
        """Those whose distributions are compared."""
        own = [self.model] if self.work.start_teaches else []
        return [*own, *(each.model for each in self.beside if each.said.phase == "log-probs")]

    @property
    def _ranked(self) -> float:
        """Operations to find teachers' most probable tokens in a sequence: their output layers once more."""
        if self.work.compares != "topk":
            return 0.0
        return self.work.trained * sum(each.flops.head for each in self._teachers)

    @property
    def _compared(self) -> float:
        """Operations of an update to compare the distributions of a sequence: the output layer in both passes again, and teachers' whole ones in each."""
        if not self.work.compares:
            return 0.0
        heads = (3.0 if self.model.trains_head else 2.0) * self.model.flops.head
        if self.work.compares == "all":
            heads += 2.0 * sum(each.flops.head for each in self._teachers)
        return self.work.trained * heads

    @property
    def _speed(self) -> float:
        return self.devices.kind.flops * _EFFICIENCY

    def _by_torch(self, engine: EngineConfig, microbatches: int, critic: bool) -> float:
        """Return an epoch's seconds: FSDP gathers weights and reduces gradients per micro-batch."""
        updates = self.work.updates
        counts = self._counts(engine, critic)
        passes = self._passes(engine, critic=critic)
        reductions = updates * (microbatches if engine.reduce_each_microbatch else 1)
        moved = 0.0
        for gathered, reduced, shards in self._fsdp(engine, critic):
            moved += updates * microbatches * self._travel(gathered, shards)
            moved += reductions * self._travel(reduced, shards)
            if engine.replicas > 1:
                moved += updates * self._travel(2 * reduced / shards, self.devices.count)
        sequence = passes * self._sequence + (0 if critic else self._compared)
        arithmetic = self._local_sequences(engine) * sequence / self._speed
        again = _RECOMPUTED[engine.activation_checkpointing] + counts
        exchanged = self._exchanged(engine, 3 + again)
        if engine.expert_parallel > 1:  # to the experts and back
            chosen = sum(each.experts_per_token for each in self.model.shape.layers)
            sent = 2 * chosen * self.model.shape.hidden * self._feature_bytes(engine)
            exchanged += self._travel((2 + again) * sent, engine.expert_parallel)
        return max(arithmetic, moved) + exchanged

    def fsdp_bytes(self, engine: EngineConfig) -> tuple[float, float]:
        """Return bytes of weights that FSDP gathers on a rank for a micro-batch of the torch engine, and of gradients that it reduces."""
        parts = [part for part in self._fsdp(engine, False) if part[2] > 1]
        return sum(part[0] for part in parts), sum(part[1] for part in parts)

    def _fsdp(self, engine: EngineConfig, critic: bool) -> Iterator[tuple[float, float, int]]:
        """Yield a micro-batch's bytes of weights that FSDP gathers on a rank, those of gradients that it reduces, and the ranks that share them.

        Experts are gathered among ranks with the same ones. Adapters count with the others.
        """
        shards = shards_of(engine, self.devices.count)
        parts = engine.expert_parallel
        experts = self.model.of_experts if parts > 1 else 0
        width = product_bytes(engine)
        width *= 1 + engine.reshard_after_forward + self._counts(engine, critic)
        has_adapter = self.model.adapter and not critic
        elements = (self.model.elements - experts) / engine.tensor_parallel
        yield width * elements, FP32 * (self.model.adapter if has_adapter else elements), shards
        if experts:
            elements = experts / parts / engine.tensor_parallel
            yield width * elements, 0.0 if has_adapter else FP32 * elements, shards // parts

    def _by_megatron(self, engine: EngineConfig, microbatches: int, critic: bool) -> float:
        """Return an epoch's seconds: weights move once a step; stages wait at its ends."""
        passes = self._passes(engine, critic=critic)
        stages = engine.pipeline_parallel
        idle = (stages - 1) / (engine.virtual_stages * microbatches)
        arithmetic = (
            passes * self._local_sequences(engine) * self._sequence / self._speed * (1 + idle)
        )
        elements = self.model.elements / (engine.tensor_parallel * stages)
        shards = shards_of(engine, self.devices.count)
        moved = self.work.updates * self._travel((FP32 + product_bytes(engine)) * elements, shards)
        feature_bytes = self._feature_bytes(engine)
        chosen = sum(each.experts_per_token for each in self.model.shape.layers)
        sent = 4 * chosen * self.model.shape.hidden * feature_bytes * passes / stages
        between = 2 * engine.virtual_stages * feature_bytes * self.model.shape.hidden
        exchanged = self._exchanged(engine, passes) / stages
        exchanged += self._travel(sent, engine.expert_parallel) + self._travel(between, stages)
        return max(arithmetic, moved) + exchanged

    def _exchanged(self, engine: EngineConfig, passes: float) -> float:
        """Return the seconds of exchanges inside layers, which nothing hides.

        Ulysses exchanges queries, keys, values and outputs. Tensor parallelism gathers and sums the hidden state twice each.
        """
        shape = self.model.shape
        feature_bytes = self._feature_bytes(engine) * passes
        exchanged = self._travel(
            self._heads * feature_bytes / engine.tensor_parallel, engine.sequence_parallel
        )
        return exchanged + self._travel(
            4 * shape.hidden * shape.depth * feature_bytes, engine.tensor_parallel
        )

    def _feature_bytes(self, engine: EngineConfig) -> float:
        ranks = engine.replicas * shards_of(engine, self.devices.count)
        return self.work.tokens / ranks * product_bytes(engine)

    def _rollout(self, engine: EngineConfig, slots: int) -> float:
        """Return the seconds to read the prompts, then weights and cache per token."""
        work = self.work
        model = self.model
        flops = model.flops.per_token
        sequences = -(-work.sequences // self.devices.count)
        slots = min(slots, sequences)
        cache = 2 * product_bytes(engine) * model.shape.key * model.shape.depth
        weights = product_bytes(engine) * (model.elements + model.published_adapter)
        read = weights / work.generator_ranks + slots * cache * (work.prompt + work.trained / 2)
        speed = self.devices.kind.bandwidth * _BANDWIDTH
        token = max(read / speed, slots * flops / self._speed)
        reading = -(-sequences // work.samples) * flops * work.prompt / self._speed
        return token * work.trained * -(-sequences // slots) + reading

    def _travel(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-gather of `size` bytes over `ranks`."""
        link = min(self.devices.kind.link, _NETWORK if ranks > PER_MACHINE else math.inf)
        return size * (ranks - 1) / ranks / (link * _LINKS)

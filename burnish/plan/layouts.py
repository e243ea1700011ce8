"""Which layouts of a run fit on some devices, the quickest first, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from burnish.config.room import longest_completed
from burnish.config.schema import EngineConfig, RunConfig
from burnish.errors import UsageError
from burnish.families import names_of
from burnish.plan.activations import Arithmetic
from burnish.plan.devices import PER_MACHINE, Devices
from burnish.plan.megatron import MegatronNeeds
from burnish.plan.megatron_layouts import degrees, divides_beside, divides_trained
from burnish.plan.megatron_model import MegatronModel
from burnish.plan.memory import Needs, Parts
from burnish.plan.model import Model
from burnish.plan.operations import Operations
from burnish.plan.shape import BLOCK, Layer, PlannedModel, adapts
from burnish.plan.share import PlannedLayout
from burnish.plan.timing import Clock
from burnish.plan.workload import Workload

_ROW_BYTES = 16
# Grouped products of experts take rows of a multiple of this (`burnish.engines.torch.compatibility`).
_CHECKPOINTING = get_args(EngineConfig.model_fields["activation_checkpointing"].annotation)


@dataclass(frozen=True)
class Plan:
    """One way to run, and what it needs."""

    layout: PlannedLayout
    """How the processes are arranged."""
    engine: EngineConfig
    """The settings that go with it."""
    phases: dict[str, Parts]
    """Bytes by phase and part, on the process that needs most."""
    host: Parts
    """Bytes of host memory of a process, where the device is not the host."""
    operations: dict[str, float]
    """Floating-point operations that a process computes, by phase."""
    seconds: dict[str, float]
    """Estimated, by phase."""
    microbatches: int
    """Of an optimizer step."""
    usable: float
    """Bytes that a process can have."""
    apart: bool
    """Whether host and device have memories of their own."""
    vocabulary: int
    """Tokens that the model knows."""

    @cached_property
    def fullest(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.total)

    @cached_property
    def need(self) -> float:
        """Bytes that it needs."""
        return self.total(self.fullest)

    @property
    def fits(self) -> bool:
        """Whether that is there."""
        return self.need <= self.usable

    @cached_property
    def step_seconds(self) -> float:
        """Of a step without a save."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != "save")

    def total(self, phase: str) -> float:
        """Bytes of a phase."""
        return sum(self.phases[phase].values())

    def within(self, phase: str) -> Plan:
        """The same with one phase only, where there is a phase of that name."""
        if phase not in self.phases:
            return self
        return replace(self, phases={phase: self.phases[phase]})

    def largest_part(self) -> str:
        """What the fullest phase holds most of."""
        parts = self.phases[self.fullest]
        return max(parts, key=parts.__getitem__)

    def divides_like(self, other: Plan) -> bool:
        """Whether both divide the work in the same way."""
        return self._division == other._division

    @property
    def _division(self) -> tuple[object, ...]:
        engine = self.engine
        experts = engine.expert_parallel, engine.expert_tensor_parallel or engine.tensor_parallel
        kept = engine.activation_checkpointing, engine.reshard_after_forward
        return self.layout, engine.virtual_stages, experts, kept

    @property
    def chosen(self) -> bool:
        """Whether a setting of how work is divided is not its default."""
        engine = EngineConfig(kind=self.engine.kind)
        layout = PlannedLayout.of(engine, self.layout.world)
        return not self.divides_like(replace(self, layout=layout, engine=engine))

    def overrides(self) -> list[str]:
        """The settings, as they are typed."""
        engine = self.engine
        if engine.kind == "megatron":
            names = ["tensor_parallel", "sequence_parallel", "pipeline_parallel", "virtual_stages"]
            names += ["expert_parallel"] if engine.expert_parallel > 1 else []
            names += ["expert_tensor_parallel"] if engine.expert_tensor_parallel else []
            names += ["activation_checkpointing"]
            return [f"engine.{name}={getattr(engine, name)}" for name in names]
        return [
            f"engine.replicas={engine.replicas}",
            f"engine.sequence_parallel={engine.sequence_parallel}",
            f"engine.tensor_parallel={engine.tensor_parallel}",
            f"engine.activation_checkpointing={engine.activation_checkpointing}",
            f"engine.reshard_after_forward={str(engine.reshard_after_forward).lower()}",
        ]


class Planner:
    """Plans of one configuration on some devices."""

    def __init__(
        self,
        shape: PlannedModel,
        config: RunConfig,
        work: Workload,
        devices: Devices,
        judges: Sequence[PlannedModel] = (),
    ) -> None:
        """`judges` are the models of `reward.models`.

        Raises `UsageError` for what the engine does not compute, and `IncompatibleError` for an adapter of layers that the model has not.
        """
        if config.engine.kind == "megatron":
            _require_known(shape)
        self.shape, self.work = shape, work
        self._judges = tuple(replace(judge, scores_values=True) for judge in judges)
        self._config, self._devices = config, devices
        self._width = 2 if config.engine.precision == "bf16" else 4
        adapter = shape.adapter(config.model.adapter)
        self._operations = Operations(shape, work, adapter > 0, self._judges)
        beside = shape.beside(config.model.adapter)
        self._clock = Clock(shape, work, devices, self._width, self._operations, adapter, beside)
        self._models: dict[tuple[int, int], tuple[Model, list[Model]]] = {}
        self._of_stages: dict[tuple[int, int], tuple[MegatronModel, list[MegatronModel]]] = {}

    def as_configured(self) -> Plan:
        """With the settings as they are."""
        engine = self._config.engine
        return next(self._plans(engine, [engine.activation_checkpointing]))

    def require_cut(self) -> None:
        """Raise `UsageError` where the settings as they are cannot cut a model: its heads, columns, layers and experts, or a family's matrices at all."""
        engine = self._config.engine
        if engine.kind == "megatron":
            trained, beside = divides_trained, divides_beside
        else:
            trained = beside = _divides_by_torch
        asked = [(self.shape, trained), *((judge, beside) for judge in self._judges)]
        for shape, divided in asked:
            if not divided(shape, engine):
                raise _uncut(shape, engine)
            if engine.kind == "torch" and not self._can_multiply(shape, engine.tensor_parallel):
                raise _too_narrow(shape, engine)
        for layer, _ in self.shape.layers:
            if not self._can_cut(engine.tensor_parallel, layer):
                raise UsageError(
                    "moments of 8 bits cannot be shared out as the settings say",
                    have=f"engine.tensor_parallel: {engine.tensor_parallel}; {layer.query} columns of all heads, "
                    f"{layer.intermediate} intermediate columns",
                    want=f"multiples of {BLOCK * engine.tensor_parallel}",
                    do="lower engine.tensor_parallel, or set optim.kind=adamw",
                )

    def all_plans(self) -> list[Plan]:
        """Every layout with every kind of checkpointing, those that fit first, then by time, then by need."""
        kinds = self._kinds()
        plans = [plan for engine in self._settings() for plan in self._plans(engine, kinds)]
        return sorted(
            plans, key=lambda p: (not p.fits, p.step_seconds if p.fits else p.need, p.need)
        )

    def _kinds(self) -> list[str]:
        """Every kind of checkpointing that goes with the other settings."""
        engine = self._config.engine
        refused = engine.kind == "torch" and (engine.activation_offload or engine.compile)
        return [kind for kind in _CHECKPOINTING if kind != "selective" or not refused]

    def _settings(self) -> Iterator[EngineConfig]:
        """Every way to divide the processes."""
        engine = self._config.engine
        if engine.kind == "megatron":
            yield from self._of_megatron()
            return
        for sequence, tensor in self._sharing():
            shares = self._devices.count // (sequence * tensor)
            for replicas in _divisors(shares):
                gathers = (True, False) if self._devices.count > replicas * tensor else (True,)
                for reshard in gathers:
                    found = {
                        "replicas": replicas,
                        "sequence_parallel": sequence,
                        "tensor_parallel": tensor,
                        "reshard_after_forward": reshard,
                    }
                    yield engine.model_copy(update=found)

    def _of_megatron(self) -> Iterator[EngineConfig]:
        """The same for the Megatron engine."""
        engine, count = self._config.engine, self._devices.count
        each_update = self.work.sequences // self.work.updates
        for given in degrees(self.shape, engine, count):
            found = engine.model_copy(update=given)
            beside = all(divides_beside(judge, found) for judge in self._judges)
            shared_out = count // found.sharing <= each_update
            if beside and shared_out and self._has_room(found.sequence_parallel):
                yield found

    def _sharing(self) -> Iterator[tuple[int, int]]:
        """How many processes of a machine may share a micro-batch: its tokens, and the matrices."""
        machine, each_update = PER_MACHINE, self.work.sequences // self.work.updates
        shapes = (self.shape, *self._judges)
        layers = [layer for shape in shapes for layer, _ in shape.layers]
        known = all(shape.family.cuts_heads for shape in shapes)
        for tensor in _divisors(machine) if known else [1]:
            if not all(self._can_cut(tensor, layer) for layer, _ in self.shape.layers):
                continue
            if not all(self._can_multiply(shape, tensor) for shape in shapes):
                continue
            for sequence in _divisors(machine // tensor):
                shares, rest = divmod(self._devices.count, sequence * tensor)
                if rest or shares > each_update or not self._has_room(sequence):
                    continue
                if all(divides(sequence, tensor, layer) for layer in layers):
                    yield sequence, tensor

    def _has_room(self, sequence: int) -> bool:
        """Whether the longest sequence that the settings allow fits into a micro-batch of so many processes."""
        config, generates = self._config, self.work.slots > 0
        longest = longest_completed(config) if generates else config.data.max_length or 0
        return longest <= config.batch.tokens_per_device * sequence

    def _can_cut(self, tensor: int, layer: Layer) -> bool:
        """Whether so many processes can share a layer's columns, where those have moments of 8 bits, in whole blocks."""
        if tensor == 1 or self._config.optim.kind != "adamw8bit":
            return True
        lora = self._config.model.adapter
        down = "experts.down_proj" if layer.experts else "down_proj"
        widths = {"o_proj": layer.query, down: layer.intermediate}
        trained = [width for name, width in widths.items() if lora is None or adapts(lora, name)]
        return all(width % (BLOCK * tensor) == 0 for width in trained)

    def _can_multiply(self, shape: PlannedModel, tensor: int) -> bool:
        """Whether the columns of an expert, shared by so many, are rows that grouped products take."""
        widths = [layer.intermediate for layer, _ in shape.layers if layer.experts]
        return all(self._width * width % (_ROW_BYTES * tensor) == 0 for width in widths)

    def _plans(self, engine: EngineConfig, kinds: Sequence[str]) -> Iterator[Plan]:
        """One for each kind of checkpointing; what has nothing to do with that is computed once."""
        layout, clock = PlannedLayout.of(engine, self._devices.count), self._clock
        before, after = clock.before(layout), clock.after(layout, engine)
        needs = self._needs(self._config.model_copy(update={"engine": engine}), layout)
        for kind in kinds:
            found = engine.model_copy(update={"activation_checkpointing": kind})
            update = {"update": clock.update(layout, found, needs.microbatches)}
            yield Plan(
                layout,
                found,
                needs.phases(kind),
                {} if self._devices.cpu else needs.host(kind),
                self._operations.phases(layout, found),
                before | update | after,
                needs.microbatches,
                self._devices.usable,
                not self._devices.cpu,
                self.shape.vocabulary,
            )

    def _needs(self, config: RunConfig, layout: PlannedLayout) -> Needs | MegatronNeeds:
        """Of the model that is trained, and of those that judge; models are made once for all layouts with the same arithmetic."""
        key = layout.sequence, layout.tensor
        arithmetic = self._arithmetic(*key)
        asked = replace(arithmetic, lora=None)
        if config.engine.kind == "megatron":
            if key not in self._of_stages:
                stages = [MegatronModel(judge, asked) for judge in self._judges]
                self._of_stages[key] = MegatronModel(self.shape, arithmetic), stages
            trained, asked_too = self._of_stages[key]
            return MegatronNeeds(trained, config, self.work, layout, asked_too)
        if key not in self._models:
            judges = [Model(judge, asked) for judge in self._judges]
            self._models[key] = Model(self.shape, arithmetic), judges
        model, judges = self._models[key]
        return Needs(model, config, self.work, layout, judges)

    def _arithmetic(self, sequence: int, tensor: int) -> Arithmetic:
        devices, lora = self._devices, self._config.model.adapter
        return Arithmetic(self._width, devices.cpu, sequence, tensor, lora, devices.exact_cache)


def _require_known(shape: PlannedModel) -> None:
    """Raise `UsageError` for a family that the Megatron engine does not compute."""
    if not shape.family.has_llama_layers:
        raise UsageError(
            "the megatron engine does not compute models of this type",
            have="a model that is not shaped like Llama's",
            want=f"one of {names_of('has_llama_layers')}",
            do="plan with engine.kind=torch",
        )


def _divides_by_torch(shape: PlannedModel, engine: EngineConfig) -> bool:
    """Whether the torch engine can cut a model as the settings say."""
    sequence, tensor = engine.sequence_parallel, engine.tensor_parallel
    known = tensor == 1 or shape.family.cuts_heads
    return known and all(divides(sequence, tensor, layer) for layer, _ in shape.layers)


def _uncut(shape: PlannedModel, engine: EngineConfig) -> UsageError:
    """What is said of a model that cannot be cut as the settings say."""
    names = ["tensor_parallel", "sequence_parallel"]
    want = "degrees that divide the heads of a layer"
    layer = shape.layers[0][0]
    model = f"{layer.heads} heads, {layer.key_heads} key heads, {layer.intermediate} intermediate columns, {shape.depth} layers"
    if engine.kind == "megatron":
        names += ["pipeline_parallel", "virtual_stages"]
        names += ["expert_parallel", "expert_tensor_parallel"]
        experts = max(each.experts for each, _ in shape.layers)
        model += f", {experts or 'no'} experts"
        want += ", its columns and its experts, and no more stages than layers"
        if experts and not engine.megatron_sequence_parallel:
            want += "; beside tensor parallelism a mixture needs engine.megatron_sequence_parallel"
    elif engine.tensor_parallel > 1 and not shape.family.cuts_heads:
        want = "engine.tensor_parallel: 1, for the torch engine does not cut the matrices of this family"
    degrees = {f"engine.{name}": getattr(engine, name) or 1 for name in names}
    given = [f"{name}: {value}" for name, value in degrees.items() if value > 1]
    return UsageError(
        "a model cannot be cut as the settings say",
        have=f"{', '.join(given)}; {model}",
        want=want,
        do="correct them",
    )


def _too_narrow(shape: PlannedModel, engine: EngineConfig) -> UsageError:
    """What is said of experts whose grouped products the settings make too narrow."""
    width = min(layer.intermediate for layer, _ in shape.layers if layer.experts)
    return UsageError(
        "experts cannot be shared out as the settings say",
        have=f"engine.tensor_parallel: {engine.tensor_parallel}, engine.precision: {engine.precision}; {width} columns of an expert",
        want=f"rows of a multiple of {_ROW_BYTES} bytes on every process",
        do="lower engine.tensor_parallel, or take a model of other widths",
    )


def why_not(plans: Sequence[Plan]) -> list[str]:
    """The reasons of those that do not fit, the commonest first."""
    groups: dict[tuple[str, str], list[Plan]] = {}
    for plan in plans:
        if not plan.fits:
            groups.setdefault((plan.fullest, plan.largest_part()), []).append(plan)
    lines = []
    for (phase, part), some in sorted(groups.items(), key=lambda item: -len(item[1])):
        least, most = (gigabytes(extreme(p.need for p in some)) for extreme in (min, max))
        span = least if len(some) == 1 else f"{least} to {most}"
        lines.append(f"{len(some)} need {span} GB in {phase}, most of it {part}")
    return lines


def gigabytes(size: float) -> str:
    """Bytes in GB, with three digits or all before the point."""
    return f"{size / 1e9:.3g}" if size < 999.5e9 else f"{size / 1e9:,.0f}"


def divides(sequence: int, tensor: int, layer: Layer) -> bool:
    """Whether so many processes can share a layer's heads."""
    return layer.heads % (sequence * tensor) == 0 and layer.key_heads % tensor == 0


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]

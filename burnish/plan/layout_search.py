"""Find the layouts of a run that fit, quickest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import ClassVar, Protocol, get_args

from burnish.config.constraints import divisors, layout_problems, refuse
from burnish.config.out_of_memory_hints import remedies
from burnish.config.schema import EngineConfig, RunConfig
from burnish.distributed.layout import indivisible
from burnish.errors import BurnishError, UsageError, bytes_text
from burnish.families import ModelShape
from burnish.plan.devices import PER_MACHINE, Clock, Devices
from burnish.plan.megatron_memory import MegatronNeeds
from burnish.plan.memory import Needs, Parts, total_of
from burnish.plan.model import PlannedBeside, PlannedModel, Workload, shards_of

_CHECKPOINTING = get_args(EngineConfig.model_fields["activation_checkpointing"].annotation)
_VIRTUAL_STAGES = (1, 2, 4)
_LARGER = (2, 4, 8)
_WORTHWHILE = 0.95
# Free share of what depends on tokens, where larger micro-batches are taken unasked. Measured runs were within 15 % of their plan, but
# few of them ran on GPUs, and NCCL's buffers are not planned. Weights and optimizer are known exactly.
_FREE = 0.25
_CERTAIN = ("weights", "optimizer")
_DEGREES = {
    "torch": ("replicas", "sequence_parallel", "tensor_parallel", "expert_parallel"),
    "megatron": (
        "tensor_parallel",
        "sequence_parallel",
        "pipeline_parallel",
        "virtual_stages",
        "expert_parallel",
        "expert_tensor_parallel",
    ),
}


@dataclass(frozen=True)
class Plan:
    """A way to run and its needs, with a process per device."""

    engine: EngineConfig
    phases: dict[str, Parts]
    """Bytes by phase and part, on the process that needs most."""
    host: Parts
    """Bytes of host memory of a process, if the device has a memory of its own."""
    operations: dict[str, float]
    """Floating-point operations of a process, by phase."""
    seconds: dict[str, float]
    """Estimated seconds by phase."""
    tokens: int
    """Most tokens of a micro-batch on each device."""
    microbatches: int
    """Micro-batches of an optimizer step."""
    devices: Devices

    @property
    def shards(self) -> int:
        """See `shards_of`."""
        return shards_of(self.engine, self.devices.count)

    @cached_property
    def fullest(self) -> str:
        """The phase that needs most memory."""
        return max(self.phases, key=self.total)

    @cached_property
    def need(self) -> float:
        """Bytes of the fullest phase."""
        return self.total(self.fullest)

    @property
    def fits(self) -> bool:
        """Whether a device has as much as `need`."""
        return self.need <= self.devices.usable

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of a step without a save."""
        return sum(seconds for phase, seconds in self.seconds.items() if phase != "save")

    def total(self, phase: str) -> float:
        """Return the bytes of a phase."""
        return total_of(self.phases[phase])

    def overrides(self) -> list[str]:
        """Return the layout's settings, as the command line takes them."""
        engine = self.engine
        kind = engine.kind
        settings = [
            f"engine.{n}={v}" for n in _DEGREES[kind] if (v := getattr(engine, n)) is not None
        ]
        if kind == "torch":
            settings.append(
                f"engine.reshard_after_forward={str(engine.reshard_after_forward).lower()}"
            )
        return [*settings, f"engine.activation_checkpointing={engine.activation_checkpointing}"]


class PlannedMethod(Protocol):
    """What the planner asks of a method (`burnish.method.Method`)."""

    generates: ClassVar[bool]

    def workload(self, config: RunConfig) -> Workload:
        """Return the sequences of a step."""

    def size_problems(self, config: RunConfig, shares: int) -> Iterable[BurnishError]:
        """Return why a step cannot be divided into `shares`."""


class Planner:
    """The plans of one configuration on some devices."""

    def __init__(  # noqa: PLR0913
        self,
        shape: ModelShape,
        config: RunConfig,
        method: PlannedMethod,
        devices: Devices,
        beside: Sequence[PlannedBeside] = (),
        *,
        positions: int | None = None,
        row_tokens: int | None = None,
        longest: int = 0,
    ) -> None:
        """Take the shape of the policy, and the frozen models `beside` it. Sequences have at most `positions` tokens, and rows `row_tokens` if that is known.

        Where tokens are auto, a micro-batch has room for `longest` (`Method.longest`).

        Raises `UsageError` for a model that the engine does not compute, `IncompatibleError` for an adapter of missing layers.
        """
        if config.engine.kind not in _DEGREES:
            raise UsageError(
                "the planner does not know the memory and time of this engine",
                have=f"engine.kind: {config.engine.kind}",
                want=f"one of {', '.join(_DEGREES)}",
                do="plan with engine.kind=torch",
            )
        self.model = PlannedModel(shape, config.model.adapter, train=config.model.train)
        self.model.require_targets()
        work = method.workload(config)
        work = work if row_tokens is None else work.of_rows(row_tokens)
        work = work.within(positions)
        self._beside = beside
        self.config = config
        """The run's settings."""
        self._method = method
        self._longest = longest if config.batch.is_auto else 0
        self.work = replace(work, saves_in_background=config.checkpoint.background)
        """The sequences of a step. Where tokens are auto, micro-batches may be larger (`Plan.tokens`)."""
        self.devices = devices
        """What the run is planned for."""
        self._clock = Clock(self.model, self.work, devices, beside)

    def as_configured(self) -> tuple[Plan | None, BurnishError | None]:
        """Return the present settings' plan, and why it cannot run or does not fit."""
        config = self.config
        engine = config.engine
        try:
            world = self.devices.count
            problems = [*layout_problems(config, world)]
            problems += self._method.size_problems(config, world // engine.sharing)
            refuse(problems, "this layout")
            for problem in self._indivisible(engine):
                raise problem
        except BurnishError as error:
            return None, error
        plan = self._decided(next(self._plans(engine, [engine.activation_checkpointing])))
        return plan, None if plan.fits else self.refusal(plan)

    def larger_microbatch(self, plan: Plan) -> Plan | None:
        """Return the plan with larger micro-batches that fit, with room to spare, and take less time; None if there are none.

        They gather weights less often, which counts most for mixtures of experts.
        """
        quickest = plan
        for times in _LARGER if plan.fits else ():
            engine = plan.engine
            longer = next(self._plans(engine, [engine.activation_checkpointing], times))
            is_quicker = longer.step_seconds <= _WORTHWHILE * quickest.step_seconds
            if is_quicker and longer.fits and _leaves_room(longer, plan):
                quickest = longer
        return None if quickest is plan else quickest

    def _decided(self, plan: Plan) -> Plan:
        """Return a plan with the micro-batches that auto is. On CPUs larger ones gain nothing."""
        is_open = not self.config.batch.is_decided and not self.devices.cpu
        return (self.larger_microbatch(plan) if is_open else None) or plan

    def _budget(self, engine: EngineConfig) -> int:
        """Return the least tokens of a micro-batch on each device."""
        return max(self.work.budget, -(-self._longest // engine.sequence_parallel))

    def fsdp_bytes(self, plan: Plan) -> tuple[float, float] | None:
        """Return bytes of weights that a rank gathers for a micro-batch, and of gradients that it reduces; None if Megatron moves them once a step."""
        return None if plan.engine.kind == "megatron" else self._clock.fsdp_bytes(plan.engine)

    def refusal(self, plan: Plan) -> UsageError:
        """Return the error of a plan that does not fit, with remedies."""
        parts = sorted(plan.phases[plan.fullest].items(), key=lambda item: -item[1])
        most = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts[:4])
        settings = self.config.model_copy(update={"engine": plan.engine})
        # Only a smaller model makes the generator smaller, so its remedies come last unless nothing else can help.
        usable = self.devices.usable
        last = [name for name, size in parts if name == "generator" and size <= usable]
        names = [name for name, _ in parts if name not in last]
        on_cpu = self.devices.cpu
        generates = self._method.generates
        beside = [each.said for each in self._beside]
        place = settings, generates, plan.fullest, names, beside
        helpful = remedies(*place, on_cpu=on_cpu, longest=self._longest)
        return UsageError(
            f"this run does not fit on {plan.devices}",
            have=f"{bytes_text(plan.need)} in {plan.fullest} ({most})",
            want=f"at most {bytes_text(plan.devices.usable)} on each device",
            do=f"try {', or '.join(helpful[:3])}",
        )

    def all_plans(self) -> list[Plan]:
        """Return a plan per layout and checkpointing: fitting ones first, by time and need."""
        engine = self.config.engine
        limited = engine.kind == "torch" and (engine.activation_offload or engine.compile)
        kinds = [kind for kind in _CHECKPOINTING if kind != "selective" or not limited]
        layouts = self._layouts()
        plans = [self._decided(plan) for each in layouts for plan in self._plans(each, kinds)]
        return sorted(
            plans, key=lambda p: (not p.fits, p.step_seconds if p.fits else p.need, p.need)
        )

    def _indivisible(self, engine: EngineConfig) -> Iterator[UsageError]:
        """Yield an error for every setting that cannot divide the policy or a model beside it."""
        plain = engine.model_copy(update={"expert_parallel": 1, "expert_tensor_parallel": None})
        beside = [(each.model.shape, plain) for each in self._beside]
        for shape, settings in ((self.model.shape, engine), *beside):
            tensor = 1 if engine.kind == "megatron" else engine.tensor_parallel
            if tensor > 1 and not shape.family.cuts_heads:
                yield UsageError(
                    "the torch engine does not divide the matrices of this family",
                    have=f"engine.tensor_parallel: {tensor}",
                    want="1",
                    do="set engine.tensor_parallel=1",
                )
            yield from indivisible(shape, settings)

    def _divides(self, engine: EngineConfig) -> bool:
        config = self.config
        shape = self.model.shape
        count = self.devices.count
        stages = engine.pipeline_parallel
        copy = count // stages // engine.replicas
        virtual = engine.virtual_stages
        tensor = engine.tensor_parallel
        within = engine.expert_tensor_parallel
        longest = config.longest_completed if self.work.slots else config.data.max_length or 0
        return (
            tensor * engine.sequence_parallel <= PER_MACHINE
            and count % (engine.sharing * engine.replicas) == 0
            and (engine.reshard_after_forward or shards_of(engine, count) > 1)
            and (virtual == 1 or stages > 1)
            and stages * virtual <= shape.depth
            and (not shape.experts or within in (None, 1, tensor))
            and (not shape.experts or copy % engine.expert_sharing == 0)
            and (engine.kind == "torch" or not any(size % tensor for size in self.model.cut))
            and count // engine.sharing <= self.work.sequences // self.work.updates
            and (config.batch.is_auto or longest <= config.batch.tokens * engine.sequence_parallel)
            and next(self._indivisible(engine), None) is None
        )

    def _layouts(self) -> Iterator[EngineConfig]:
        engine = self.config.engine
        experts = self.model.shape.experts
        every = divisors(self.devices.count)
        within = divisors(PER_MACHINE)
        values: dict[str, Sequence[object]] = {"tensor_parallel": within}
        values |= {"sequence_parallel": within}
        if engine.kind == "torch":
            values |= {"replicas": every, "reshard_after_forward": (True, False)}
            values |= {"expert_parallel": within} if experts else {}
        else:
            values |= {"pipeline_parallel": every, "virtual_stages": _VIRTUAL_STAGES}
            values |= {"expert_tensor_parallel": within} if experts else {}
            values |= {"expert_parallel": divisors(max(experts, 1))}
        for combination in product(*values.values()):
            layout = engine.model_copy(update=dict(zip(values, combination, strict=True)))
            if self._divides(layout):
                yield layout

    def _plans(self, engine: EngineConfig, kinds: Sequence[str], times: int = 1) -> Iterator[Plan]:
        """Yield a plan for each kind of checkpointing, with micro-batches that are `times` as large as the least."""
        of_engine = MegatronNeeds if engine.kind == "megatron" else Needs
        optim = self.config.optim
        work = replace(self.work, budget=times * self._budget(engine))
        needs = of_engine(self.model, work, self.devices, engine, optim, beside=self._beside)
        for kind in kinds:
            candidate = engine.model_copy(update={"activation_checkpointing": kind})
            host = {} if self.devices.cpu else needs.host(kind)
            operations = self._clock.operations(candidate)
            microbatches = needs.microbatches
            seconds = self._clock.seconds(candidate, microbatches, operations, needs.slots)
            phases = needs.phases(kind)
            yield Plan(
                candidate,
                phases,
                host,
                operations,
                seconds,
                work.budget,
                microbatches,
                self.devices,
            )


def _leaves_room(longer: Plan, plan: Plan) -> bool:
    """Return whether phases that need more than in another plan leave room for what is not planned."""
    for phase, parts in longer.phases.items():
        certain = sum(parts.get(name, 0.0) for name in _CERTAIN)
        unsure = longer.total(phase) - certain
        wanted = certain + (1 + _FREE) * unsure
        if longer.total(phase) > plan.total(phase) and wanted > longer.devices.usable:
            return False
    return True


def why_not(plans: Sequence[Plan]) -> list[str]:
    """Return why plans do not fit, the commonest reason first."""
    groups: dict[tuple[str, str], list[Plan]] = {}
    for plan in plans:
        if not plan.fits:
            parts = plan.phases[plan.fullest]
            groups.setdefault((plan.fullest, max(parts, key=parts.__getitem__)), []).append(plan)
    lines = []
    for (phase, part), group in sorted(groups.items(), key=lambda item: -len(item[1])):
        least, most = (bytes_text(extreme(p.need for p in group)) for extreme in (min, max))
        span = least if len(group) == 1 else f"{least} to {most}"
        lines.append(f"{len(group)} need {span} in {phase}, most of it {part}")
    return lines

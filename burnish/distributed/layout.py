"""The place of a process in the run, and the degrees of parallelism that can divide a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Self

from burnish.errors import UsageError

if TYPE_CHECKING:  # this module must not load torch, and --help shows before pydantic is loaded
    from torch.distributed import ProcessGroup

    from burnish.config.schema import EngineConfig
    from burnish.families import ModelSizes

# Grouped matrix products of experts need rows whose size is a multiple of this many bytes.
_ROW_BYTES = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """One process's place. All sizes count processes.

    Processes form a grid of pipeline × data × sequence × tensor, the last running fastest. Only processes with
    different data coordinates run different micro-batches.
    """

    rank: int = 0
    """This process's rank in the run, from 0."""
    world: int = 1
    """Processes in the run."""
    local_rank: int = 0
    """This process's rank on its machine, from 0."""
    local_world: int = 1
    """Processes of the run on this machine."""
    sequence: int = 1
    """Processes that share the tokens of a micro-batch."""
    tensor: int = 1
    """Processes that share the matrices of a layer."""
    pipeline: int = 1
    """Pipeline stages: groups of processes, each with some of the model's layers."""
    groups: tuple[ProcessGroup, ...] = field(default=(), compare=False, repr=False)
    """This process's group along each dim of a grid of all processes. Small messages travel along one dim after the other.

    The first dim runs fastest. Empty for few processes, which use one group. Pickling leaves groups out.
    """

    machines: tuple[ProcessGroup, ...] = field(default=(), compare=False, repr=False)
    """Two gloo groups for sending weights: the processes of this machine, and those with this local rank on every machine.

    Empty on one machine, and where machines have unequal numbers of processes.
    """

    def __reduce__(self) -> tuple[type[Self], tuple[int, ...]]:
        """Pickle without the groups, which belong to this process."""
        values = [getattr(self, each.name) for each in fields(self) if each.compare]
        return type(self), tuple(values)

    @property
    def sharing(self) -> int:
        """Processes that work on the same micro-batch."""
        return self.sequence * self.tensor * self.pipeline

    @property
    def data_rank(self) -> int:
        """The number of this process's share of the batch."""
        return self.rank // (self.sequence * self.tensor) % self.data_size

    @property
    def data_size(self) -> int:
        """The number of shares of the batch."""
        return self.world // self.sharing

    def peers(self, data_rank: int) -> list[int]:
        """Return the ranks that run this share of the batch."""
        inner = self.sequence * self.tensor
        stages = range(0, self.world, self.data_size * inner)
        return [stage + data_rank * inner + k for stage in stages for k in range(inner)]

    @property
    def is_first_peer(self) -> bool:
        """Whether this process speaks for its peers."""
        return self.rank == self.peers(self.data_rank)[0]

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's logs."""
        return self.rank == 0


def require_divisible(sizes: ModelSizes, engine: EngineConfig) -> None:
    """Raise `UsageError` if an engine setting cannot divide the model."""
    for problem in indivisible(sizes, engine):
        raise problem


def indivisible(sizes: ModelSizes, engine: EngineConfig) -> Iterator[UsageError]:
    """Yield an error for every setting that cannot divide a model. Unknown sizes, 0, are not checked."""
    if engine.kind == "megatron":
        from burnish.distributed.megatron_layout import indivisible_by_megatron

        yield from indivisible_by_megatron(sizes, engine, _division)
    else:
        yield from _by_torch(sizes, engine)
    yield from _experts(sizes, engine)
    tensor = engine.tensor_parallel
    of = f"attention heads on each of {tensor} tensor ranks" if tensor > 1 else "attention heads"
    left = sizes.heads // tensor
    yield from _division("engine.sequence_parallel", engine.sequence_parallel, left, of)


def _by_torch(sizes: ModelSizes, engine: EngineConfig) -> Iterator[UsageError]:
    multiple = _ROW_BYTES // (4 if engine.precision == "fp32" else 2)
    tensor = engine.tensor_parallel
    width = sizes.expert_intermediate
    if sizes.experts and (width % (tensor * multiple) or sizes.hidden % multiple):
        yield UsageError(
            "grouped matrix products cannot take experts of these widths",
            have=f"{width} columns of an expert, hidden size {sizes.hidden}, engine.tensor_parallel: {tensor}, engine.precision: {engine.precision}",
            want=f"a multiple of {multiple} of both on every process",
            do="lower engine.tensor_parallel, or take a model of other widths",
        )
    yield from _division("engine.tensor_parallel", tensor, sizes.key_heads, "key heads")


def _experts(sizes: ModelSizes, engine: EngineConfig) -> Iterator[UsageError]:
    if sizes.experts:
        parts = engine.expert_parallel
        yield from _division("engine.expert_parallel", parts, sizes.experts, "experts")
        return
    for name in ("expert_parallel", "expert_tensor_parallel"):
        if (getattr(engine, name) or 1) > 1:
            yield UsageError(
                f"engine.{name} divides experts, and the model has none",
                have=f"engine.{name}: {getattr(engine, name)}",
                want="1",
                do=f"remove engine.{name}",
            )


def _division(
    setting: str, degree: int, size: int, of: str, *, or_multiple: bool = False
) -> Iterator[UsageError]:
    if size % degree == 0 or (or_multiple and degree % size == 0):
        return
    fitting = [str(each) for each in range(1, size + 1) if size % each == 0]
    shown = fitting if len(fitting) <= 8 else [*fitting[:4], "...", *fitting[-4:]]
    yield UsageError(
        f"{setting} does not divide the model's {of}",
        have=f"{setting}: {degree}, {size} {of}",
        want=f"equally many {of} on every process",
        do=f"set {setting} to one of {', '.join(shown)}"
        + (f", or to a multiple of {size}" if or_multiple else ""),
    )

"""Filling shards from a committed step, at whatever layout it is wanted.

What can be asked for by name, and whether it fits; `burnish.checkpoint.reader` reads it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import torch
from torch import Tensor

from burnish.boxes.pieces import PieceTable, gather_pieces
from burnish.boxes.plan import Move
from burnish.boxes.shards import Piece, Shard
from burnish.checkpoint.dtypes import BY_NAME
from burnish.checkpoint.layout import PlannedFile, add_residual
from burnish.checkpoint.manifest import ANOTHER_STEP
from burnish.checkpoint.naming import MAIN, MODEL, RESIDUAL, prefix_of, roles_in, set_of
from burnish.checkpoint.reader import BlockReader, ReadPlan
from burnish.checkpoint.steps import Committed
from burnish.checkpoint.streams import Described
from burnish.checkpoint.verify import checked_header
from burnish.checkpoint.writer import is_plain
from burnish.distributed.collectives import agree, gather_objects
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.errors import CorruptError, IncompatibleError, MissingError
from burnish.files.safetensors import TensorEntry
from burnish.files.storage import LocalStorage, Source

_SHOWN = 12
_NOTHING = "-"


def require_slots(where: PurePath, stored: set[str], wanted: set[str]) -> None:
    """Raise `MissingError` unless every set of optimizer slots that is wanted is there."""
    absent = sorted(wanted - stored)
    if absent:
        raise MissingError(
            f"{where} has no optimizer state {', '.join(absent)}",
            have=", ".join(sorted(stored)) or "no tensors",
            want=", ".join(sorted(wanted)),
            do="resume with the optimizer that wrote it; checkpoint.fresh_optimizer=true begins with a fresh one where there is none",
        )


def require_fit(
    where: PurePath, have: Mapping[str, Described], want: Mapping[str, Described]
) -> None:
    """Raise with a table unless both describe the same tensors, by key, with the same dtypes and shapes.

    `IncompatibleError`, or `MissingError` where all that is wrong is that the step lacks some.
    Slots follow their weights, so they are shown only where the weights agree.
    """
    keys = sorted(key for key in {**want, **have} if have.get(key) != want.get(key))
    if not keys:
        return
    keys = [key for key in keys if key.startswith(f"{MODEL}/")] or keys
    text = f"{where} does not hold what is trained\n{_table(keys, have, want)}"
    do = "resume with the model that wrote it, or begin another run with name=NAME"
    if all(key not in have for key in keys):
        raise MissingError(text, do=do)
    raise IncompatibleError(text, do=do)


def _table(keys: list[str], have: Mapping[str, Described], want: Mapping[str, Described]) -> str:
    rows = [("tensor", "have", "want")]
    rows += [
        (key.removeprefix(f"{MODEL}/"), _words(have.get(key)), _words(want.get(key)))
        for key in keys[:_SHOWN]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {name:<{widths[0]}}  {a:<{widths[1]}}  {b}" for name, a, b in rows]
    more = [f"  and {len(keys) - _SHOWN} more"] if len(keys) > _SHOWN else []
    return "\n".join(lines + more)


def _words(tensor: Described | None) -> str:
    if tensor is None:
        return _NOTHING
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies."""

    file: int
    entry: TensorEntry


class CheckpointSource:
    """The tensors of a committed step's model; a `ShardSource` for weights and optimizer slots alike.

    The model is the run's own; `of` gives any other. A shard's name is that of a weight, or `slot/weight`. Every rank makes one and calls `fill`
    together. fp32 weights that were split come back bit for bit; other dtypes are converted from
    what `model/` holds. Takes 32 MiB beside the tensors, or two blocks where these are larger, from `arena`
    where there is one.
    """

    def __init__(
        self,
        committed: Committed,
        layout: Layout,
        storage: Source | None = None,
        arena: Arena | None = None,
    ) -> None:
        self._step = committed
        self._layout = layout
        self._storage = storage or LocalStorage()
        self._arena = arena or Arena(torch.device("cpu"))
        with agree(layout):
            names = [name for name in sorted(committed.manifest.files) if set_of(name) is not None]
            mine = [self._open(name) for name in names[layout.rank :: layout.world]]
        found = {file.path: file for theirs in gather_objects(mine, layout) for file in theirs}
        self._files = [found[name] for name in names]
        self._places = {
            f"{file.tensor_set}/{entry.name}": _Place(index, entry)
            for index, file in enumerate(self._files)
            for entry in file.entries
        }
        self._sets = {file.tensor_set for file in self._files}
        self._prefix = prefix_of(MAIN)

    def of(self, role: str) -> CheckpointSource:
        """The same step's tensors of another trained model. Raises `MissingError` where it has none of that role."""
        prefix = prefix_of(role)
        if f"{prefix}{MODEL}" not in self._sets:
            roles = roles_in(self._step.manifest.files)
            raise MissingError(
                f"{self._step.path} holds no {role}",
                have=", ".join(each or "the run's own model" for each in roles) or "no model",
                want=f"{role}/{MODEL} and {role}/training",
                do=f"resume a run that trains a {role}; a new run may start from this one's model directories",
            )
        other = copy.copy(self)
        other._prefix = prefix
        return other

    def require(self, weights: Iterable[Shard], training: Iterable[Shard]) -> None:
        """Raise unless the step holds what all ranks' shards are pieces of, in the same dtypes, and no more. Collective.

        `MissingError` for optimizer slots that are not there, else a table of have and want:
        `MissingError` where the step only lacks tensors, or `IncompatibleError`. Nothing is filled.
        """
        mine = {f"{MODEL}/{shard.spec.name}": _described(shard) for shard in weights}
        mine |= {shard.spec.name: _described(shard) for shard in training}
        stored = self._stored()
        misfits = {key: each for key, each in mine.items() if stored.get(key) != each}
        told = gather_objects((misfits, stored.keys() - mine.keys()), self._layout)
        want = {key: each for theirs, _ in told for key, each in theirs.items()}
        unwanted = set.intersection(*(unwanted for _, unwanted in told))
        have = {key: stored[key] for key in want.keys() | unwanted if key in stored}
        require_slots(self._step.path, _kinds(stored), _kinds(want))
        require_fit(self._step.path, have, want)

    @property
    def holds_training(self) -> bool:
        """Whether the step holds optimizer state of the model."""
        return bool(_kinds(self._stored()) - {MODEL, RESIDUAL})

    def _stored(self) -> dict[str, Described]:
        """The model's tensors by key, without their role; a weight that was split as the fp32 that comes back."""
        found: dict[str, Described] = {}
        for place in self._places.values():
            tensor_set, entry = self._files[place.file].tensor_set, place.entry
            kind = tensor_set.removeprefix(self._prefix)
            if f"{self._prefix}{kind}" == tensor_set and "/" not in kind:
                found[f"{kind}/{entry.name}"] = Described(BY_NAME[entry.dtype], entry.shape)
        for key in [key for key in found if key.startswith(f"{RESIDUAL}/")]:
            weight = f"{MODEL}/{key.removeprefix(f'{RESIDUAL}/')}"
            if weight in found:
                found[weight] = Described(torch.float32, found.pop(key).shape)
        return found

    def fill(self, shards: Iterable[Shard]) -> None:
        """Write each shard's tensor in place, converting to its dtype. Collective, errors included.

        Raises `MissingError` for a tensor that the step lacks, `IncompatibleError` for one of
        another shape or an unknown dtype, `CorruptError` naming file and tensor for a damaged block.
        """
        shards = list(shards)
        with agree(self._layout):
            keys = [self._checked(shard) for shard in shards]
        self._deliver(shards, keys, _copy)
        exact = [
            (shard, f"{self._prefix}{RESIDUAL}/{shard.spec.name}")
            for shard, key in zip(shards, keys, strict=True)
            if key.startswith(f"{self._prefix}{MODEL}/")
            and f"{self._prefix}{RESIDUAL}/{shard.spec.name}" in self._places
            and shard.tensor.dtype == torch.float32
        ]
        self._deliver([shard for shard, _ in exact], [key for _, key in exact], add_residual)

    def _open(self, name: str) -> PlannedFile:
        """A tensor file as its header, which is checked, describes it."""
        header = checked_header(self._step, name, self._storage)
        for entry in header.entries.values():
            if entry.dtype not in BY_NAME:
                raise IncompatibleError(
                    f"tensor {entry.name} in {self._step.path / name} has an unknown dtype",
                    have=entry.dtype,
                    want=", ".join(BY_NAME),
                    do="resume with the version of Burnish that wrote it",
                )
            if entry.begin % BY_NAME[entry.dtype].itemsize:
                raise CorruptError(
                    f"tensor {entry.name} in {self._step.path / name} is misplaced",
                    have=f"byte {entry.begin}",
                    want=f"a multiple of {BY_NAME[entry.dtype].itemsize}",
                    do=ANOTHER_STEP,
                )
        entries = tuple(header.entries.values())
        size = self._step.manifest.files[name].size
        return PlannedFile(name, set_of(name) or "", b"", entries, size)

    def _checked(self, shard: Shard) -> str:
        """The key of the stored tensor that a shard is a piece of."""
        name = shard.spec.name
        first = f"{self._prefix}{name.partition('/')[0]}"
        is_slot = first in self._sets - {f"{self._prefix}{MODEL}"}
        key = f"{self._prefix}{name}" if is_slot else f"{self._prefix}{MODEL}/{name}"
        if key not in self._places:
            raise MissingError(
                f"{self._step.path} has no tensor {name}",
                have=f"{len(self._places)} tensors: {', '.join(sorted(self._sets))}",
                want=name,
                do="resume with the model and optimizer that wrote it",
            )
        entry = self._places[key].entry
        if entry.shape != shard.spec.shape:
            raise IncompatibleError(
                f"tensor {name} in {self._step.path} has another shape than the model's",
                have=list(entry.shape),
                want=list(shard.spec.shape),
                do="resume with the model that wrote it",
            )
        return key

    def _deliver(
        self,
        shards: Sequence[Shard],
        keys: Sequence[str],
        put: Callable[[Tensor, Tensor], None],
    ) -> None:
        """Read what all ranks want of the tensors with these keys; `put(mine, elements)` each piece."""
        pieces = [
            Piece(key, shard.spec.shape, shard.box, BY_NAME[self._places[key].entry.dtype])
            for shard, key in zip(shards, keys, strict=True)
        ]
        want = gather_pieces(PieceTable.of(pieces), self._layout)
        block_bytes = [self._step.manifest.files[file.path].block_bytes for file in self._files]
        plan = ReadPlan.of(self._files, block_bytes, want, self._layout)

        def mine(move: Move) -> Tensor:
            return shards[move.want].part(move.box).detach()

        def place(move: Move) -> Tensor | None:
            there = mine(move)
            is_same = put is _copy and there.dtype == move.dtype
            return there if is_same and is_plain(there) else None

        def write(move: Move, elements: Tensor) -> None:
            put(mine(move), elements)

        reader = BlockReader(self._step, self._files, plan, self._layout, self._arena)
        reader.read(self._storage, place, write)


def _described(shard: Shard) -> Described:
    return Described(shard.tensor.dtype, shard.spec.shape)


def _kinds(keys: Iterable[str]) -> set[str]:
    """The sets that these keys are of."""
    return {key.partition("/")[0] for key in keys}


def _copy(mine: Tensor, elements: Tensor) -> None:
    mine.copy_(elements)

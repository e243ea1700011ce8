"""Read tensors of a committed step, at any layout, and check every block that is read."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy as shallow_copy
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from burnish.boxes.shards import Shard, renamed
from burnish.boxes.tensor_reader import (
    OpenFiles,
    Sources,
    TensorInfo,
    TensorReader,
    copy,
    locate,
)
from burnish.checkpoint.steps import CommittedStep, checked_header, read_blocks, read_file
from burnish.checkpoint.write_plan import (
    MAIN,
    MODEL,
    RESIDUAL,
    add_residual,
    prefix_of,
    roles_in,
    set_of,
)
from burnish.distributed.collectives import agree, gather_objects
from burnish.distributed.device import own_cores
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError, MissingError, few, table
from burnish.files.durable import naming_failures
from burnish.files.safetensors import Header

# Bytes of blocks that are cached, because the next box may need them too. At least two blocks per thread are cached.
_HELD_BYTES = 2 << 20
_READERS = 2  # threads, if the process has as many cores
_ROWS = 12

_log = logging.getLogger(__name__)

_Described = tuple[torch.dtype, tuple[int, ...]]


class StepReader(TensorReader):
    """All tensors of a step, by key (`model/NAME`, `critic/exp_avg/NAME`). Raises `DamagedBlock`.

    Reading into fp32 memory restores split weights bit for bit; other dtypes come from `model/`.
    """

    def __init__(
        self,
        step: CommittedStep,
        headers: Mapping[str, Header] | None = None,
        arena: Arena | None = None,
    ) -> None:
        self._step = step
        self._arena = arena
        if headers is None:
            headers = _read_headers(step, _tensor_files(step))
        places = [(f"{set_of(name)}/", name, header) for name, header in headers.items()]
        super().__init__(step.path, locate(step.path, places))
        self._residuals = _residuals(self.locations)
        hidden = set(self._residuals.values())
        self.tensors = {
            key: replace(info, dtype=torch.float32) if key in self._residuals else info
            for key, info in self.tensors.items()
            if key not in hidden
        }
        self.apart_bytes = max(
            (step.manifest.files[name].block_bytes for name in headers), default=1
        )
        most = max(2 * step.source.reads_at_once, 2 * _READERS, _HELD_BYTES // self.apart_bytes)
        self._block = lru_cache(most)(self._read_block)
        self._files = OpenFiles(lambda name: step.source.open(step.path / name))

    def _sources(self, key: str, dtype: torch.dtype) -> Sources:
        if key in self._residuals and dtype == torch.float32:
            return [(key, copy), (self._residuals[key], add_residual)]
        return super()._sources(key, dtype)

    def _read_bytes(self, file: str, into: memoryview, offset: int) -> None:
        record = self._step.manifest.files[file]
        size = record.block_bytes
        while into:
            number, skipped = divmod(offset, size)
            is_end = offset + len(into) == record.size
            count = len(into) if is_end else len(into) // size * size
            if count and not skipped:
                read_blocks(self._files[file], self._step, file, number, into[:count])
            else:
                count = min(len(into), size - skipped)
                into[:count] = self._block(file, number)[skipped : skipped + count]
            into = into[count:]
            offset = offset + count

    def _read_block(self, file: str, number: int) -> memoryview:
        record = self._step.manifest.files[file]
        size = min(record.block_bytes, record.size - number * record.block_bytes)
        data = np.empty(size, np.uint8).data
        read_blocks(self._files[file], self._step, file, number, data)
        return data

    def _new_buffer(self, size: int) -> Tensor:
        return super()._new_buffer(size) if self._arena is None else self._arena.take(size)

    def close(self) -> None:
        """Close the files and free memory."""
        super().close()
        self._block.cache_clear()
        self._files.close()


def _tensor_files(step: CommittedStep) -> list[str]:
    return [name for name in sorted(step.manifest.files) if set_of(name) is not None]


def _read_headers(step: CommittedStep, names: Iterable[str]) -> dict[str, Header]:
    return {name: checked_header(step, name) for name in names}


def _residuals(keys: Iterable[str]) -> dict[str, str]:
    known = set(keys)
    residuals = {}
    for key in known:
        role, slash, name = key.partition(f"{RESIDUAL}/")
        weight = f"{role}{MODEL}/{name}"
        if slash and (not role or role.endswith("/")) and weight in known:
            residuals[weight] = key
    return residuals


class CheckpointSource:
    """The tensors of one of a step's models, by default the run's own; a `ShardSource`. Takes 32 MiB, or four blocks if larger.

    A shard is named by its weight, or `slot/weight`.
    """

    def __init__(
        self, committed: CommittedStep, layout: Layout, arena: Arena | None = None
    ) -> None:
        self._step = committed
        self._layout = layout
        names = _tensor_files(committed)
        with agree(layout):
            own_headers = _read_headers(committed, names[layout.rank :: layout.world])
        headers = dict[str, Header]()
        for rank_headers in gather_objects(own_headers, layout):
            headers |= rank_headers
        with agree(layout):
            headers = {name: headers[name] for name in names}
            self._reader = StepReader(committed, headers, arena)
        self._prefix = prefix_of(MAIN)
        self._names: Mapping[str, str] = {}

    def of(self, role: str, names: Mapping[str, str] | None = None) -> CheckpointSource:
        """Return the source of a role, whose weights have other `names` in the step. Raises `MissingError`."""
        roles = roles_in(self._step.manifest.files)
        if role not in roles:
            raise MissingError(
                f"{self._step.path} holds no {role}",
                have=", ".join(each or "the run's own model" for each in roles) or "no model",
                want=f"{role}/{MODEL} and {role}/training",
                do=f"resume a run that trains a {role}; a new run may start from this one's model directories",
            )
        other = shallow_copy(self)
        other._prefix = prefix_of(role)
        other._names = names or {}
        return other

    def files(self, below: str) -> dict[str, bytes]:
        """Return all files below a directory ("ahead/"), by path, to rank 0. Collective, errors included."""
        step = self._step
        contents = dict[str, bytes]()
        names = [name for name in step.manifest.files if name.startswith(below)]
        if names:
            with agree(self._layout), naming_failures(f"{step.path} cannot be read"):
                if self._layout.is_main:
                    contents = {name: read_file(step, name) for name in names}
        return contents

    def require(
        self,
        weights: Iterable[Shard],
        training: Iterable[Shard],
        rest: Mapping[str, TensorInfo] | None = None,
    ) -> None:
        """Require that the step has exactly all ranks' tensors and dtypes, and the `rest`. Collective.

        The step may have trained the rest: then it may be in fp32, and its optimizer state is not read. Raises `MissingError` if it only lacks tensors, else `IncompatibleError`.
        """
        weights = [renamed(shard, self._names) for shard in weights]
        training = [renamed(shard, self._names) for shard in training]
        own_tensors = {f"{MODEL}/{s.spec.name}": (s.tensor.dtype, s.spec.shape) for s in weights}
        own_tensors |= {s.spec.name: (s.tensor.dtype, s.spec.shape) for s in training}
        stored = self._stored()
        rest = rest or {}
        for name, info in rest.items():
            own_tensors[f"{MODEL}/{name}"] = (info.dtype, info.shape)
        slots = {key for key in stored.keys() - own_tensors.keys() if _weight(key) in rest}
        if slots:
            in_fp32 = {f"{MODEL}/{n}": (torch.float32, info.shape) for n, info in rest.items()}
            own_tensors |= {key: each for key, each in in_fp32.items() if stored.get(key) == each}
            own_tensors |= {key: stored[key] for key in slots}
            if self._layout.is_main:
                trained = sorted({_weight(key) for key in slots})
                message = (
                    "%s trained %s, which from here on stays as it is, without optimizer state"
                )
                _log.warning(message, self._step.path, few(trained))
        misfits = {
            key: own_tensors[key] for key in own_tensors if stored.get(key) != own_tensors[key]
        }
        gathered = gather_objects((misfits, stored.keys() - own_tensors.keys()), self._layout)
        want = dict[str, _Described]()
        for rank_misfits, _ in gathered:
            want |= rank_misfits
        if absent := sorted(_sets(want) - _sets(stored)):
            raise MissingError(
                f"{self._step.path} has no optimizer state {', '.join(absent)}",
                have=", ".join(sorted(_sets(stored))) or "no tensors",
                want=", ".join(sorted(_sets(want))),
                do="resume with the optimizer that wrote it, or start without its state with checkpoint.fresh_optimizer=true",
            )
        keys = sorted(want.keys() | set.intersection(*(unwanted for _, unwanted in gathered)))
        if not keys:
            return
        keys = [key for key in keys if key.startswith(f"{MODEL}/")] or keys
        kind = IncompatibleError if stored.keys() & keys else MissingError
        raise kind(
            f"{self._step.path} does not hold exactly the tensors of this run\n{_table(keys, stored, want)}",
            do="resume with the model that wrote it, or begin another run with name=NAME",
        )

    def read(self, weight: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return a weight's elements `start` to `stop` in C order, in `dtype`. Raises `DamagedBlock`."""
        return self._reader.read_range(f"{self._prefix}{MODEL}/{weight}", start, stop, dtype)

    @property
    def holds_training(self) -> bool:
        """Whether the step holds the optimizer state."""
        return bool(_sets(self._stored()) - {MODEL})

    def _stored(self) -> dict[str, _Described]:
        stored = {}
        for key, info in self._reader.tensors.items():
            tensor_set = set_of(self._reader.locations[key].file) or ""
            if tensor_set.rpartition("/")[0] == self._prefix.rstrip("/"):
                stored[key.removeprefix(self._prefix)] = (info.dtype, info.shape)
        return stored

    def fill(self, shards: Iterable[Shard]) -> None:
        """See `ShardSource.fill`. Collective, errors included. Also raises `CorruptError` for a damaged block."""
        shards = [renamed(shard, self._names) for shard in shards]
        with agree(self._layout):
            keyed = [(self._checked(shard), shard) for shard in shards]
        readers = min(_READERS, own_cores(self._layout.local_world))
        readers = max(readers, self._step.source.reads_at_once)
        what = f"{self._step.path} cannot be read"
        with agree(self._layout), naming_failures(what), self._reader:
            places = self._reader.locations
            keyed.sort(key=lambda each: (places[each[0]].file, places[each[0]].entry.begin))
            with ThreadPoolExecutor(readers, "burnish-read") as pool:
                unread = iter(keyed)
                for reading in [pool.submit(self._read_all, unread) for _ in range(readers)]:
                    reading.result()

    def _read_all(self, unread: Iterator[tuple[str, Shard]]) -> None:
        """Fill shards from an iterator that threads share. After an error, exhaust it."""
        try:
            for key, shard in unread:
                self._reader.read(key, shard.box, shard.tensor)
        except BaseException:
            deque(unread, maxlen=0)
            raise

    def _checked(self, shard: Shard) -> str:
        name = shard.spec.name
        slot = f"{self._prefix}{name}"
        key = slot if slot in self._reader.tensors else f"{self._prefix}{MODEL}/{name}"
        info = self._reader.tensors.get(key)
        if info is None:
            raise MissingError(
                f"{self._step.path} has no tensor {name}",
                have=f"{len(self._reader.tensors)} tensors",
                want=name,
                do="resume with the model and optimizer that wrote it",
            )
        if info.shape != shard.spec.shape:
            raise IncompatibleError(
                f"tensor {name} in {self._step.path} has another shape than the model's",
                have=list(info.shape),
                want=list(shard.spec.shape),
                do="resume with the model that wrote it",
            )
        return key


def _weight(key: str) -> str:
    return key.partition("/")[2]


def _sets(keys: Iterable[str]) -> set[str]:
    return {key.partition("/")[0] for key in keys}


def _table(keys: list[str], have: Mapping[str, _Described], want: Mapping[str, _Described]) -> str:
    def text(key: str, side: Mapping[str, _Described]) -> str:
        if key not in side:
            return "-"
        dtype, shape = side[key]
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

    rows = [("tensor", "have", "want")]
    rows += [(k.removeprefix(f"{MODEL}/"), text(k, have), text(k, want)) for k in keys[:_ROWS]]
    lines = [f"  {line}" for line in table(rows)]
    more = [f"  and {len(keys) - _ROWS} more"] if len(keys) > _ROWS else []
    return "\n".join(lines + more)

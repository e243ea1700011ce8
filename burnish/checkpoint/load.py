"""Fill shards from a committed step, at any layout.

Each rank reads and checks the blocks of its own shards. Ranks of one machine find shared blocks in the page cache. Headers are
compared before anything is filled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath

from burnish.boxes.shards import Shard
from burnish.boxes.tensor_reader import TensorInfo
from burnish.checkpoint.naming import MAIN, MODEL, prefix_of, roles_in, set_of
from burnish.checkpoint.reader import StepReader, read_headers, tensor_files
from burnish.checkpoint.steps import Committed
from burnish.distributed.collectives import agree, gather_objects
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError, MissingError
from burnish.files.durable import naming_failures
from burnish.files.storage import LocalStorage, Source

_READERS = 2
_ROWS = 12
_NOTHING = "-"


class CheckpointSource:
    """The tensors of one model of a committed step; a `ShardSource` for weights and optimizer slots.

    The model is the run's own; `of` returns another. A shard is named by its weight, or `slot/weight`. Every rank makes a source and
    calls `fill` together. Split fp32 weights come back bit for bit; other dtypes are converted from `model/`. Takes 32 MiB beside
    the tensors, or four blocks if these are larger.
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
        names = tensor_files(committed)
        with agree(layout):
            mine = read_headers(committed, names[layout.rank :: layout.world], self._storage)
        headers = {name: h for theirs in gather_objects(mine, layout) for name, h in theirs.items()}
        with agree(layout):
            headers = {name: headers[name] for name in names}
            self._reader = StepReader(committed, self._storage, headers, arena)
        self._prefix = prefix_of(MAIN)

    def of(self, role: str) -> CheckpointSource:
        """Return the tensors of the same step's model with this role. Raises `MissingError` if there is none."""
        roles = roles_in(self._step.manifest.files)
        if role not in roles:
            raise MissingError(
                f"{self._step.path} holds no {role}",
                have=", ".join(each or "the run's own model" for each in roles) or "no model",
                want=f"{role}/{MODEL} and {role}/training",
                do=f"resume a run that trains a {role}; a new run may start from this one's model directories",
            )
        other = copy.copy(self)
        other._prefix = prefix_of(role)
        return other

    def require(self, weights: Iterable[Shard], training: Iterable[Shard]) -> None:
        """Require that the step holds exactly the tensors of all ranks' shards, in the same dtypes. Collective.

        Raises `MissingError` for absent optimizer slots. Otherwise the error has a table of have and want: `MissingError` if the step
        only lacks tensors, else `IncompatibleError`.
        """
        mine = {f"{MODEL}/{shard.spec.name}": _info(shard) for shard in weights}
        mine |= {shard.spec.name: _info(shard) for shard in training}
        stored = self._stored()
        misfits = {key: each for key, each in mine.items() if stored.get(key) != each}
        told = gather_objects((misfits, stored.keys() - mine.keys()), self._layout)
        want = {key: each for theirs, _ in told for key, each in theirs.items()}
        unwanted = set.intersection(*(unwanted for _, unwanted in told))
        have = {key: stored[key] for key in want.keys() | unwanted if key in stored}
        _require_slots(self._step.path, _sets(stored), _sets(want))
        _require_same(self._step.path, have, want)

    @property
    def holds_training(self) -> bool:
        """Whether the step holds optimizer state of the model."""
        return bool(_sets(self._stored()) - {MODEL})

    def _stored(self) -> dict[str, TensorInfo]:
        """The model's tensors by key without their role."""
        found = {}
        for key, info in self._reader.tensors.items():
            tensor_set = set_of(self._reader.locations[key].file) or ""
            if tensor_set.rpartition("/")[0] == self._prefix.rstrip("/"):
                found[key.removeprefix(self._prefix)] = TensorInfo(info.dtype, info.shape)
        return found

    def fill(self, shards: Iterable[Shard]) -> None:
        """Fill each shard's tensor in place, converted to its dtype. Collective, errors included.

        Raises `MissingError` for an absent tensor, `IncompatibleError` for another shape or an unknown dtype, `CorruptError` naming file
        and tensor for a damaged block.
        """
        shards = list(shards)
        with agree(self._layout):
            keyed = [(self._checked(shard), shard) for shard in shards]
        what = f"{self._step.path} cannot be read"
        readers = max(_READERS, self._storage.reads_at_once)
        with agree(self._layout), naming_failures(what), self._reader:
            places = self._reader.locations
            keyed.sort(key=lambda each: (places[each[0]].file, places[each[0]].entry.begin))
            with ThreadPoolExecutor(readers, "burnish-read") as pool:
                reads = [
                    pool.submit(self._reader.read, key, shard.box, shard.tensor)
                    for key, shard in keyed
                ]
                try:
                    for read in reads:
                        read.result()
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise

    def _checked(self, shard: Shard) -> str:
        """The key of the stored tensor that a shard is a piece of."""
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


def _info(shard: Shard) -> TensorInfo:
    return TensorInfo(shard.tensor.dtype, shard.spec.shape)


def _sets(keys: Iterable[str]) -> set[str]:
    return {key.partition("/")[0] for key in keys}


def _require_slots(where: PurePath, stored: set[str], wanted: set[str]) -> None:
    """Raise `MissingError` unless every set of optimizer slots that is wanted is there."""
    absent = sorted(wanted - stored)
    if absent:
        raise MissingError(
            f"{where} has no optimizer state {', '.join(absent)}",
            have=", ".join(sorted(stored)) or "no tensors",
            want=", ".join(sorted(wanted)),
            do="resume with the optimizer that wrote it; checkpoint.fresh_optimizer=true begins with a fresh one where there is none",
        )


def _require_same(
    where: PurePath, have: Mapping[str, TensorInfo], want: Mapping[str, TensorInfo]
) -> None:
    """Raise with a table unless both have the same tensors, dtypes and shapes; slots are shown only if weights agree."""
    keys = sorted(key for key in {**want, **have} if have.get(key) != want.get(key))
    if not keys:
        return
    keys = [key for key in keys if key.startswith(f"{MODEL}/")] or keys
    text = f"{where} does not hold what is trained\n{_table(keys, have, want)}"
    do = "resume with the model that wrote it, or begin another run with name=NAME"
    if all(key not in have for key in keys):
        raise MissingError(text, do=do)
    raise IncompatibleError(text, do=do)


def _table(keys: list[str], have: Mapping[str, TensorInfo], want: Mapping[str, TensorInfo]) -> str:
    rows = [("tensor", "have", "want")]
    rows += [
        (key.removeprefix(f"{MODEL}/"), _text(have.get(key)), _text(want.get(key)))
        for key in keys[:_ROWS]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {name:<{widths[0]}}  {a:<{widths[1]}}  {b}" for name, a, b in rows]
    more = [f"  and {len(keys) - _ROWS} more"] if len(keys) > _ROWS else []
    return "\n".join(lines + more)


def _text(info: TensorInfo | None) -> str:
    return (
        _NOTHING if info is None else f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
    )

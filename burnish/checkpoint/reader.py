"""Read tensors of a committed step: `burnish.boxes.tensor_reader` that checks every block it reads.

Weights stored as bf16 and residual are returned exact, as fp32.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from threading import Lock

import torch
from torch import Tensor

from burnish.boxes.box import Box
from burnish.boxes.tensor_reader import OpenFiles, TensorReader, locate
from burnish.checkpoint.layout import add_residual
from burnish.checkpoint.naming import MODEL, RESIDUAL, set_of
from burnish.checkpoint.steps import Committed
from burnish.checkpoint.verify import READ_BYTES, checked_header, read_blocks
from burnish.distributed.host_memory import Arena
from burnish.files.safetensors import Header
from burnish.files.storage import LocalStorage, Source

_HELD_BYTES = 8 << 20
# Of blocks that were read and may hold more that is wanted; two blocks at least.


class StepReader(TensorReader):
    """All tensors of a committed step, by key (`model/NAME`, `exp_avg/NAME`, `critic/model/NAME`).

    `read` into fp32 memory returns split weights bit for bit; other dtypes are converted from `model/`. Raises `DamagedBlock` for a
    damaged block. Opening raises as `verify.checked_header` does, unless the `headers` of all files are given. Buffers come from
    `arena` if there is one.
    """

    def __init__(
        self,
        step: Committed,
        storage: Source | None = None,
        headers: Mapping[str, Header] | None = None,
        arena: Arena | None = None,
    ) -> None:
        self._step, self._storage, self._arena = step, storage or LocalStorage(), arena
        if headers is None:
            headers = read_headers(step, tensor_files(step), self._storage)
        places = [(f"{set_of(name)}/", name, header) for name, header in headers.items()]
        super().__init__(step.path, locate(step.path, places))
        self._residuals = _residuals(self.locations)
        hidden = set(self._residuals.values())
        self.tensors = {
            key: replace(info, dtype=torch.float32) if key in self._residuals else info
            for key, info in self.tensors.items()
            if key not in hidden
        }
        sizes = [step.manifest.files[name].block_bytes for name in headers]
        self.apart_bytes = max(sizes, default=1)
        self._held = max(2, _HELD_BYTES // self.apart_bytes)
        self._spare: list[memoryview] = []
        self._files = OpenFiles(lambda name: self._storage.open(step.path / name))
        self._blocks: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._lock = Lock()

    def read(self, key: str, box: Box, into: Tensor) -> None:
        """See `TensorReader.read`."""
        if key in self._residuals and into.dtype == torch.float32:
            self.fill([(key, Tensor.copy_), (self._residuals[key], add_residual)], box, into)
        else:
            super().read(key, box, into)

    def _read_bytes(self, file: str, into: memoryview, offset: int) -> None:
        record = self._step.manifest.files[file]
        size = record.block_bytes
        at_once = READ_BYTES if self._storage.reads_at_once > 1 else READ_BYTES // 16
        while into:
            number, skipped = divmod(offset, size)
            is_end = offset + len(into) == record.size
            count = len(into) if is_end else len(into) // size * size
            if count and not skipped:
                read_blocks(self._files[file], self._step, file, number, into[:count], at_once)
            else:
                count = min(len(into), size - skipped)
                self._read_part(file, number, into[:count], skipped)
            into, offset = into[count:], offset + count

    def _read_part(self, file: str, number: int, into: memoryview, start: int) -> None:
        """Fill memory from byte `start` of a block, and keep the block for the next tensor."""
        with self._lock:
            data = self._blocks.pop((file, number), None)
            if data is not None:
                self._blocks[file, number] = data
                into[:] = data[start : start + len(into)]
                return
            data = self._spare.pop() if self._spare else memoryview(bytearray(self.apart_bytes))
        record = self._step.manifest.files[file]
        size = min(record.block_bytes, record.size - number * record.block_bytes)
        read_blocks(self._files[file], self._step, file, number, data[:size])
        with self._lock:
            into[:] = data[start : start + len(into)]
            if (file, number) in self._blocks:
                self._spare.append(data)
                return
            self._blocks[file, number] = data
            if len(self._blocks) > self._held:
                self._spare.append(self._blocks.popitem(last=False)[1])

    def _new_buffer(self, size: int) -> Tensor:
        return super()._new_buffer(size) if self._arena is None else self._arena.take(size)

    def close(self) -> None:
        """Close the files, and give memory back."""
        super().close()
        self._blocks.clear()
        self._spare.clear()
        self._files.close()


def tensor_files(step: Committed) -> list[str]:
    """The names of a step's files that hold tensors."""
    return [name for name in sorted(step.manifest.files) if set_of(name) is not None]


def read_headers(step: Committed, names: Iterable[str], storage: Source) -> dict[str, Header]:
    """Return the headers of some files of a step. Raises as `verify.checked_header` does."""
    return {name: checked_header(step, name, storage) for name in names}


def _residuals(keys: Iterable[str]) -> dict[str, str]:
    """For the key of each weight that was split, the key of its residual."""
    known, found = set(keys), {}
    for key in known:
        role, slash, name = key.partition(f"{RESIDUAL}/")
        weight = f"{role}{MODEL}/{name}"
        if slash and (not role or role.endswith("/")) and weight in known:
            found[weight] = key
    return found

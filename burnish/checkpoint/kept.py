"""A run's own copy of the tensors that it does not train, from which every step takes them.

So nothing is lost if the directory that training began from changes or vanishes.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash
from safetensors.torch import load_file
from torch import Tensor

from burnish.boxes.tensor_reader import DirectoryReader, TensorInfo, bytes_of, chunks, dtype_name
from burnish.checkpoint.load import CheckpointSource
from burnish.errors import CorruptError, few
from burnish.files.safetensors import build_header
from burnish.models.language_model import Composite

_CHUNK = 1 << 20

_log = logging.getLogger(__name__)

Read = Callable[[str, int, int], Tensor]
"""Returns a tensor's elements from one to another in C order, in its own dtype."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of tensors, and the digest of its bytes."""

    path: Path
    digest: str

    @classmethod
    def write(cls, path: Path, tensors: Mapping[str, TensorInfo], read: Read) -> KeptFile:
        """Copy tensors into a file, some MiB at a time; the file appears whole. Raises `OSError`, and as `read` does."""
        described = [(n, dtype_name(info.dtype, n), info.shape) for n, info in tensors.items()]
        header, _ = build_header(described, {"format": "pt"})
        digest = xxhash.xxh3_128(header)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        path.parent.mkdir(exist_ok=True)
        try:
            with partial.open("xb") as file:
                file.write(header)
                for name, info in tensors.items():
                    for start, stop in chunks(info.elements, _CHUNK):
                        data = bytes_of(read(name, start, stop))
                        file.write(data)
                        digest.update(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        return cls(path, digest.hexdigest())

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors, mapped and not read into memory. Raises `CorruptError` if the file has changed."""
        digest = xxhash.xxh3_128()
        with self.path.open("rb") as file:
            while data := file.read(_CHUNK):
                digest.update(data)
        if digest.hexdigest() != self.digest:
            raise CorruptError(
                f"{self.path} has changed since the run began",
                have=digest.hexdigest(),
                want=self.digest,
                do="start the same command again: it takes these tensors from the newest step",
            )
        return load_file(self.path)


def keep(
    path: Path, composite: Composite, step: CheckpointSource | None
) -> Callable[[], Mapping[str, Tensor]]:
    """Copy what surrounds a composite's language model, from a step or the composite itself; return the copy's reader.

    Raises as `KeptFile.write` does, and `DamagedBlock`.
    """
    if step is None:
        with DirectoryReader(composite.directory) as reader:
            file = KeptFile.write(path, composite.rest, reader.read_range)
    else:

        def read(name: str, start: int, stop: int) -> Tensor:
            return step.read(name, start, stop, composite.rest[name].dtype)

        file = KeptFile.write(path, composite.rest, read)
    message = "the language model of %s is trained; %d other tensors are saved as they are: %s"
    _log.info(message, composite.directory, len(composite.rest), few(list(composite.rest)))
    return file.tensors

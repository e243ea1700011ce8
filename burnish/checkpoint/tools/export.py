"""Write a model as a plain Hugging Face directory in a chosen dtype, streamed from disk to disk.

A step's `model/` is one already, in bf16. This is for another dtype or file size, a merged adapter, or a copy without anything of
Burnish. The directory appears whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from burnish.boxes.tensor_reader import TensorInfo, chunks, dtype_name
from burnish.checkpoint.layout import PlannedFile, Stored, plan_files
from burnish.checkpoint.naming import MODEL
from burnish.checkpoint.steps import require_outside_steps
from burnish.checkpoint.tools.exportable import Exportable
from burnish.errors import IncompatibleError, UsageError
from burnish.files.durable import naming_failures, partial_directory
from burnish.files.storage import File, LocalStorage, Storage

_CHUNK = (
    1 << 14
)  # elements: temporaries that malloc keeps; larger ones cost ten times as much, in page faults


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    """The directory."""
    files: tuple[str, ...]
    """The names in it."""
    size: int
    """Bytes of all of them."""


def export(
    model: Exportable,
    target: Path,
    dtype: torch.dtype,
    max_file_bytes: int,
    storage: Storage | None = None,
) -> Exported:
    """Write a model to the directory `target`, its floating-point tensors in `dtype`.

    Tensors that stay in fp32 beside lower precision stay so. Files have `max_file_bytes` or one tensor. Holds a few blocks in memory.
    Raises `UsageError` if `target` exists or is inside a step, `IncompatibleError` naming a tensor with a number too large for
    `dtype`, or in 8 bits, `CorruptError` for a damaged block.
    """
    storage = storage or LocalStorage()
    target = target.absolute()
    _check_new(target, storage)
    with (
        naming_failures(f"{target} could not be written"),
        partial_directory(target, storage) as partial,
    ):
        _write_tensors(model, partial, dtype, max_file_bytes, storage)
        for name, data in model.assets(dtype):
            storage.make_dirs((partial / name).parent)
            _write_file(partial / name, data, storage)
        found = _sync(partial, partial, storage)
        storage.rename(partial, target)
        storage.sync_dir(target.parent)
    return Exported(target, tuple(found), sum(found.values()))


def _check_new(target: Path, storage: Storage) -> None:
    """Refuse what is there; an empty directory is as good as none."""
    kind = storage.kind(target)
    if kind is not None and (kind != "directory" or storage.entries(target)):
        raise UsageError(
            f"{target} is there already",
            want="a directory that is yet to be made",
            do="give another name, or remove it",
        )
    require_outside_steps(target, storage)


def _write_tensors(
    model: Exportable, directory: Path, dtype: torch.dtype, max_file_bytes: int, storage: Storage
) -> None:
    for name, each in model.weights.items():
        if each.dtype.is_floating_point and each.dtype.itemsize == 1:
            raise IncompatibleError(
                f"tensor {name} is quantized to 8 bits",
                have=each.dtype,
                want="weights of 16 bits or more; without their scales these mean nothing",
                do="take the directory as it is, or convert it with the program that quantized it",
            )
    stored = [
        Stored(MODEL, name, dtype_name(_target(each, dtype), name), each.shape)
        for name, each in model.weights.items()
    ]
    files, indices = plan_files(stored, max_file_bytes)
    for file in files:  # all of them first, so that a full disk shows at once
        with storage.create(directory / Path(file.path).name, file.size):
            pass
    for path, data in indices.items():
        _write_file(directory / Path(path).name, data, storage)
    for file in files:
        with storage.open(directory / Path(file.path).name, write=True) as out:
            out.pwrite(file.header, 0)
            _write_file_tensors(model, file, dtype, out)
            out.sync()


def _write_file_tensors(
    model: Exportable, file: PlannedFile, dtype: torch.dtype, out: File
) -> None:
    for entry in file.entries:
        described = model.weights[entry.name]
        wanted = _target(described, dtype)
        for start, stop in chunks(described.elements, _CHUNK):
            read = model.read(entry.name, start, stop, wanted)
            elements = _converted(read, wanted, entry.name)
            data = memoryview(elements.view(torch.uint8).numpy().data)
            out.pwrite(data, entry.begin + start * wanted.itemsize)


def _target(described: TensorInfo, dtype: torch.dtype) -> torch.dtype:
    """Return a tensor's dtype in the export."""
    if not described.dtype.is_floating_point or described.stays_fp32:
        return described.dtype
    return dtype


def _converted(elements: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if elements.dtype == dtype:
        return elements
    result = elements.to(dtype)
    if not dtype.is_floating_point:
        return result
    too_large = result.isinf() & elements.isfinite()
    if bool(too_large.any()):
        raise IncompatibleError(
            f"tensor {name} has numbers too large for {str(dtype).partition('.')[2]}",
            have=float(elements[too_large].abs().max()),
            want=f"at most {torch.finfo(dtype).max:g}",
            do="export bf16 or fp32",
        )
    return result


def _write_file(path: Path, data: bytes, storage: Storage) -> None:
    with storage.create(path, len(data)) as out:
        out.pwrite(data, 0)
        out.sync()


def _sync(directory: Path, root: Path, storage: Storage) -> dict[str, int]:
    """Make the names durable; the files below by name, with their sizes."""
    found: dict[str, int] = {}
    for entry in storage.entries(directory):
        path = directory / entry.name
        if entry.kind == "directory":
            found |= _sync(path, root, storage)
        else:
            found[path.relative_to(root).as_posix()] = entry.size
    storage.sync_dir(directory)
    return found

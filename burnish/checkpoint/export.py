"""A step's model as a plain Hugging Face directory in a dtype of choice, streamed from disk to disk.

`model/` is such a directory already, in bf16; this is for another dtype, another size of files, or
a copy that has nothing of Burnish in it. Nothing is there under its name before it is whole.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from burnish.checkpoint.assets import CONFIG, with_dtype
from burnish.checkpoint.blocks import PlannedFile, Stored, plan_files
from burnish.checkpoint.committed import Committed
from burnish.checkpoint.dtypes import dtype_name
from burnish.checkpoint.streams import SUFFIX, Described, StepTensors, chunks
from burnish.checkpoint.tensor_sets import MAIN, MODEL, prefix_of, roles_in
from burnish.checkpoint.verify import read_block
from burnish.errors import IncompatibleError, MissingError, UsageError
from burnish.files.durable import naming_failures
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
    step: Committed,
    target: Path,
    dtype: torch.dtype,
    max_file_bytes: int,
    storage: Storage | None = None,
    role: str = MAIN,
) -> Exported:
    """Write a model of a step, the run's own or that of a role, to the directory `target`, its floating-point tensors in `dtype`.

    bf16 is what `model/` holds, bit for bit; other dtypes come from the exact fp32 weights where
    the step has them. Files have `max_file_bytes` or a single tensor. Holds a few blocks.

    Raises `UsageError` when `target` is there, `IncompatibleError` naming the tensor with a number
    too large for `dtype` or for a step without a whole model, `MissingError` for one without this role, `CorruptError` for a damaged block.
    """
    storage = storage or LocalStorage()
    model = _model_directory(step, role)
    target = target.absolute()
    _check_new(target, storage)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    with naming_failures(f"{target} could not be written"), StepTensors(step, storage) as tensors:
        try:
            storage.make_dirs(partial)
            _write_tensors(tensors, model, partial, dtype, max_file_bytes, storage)
            _write_assets(step, model, partial, dtype, storage)
            found = _sync(partial, partial, storage)
            storage.rename(partial, target)
            storage.sync_dir(target.parent)
        except BaseException:
            with suppress(OSError):
                storage.remove(partial)
            raise
    return Exported(target, tuple(found), sum(found.values()))


def _model_directory(step: Committed, role: str) -> str:
    """Where the model lies below the step, with a slash at the end."""
    roles = roles_in(step.manifest.files)
    if role not in roles:
        raise MissingError(
            f"{step.path} holds no {role or 'model'}",
            have=f"further models: {', '.join(each for each in roles if each) or 'none'}",
            want=f"the name of one of them, or none for {MODEL}/",
        )
    directory = f"{prefix_of(role)}{MODEL}/"
    if f"{directory}{CONFIG}" not in step.manifest.files:
        raise IncompatibleError(f"{step.path} holds no whole model", want=f"{directory}{CONFIG}")
    return directory


def _check_new(target: Path, storage: Storage) -> None:
    """Refuse what is there; an empty directory is as good as none."""
    there = [entry for entry in storage.entries(target.parent) if entry.name == target.name]
    if there and (there[0].kind != "directory" or storage.entries(target)):
        raise UsageError(f"{target} is there already", want="a directory that is yet to be made")


def _write_tensors(
    tensors: StepTensors,
    model: str,
    directory: Path,
    dtype: torch.dtype,
    max_file_bytes: int,
    storage: Storage,
) -> None:
    weights = {
        key.removeprefix(model): described
        for key, described in tensors.tensors.items()
        if key.startswith(model)
    }
    stored = [
        Stored(MODEL, name, dtype_name(_target(each, dtype), name), each.shape)
        for name, each in weights.items()
    ]
    files, indices = plan_files(stored, max_file_bytes)
    for file in files:  # all of them first, so that a full disk shows at once
        with storage.create(directory / Path(file.path).name, file.size):
            pass
    for path, data in indices.items():
        _write_file(directory / Path(path).name, [data], storage)
    for file in files:
        with storage.open(directory / Path(file.path).name, write=True) as out:
            out.pwrite(file.header, 0)
            _write_file_tensors(tensors, model, file, weights, dtype, out)
            out.sync()


def _write_file_tensors(
    tensors: StepTensors,
    model: str,
    file: PlannedFile,
    weights: Mapping[str, Described],
    dtype: torch.dtype,
    out: File,
) -> None:
    for entry in file.entries:
        key, described = f"{model}{entry.name}", weights[entry.name]
        wanted = _target(described, dtype)
        read = tensors.read_rounded if wanted == torch.bfloat16 else tensors.read
        for start, stop in chunks(described.elements, _CHUNK):
            elements = _converted(read(key, start, stop), wanted, entry.name)
            data = memoryview(elements.view(torch.uint8).numpy().data)
            out.pwrite(data, entry.begin + start * wanted.itemsize)


def _target(described: Described, dtype: torch.dtype) -> torch.dtype:
    """What a tensor becomes: floating-point ones the dtype of choice, others stay."""
    return dtype if described.dtype.is_floating_point else described.dtype


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


def _write_assets(
    step: Committed, model: str, directory: Path, dtype: torch.dtype, storage: Storage
) -> None:
    """Copy what makes it a Hugging Face directory; config.json gets the dtype."""
    for name, record in step.manifest.files.items():
        if not name.startswith(model) or name.endswith((SUFFIX, f"{SUFFIX}.index.json")):
            continue
        with storage.open(step.path / name) as file:
            blocks = [bytes(read_block(file, step, name, n)) for n in range(len(record.blocks))]
        if name == f"{model}{CONFIG}":
            blocks = [with_dtype(b"".join(blocks), dtype, step.path / name)]
        target = directory / name.removeprefix(model)
        storage.make_dirs(target.parent)
        _write_file(target, blocks, storage)


def _write_file(path: Path, parts: Sequence[bytes], storage: Storage) -> None:
    with storage.create(path, sum(map(len, parts))) as out:
        position = 0
        for part in parts:
            out.pwrite(part, position)
            position += len(part)
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

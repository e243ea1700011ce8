"""Tensors on disk read from the first element to the last, in pieces: for tools that hold no model.

A step's blocks are checked as they are read, and weights that were split are given exact, as fp32.
Left out: reading a part of many tensors onto many ranks (`burnish.checkpoint.load`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Protocol

import torch
from torch import Tensor

from burnish.checkpoint.dtypes import BY_NAME
from burnish.checkpoint.layout import add_residual
from burnish.checkpoint.naming import MODEL, RESIDUAL, set_of
from burnish.checkpoint.steps import Committed
from burnish.checkpoint.verify import checked_header, read_block
from burnish.errors import CorruptError, IncompatibleError
from burnish.files.safetensors import Header, TensorEntry, read_header, weight_files
from burnish.files.storage import Closing, LocalStorage, ReadableFile, Source

_BLOCKS_HELD = 3


@dataclass(frozen=True, slots=True)
class Described:
    """What is known of a tensor without reading it."""

    dtype: torch.dtype
    """As `read` gives it."""
    shape: tuple[int, ...]
    """Its shape."""
    stays_fp32: bool = False
    """Whether it is stored in fp32 beside others that are not: its family keeps it so."""

    @property
    def elements(self) -> int:
        """How many."""
        return prod(self.shape)


class TensorStream(Closing, Protocol):
    """Tensors by key (`model/NAME`, `exp_avg/NAME`), read in pieces of any size. A context manager."""

    path: PurePath
    tensors: Mapping[str, Described]

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """The elements from `start` to `stop` in C order, one-dimensional, in memory of their own."""


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    """Its name below the directory."""
    entry: TensorEntry

    @property
    def dtype(self) -> torch.dtype:
        return BY_NAME[self.entry.dtype]

    def tensor_set(self, key: str) -> str:
        """The tensor set that it is in, of its key."""
        return key.removesuffix(f"/{self.entry.name}")


class _Files(Closing):
    """The files of a directory, each opened once, by name."""

    def __init__(self, directory: PurePath, storage: Source | None) -> None:
        self.path = directory
        self._storage = storage or LocalStorage()
        self._opened = ExitStack()
        self._files: dict[str, ReadableFile] = {}

    def _file(self, name: str) -> ReadableFile:
        if name not in self._files:
            opened = self._storage.open(self._where(name))
            self._files[name] = self._opened.enter_context(opened)
        return self._files[name]

    def _where(self, name: str) -> PurePath:
        return self.path / name

    def close(self) -> None:
        """Close the files."""
        self._opened.close()


class DirectoryTensors(_Files):
    """The weights of a Hugging Face directory; a `TensorStream` that checks headers and nothing else.

    Follows links, for Hugging Face's cache is made of them.
    Raises `MissingError` for a directory without safetensors or that lacks one of its files,
    `CorruptError` for a file that is not what it says, `IncompatibleError` for an unknown dtype.
    """

    def __init__(self, directory: Path, storage: Source | None = None) -> None:
        super().__init__(directory, storage)
        headers = [(path.name, read_header(path)) for path in weight_files(directory)]
        self._places = _places(directory, [("model", *each) for each in headers])
        self.tensors: Mapping[str, Described] = _described(self._places, {})

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """See `TensorStream.read`."""
        place = self._places[key]
        result = torch.empty(stop - start, dtype=place.dtype)
        offset = place.entry.begin + start * place.dtype.itemsize
        try:
            self._file(place.file).pread_into(_memory(result), offset)
        except EOFError as error:
            raise CorruptError(
                f"{self.path / place.file} became shorter",
                have=error,
                do="try again when nobody writes there",
            ) from error
        return result

    def _where(self, name: str) -> PurePath:
        return Path(self.path / name).resolve()


class StepTensors(_Files):
    """All tensors of a committed step; a `TensorStream` that holds a few blocks.

    Reading raises `DamagedBlock` for a block that is not what was written. Opening raises as
    `DirectoryTensors` does.
    """

    def __init__(self, step: Committed, storage: Source | None = None) -> None:
        super().__init__(step.path, storage)
        self._step = step
        self._blocks: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        headers = [
            (tensor_set, name, checked_header(step, name, self._storage))
            for name in sorted(step.manifest.files)
            if (tensor_set := set_of(name)) is not None
        ]
        self._places = _places(step.path, headers)
        self._residuals = _residuals(self._places)
        self.tensors: Mapping[str, Described] = _described(self._places, self._residuals)

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """See `TensorStream.read`; fp32 where the weight was split."""
        stored = self._read(key, start, stop)
        if key not in self._residuals:
            return stored
        exact = stored.to(torch.float32)
        add_residual(exact, self._read(self._residuals[key], start, stop))
        return exact

    def read_rounded(self, key: str, start: int, stop: int) -> Tensor:
        """As `model/` holds it."""
        return self._read(key, start, stop)

    def _read(self, key: str, start: int, stop: int) -> Tensor:
        place = self._places[key]
        result = torch.empty(stop - start, dtype=place.dtype)
        target = _memory(result)
        size = self._step.manifest.files[place.file].block_bytes
        position = place.entry.begin + start * place.dtype.itemsize
        while target:
            number, offset = divmod(position, size)
            data = self._block(place.file, number)[offset : offset + len(target)]
            target[: len(data)] = data
            target, position = target[len(data) :], position + len(data)
        return result

    def _block(self, name: str, number: int) -> memoryview:
        key = (name, number)
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        if len(self._blocks) == _BLOCKS_HELD:
            self._blocks.popitem(last=False)
        self._blocks[key] = read_block(self._file(name), self._step, name, number)
        return self._blocks[key]


def chunks(elements: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of at most `size` that make up so many elements."""
    for start in range(0, elements, size):
        yield start, min(start + size, elements)


def _places(directory: PurePath, headers: list[tuple[str, str, Header]]) -> dict[str, _Place]:
    """Tensors by key, in the order of their bytes. Checks dtypes, and that none is there twice."""
    places: dict[str, _Place] = {}
    for tensor_set, name, header in headers:
        for entry in header.entries.values():
            key = f"{tensor_set}/{entry.name}"
            if key in places:
                both = f"{places[key].file} and {name}"
                raise CorruptError(
                    f"tensor {key} is in two files of {directory}",
                    have=both,
                    do="remove the file that is not the model's",
                )
            if entry.dtype not in BY_NAME:
                raise IncompatibleError(
                    f"tensor {entry.name} in {directory / name} has a dtype that is not handled",
                    have=entry.dtype,
                    want=", ".join(BY_NAME),
                    do="use the program that wrote it",
                )
            places[key] = _Place(name, entry)
    return places


def _described(places: Mapping[str, _Place], residuals: Mapping[str, str]) -> dict[str, Described]:
    """What is known of each tensor by key; residuals belong to the weights that they complete."""
    hidden = set(residuals.values())
    lower = {
        place.tensor_set(key)
        for key, place in places.items()
        if place.dtype.is_floating_point and place.dtype.itemsize < torch.float32.itemsize
    }
    return {
        key: Described(
            torch.float32 if key in residuals else place.dtype,
            place.entry.shape,
            place.dtype == torch.float32 and place.tensor_set(key) in lower,
        )
        for key, place in places.items()
        if key not in hidden
    }


def _residuals(places: Mapping[str, _Place]) -> dict[str, str]:
    """For the key of each weight that was split, the key of what `model/` lacks of it."""
    found = {}
    for key, place in places.items():
        tensor_set = place.tensor_set(key)
        weight = f"{tensor_set.removesuffix(RESIDUAL)}{MODEL}/{place.entry.name}"
        if tensor_set.rpartition("/")[2] == RESIDUAL and weight in places:
            found[weight] = key
    return found


def _memory(tensor: Tensor) -> memoryview:
    """A tensor's bytes."""
    return memoryview(tensor.view(torch.uint8).numpy().data).cast("B")

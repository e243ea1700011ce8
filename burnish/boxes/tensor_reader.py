"""Read any part of the tensors in safetensors files. Threads may share a reader."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from burnish.boxes.box import Box, flat_range, intersect
from burnish.errors import CorruptError, IncompatibleError
from burnish.files.safetensors import Header, TensorEntry, read_header, weight_files
from burnish.files.storage import LOCAL, Closing, ReadableFile

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip
"""torch's dtypes by the names that safetensors files give them: all whose elements fill whole bytes."""

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_BUFFER_BYTES = 1 << 20
_PAGE = 4096

F = TypeVar("F", bound=ReadableFile)

Put = Callable[[Tensor, Tensor], object]
"""Writes elements that were read (second) into the memory that wants them (first), of the same shape."""


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Return the format's name of a dtype. Raises `IncompatibleError` naming the tensor."""
    if dtype not in _NAMES:
        raise IncompatibleError(
            f"tensor {tensor} has a dtype that safetensors files cannot hold",
            have=dtype,
            want=", ".join(TORCH_DTYPES),
            do="convert the tensor to one of them before it is saved",
        )
    return _NAMES[dtype]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that is not read."""

    dtype: torch.dtype
    """The dtype that loses nothing; `read` converts to whatever it is given."""
    shape: tuple[int, ...]
    """Its shape."""
    stays_fp32: bool = False
    """Whether it is stored in fp32 beside others that are not, because its family keeps it so."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Location:
    """Where a stored tensor lies."""

    file: str
    """Name of the file below the reader's directory."""
    entry: TensorEntry
    """Its name, dtype, shape and bytes in that file."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it is stored in."""
        return TORCH_DTYPES[self.entry.dtype]


def locate(directory: PurePath, headers: Iterable[tuple[str, str, Header]]) -> dict[str, Location]:
    """Return the tensors of files, by key, in the order of their bytes. A header comes with key prefix and file name.

    Raises `CorruptError` for a tensor that is there twice, `IncompatibleError` for a dtype that torch lacks.
    """
    found: dict[str, Location] = {}
    for prefix, file, header in headers:
        for entry in header.entries.values():
            key = f"{prefix}{entry.name}"
            if key in found:
                raise CorruptError(
                    f"tensor {key} is in two files of {directory}",
                    have=f"{found[key].file} and {file}",
                    do="remove the file that is not the model's",
                )
            if entry.dtype not in TORCH_DTYPES:
                raise IncompatibleError(
                    f"tensor {entry.name} in {directory / file} has a dtype that is not handled",
                    have=entry.dtype,
                    want=", ".join(TORCH_DTYPES),
                    do="convert it with the program that wrote it",
                )
            found[key] = Location(file, entry)
    return found


class TensorReader(Closing, ABC):
    """Read any part of tensors into any memory. Holds a buffer of 1 MiB for each thread."""

    path: PurePath
    """The directory."""
    locations: Mapping[str, Location]
    """Every stored tensor, in the order of the files."""
    tensors: Mapping[str, TensorInfo]
    """What can be read."""
    apart_bytes = _PAGE
    """Wanted bytes closer to each other than this are read together with what lies between them."""

    def __init__(self, path: PurePath, locations: Mapping[str, Location]) -> None:
        self.path = path
        self.locations = locations
        self.tensors = _described(locations)
        self._buffers: list[Tensor] = []

    def read(self, key: str, box: Box, into: Tensor) -> None:
        """Write a box into memory of its shape, with any dtype, strides and device. Raises `CorruptError`."""
        self.fill([(key, Tensor.copy_)], box, into)

    def read_range(
        self, key: str, start: int, stop: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return elements in C order, flat, in `dtype` or the tensor's own."""
        info = self.tensors[key]
        result = torch.empty(stop - start, dtype=dtype or info.dtype)
        for box in flat_range(info.shape, start, stop):
            first = _flat(info.shape, box.offsets) - start
            self.read(key, box, result[first : first + box.elements].view(box.sizes))
        return result

    def fill(self, sources: Sequence[tuple[str, Put]], box: Box, into: Tensor) -> None:
        """Read several stored tensors of one shape, each with its way to put elements."""
        shape = self.locations[sources[0][0]].entry.shape
        if not box.fits(shape):
            raise ValueError(f"{box} does not lie inside a tensor of shape {shape}")
        into = into.detach()
        widest = max(self.locations[key].dtype.itemsize for key, _ in sources)
        with torch.no_grad():
            for part in _dense_boxes(shape, box, self.apart_bytes // widest):
                there = into if part == box else into[part.relative_to(box).slices]
                [(key, put), *more] = sources
                if not more and put is Tensor.copy_ and self._read_directly(key, part, there):
                    continue
                self._read_in_chunks(sources, shape, part, there)

    def _read_directly(self, key: str, box: Box, into: Tensor) -> bool:
        """Read straight into memory with the file's layout; return whether it has."""
        at = self.locations[key]
        start, stop = _span(at.entry.shape, box)
        is_alike = into.device.type == "cpu" and into.dtype == at.dtype and into.is_contiguous()
        if not is_alike or stop - start != box.elements:
            return False
        flat = into.as_strided((into.numel(),), (1,))
        memory = memoryview(flat.view(torch.uint8).numpy().data)
        self._read_bytes(at.file, memory, at.entry.begin + start * at.dtype.itemsize)
        return True

    def _read_in_chunks(
        self, sources: Sequence[tuple[str, Put]], shape: tuple[int, ...], box: Box, into: Tensor
    ) -> None:
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = self._new_buffer(_BUFFER_BYTES)
        size = buffer.numel() // max(self.locations[key].dtype.itemsize for key, _ in sources)
        first, last = _span(shape, box)
        for start in range(first, last, size):
            stop = min(start + size, last)
            for key, put in sources:
                at = self.locations[key]
                raw = buffer[: (stop - start) * at.dtype.itemsize]
                offset = at.entry.begin + start * at.dtype.itemsize
                self._read_bytes(at.file, memoryview(raw.numpy().data), offset)
                elements = raw.view(at.dtype)
                for there in flat_range(shape, start, stop):
                    if (common := intersect(there, box)) is not None:
                        begin = _flat(shape, there.offsets) - start
                        part = elements[begin : begin + there.elements].view(there.sizes)
                        wanted = into[common.relative_to(box).slices]
                        put(wanted, part[common.relative_to(there).slices])
        self._buffers.append(buffer)

    def _new_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    @abstractmethod
    def _read_bytes(self, file: str, into: memoryview, offset: int) -> None:
        """Fill memory from a file's byte `offset` on."""

    def close(self) -> None:
        """Let go of the buffers."""
        self._buffers.clear()


class DirectoryReader(TensorReader):
    """Read the weights of a Hugging Face directory, by name behind `prefix`; check headers only. Follows links.

    Raises `MissingError`, `CorruptError`, and `IncompatibleError` for an unknown dtype.
    """

    def __init__(self, directory: Path, prefix: str = "") -> None:
        headers = [(prefix, path.name, read_header(path)) for path in weight_files(directory)]
        super().__init__(directory, locate(directory, headers))
        self._opened = OpenFiles(lambda name: LOCAL.open(Path(directory / name).resolve()))

    def _read_bytes(self, file: str, into: memoryview, offset: int) -> None:
        try:
            self._opened[file].pread_into(into, offset)
        except EOFError as error:
            raise CorruptError(
                f"{self.path / file} became shorter",
                have=error,
                do="try again when nobody writes there",
            ) from error

    def close(self) -> None:
        """Close the files; reading opens them again."""
        super().close()
        self._opened.close()


class OpenFiles(Closing, Generic[F]):
    """Open files by name, each once, on first use."""

    def __init__(self, opens: Callable[[str], F]) -> None:
        self._opens = opens
        self._lock = Lock()
        self._stack = ExitStack()
        self._files: dict[str, F] = {}

    def __getitem__(self, name: str) -> F:
        with self._lock:
            if name not in self._files:
                file = self._opens(name)
                self._stack.enter_context(file)
                self._files[name] = file
            return self._files[name]

    def close(self) -> None:
        """Close them."""
        self._stack.close()
        self._files.clear()


def _described(locations: Mapping[str, Location]) -> dict[str, TensorInfo]:
    def set_of(key: str) -> str:
        return key.removesuffix(locations[key].entry.name)

    narrow = {
        set_of(key)
        for key, each in locations.items()
        if each.dtype.is_floating_point and each.dtype.itemsize < torch.float32.itemsize
    }
    return {
        key: TensorInfo(
            each.dtype, each.entry.shape, each.dtype == torch.float32 and set_of(key) in narrow
        )
        for key, each in locations.items()
    }


def chunks(elements: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `size` that cover `elements`."""
    for start in range(0, elements, size):
        yield start, min(start + size, elements)


def _flat(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    place = 0
    for extent, at in zip(shape, index, strict=True):
        place = place * extent + at
    return place


def _span(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    if not box.elements:
        return 0, 0
    last = tuple(o + s - 1 for o, s in zip(box.offsets, box.sizes, strict=True))
    return _flat(shape, box.offsets), _flat(shape, last) + 1


def _dense_boxes(shape: tuple[int, ...], box: Box, apart: int) -> Iterator[Box]:
    """Split a box until neighbours in C order are less than `apart` elements apart."""
    if not box.elements:
        return
    cut, stride, extent = -1, 1, 1  # dims up to `cut` are walked over; `extent` spans those behind
    for dim in reversed(range(len(shape))):
        if box.sizes[dim] > 1 and stride - extent >= max(apart, 1):
            cut = dim
            break
        extent += (box.sizes[dim] - 1) * stride
        stride *= shape[dim]
    rest = (box.offsets[cut + 1 :], box.sizes[cut + 1 :])
    outer = (range(o, o + s) for o, s in zip(box.offsets[: cut + 1], box.sizes, strict=False))
    for index in itertools.product(*outer):
        yield Box((*index, *rest[0]), ((1,) * len(index)) + rest[1])

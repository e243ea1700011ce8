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
# Elements per chunk: few enough to stay in the processor's cache, and for torch to use a single thread. With two
# threads on a busy machine, each operation would wait for a processor.
_CHUNK = 1 << 15

F = TypeVar("F", bound=ReadableFile)

Sources = Sequence[tuple[str, Callable[[Tensor, Tensor], object]]]
"""Keys of stored tensors of one shape. Each key's function puts elements just read (first) into memory (second)."""


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Return safetensors' name of a dtype. Raises `IncompatibleError` naming the tensor."""
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
    """Dtype and shape of a stored tensor."""

    dtype: torch.dtype
    """The dtype that keeps every bit. `read` converts to the dtype of the memory that it fills."""
    shape: tuple[int, ...]
    """Its shape."""
    stays_fp32: bool = False
    """Whether the tensor is stored in fp32 beside tensors of lower precision, because its family keeps it in fp32."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Location:
    """Place of a stored tensor."""

    file: str
    """Name of the file below the reader's directory."""
    entry: TensorEntry
    """Its name, dtype, shape and bytes in that file."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it is stored in."""
        return TORCH_DTYPES[self.entry.dtype]

    def offset(self, element: int) -> int:
        """Return an element's first byte in the file."""
        return self.entry.begin + element * self.dtype.itemsize


def locate(directory: PurePath, headers: Iterable[tuple[str, str, Header]]) -> dict[str, Location]:
    """Return tensors' locations by key, in the order of their bytes. `headers` has each file's key prefix, name and header.

    Raises `CorruptError` for a tensor in two files, `IncompatibleError` for a dtype that torch lacks.
    """
    locations: dict[str, Location] = {}
    for prefix, file, header in headers:
        for entry in header.entries.values():
            key = f"{prefix}{entry.name}"
            if key in locations:
                raise CorruptError(
                    f"tensor {key} is in two files of {directory}",
                    have=f"{locations[key].file} and {file}",
                    do="remove the file that is not the model's",
                )
            if entry.dtype not in TORCH_DTYPES:
                raise IncompatibleError(
                    f"tensor {entry.name} in {directory / file} has a dtype that is not handled",
                    have=entry.dtype,
                    want=", ".join(TORCH_DTYPES),
                    do="convert it with the program that wrote it",
                )
            locations[key] = Location(file, entry)
    return locations


class TensorReader(Closing, ABC):
    """Read any part of tensors into any memory. Holds a buffer of 1 MiB per thread."""

    path: PurePath
    """The directory."""
    locations: Mapping[str, Location]
    """Every stored tensor, in the order of the files."""
    tensors: Mapping[str, TensorInfo]
    """The tensors that can be read, by key."""
    apart_bytes = 4096
    """Wanted bytes closer together than this are read at once, with the bytes between them."""

    def __init__(self, path: PurePath, locations: Mapping[str, Location]) -> None:
        self.path = path
        self.locations = locations
        self.tensors = _tensor_infos(locations)
        self._buffers: list[Tensor] = []

    def read(self, key: str, box: Box, into: Tensor) -> None:
        """Write a box into memory of its shape, with any dtype, strides and device. Raises `CorruptError`."""
        sources = self._sources(key, into.dtype)
        shape = self.locations[key].entry.shape
        if not box.fits(shape):
            raise ValueError(f"{box} does not lie inside a tensor of shape {shape}")
        into = into.detach()
        with torch.no_grad():
            widest = max(self.locations[key].dtype.itemsize for key, _ in sources)
            dense = _dense_boxes(shape, box, self.apart_bytes // widest)
            for part in [box] if _is_run(shape, box) else dense:
                target = into if part == box else into[part.relative_to(box).slices]
                if _is_run(shape, part) and target.is_contiguous():
                    self._read_run(sources, _flat(shape, part.offsets), target.view(-1))
                else:
                    self._read_dense(sources, shape, part, target)

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

    def same(self, key: str, other: str) -> bool:
        """Return whether two tensors have the same shape and numbers, in any dtypes. Stops at the first difference."""
        one = self.tensors[key]
        two = self.tensors[other]
        if one.shape != two.shape:
            return False
        for start, stop in chunks(one.elements, _BUFFER_BYTES):
            x = self.read_range(key, start, stop)
            y = self.read_range(other, start, stop)
            equal_bytes = x.dtype == y.dtype and torch.equal(
                x.view(torch.uint8), y.view(torch.uint8)
            )
            if not equal_bytes and not torch.equal(x.double(), y.double()):
                return False
        return True

    def _sources(self, key: str, dtype: torch.dtype) -> Sources:
        return [(key, copy)]

    def _read_run(self, sources: Sources, start: int, into: Tensor) -> None:
        [(key, put), *other_sources] = sources
        at = self.locations[key]
        if not other_sources and put is copy and into.is_cpu and into.dtype == at.dtype:
            self._read_bytes(at.file, bytes_of(into), at.offset(start))
            return
        for first, put, elements in self._elements(sources, start, start + len(into)):
            put(elements, into[first - start :][: len(elements)])

    def _read_dense(self, sources: Sources, shape: tuple[int, ...], box: Box, into: Tensor) -> None:
        for first, put, elements in self._elements(sources, *_span(shape, box)):
            for run in flat_range(shape, first, first + len(elements)):
                if (common := intersect(run, box)) is not None:
                    part = elements[_flat(shape, run.offsets) - first :][: run.elements]
                    common_elements = part.view(run.sizes)[common.relative_to(run).slices]
                    put(common_elements, into[common.relative_to(box).slices])

    def _elements(
        self, sources: Sources, first: int, last: int
    ) -> Iterator[tuple[int, Callable[[Tensor, Tensor], object], Tensor]]:
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = self._new_buffer(_BUFFER_BYTES)
        size = len(buffer) // max(self.locations[key].dtype.itemsize for key, _ in sources)
        for start, stop in chunks(last - first, size):
            for key, put in sources:
                at = self.locations[key]
                raw = buffer[: (stop - start) * at.dtype.itemsize]
                self._read_bytes(at.file, bytes_of(raw), at.offset(first + start))
                yield first + start, put, raw.view(at.dtype)
        self._buffers.append(buffer)

    def _new_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    @abstractmethod
    def _read_bytes(self, file: str, into: memoryview, offset: int) -> None:
        """Fill memory from a file's byte `offset` on."""

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


class DirectoryReader(TensorReader):
    """Read the weights of a Hugging Face directory, by `prefix` and name; check only headers. Follows links.

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
                f"{self.path / file} became shorter while it was read",
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
        """Close all files."""
        self._stack.close()
        self._files.clear()


def _tensor_infos(locations: Mapping[str, Location]) -> dict[str, TensorInfo]:
    def set_of(key: str) -> str:
        return key.removesuffix(locations[key].entry.name)

    narrow = {
        set_of(key)
        for key, location in locations.items()
        if location.dtype.is_floating_point and location.dtype.itemsize < torch.float32.itemsize
    }
    return {
        key: TensorInfo(
            location.dtype,
            location.entry.shape,
            location.dtype == torch.float32 and set_of(key) in narrow,
        )
        for key, location in locations.items()
    }


def copy(x: Tensor, into: Tensor) -> None:
    """Write x into memory."""
    for elements, copied in in_chunks(x.detach(), into):
        copied.copy_(elements)


def in_chunks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Split long contiguous CPU tensors into chunks."""
    if tensors[0].numel() <= _CHUNK or not all(x.is_cpu and x.is_contiguous() for x in tensors):
        return (tensors,)
    return zip(*(torch.split(each.view(-1), _CHUNK) for each in tensors), strict=True)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data)


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


def _is_run(shape: tuple[int, ...], box: Box) -> bool:
    first, last = _span(shape, box)
    return last - first == box.elements


def _dense_boxes(shape: tuple[int, ...], box: Box, apart: int) -> Iterator[Box]:
    """Split a box until neighbours in C order are less than `apart` elements apart."""
    if not box.elements:
        return
    # dims up to `cut` are split; `extent` is the later dims' span
    cut = -1
    stride = 1
    extent = 1
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

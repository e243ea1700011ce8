"""Keep activations of decoder layers on the host until the backward pass (vDNN, arXiv 1602.08124).

Whole storages are moved once each, and restored as the same views. On an accelerator, copies run on their own stream, one layer
behind the forward pass and one ahead of the backward pass, so the device holds two layers. Not moved: parameters, small tensors, and
results that selective checkpointing keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from burnish.distributed.host_memory import Arena, storage_bytes
from burnish.engines.torch.parallelize import Run

# Tensors of fewer bytes stay on the device.
_SMALL_BYTES = 1024


class _Stored:
    def __init__(self, tensor: Tensor) -> None:
        self.current = tensor
        """The tensor with the bytes: the saved tensor, a copy on the host, or a later copy on the device."""
        self.copy: Tensor | None = None
        """A copy on the host that may still be running."""
        self.on_host = False
        self.origin = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        """Keeps another storage from getting the same address, which identifies this one."""
        self._version: int | None = tensor._version

    @property
    def changed(self) -> bool:
        return self._version is not None and self.current._version != self._version

    def move(self, moved: Tensor) -> None:
        self.current = moved
        self.copy = None
        self._version = None
        self.on_host = not self.on_host


@dataclass(frozen=True, slots=True)
class _Saved:
    """A view of a storage. Autograd holds it in place of the saved tensor."""

    stored: _Stored
    dtype: torch.dtype
    offset: int | torch.SymInt
    shape: torch.Size
    strides: Sequence[int | torch.SymInt]

    def tensor(self) -> Tensor:
        storage = self.stored.current.untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.strides)


class _Layer:
    def __init__(self, module: nn.Module) -> None:
        self.stored: weakref.WeakSet[_Stored] = weakref.WeakSet()
        self.copied: torch.Event | None = None
        self.fetched = False
        self._module = module
        self._weights: frozenset[int] | None = None

    def weights(self) -> frozenset[int]:
        """Return the addresses of its parameters that FSDP has gathered. Experts that ranks share are gathered after the others."""
        if self._weights is not None:
            return self._weights
        parameters = list(self._module.parameters())
        gathered = [each for each in parameters if not isinstance(each, DTensor)]
        addresses = frozenset(each.untyped_storage().data_ptr() for each in gathered)
        if len(gathered) == len(parameters):
            self._weights = addresses
        return addresses


class ActivationOffload:
    """Moves tensors that layers save, for one device. Only autograd holds them; here are weak references."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self._arena = arena
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._moves = False
        self._layers: list[_Layer] = []
        """The layers of this forward pass, in order."""
        self._known: weakref.WeakValueDictionary[tuple[int, int], _Stored] = (
            weakref.WeakValueDictionary()
        )

    @contextmanager
    def forward_and_backward(self) -> Iterator[None]:
        """Move saved tensors in both passes over one micro-batch."""
        self._moves = True
        try:
            yield
        finally:
            self._moves = False
            self._layers.clear()
            self._known.clear()
            if self._stream is not None:
                self._wait(self._stream.record_event())

    def around(self, run: Run) -> Run:
        """Wrap `run`, which gets a layer's bound `__call__` or a partial of it."""

        def running(call: Any, *args: Any) -> Any:
            if not self._moves:
                return run(call, *args)
            with self._layer(getattr(call, "func", call).__self__):
                return run(call, *args)

        return running

    @contextmanager
    def _layer(self, module: nn.Module) -> Iterator[None]:
        """Note tensors that the block saves; meanwhile move those of the previous layer."""
        before = self._layers[-1] if self._layers else None
        if before is not None:
            before.copied = self._copy_out(before.stored)
        number = len(self._layers)
        layer = _Layer(module)
        self._layers.append(layer)
        with saved_tensors_hooks(partial(self._pack, layer), partial(self._unpack, number)):
            yield
        if before is not None:
            self._wait(before.copied)
            for stored in before.stored:
                if stored.copy is not None and not stored.changed:
                    stored.move(stored.copy)

    def _pack(self, layer: _Layer, tensor: Tensor) -> Tensor | _Saved:
        tensor = tensor.detach()  # its graph would hold our result, which holds it: a cycle
        storage = tensor.untyped_storage() if self._can_move(tensor) else None
        if storage is None or storage.data_ptr() in layer.weights():
            return tensor
        key = (storage._cdata, tensor._version)
        stored = self._known.get(key)
        if stored is None:
            stored = self._known[key] = _Stored(tensor)
        layer.stored.add(stored)
        offset = tensor.storage_offset()
        return _Saved(stored, tensor.dtype, offset, tensor.shape, tensor.stride())

    def _unpack(self, number: int, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.stored.changed:
            raise RuntimeError("a tensor that a layer had saved for its gradient was changed since")
        self._fetch(self._layers[number])
        self._wait(self._layers[number].copied)
        if number > 0:
            self._fetch(self._layers[number - 1])
        return saved.tensor()

    def _can_move(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        return (
            plain
            and tensor.device.type == self._device.type
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= _SMALL_BYTES
        )

    def _copy_out(self, saved: Iterable[_Stored]) -> torch.Event | None:
        pairs = []
        for stored in saved:
            if not (stored.on_host or stored.copy is not None or stored.changed):
                source = storage_bytes(stored.current)
                stored.copy = self._arena.take(len(source))
                pairs.append((stored.copy, source))
        return self._copy(pairs)

    def _fetch(self, layer: _Layer) -> None:
        """Begin to copy a layer's saved tensors to the device, once."""
        if layer.fetched:
            return
        moving = [stored for stored in layer.stored if stored.on_host]
        pairs = [(torch.empty_like(s.current, device=self._device), s.current) for s in moving]
        layer.fetched = True
        layer.copied = self._copy(pairs)
        for stored, (moved, _) in zip(moving, pairs, strict=True):
            stored.move(moved)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> torch.Event | None:
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_event(torch.accelerator.current_stream(self._device).record_event())
        with self._stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=self._device.type == "cuda")
        return self._stream.record_event()

    def _wait(self, event: torch.Event | None) -> None:
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

"""Find the tensors of a Hugging Face checkpoint in a model's parameters, under canonical names.

transformers fuses some tensors on loading and undoes that on saving, by views only. So its conversion for saving
runs once on shapes without data, and each view shows where a checkpoint tensor lies in a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from burnish.boxes.box import Box, intersect, whole
from burnish.boxes.shards import Shard, TensorSpec
from burnish.errors import IncompatibleError


def is_matrix(name: str, dims: int) -> bool:
    """Return whether a weight is used in matrix products, unlike norms per head (Cohere), biases per expert and decays (Jamba)."""
    owner, _, kind = name.rpartition(".")
    is_norm = "norm" in owner.rpartition(".")[2].lower()
    return dims >= 2 and not is_norm and not kind.endswith(("bias", "A_log"))


@dataclass(frozen=True, slots=True)
class Region:
    """One checkpoint tensor as a box of one parameter (or persistent buffer) of the model."""

    name: str
    """Canonical name."""
    shape: tuple[int, ...]
    """Shape in the checkpoint."""
    parameter: str
    """Name in the model's `state_dict`."""
    box: Box
    """The part of the parameter."""
    dims: tuple[int, ...]
    """The parameter's dims that the checkpoint tensor has, in order; the others have size 1 in the box."""
    start: tuple[int, ...] = ()
    """Offsets of the box in the checkpoint tensor; () if the box has all of it."""

    def in_tensor(self, part: Box) -> Box:
        """Return a part of the region, in coordinates of the checkpoint tensor."""
        sizes = tuple(part.sizes[dim] for dim in self.dims)
        box = Box(tuple(part.offsets[dim] for dim in self.dims), sizes)
        return box.shift(self.start) if self.start else box

    def shard_of(self, local: Tensor, box: Box, prefix: str = "") -> Shard | None:
        """View this tensor's elements, if any, in `local`, which has the parameter's elements in `box`. `prefix` precedes the name."""
        common = intersect(self.box, box)
        if common is None:
            return None
        part = self.in_tensor(common.relative_to(self.box))
        view = local[common.relative_to(box).slices].view(part.sizes)
        return Shard(TensorSpec(prefix + self.name, self.shape, local.dtype), part, view)


def regions(model: PreTrainedModel) -> tuple[Region, ...]:
    """Return every tensor of the model's checkpoint, in a fixed order. Tied weights appear once.

    Works on meta, plain and FSDP2-sharded models. Raises `IncompatibleError` for a tensor that is not a
    box of a parameter.
    """
    saved = _saved_tensors(model)
    sizes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in saved.items()}
    owners = {_storage(tensor): name for name, tensor in sizes.items()}
    with torch.no_grad(), _CopiesAreViews():  # type: ignore[no-untyped-call]
        canonical = revert_weight_conversion(model, dict(sizes))
    return tuple(
        _region(name, tensor, owners.get(_storage(tensor)), sizes)
        for name, tensor in canonical.items()
    )


def tensor_specs(model: PreTrainedModel) -> list[TensorSpec]:
    """Return the tensors of a model's checkpoint, in the order of `regions`."""
    saved = _saved_tensors(model)
    return [TensorSpec(r.name, r.shape, saved[r.parameter].dtype) for r in regions(model)]


def model_shards(
    model: PreTrainedModel,
    tensors: Mapping[str, Tensor] | None = None,
    prefix: str = "",
    parts: Iterable[Region] | None = None,
) -> Iterator[Shard]:
    """Yield this rank's pieces with elements, as views of local memory.

    `tensors` (optimizer slots) replace parameters: by parameter name, in the (local) shape of the
    parameter. `prefix` precedes every canonical name. `parts` replaces `regions(model)`.
    """
    saved = _saved_tensors(model)
    for region in regions(model) if parts is None else parts:
        parameter = saved[region.parameter]
        source = parameter if tensors is None else tensors.get(region.parameter)
        if source is None:
            continue
        local = source.to_local() if isinstance(source, DTensor) else source
        shard = region.shard_of(local.detach(), local_box(parameter), prefix)
        if shard is not None:
            yield shard


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return other names for tied weights, each with the canonical name (`lm_head.weight` → embeddings)."""
    saved = _saved_tensors(model)
    canonical = {id(tensor): name for name, tensor in saved.items()}
    state = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    return {n: canonical[key] for n, key in state.items() if n not in saved and key in canonical}


def local_box(parameter: Tensor) -> Box:
    """Return the part of a parameter that this process holds.

    FSDP2 cuts dim 0 as `torch.chunk` does. Raises `IncompatibleError` for any other sharding.
    """
    if not isinstance(parameter, DTensor):
        return whole(tuple(parameter.shape))
    start = 0
    stop = parameter.shape[0]
    coordinate = parameter.device_mesh.get_coordinate()
    for axis, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            continue
        if type(placement) is not ShardPlacement or placement.dim != 0 or coordinate is None:
            raise IncompatibleError(
                "Burnish cannot save a parameter that is sharded like this",
                have=parameter.placements,
                want="Replicate and Shard(0)",
            )
        piece = -(-(stop - start) // parameter.device_mesh.size(axis))
        start = min(start + coordinate[axis] * piece, stop)
        stop = min(start + piece, stop)
    tail = tuple(parameter.shape[1:])
    return Box((start, *[0] * len(tail)), (stop - start, *tail))


class _CopiesAreViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes `contiguous` return its input, so that views stay traceable."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0].view(args[0].shape)
        return func(*args, **(kwargs or {}))


def _saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, tied ones once, under the name that saving keeps."""
    aliases = set(getattr(model, "all_tied_weights_keys", None) or ())
    ignored = set(model._keys_to_ignore_on_save or ())
    state = model.state_dict(keep_vars=True)
    first_names: dict[int, str] = {}
    for name in sorted(state, key=aliases.__contains__):  # those that saving keeps come first
        first_names.setdefault(id(state[name]), name)
    names = set(first_names.values()) - ignored
    return {name: tensor for name, tensor in state.items() if name in names}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _region(name: str, view: Tensor, parameter: str | None, sizes: Mapping[str, Tensor]) -> Region:
    """Read the box off a view's offset and strides."""
    problem = IncompatibleError(
        f"transformers mixes the elements of parameters in the checkpoint tensor {name}, so ranks cannot save their parts",
        have="a conversion that moves elements",
        want="checkpoint tensors that are slices of parameters",
        do="train a model of another family",
    )
    if parameter is None:
        raise problem
    strides = sizes[parameter].stride()
    shape = sizes[parameter].shape
    offsets = []
    rest = int(view.storage_offset())
    for stride in strides:
        offset, rest = divmod(rest, stride)
        offsets.append(offset)
    extents = [1] * len(shape)
    dims = []
    dim = 0
    for extent, stride in zip(view.shape, view.stride(), strict=True):
        while dim < len(shape) and (strides[dim] != stride or shape[dim] < extent):
            dim += 1
        if dim == len(shape):
            raise problem
        extents[dim] = extent
        dims.append(dim)
        dim += 1
    box = Box(tuple(offsets), tuple(extents))
    if not box.fits(tuple(shape)):
        raise problem
    return Region(name, tuple(view.shape), parameter, box, tuple(dims))

"""Names and parameters of Megatron's `torch_dist` checkpoints: DCP directories with a metadata.json.

Parameters are uncut but possibly stacked: one tensor for all layers, or for a layer's experts. Other savers number layers and
experts, and separate gate and up, as `weight_w` and `weight_v`. Left out: optimizer states, and models unknown to
`burnish.models.megatron_names`. Norms saved minus one (`apply_layernorm_1p`) are not detected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from burnish.boxes.box import Box
from burnish.boxes.shards import Shard, TensorSpec
from burnish.errors import IncompatibleError
from burnish.families import ModelSizes
from burnish.files.durable import read_whole
from burnish.files.storage import LOCAL
from burnish.files.strict_json import parse_json
from burnish.models.megatron_names import IN_LAYER, OUTSIDE_LAYERS, Seat, regions_of

_METADATA, _METADATA_LIMIT = "metadata.json", 1 << 16
_LAYER = re.compile(r"decoder\.layers\.(?:([0-9]+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:([0-9]+)\.)?(.+)")
_OF_EXPERTS = tuple(f"mlp.experts.experts.linear_fc{number}.weight" for number in (1, 2))
_HALVES = {"weight_w": 0, "weight_v": 1}


def is_torch_dist(source: Path) -> bool:
    """Return whether a DCP directory's metadata names Megatron's format."""
    path = source / _METADATA
    if not path.is_file() or path.stat().st_size > _METADATA_LIMIT:
        return False
    metadata = parse_json(read_whole(LOCAL, path, _METADATA_LIMIT), str(path))
    return isinstance(metadata, dict) and metadata.get("sharded_backend") == "torch_dist"


def tensor_names() -> frozenset[str]:
    """Return the possible names of tensors, without numbers."""
    parts = [*IN_LAYER, *_OF_EXPERTS]
    both = [part for part in parts if "fc1.weight" in part]
    parts += [part.replace(".weight", f".{half}") for part in both for half in _HALVES]
    return frozenset([*OUTSIDE_LAYERS, *(f"decoder.layers.{part}" for part in parts)])


def shards_of(
    pieces: Iterable[Shard], sizes: ModelSizes, canonical: Mapping[str, tuple[int, ...]]
) -> Iterator[Shard]:
    """Yield the parts of canonical tensors in `pieces`; `canonical` has their shapes.

    Raises `IncompatibleError` for another model's piece.
    """
    for single in chain.from_iterable(map(_unstacked, pieces)):
        if not _is_whole(single.spec, sizes, canonical):
            raise IncompatibleError(
                f"tensor {single.spec.name} is not one of this model",
                have=list(single.spec.shape),
                want="the shapes that config.json gives",
                do="give the config.json that belongs to these weights with --assets",
            )
        for region in regions_of(single.spec.name, single.spec.shape, sizes, Seat(), Seat()):
            if (shard := region.shard_of(single.tensor, single.box)) is not None:
                yield shard


def _unstacked(piece: Shard) -> Iterator[Shard]:
    layer = _LAYER.fullmatch(piece.spec.name)
    if layer is None:
        yield piece
        return
    for number, of_layer in _along(piece, layer[1]):
        expert = _EXPERT.fullmatch(layer[2])
        if expert is None:
            yield _renamed(of_layer, f"decoder.layers.{number}.{layer[2]}")
            continue
        for index, of_expert in _along(of_layer, expert[1]):
            name = f"decoder.layers.{number}.mlp.experts.local_experts.{index}.{expert[2]}"
            yield _renamed(of_expert, name)


def _along(piece: Shard, number: str | None) -> Iterator[tuple[int, Shard]]:
    """Yield a piece's layers or experts by number: from the name, or along the first dim."""
    if number is not None:
        yield int(number), piece
    elif piece.spec.shape:
        spec = piece.spec._replace(shape=piece.spec.shape[1:])
        box = Box(piece.box.offsets[1:], piece.box.sizes[1:])
        for index, tensor in enumerate(piece.tensor, start=piece.box.offsets[0]):
            yield index, Shard(spec, box, tensor)


def _renamed(piece: Shard, name: str) -> Shard:
    """Rename a piece; a separate gate or up becomes a part of their common parameter."""
    stem, _, kind = name.rpartition(".")
    shape, box = piece.spec.shape, piece.box
    if kind in _HALVES and shape:
        name = f"{stem}.weight"
        box = box.shift((_HALVES[kind] * shape[0], *(0 for _ in shape[1:])))
        shape = (2 * shape[0], *shape[1:])
    return Shard(TensorSpec(name, shape, piece.spec.dtype), box, piece.tensor)


def _is_whole(
    spec: TensorSpec, sizes: ModelSizes, canonical: Mapping[str, tuple[int, ...]]
) -> bool:
    """Return whether the parameter consists of whole tensors of the model, and padding."""
    name, shape, _ = spec
    is_vector = "norm" in name or name.endswith(".bias")
    if len(shape) != (1 if is_vector else 2):
        return False
    regions = regions_of(name, shape, sizes, Seat(), Seat())
    if any(canonical.get(region.name) != region.shape for region in regions):
        return False
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return shape[0] >= sizes.vocabulary
    elements = sum(region.box.elements for region in regions)
    tensors = {region.name: math.prod(region.shape) for region in regions}
    return elements == math.prod(shape) == sum(tensors.values())

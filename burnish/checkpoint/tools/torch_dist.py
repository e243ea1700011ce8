"""Megatron's `torch_dist` checkpoints: what their tensors are called, and which parameters they are.

Such a checkpoint is a DCP directory with a metadata.json. Its tensors are Megatron's parameters with
nothing cut, but they may be stacked: the same parameter of all layers in one tensor, the same matrix
of all experts of a layer in one, layers outside. Other savers number layers and experts, and keep gate
and up apart, as `weight_w` and `weight_v`. Left out: optimizer states, and models that
`burnish.models.megatron_names` does not know. Norms that were saved less one (`apply_layernorm_1p`)
look like others and are not found out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from burnish.boxes.box import Box
from burnish.boxes.shards import Shard
from burnish.checkpoint.tools.foreign_pieces import ForeignPiece
from burnish.errors import IncompatibleError
from burnish.files.durable import read_whole
from burnish.files.storage import LocalStorage
from burnish.files.strict_json import parse_json
from burnish.models.megatron_names import IN_LAYER, OUTSIDE_LAYERS, Naming, Seat, regions_of

_METADATA, _METADATA_LIMIT = "metadata.json", 1 << 16
_LAYER = re.compile(r"decoder\.layers\.(?:([0-9]+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:([0-9]+)\.)?(.+)")
_OF_EXPERT = ("linear_fc1.weight", "linear_fc2.weight")
_HALVES = {"weight_w": 0, "weight_v": 1}
_IN_CHECKPOINT = re.compile(r"\.(layers|experts)\.([0-9]+)\.")


def is_torch_dist(source: Path) -> bool:
    """Whether a DCP directory says that Megatron wrote it."""
    path = source / _METADATA
    if not path.is_file() or path.stat().st_size > _METADATA_LIMIT:
        return False
    said = parse_json(read_whole(LocalStorage(), path, _METADATA_LIMIT), str(path))
    return isinstance(said, dict) and said.get("sharded_backend") == "torch_dist"


def tensor_names(canonical: Mapping[str, object]) -> frozenset[str]:
    """What the tensors of a model with these checkpoint tensors may be called.

    Among them are those of one layer and one expert more than it has: where they are found, it is another model.
    """
    counts = {"layers": 0, "experts": 0}
    for name in canonical:
        for kind, number in _IN_CHECKPOINT.findall(name):
            counts[kind] = max(counts[kind], int(number) + 1)
    layers, experts = (
        ["", *(f"{number}." for number in range(counts[kind] + 1))] for kind in counts
    )
    parts = [*IN_LAYER]
    parts += [f"mlp.experts.experts.{expert}{part}" for expert in experts for part in _OF_EXPERT]
    halves = [
        part.replace(".weight", f".{half}")
        for part in parts
        if "fc1.weight" in part
        for half in _HALVES
    ]
    named = [f"decoder.layers.{layer}{part}" for layer in layers for part in parts + halves]
    return frozenset([*OUTSIDE_LAYERS, *named])


def shards_of(
    piece: ForeignPiece, naming: Naming, canonical: Mapping[str, tuple[int, ...]]
) -> list[Shard]:
    """The checkpoint tensors' parts in a piece; `canonical` says which there are, and their shapes.

    Raises `IncompatibleError` where the piece is of another model.
    """
    found: list[Shard] = []
    for single in _unstacked(piece):
        if not _is_whole(single, naming, canonical):
            raise IncompatibleError(
                f"tensor {piece.name} is not one of this model",
                have=f"{list(piece.shape)}, as {single.name}",
                want="the shapes that config.json tells of",
                do="give the config.json that belongs to these weights with --assets",
            )
        for region in regions_of(single.name, single.shape, naming, Seat(), Seat()):
            found += single.part_of(region)
    return found


def _unstacked(piece: ForeignPiece) -> Iterator[ForeignPiece]:
    """A piece as those of single parameters, by the names of `regions_of`."""
    layer = _LAYER.fullmatch(piece.name)
    if layer is None:
        yield piece
        return
    for number, of_layer in _along(piece, layer[1]):
        expert = _EXPERT.fullmatch(layer[2])
        if expert is None:
            yield _both_halves(replace(of_layer, name=f"decoder.layers.{number}.{layer[2]}"))
            continue
        for index, of_expert in _along(of_layer, expert[1]):
            name = f"decoder.layers.{number}.mlp.experts.local_experts.{index}.{expert[2]}"
            yield _both_halves(replace(of_expert, name=name))


def _along(piece: ForeignPiece, number: str | None) -> Iterator[tuple[int, ForeignPiece]]:
    """The numbers that the piece has, each with what belongs to it: the one in its name, or those along its first dim."""
    if number is not None:
        yield int(number), piece
        return
    first = piece.box.offsets[0] if piece.shape else 0
    box = Box(piece.box.offsets[1:], piece.box.sizes[1:])
    for at, tensor in enumerate(piece.tensor if piece.shape else ()):
        yield first + at, ForeignPiece(piece.name, piece.shape[1:], box, tensor)


def _both_halves(piece: ForeignPiece) -> ForeignPiece:
    """Gate or up that are apart, as a part of the parameter that has both."""
    stem, _, kind = piece.name.rpartition(".")
    if kind not in _HALVES or not piece.shape:
        return piece
    rows = piece.shape[0]
    moved = piece.box.shift((_HALVES[kind] * rows, *(0 for _ in piece.shape[1:])))
    return ForeignPiece(f"{stem}.weight", (2 * rows, *piece.shape[1:]), moved, piece.tensor)


def _is_whole(
    piece: ForeignPiece, naming: Naming, canonical: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether the parameter has the dims of its kind and is made of whole tensors of the model, and of padding at most."""
    name, shape = piece.name, piece.shape
    is_vector = "norm" in name or name.endswith(".bias")
    if len(shape) != (1 if is_vector else 2):
        return False
    regions = regions_of(name, shape, naming, Seat(), Seat())
    if any(canonical.get(region.name) != region.shape for region in regions):
        return False
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return shape[0] >= naming.vocabulary
    elements = sum(region.box.elements for region in regions)
    tensors = {region.name: math.prod(region.shape) for region in regions}
    return elements == math.prod(shape) == sum(tensors.values())

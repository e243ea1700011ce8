"""Name the tensors of Megatron's `torch_dist` checkpoints as the Hugging Face checkpoint does.

Parameters are uncut but possibly stacked: one tensor for all layers, or for a layer's experts. Other savers number layers and experts, and
separate gate and up, as `weight_w` and `weight_v`.

Left out: layers for multi-token prediction, and Megatron's models unknown to `burnish.models.megatron_names`. Norms saved minus one
(`apply_layernorm_1p`) are not detected, but for that of Gated DeltaNet, which Megatron always saves like all others of the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from burnish.boxes.box import Box, intersect
from burnish.boxes.shards import Shard, TensorSpec
from burnish.errors import IncompatibleError, MissingError, few
from burnish.models.megatron_names import (
    IN_LAYER,
    MIXER_PARAMETERS,
    OUTSIDE_LAYERS,
    STACKED,
    MegatronSlot,
    MixerSizes,
    mixer_regions,
    regions_of,
)
from burnish.models.meta_init import model_sizes
from burnish.models.names import Region

_LAYER = re.compile(r"decoder\.layers\.(?:([0-9]+)\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:([0-9]+)\.)?(.+)")
_OF_STACKED = re.compile(
    r"decoder\.layers\.([0-9]+)\.mlp\.experts\.local_experts\.([0-9]+)\.(linear_fc[12]\.(?:weight|bias))"
)
_OF_MIXER = frozenset(name.partition(".")[2] for name in MIXER_PARAMETERS)
_OF_EXPERTS = tuple(f"mlp.experts.experts.{matrix}" for matrix in STACKED)
_HALVES = {f"{kind}_{half}": n for kind in ("weight", "bias") for n, half in enumerate("wv")}
_VECTORS = ("norm", "bias", "softmax_offset")
_RUN_CONFIG = "run_config.yaml"
_RUN_CONFIG_LIMIT = 1 << 20
_INTERLEAVED = re.compile(rb"(moe_\w*glu_interleave_size):\s*([1-9][0-9]*)")


def saved_parameters() -> frozenset[str]:
    """Return the possible names of Megatron's tensors, without numbers."""
    parts = [*IN_LAYER, *MIXER_PARAMETERS, *_OF_EXPERTS]
    both = [part for part in parts if "fc1." in part and "norm" not in part]
    parts += [f"{part}_{half}" for part in both for half in "wv"]
    return frozenset([*OUTSIDE_LAYERS, *(f"decoder.layers.{part}" for part in parts)])


def require_known_layout(source: Path) -> None:
    """Raise `IncompatibleError` if Megatron-Bridge's configuration says that gate and up take turns in blocks of rows.

    Nothing in the tensors shows it.
    """
    path = source / _RUN_CONFIG
    if not path.is_file() or path.stat().st_size > _RUN_CONFIG_LIMIT:
        return
    if match := _INTERLEAVED.search(path.read_bytes()):
        raise IncompatibleError(
            f"gate and up of the experts in {source} take turns in blocks of rows",
            have=f"{match[1].decode()}: {int(match[2])} in {_RUN_CONFIG}",
            want="gate above up",
            do="save the model with Megatron-Bridge and without this setting",
        )


class MegatronPieces:
    """Names the pieces of a model's Megatron checkpoint."""

    def __init__(
        self, hf_config: PretrainedConfig, canonical: Mapping[str, tuple[int, ...]]
    ) -> None:
        """`canonical` has the shapes of the model's tensors."""
        self._sizes = model_sizes(hf_config)
        self._canonical = canonical
        heads = (f"linear_num_{part}_heads" for part in ("key", "value"))
        widths = (f"linear_{part}_head_dim" for part in ("key", "value"))
        self._mixer = MixerSizes(*(getattr(hf_config, name, 0) for name in (*heads, *widths)))
        self._halves: dict[tuple[str, Box], tuple[int, Tensor]] = {}
        """Gates without their up, and the other way round: which half, and its elements [1, ..., n]."""

    def shards_of(self, pieces: Iterable[Shard]) -> Iterator[Shard]:
        """Yield the parts of canonical tensors in `pieces`.

        Raises `IncompatibleError` for another model's piece, `MissingError` for a gate without up, or an up without gate.
        """
        for single in chain.from_iterable(map(_unstacked, pieces)):
            name = single.spec.name
            if name.partition(".self_attention.")[2] in _OF_MIXER:
                yield from self._of_mixer(single)
            elif self._sizes.family.stacks_experts and (match := _OF_STACKED.fullmatch(name)):
                yield from self._of_stacked(single, int(match[1]), int(match[2]), match[3])
            else:
                yield from self._of_layer(single)
        if self._halves:
            lacking = sorted({name for name, _ in self._halves})
            raise MissingError(
                f"the checkpoint has parts of {len(lacking)} experts without their counterparts",
                have=f"only gates or only up projections of {few(lacking)}",
                want="both",
                do="get the files of all ranks: each machine may have its own",
            )

    def _of_layer(self, single: Shard) -> Iterator[Shard]:
        name, shape, _ = single.spec
        if len(shape) != (1 if any(kind in name for kind in _VECTORS) else 2):
            raise _of_another_model(single.spec)
        regions = regions_of(name, shape, self._sizes, MegatronSlot(), MegatronSlot())
        if not self._is_whole(single.spec, regions):
            raise _of_another_model(single.spec)
        yield from _shards(regions, single)

    def _of_mixer(self, single: Shard) -> Iterator[Shard]:
        name, shape, _ = single.spec
        regions = mixer_regions(name, shape, self._mixer, self._canonical)
        if not regions:
            raise _of_another_model(single.spec)
        if name.endswith("out_norm.weight"):
            # Megatron adds one offset in all norms; transformers adds none in this one.
            offset = self._sizes.family.norm_offset
            single = replace(single, tensor=single.tensor + offset)
        yield from _shards(regions, single)

    def _of_stacked(self, single: Shard, layer: int, expert: int, matrix: str) -> Iterator[Shard]:
        """Yield the part of a stacked tensor that an expert's matrix [out, in] or bias has, gate and up together."""
        shape = single.spec.shape
        name = (
            f"model.layers.{layer}.{self._sizes.family.experts_module}.experts.{STACKED[matrix][1]}"
        )
        total = (self._sizes.experts, *reversed(shape))
        if self._canonical.get(name) != total or expert >= total[0]:
            raise _of_another_model(single.spec)
        spec = TensorSpec(name, total, single.spec.dtype)

        def box_of(part: Box, rows: int) -> Box:
            """Return a part's place, where each of its rows takes so many."""
            start, *columns = part.offsets
            count, *widths = part.sizes
            return Box((expert, *columns, start * rows), (1, *widths, count * rows))

        if not matrix.startswith("linear_fc1"):
            yield Shard(spec, box_of(single.box, 1), _reversed(single.tensor)[None])
            return
        half = shape[0] // 2
        for number in range(2):
            begin = (number * half, *(0 for _ in shape[1:]))
            common = intersect(single.box, Box(begin, (half, *shape[1:])))
            if common is None:
                continue
            rows = common.relative_to(Box(begin, common.sizes))
            elements = _reversed(single.tensor[common.relative_to(single.box).slices])[None]
            other = self._halves.pop((single.spec.name, rows), None)
            if other is None or other[0] == number:
                self._halves[single.spec.name, rows] = number, elements
                continue
            halves = (other[1], elements) if number else (elements, other[1])
            yield _AlternatingShard(spec, box_of(rows, 2), *halves)

    def _is_whole(self, spec: TensorSpec, regions: Collection[Region]) -> bool:
        """Return whether the parameter consists of whole tensors of the model, and padding."""
        name, shape, _ = spec
        if any(self._canonical.get(region.name) != region.shape for region in regions):
            return False
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            return shape[0] >= self._sizes.vocabulary
        elements = sum(region.box.elements for region in regions)
        tensors = {region.name: math.prod(region.shape) for region in regions}
        return elements == math.prod(shape) == sum(tensors.values())


@dataclass(frozen=True, slots=True, eq=False)
class _AlternatingShard(Shard):
    """Gate and up, which take turns along the last dim; `tensor` has the gate alone."""

    up: Tensor
    """Of the gate's shape."""

    def part(self, box: Box) -> Tensor:
        """See `Shard.part`."""
        *others, last = box.relative_to(self.box).slices
        first = last.start // 2
        pairs = slice(first, -(-last.stop // 2))
        halves = [half[(*others, pairs)] for half in (self.tensor, self.up)]
        turns = torch.stack(halves, dim=-1).flatten(-2)
        return turns[..., last.start - 2 * first : last.stop - 2 * first]


def _shards(regions: Iterable[Region], piece: Shard) -> Iterator[Shard]:
    for region in regions:
        if (shard := region.shard_of(piece.tensor, piece.box)) is not None:
            yield shard


def _reversed(tensor: Tensor) -> Tensor:
    """Return a view with the dims the other way round."""
    return tensor.permute(*reversed(range(tensor.ndim)))


def _of_another_model(spec: TensorSpec) -> IncompatibleError:
    return IncompatibleError(
        f"tensor {spec.name} is not one of this model",
        have=list(spec.shape),
        want="the shapes that config.json gives",
        do="give the config.json that belongs to these weights with --assets",
    )


def _unstacked(piece: Shard) -> Iterator[Shard]:
    layer = _LAYER.fullmatch(piece.spec.name)
    if layer is None:
        yield piece
        return
    for number, of_layer in _along(piece, layer[1]):
        expert = _EXPERT.fullmatch(layer[2])
        if expert is None:
            yield _unhalved(of_layer, f"decoder.layers.{number}.{layer[2]}")
            continue
        for index, of_expert in _along(of_layer, expert[1]):
            name = f"decoder.layers.{number}.mlp.experts.local_experts.{index}.{expert[2]}"
            yield _unhalved(of_expert, name)


def _along(piece: Shard, number: str | None) -> Iterator[tuple[int, Shard]]:
    """Yield a piece's layers or experts by number: from the name, or along the first dim."""
    if number is not None:
        yield int(number), piece
    elif piece.spec.shape:
        spec = piece.spec._replace(shape=piece.spec.shape[1:])
        box = Box(piece.box.offsets[1:], piece.box.sizes[1:])
        for index, tensor in enumerate(piece.tensor, start=piece.box.offsets[0]):
            yield index, Shard(spec, box, tensor)


def _unhalved(piece: Shard, name: str) -> Shard:
    """Rename a piece; a separate gate or up becomes a part of their common parameter."""
    stem, _, kind = name.rpartition(".")
    shape = piece.spec.shape
    box = piece.box
    if kind in _HALVES and shape:
        name = f"{stem}.{kind.partition('_')[0]}"
        box = box.shift((_HALVES[kind] * shape[0], *(0 for _ in shape[1:])))
        shape = (2 * shape[0], *shape[1:])
    return Shard(TensorSpec(name, shape, piece.spec.dtype), box, piece.tensor)

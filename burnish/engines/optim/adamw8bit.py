"""AdamW with moments of 8 bits (Dettmers et al., arXiv 2110.02861), quantized by torchao's functions.

Every row of a matrix is quantized in blocks of 256 of its own elements, each with a scale, by torchao's dynamic map. So a block is
part of one row of the checkpoint's tensor, and comes back bit for bit at any layout. Vectors are left to plain AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from burnish.boxes.box import Box
from burnish.config.schema import OptimConfig
from burnish.engines.optim.adamw import SLOTS
from burnish.errors import UsageError, install
from burnish.models.names import Cut, Region

BLOCK = 256
"""Neighbours in a row that share a scale."""
SCALES = tuple(f"{slot}_scale" for slot in SLOTS)
"""The slots of the scales, beside those of the codes, which have AdamW's names."""

_CHUNK_ELEMENTS = 1 << 22
# Of a weight at a time in fp32, with about ten temporaries of its size.


class AdamW8bit:
    """AdamW (arXiv 1711.05101, algorithm 2) on this rank's parts of matrices, with moments of 8 bits.

    For a weight W [..., n] codes are [..., n] uint8, scales [..., ⌈n / 256⌉] fp32. A step uses the moments before quantization, as
    torchao's does.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: OptimConfig) -> None:
        """Take at least one local tensor by name, of two or more dims. Raises `UsageError` without torchao."""
        self._weights, self._config = dict(weights), config
        self._moments = {name: _Moments.of(tensor) for name, tensor in weights.items()}
        arithmetic, device = _torchao(), next(iter(weights.values())).device
        self._quantizers = [_Quantizer.of(arithmetic, signed, device) for signed in (True, False)]

    def slots(self) -> dict[str, dict[str, Tensor]]:
        """The codes, by slot and weight name."""
        return {
            slot: {name: moments.codes[i] for name, moments in self._moments.items()}
            for i, slot in enumerate(SLOTS)
        }

    def scales(self) -> dict[str, dict[str, Tensor]]:
        """The scales, by slot and weight name."""
        return {
            slot: {name: moments.scales[i] for name, moments in self._moments.items()}
            for i, slot in enumerate(SCALES)
        }

    def step(self, lr: float, steps: int, gradients: Mapping[str, Tensor]) -> None:
        """Update number `steps`, from 1; a weight without a gradient stays as it is."""
        for name, weight in self._weights.items():
            if name not in gradients or weight.numel() == 0:
                continue
            moments = self._moments[name]
            tensors = (weight, gradients[name], *moments.codes, *moments.scales)
            chunk = max(1, _CHUNK_ELEMENTS // weight.shape[-1])
            parts = (torch.split(each.view(-1, each.shape[-1]), chunk) for each in tensors)
            for w, g, *state in zip(*parts, strict=True):
                self._update(w, g, lr, steps, state)

    def _update(self, w: Tensor, g: Tensor, lr: float, steps: int, state: list[Tensor]) -> None:
        """Some rows: W ← (1 - lr λ) W - lr m̂ / (√v̂ + ε)."""
        moments = []
        powers = zip((g, g.square()), self._config.betas, strict=True)
        for (power, beta), quantizer, codes, scales in zip(
            powers, self._quantizers, state[:2], state[2:], strict=True
        ):
            moment = quantizer.floats(codes, scales).lerp_(power, 1 - beta)
            quantizer.quantize(moment, codes, scales)
            moments.append(moment / (1 - beta**steps))
        mean, square = moments
        w.mul_(1 - lr * self._config.weight_decay)
        w.addcdiv_(mean, square.sqrt_().add_(self._config.eps), value=-lr)


@dataclass(frozen=True, slots=True)
class _Moments:
    """First and second moment of a weight."""

    codes: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, weight: Tensor) -> _Moments:
        """Zeros, which are codes of any kind with scales of 0."""
        shape = (*weight.shape[:-1], _blocks(weight.shape[-1]))
        zeros = [torch.zeros_like(weight, dtype=torch.uint8) for _ in SLOTS]
        scales = [weight.new_zeros(shape, dtype=torch.float32) for _ in SLOTS]
        return cls((zeros[0], zeros[1]), (scales[0], scales[1]))


@dataclass(frozen=True, slots=True)
class _Quantizer:
    """torchao's arithmetic with one of its maps, on rows [R, n] cut into blocks."""

    arithmetic: Any
    table: Tensor
    """[256] fp32, what each code stands for, times the block's scale."""

    @classmethod
    def of(cls, arithmetic: Any, signed: bool, device: torch.device) -> _Quantizer:
        """With the map of numbers of both signs, or of those that are not negative."""
        table = arithmetic.create_dynamic_map(signed=signed)
        return cls(arithmetic, torch.tensor(table, device=device))

    def floats(self, codes: Tensor, scales: Tensor) -> Tensor:
        """fp32 [R, n] in memory of its own."""
        blocks = _padded(codes, 0).int()
        values = self.table[blocks].view(*scales.shape, -1) * scales[..., None]
        return values.flatten(1)[:, : codes.shape[1]]

    def quantize(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write fp32 rows [R, n] as codes and scales."""
        padded = _padded(rows, 0.0)
        width = padded.shape[1] // scales.shape[1]
        scaled, found = self.arithmetic.scale_tensor(padded, width)
        coded = self.arithmetic.quantize_8bit_with_qmap(scaled, self.table)
        codes.copy_(coded[:, : codes.shape[1]])
        scales.copy_(found.view_as(scales))


def scale_regions(regions: Iterable[Region], ranks: int) -> tuple[Region, ...]:
    """Return the regions of `AdamW8bit.scales`, one element per block of a row.

    Raises `UsageError` if a tensor rank's columns are not whole blocks, on all of them.
    """
    return tuple(_of_blocks(region, ranks) for region in regions)


def _of_blocks(region: Region, ranks: int) -> Region:
    start = region.start or (0,) * len(region.shape)
    offsets, sizes = region.box.offsets, region.box.sizes
    begins = [offsets[-1]]
    if sizes[-1] < region.shape[-1]:
        cuts = [Cut.of(region.shape[-1], 0, rank, ranks) for rank in range(ranks)]
        begins += [cut.spans[0].start for cut in cuts]
    if broken := [each for each in begins if each % BLOCK]:
        raise UsageError(
            f"the columns of {region.name} cannot be shared out for optim.kind adamw8bit",
            have=f"a part that begins at column {broken[0]}",
            want=f"a multiple of {BLOCK}",
            do="lower engine.tensor_parallel, or set optim.kind=adamw",
        )
    return replace(
        region,
        shape=(*region.shape[:-1], _blocks(region.shape[-1])),
        box=Box((*offsets[:-1], offsets[-1] // BLOCK), (*sizes[:-1], _blocks(sizes[-1]))),
        start=(*start[:-1], start[-1] // BLOCK),
    )


def _blocks(columns: int) -> int:
    return -(-columns // BLOCK)


def _padded(rows: Tensor, value: float) -> Tensor:
    """Rows [R, n] as long as whole blocks; one block may be shorter where it is alone."""
    columns = rows.shape[1]
    missing = -columns % min(BLOCK, columns)
    return functional.pad(rows, (0, missing), value=value) if missing else rows


def _torchao() -> Any:
    try:
        from torchao.optim import quant_utils
    except ImportError as error:
        raise UsageError(
            "optim.kind adamw8bit needs a package that is not installed",
            have=error,
            want="torchao",
            do=f"{install('adamw8bit')}, or set optim.kind=adamw",
        ) from error
    return quant_utils

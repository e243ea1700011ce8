"""Products with weights that stay the same for thousands of small batches.

A matrix product on a CPU first brings its weight into the order that the processor's matrix units
read. With a batch of a hundred rows that takes as long as the product itself. The generator's weights
change only when new ones arrive, so they are brought into that order then: results are the same to the
last bit, and the memory of the weights is there twice. Left out: accelerators, whose libraries
read weights as they are, and fp32, for which a CPU has no such units.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from burnish.distributed.device import has_bf16_products


class Product:
    """`x W.T + b` of one layer, in its own dtype. Call `refresh` whenever the weight has changed."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` is [out, in], `bias` [out]; both are read at each `refresh`, not copied here."""
        self._weight, self._bias = weight, bias
        self._ordered: Tensor | None = None

    def refresh(self) -> None:
        """Bring the weight into the order in which it is read, where that helps."""
        weight = self._weight
        is_bf16 = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
        if is_bf16 and has_bf16_products(weight.device):
            self._ordered = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def __call__(self, rows: Tensor) -> Tensor:
        """The product of `rows` [n, in]: [n, out]."""
        if self._ordered is None:
            return linear(rows, self._weight, self._bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._ordered, self._bias, "none", [], ""
        )
        return product

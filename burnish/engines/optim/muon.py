"""Muon: update a matrix by its orthogonalized momentum (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

Orthogonalizing needs whole matrices, as in the checkpoint: query and key apart, each expert by itself. One rank gathers each whole
matrix, so any layout computes the same, up to the rounding of bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from burnish.boxes.box import whole
from burnish.boxes.shards import Shard, TensorSpec
from burnish.boxes.transfer import Transfer
from burnish.config.schema import OptimConfig
from burnish.data.balance import share_evenly
from burnish.distributed.collectives import agree, gather_objects
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.engines.optim.slots import zero_slot
from burnish.engines.torch.parallelize import decoder_layers
from burnish.models.names import Region, is_matrix, model_shards

MOMENTUM = "momentum_buffer"
"""Muon's state of a weight, by torch's name."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
_TINY = 1e-7


class Muon:
    """Muon on this rank's parts of the matrices in decoder layers. Making it is collective.

    One step, for a matrix W [m, n] with gradient G (fp32 except in orthogonalizing):

        B ← μ B + (1 - μ) G        U = (1 - μ) G + μ B        O = orthogonalized(U)
        W ← (1 - lr λ) W - 0.2 √max(m, n) lr O

    The factor makes updates as large as AdamW's, so one learning rate serves both (Liu et al., arXiv 2502.16982, equation 4).
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        matrices: Mapping[str, Sequence[TensorSpec]],
        describe: Callable[[Mapping[str, Tensor]], Iterable[Shard]],
        config: OptimConfig,
        layout: Layout,
        arena: Arena | None = None,
    ) -> None:
        """Step local tensors by name, of which `matrices` names the checkpoint tensors in each. Others are left out.

        `describe` yields the pieces of checkpoint tensors in tensors of the same names and shapes.
        """
        self.weights = {name: tensor for name, tensor in weights.items() if name in matrices}
        """The local tensors that this optimizer steps, by name."""
        self._describe = describe
        self._momentum = config.momentum
        self._weight_decay = config.weight_decay
        with agree(layout):
            self._buffers = {n: zero_slot(tensor, arena) for n, tensor in self.weights.items()}
        self.slots = {MOMENTUM: self._buffers}
        """Each slot's tensors by weight name, by torch's name of the slot."""
        self._own_specs = _share([spec for name in self.weights for spec in matrices[name]], layout)
        updates = list(self._describe({n: t.bfloat16() for n, t in self.weights.items()}))
        own_matrices = self._matrices()
        self._gather = Transfer(updates, own_matrices, layout)
        self._scatter = Transfer(own_matrices, updates, layout)

    @classmethod
    def of_model(
        cls,
        model: PreTrainedModel,
        regions: Sequence[Region],
        weights: Mapping[str, Tensor],
        config: OptimConfig,
        layout: Layout,
        arena: Arena | None = None,
    ) -> Muon:
        """Step local tensors of `model` by name; `regions` are the checkpoint tensors in them. Collective."""
        describe = partial(model_shards, model, parts=regions)
        return cls(weights, _matrices_of(model, regions), describe, config, layout, arena)

    def step(self, lr: float, gradients: Mapping[str, Tensor]) -> None:
        """Update once; a missing gradient counts as zeros. Collective."""
        directions = {n: self._direction(n, gradients).bfloat16() for n in self.weights}
        updates = list(self._describe(directions))
        own_matrices = self._matrices()
        self._gather.run(updates, own_matrices)
        for matrix in own_matrices:
            matrix.tensor.copy_(orthogonalized(matrix.tensor))
        self._scatter.run(own_matrices, updates)
        for weight, update in zip(self._describe(self.weights), updates, strict=True):
            weight.tensor.mul_(1 - lr * self._weight_decay)
            size = 0.2 * max(weight.spec.shape) ** 0.5
            weight.tensor.add_(update.tensor, alpha=-lr * size)

    def _direction(self, name: str, gradients: Mapping[str, Tensor]) -> Tensor:
        stored = self._buffers[name]
        device = self.weights[name].device
        buffer = stored.to(device)
        gradient = gradients[name] if name in gradients else torch.zeros_like(buffer)
        buffer.lerp_(gradient, 1 - self._momentum)
        if buffer is not stored:
            stored.copy_(buffer)
        return gradient.lerp(buffer, self._momentum)

    def _matrices(self) -> list[Shard]:
        device = next((weight.device for weight in self.weights.values()), None)
        empty = partial(torch.empty, dtype=torch.bfloat16, device=device)
        return [Shard(spec, whole(spec.shape), empty(spec.shape)) for spec in self._own_specs]


def orthogonalized(matrix: Tensor) -> Tensor:
    """Approximate U Vᵀ of `matrix` = U S Vᵀ [m, n] bf16, with singular values in 0.7 to 1.2, by five Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / x.norm().clamp(min=_TINY)
    for _ in range(_ROUNDS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def matrices_in(parameters: Mapping[str, Iterable[Region]]) -> dict[str, list[TensorSpec]]:
    """Return the parameters that hold only matrices, each with the checkpoint tensors in it."""
    matrices = {}
    for name, regions in parameters.items():
        specs = {TensorSpec(region.name, region.shape, torch.bfloat16) for region in regions}
        if specs and all(len(spec.shape) == 2 and is_matrix(name, 2) for spec in specs):
            matrices[name] = sorted(specs)
    return matrices


def _matrices_of(model: PreTrainedModel, regions: Sequence[Region]) -> dict[str, list[TensorSpec]]:
    """Return the parameters of decoder layers that hold only matrices, each with these checkpoint tensors."""
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    by_parameter: dict[str, list[Region]] = {
        name: [] for name, p in model.named_parameters() if id(p) in inside
    }
    for region in regions:
        if region.parameter in by_parameter:
            by_parameter[region.parameter].append(region)
    return matrices_in(by_parameter)


def _share(own: list[TensorSpec], layout: Layout) -> list[TensorSpec]:
    """Return the matrices, of those that any rank has a part of, that this rank orthogonalizes. Collective."""
    matrices = sorted({spec for specs in gather_objects(own, layout) for spec in specs})
    if not matrices:
        return []
    # The products of an iteration multiply square matrices of the shorter side.
    work = [float(min(m.shape) ** 2 * max(m.shape)) for m in matrices]
    ranks = share_evenly(np.array(work), layout.world)
    return [matrices[index] for index in np.flatnonzero(ranks == layout.rank)]

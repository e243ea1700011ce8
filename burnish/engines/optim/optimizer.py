"""The engine's optimizer: AdamW, and Muon for the matrices of the layers if configured.

Parameters may be DTensors; all work on their local tensors, so slots lie on the weights' boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from burnish.boxes.shards import Shard, TensorSpec
from burnish.config.schema import OptimConfig
from burnish.distributed.collectives import agree
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.engines.optim.adamw import ShardedAdamW
from burnish.engines.optim.muon import MOMENTUM, Muon
from burnish.engines.torch.parallelize import decoder_layers
from burnish.models.names import Region, is_matrix, model_shards


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the local tensor of a DTensor, anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedOptimizer:
    """The optimizer of `config.kind` on this rank's shards of what `model` trains. Making it is collective."""

    def __init__(
        self,
        model: PreTrainedModel,
        regions: Sequence[Region],
        config: OptimConfig,
        layout: Layout,
        arena: Arena | None = None,
    ) -> None:
        """`regions` are the checkpoint tensors that the trained parameters hold; with `arena` the slots rest there."""
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        weights = {name: local(p.data) for name, p in self._parameters.items()}
        hidden = _matrices(model, regions) if config.kind == "muon" else {}
        matrices = {name: weights.pop(name) for name in list(weights) if name in hidden}
        decayed = {name for name in weights if is_matrix(name, self._parameters[name].ndim)}
        with agree(layout):  # a rank may have no room in the arena
            self._adamw = ShardedAdamW(weights, decayed, config, arena)
        self._model, self._regions = model, regions

        def describe(tensors: Mapping[str, Tensor]) -> Iterator[Shard]:
            return model_shards(model, tensors, parts=regions)

        self._muon = (
            Muon(
                matrices,
                describe,
                [spec for name in matrices for spec in hidden[name]],
                layout,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                arena=arena,
            )
            if matrices
            else None
        )

    @property
    def steps(self) -> int:
        """Steps taken; Adam's bias correction runs on it."""
        return self._adamw.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._adamw.steps = value

    def slots(self) -> dict[str, dict[str, Tensor]]:
        """For each slot, its local tensors by weight name; zero-size for a weight this rank holds nothing of."""
        slots = self._adamw.slots()
        return slots if self._muon is None else slots | {MOMENTUM: self._muon.buffers}

    def shards(self) -> Iterator[Shard]:
        """This rank's pieces of the slots, `exp_avg/<weight>` and so on."""
        for slot, held in self.slots().items():
            yield from model_shards(self._model, held, f"{slot}/", self._regions)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients by weight name, those that exist."""
        return {n: local(p.grad) for n, p in self._parameters.items() if p.grad is not None}

    def step(self, lr: float) -> None:
        """One update at learning rate `lr`, from the parameters' gradients. Collective for Muon."""
        gradients = self.gradients()
        self._adamw.step(lr, gradients)
        if self._muon is not None:
            self._muon.step(lr, gradients)

    def zero_grad(self) -> None:
        """Forget the gradients, freeing their memory."""
        for parameter in self._parameters.values():
            parameter.grad = None


def _matrices(model: PreTrainedModel, regions: Sequence[Region]) -> dict[str, list[TensorSpec]]:
    """The parameters of decoder layers that are made of matrices, with the checkpoint's matrices in each."""
    inside = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    names = {name for name, p in model.named_parameters() if id(p) in inside}
    found: dict[str, dict[str, TensorSpec]] = {}
    for region in regions:
        if region.parameter in names:
            spec = TensorSpec(region.name, region.shape, torch.bfloat16)
            found.setdefault(region.parameter, {})[region.name] = spec
    return {
        name: list(specs.values())
        for name, specs in found.items()
        if all(len(spec.shape) == 2 and is_matrix(name, 2) for spec in specs.values())
    }

"""For tests of `burnish check`: engines with planted faults, which it has to find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from burnish.engines.base import LossFn, Part
from burnish.engines.megatron import distributed_optimizer as optimizer
from burnish.engines.megatron.megatron_engine import MegatronEngine
from burnish.engines.sharded_engine import trained
from burnish.engines.torch import tensor_parallel
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.models import routing
from burnish.records import Batch, TokenOutputs
from burnish.tracking.stats import Stats


class WithoutSync(TorchEngine):
    """Gradients stay on the rank that computed them."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        backward = Tensor.backward

        def alone(value: Tensor) -> None:
            with pytest.MonkeyPatch.context() as inside:
                inside.setattr(dist, "all_reduce", lambda *args, **options: None)
                for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
                    inside.setattr(dist, name, own_part, raising=False)
                backward(value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "backward", alone)
            return super().forward_backward(batch, loss)


def own_part(output: Tensor, input: Tensor, group: dist.ProcessGroup, **_: Any) -> None:
    """What a reduce-scatter gives where no other rank adds anything."""
    output.copy_(input.chunk(group.size())[group.rank()])


class WithoutTensorSum(TorchEngine):
    """Each tensor rank steps what it has alike with the others by its own part of the gradients."""

    def optim_step(self, lr: float) -> Stats:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor_parallel, "sum_over", lambda group, gradients: None)
            return super().optim_step(lr)


class OneGradient(TorchEngine):
    """The gradient of one parameter is too small by a tenth."""

    parameter = "model.layers.1.mlp.down_proj.weight"

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        stats = super().forward_backward(batch, loss)
        gradient = trained(self._optimizer).gradients()[self.parameter]
        gradient *= 0.9
        return stats


class Averaging(TorchEngine):
    """Gradients are averaged over ranks, though the loss is divided by global counts already."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        stats = super().forward_backward(batch, loss)
        for gradient in trained(self._optimizer).gradients().values():
            gradient /= self.layout.world
        return stats


def divided(loss: LossFn, ranks: int) -> LossFn:
    """A loss that every rank divides, as if gradients were added up where they are averaged."""

    def scaled(outputs: Any, micro: Any) -> Any:
        value, stats = loss(outputs, micro)
        return value / ranks, stats

    return scaled


class ScaledLoss(TorchEngine):
    """The loss is divided by the number of ranks."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        return super().forward_backward(batch, divided(loss, self.layout.world))


class MegatronScaledLoss(MegatronEngine):
    """The loss is divided by the number of ranks."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        return super().forward_backward(batch, divided(loss, self.layout.world))


class MegatronWithoutSync(MegatronEngine):
    """Each rank steps its part of the weights by the gradients that it computed alone, those of norms between tensor ranks and of tied embeddings between stages among them."""

    def optim_step(self, lr: float) -> Stats:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer, "finalize_model_grads", lambda *args, **options: None)
            return super().optim_step(lr)


def moved(batch: Batch) -> Batch:
    """With the masks of the tokens behind those that are meant."""
    micros = [replace(m, loss_mask=m.loss_mask.roll(1)) for m in batch.microbatches]
    return replace(batch, microbatches=tuple(micros))


class OffByOne(TorchEngine):
    """Trains on the tokens behind those that are meant."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        return super().forward_backward(moved(batch), loss)


class MegatronOffByOne(MegatronEngine):
    """Trains on the tokens behind those that are meant."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        return super().forward_backward(moved(batch), loss)


class ShiftedColumn(TorchEngine):
    """Trains each token with the advantage of the token before it."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        micros = [replace(m, advantages=m.given("advantages").roll(1)) for m in batch.microbatches]
        return super().forward_backward(replace(batch, microbatches=tuple(micros)), loss)


class AtOne(TorchEngine):
    """Computes at temperature 1, whatever it is told."""

    def forward(self, batch: Batch) -> list[TokenOutputs]:
        return super().forward(_at_one(batch))

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        return super().forward_backward(_at_one(batch), loss)


def _at_one(batch: Batch) -> Batch:
    return replace(
        batch, microbatches=tuple(replace(m, temperature=1.0) for m in batch.microbatches)
    )


class Drifting(TorchEngine):
    """The first rank's copy of the weights is not that of the others."""

    def optim_step(self, lr: float) -> Stats:
        stats = super().optim_step(lr)
        for shard in self.shards(Part.WEIGHTS) if self.layout.is_main else ():
            shard.tensor.mul_(1.001)
        return stats


class WrongBalance(TorchEngine):
    """The load-balancing loss of experts is that of one rank's share of the tokens, times the ranks."""

    def _balanced(self, batch: Batch, *sizes: int) -> tuple[Batch, Tensor | None, Stats]:
        evened, factors, stats = super()._balanced(batch, *sizes)
        assert factors is not None
        return evened, factors * self.layout.world, stats


class WrongBalanceGradient(TorchEngine):
    """The loss of experts is right, and its gradient as many times too large as there are ranks."""

    def forward_backward(self, batch: Batch, loss: LossFn) -> Stats:
        with pytest.MonkeyPatch.context() as patch:
            right = routing._WithLoss.backward

            def wrong(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
                values, of_loss = right(ctx, *gradients)
                return values, of_loss * self.layout.world

            patch.setattr(routing._WithLoss, "backward", staticmethod(wrong))
            return super().forward_backward(batch, loss)


ENGINES = {
    engine.__name__: engine
    for engine in (
        TorchEngine,
        WithoutSync,
        WithoutTensorSum,
        OneGradient,
        Averaging,
        ScaledLoss,
        OffByOne,
        ShiftedColumn,
        AtOne,
        Drifting,
        WrongBalance,
        WrongBalanceGradient,
        MegatronScaledLoss,
        MegatronWithoutSync,
        MegatronOffByOne,
    )
}
"""By name."""

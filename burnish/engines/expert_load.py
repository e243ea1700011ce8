"""What engines do with the experts of a step: prescribe and count them, and even out their load by a loss or by the routers' biases.

After a step, of a router with E experts whose bias is b and which chose expert e c_e times in the step,

    b_e += rate · sign(Σ c / E - c_e)

(arXiv 2408.15664, algorithm 1; arXiv 2412.19437, section 2.1.2), where c counts the tokens of all ranks and micro-batches. Biases have no
gradient and no optimizer state. `burnish.models.routing` has the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from burnish.distributed.device import widest_float
from burnish.distributed.layout import Layout
from burnish.engines.optim.optimizer import local
from burnish.errors import IncompatibleError, UsageError
from burnish.families import family_of, names_of
from burnish.models.routing import (
    Routing,
    balance_factors,
    expert_counts,
    require_recorded,
    require_routers,
    row_weights,
    rows_of,
)
from burnish.models.scorer import ScoringPlan
from burnish.records import Batch, MicroBatch, to_device
from burnish.tracking.stats import Mean, Stats

_RATE = "engine.router_bias_update_rate"


def require_router_biases(hf_config: PretrainedConfig) -> None:
    """Raise `UsageError` for a model whose routers have no bias that chooses experts."""
    require_routers(hf_config, _RATE)
    kind = hf_config.get_text_config().model_type
    if not family_of(kind).router_bias:
        raise UsageError(
            f"{_RATE} is for routers with a bias that chooses experts",
            have=f"a model of type {kind}",
            want=f"one of {names_of('router_bias')}",
            do=f"remove {_RATE}; engine.router_aux_loss evens out the experts of other mixtures",
        )


def require_routed(batch: Batch, sizes: tuple[int, int, int]) -> None:
    """Raise `IncompatibleError` if a batch has another model's experts, or the model has no routers. `sizes` are those of `router_sizes`."""
    routers, experts, chosen = sizes
    if routers == 0:
        raise IncompatibleError(
            "the engine cannot record experts, because the model has no known routers",
            want="a mixture of experts",
            do="set algorithm.router_replay=none",
        )
    for micro in batch.microbatches:
        if micro.experts is not None:
            require_recorded(micro.experts, (len(micro.input_ids), routers, chosen), experts)


def routing_of(
    micro: MicroBatch,
    plan: ScoringPlan,
    part: tuple[slice, int],
    factors: Tensor | None,
    device: torch.device,
) -> Routing:
    """Return a micro-batch's instructions to the routers of this rank, which see the `part` of its rows, as other ranks may."""
    rows, copies = part
    routing = Routing(balance=factors, tokens=row_weights(plan, device)[rows] / copies)
    if micro.experts is not None:
        routing.prescribed = to_device(rows_of(plan, micro.experts)[rows], device)
    return routing


def balance(
    batch: Batch,
    sizes: tuple[int, int, int],
    coefficient: float,
    layout: Layout,
    device: torch.device,
) -> tuple[Tensor, Stats]:
    """Return `Routing.balance` for the recorded experts of a step, and `moe/load_imbalance`. Collective."""
    routers, experts, chosen = sizes
    counts = expert_counts(batch, routers, experts, layout, device)
    return balance_factors(counts, coefficient, chosen), _imbalance(counts)


def _imbalance(counts: Tensor) -> Stats:
    """Return the load of a router's busiest expert over the mean load, averaged over routers, from counts [L, E]."""
    imbalance = (counts.amax(dim=1) / counts.float().mean(dim=1)).mean()
    return Stats({"moe/load_imbalance": Mean(imbalance, 1.0)})


def biases_of(model: PreTrainedModel) -> Iterator[tuple[int, Tensor]]:
    """Yield each router's number and this rank's part of its bias, in a model of transformers."""
    mixtures = (each.mlp for each in model.base_model.layers if hasattr(each.mlp, "experts"))
    for number, mixture in enumerate(mixtures):
        held = (*mixture.named_buffers(), *mixture.named_parameters())
        bias = next(each for name, each in held if name.endswith("e_score_correction_bias"))
        yield number, local(bias.detach())


class BiasUpdates:
    """Counts the load of a step, then moves the biases."""

    def __init__(
        self,
        biases: Callable[[], Iterable[tuple[int, Tensor]]],
        sizes: tuple[int, int, int],
        rate: float,
        layout: Layout,
        device: torch.device,
    ) -> None:
        """`biases` returns those that this rank holds, all or nothing of each, with their routers' numbers; `sizes` are those of `router_sizes`."""
        self._biases = biases
        self._rate = rate
        self._layout = layout
        # Whole numbers, but while several ranks compute a row each counts a part.
        self._counts = torch.zeros(sizes[:2], dtype=widest_float(device), device=device)

    def count(self, routing: Routing) -> None:
        """Add the choices of a micro-batch's rows."""
        assert routing.tokens is not None
        for router, chosen in routing.chosen.items():
            tokens = routing.tokens.to(self._counts.dtype)
            of_choices = tokens.repeat_interleave(chosen.shape[-1])
            self._counts[router].index_add_(0, chosen.long().flatten(), of_choices)

    @torch.no_grad()
    def step(self, *, is_skipped: bool) -> Stats:
        """Move the biases unless the step is skipped, and count anew. Return `moe/load_imbalance`. Collective."""
        if self._layout.world > 1:
            dist.all_reduce(self._counts)
        counts = self._counts.round().long()
        self._counts.zero_()
        moves = (counts.sum(dim=1, keepdim=True) - counts.shape[1] * counts).sign()
        for router, bias in () if is_skipped else self._biases():
            if bias.numel():
                bias += self._rate * moves[router].view_as(bias)
        return _imbalance(counts)

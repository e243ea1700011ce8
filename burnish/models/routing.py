"""Record, prescribe and balance the experts of tokens, by hooks on a model's routers.

Training may send a token to other experts than sampling did. Routing replay prescribes those chosen before (arXiv 2507.18071,
section 5.3; arXiv 2510.11370). With p = softmax(router logits) and the prescribed experts c_1 ... c_k, expert c_i has the weight

    p_{c_i},  or p_{c_i} / Σ_j p_{c_j} where the family normalizes,

so the router keeps its gradient. Routers that score by sigmoid have p = sigmoid(router logits) there, times the family's factor
(arXiv 2412.19437, equations 12 to 15). Their bias chooses experts and is no part of the weights. Instructions are the keyword argument `routing`, so that recomputation repeats them.

The load-balancing loss is the families' own (arXiv 2101.03961, equations 4 to 6): of E experts, N tokens and L routers,

    E Σ_e f_e P_e,  f_e = choices of e / (N L),  P_e = Σ p_e / (N L),

over all tokens and routers of a step. Sigmoids are divided by their sum over all experts (arXiv 2412.19437, equation 19). f_e has no
gradient. Each router adds the gradient of its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from burnish.distributed.device import uncompiled
from burnish.distributed.layout import Layout
from burnish.distributed.tensor_collectives import all_gather_replicated
from burnish.errors import IncompatibleError, UsageError
from burnish.families import Family, family_of, names_of
from burnish.models.meta_init import router_sizes
from burnish.models.packing import on_device
from burnish.records import Batch

if TYPE_CHECKING:
    from burnish.models.scorer import ScoringPlan

# Least sum of probabilities to divide by, so that experts of probability 0 get weight 0 and a finite gradient.
_LEAST_SUM = 1e-30
# Added to sums of sigmoids, as the families do.
_LEAST_SIGMOIDS = 1e-20


def require_routers(hf_config: PretrainedConfig, setting: str) -> None:
    """Raise `UsageError`, naming the `setting`, for a model without known routers."""
    if router_sizes(hf_config) == (0, 0, 0):
        kind = hf_config.get_text_config().model_type
        without = " without a layer of experts" if family_of(kind).has_router else ""
        raise UsageError(
            f"{setting} is for mixtures of experts whose routers are known",
            have=f"a model of type {kind}{without}",
            want=f"one of {names_of('has_router')}, with experts",
            do=f"remove {setting}, or train such a model",
        )


@dataclass(slots=True, eq=False)
class Routing:
    """Instructions to the routers of one forward pass, and their choices. R rows, L routers, k of E experts."""

    prescribed: Tensor | None = None
    """[R, L, k] integers: the experts of each row; None: the routers choose."""
    balance: Tensor | None = None
    """[E] fp32: c E f_e / (N L), by which the load-balancing loss multiplies each expert's probability; c is the loss's weight. None: it is not computed."""
    tokens: Tensor | None = None
    """[R] fp32: the number of tokens that each row stands for, divided by the number of ranks that compute the row."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """By router: the experts [R, k] of the rows."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """By router: its part of the load-balancing loss, a scalar without gradient."""

    def settle(
        self,
        router: int,
        logits: Tensor,
        experts: Tensor,
        weights: Tensor,
        *,
        by_sigmoid: bool = False,
    ) -> Tensor:
        """Record the `experts` [R, k] of a router with these `logits` [R, E].

        Return their `weights`, which carry the gradient of its part of the load-balancing loss.
        """
        self.chosen[router] = experts.to(index_dtype(logits.shape[-1]))
        if self.balance is None or self.tokens is None:
            return weights
        if by_sigmoid:
            probabilities = sigmoid_weights(logits.float().sigmoid())
        else:
            probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        loss = torch.dot(torch.mv(probabilities, self.balance), self.tokens)
        self.losses[router] = loss.detach()
        return _WithLoss.apply(weights, loss)  # type: ignore[no-untyped-call]

    def record(self) -> Tensor:
        """Return the experts of all routers, [R, L, k] in `index_dtype`. Raises `IncompatibleError` without known routers."""
        if not self.chosen:
            raise IncompatibleError(
                "the experts of tokens cannot be recorded, because the model has no known routers",
                want=f"a model of type {names_of('has_router')}",
                do="set algorithm.router_replay=none and engine.router_aux_loss=0",
            )
        return torch.stack([self.chosen[number] for number in sorted(self.chosen)], dim=1)

    def loss(self) -> Tensor:
        """Return the load-balancing loss of this rank's rows, times its weight, without gradient."""
        return torch.stack(list(self.losses.values())).sum()


def hook_routers(model: PreTrainedModel) -> None:
    """Make the routers of a model follow the `routing` of each forward pass. Call it once.

    Only a pass with `routing` needs it, so the compiled layers of other runs have no hooks.
    """
    text = model.config.get_text_config()
    family = family_of(text.model_type)
    normalizes = getattr(text, "norm_topk_prob", True)
    factor = getattr(text, "routed_scaling_factor", 1.0)
    layers: Any = getattr(model.base_model, "layers", ()) if family.has_router else ()
    for number, layer in enumerate(each for each in layers if hasattr(each.mlp, "experts")):
        gate = router_of(layer.mlp)
        # DeepSeek-V2's never normalize.
        router = _Router(number, family, normalizes and not hasattr(gate, "topk_method"), factor)
        layer.register_forward_pre_hook(router.take, with_kwargs=True)
        gate.register_forward_hook(router.route)


def router_of(mixture: Any) -> nn.Module:
    """Return a mixture's router."""
    return mixture.router if hasattr(mixture, "router") else mixture.gate


def require_recorded(recorded: Tensor, sizes: tuple[int, int, int], count: int) -> None:
    """Raise `IncompatibleError` unless experts have the shape `sizes` and are below `count`.

    Values on an accelerator are not checked: they were recorded there.
    """
    outside = recorded.device.type == "cpu" and recorded.numel() > 0
    least, largest = (int(each) for each in recorded.aminmax()) if outside else (0, 0)
    if tuple(recorded.shape) != sizes or least < 0 or largest >= max(count, 1):
        raise IncompatibleError(
            "the recorded experts are not those of this model and these tokens",
            have=f"{' × '.join(map(str, recorded.shape))} numbers from {least} to {largest}",
            want=f"{sizes[0]} tokens × {sizes[1]} routers × {sizes[2]} of the experts 0 to {count - 1}",
            do="record them with the model that is trained, for all tokens, or set algorithm.router_replay=recompute",
        )


class _Router:
    def __init__(
        self, number: int, family: Family, normalizes: bool = True, factor: float = 1.0
    ) -> None:
        self._number = number
        self._family = family
        self._normalizes = normalizes
        self._factor = factor
        self._routing: Routing | None = None

    @uncompiled
    def take(self, _: nn.Module, __: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._routing = options.get("routing")

    @uncompiled
    def route(
        self, _: nn.Module, __: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Replace the router's logits [R, E], weights [R, k] and experts [R, k]."""
        routing = self._routing
        if routing is None:
            return output
        logits, weights, experts = output
        if routing.prescribed is not None:
            experts = routing.prescribed[:, self._number].long()
            weights = self._weights(logits, experts).to(weights.dtype)
        by_sigmoid = self._family.scores_by_sigmoid
        weights = routing.settle(self._number, logits, experts, weights, by_sigmoid=by_sigmoid)
        return logits, weights, experts

    def _weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        if self._family.scores_by_sigmoid:
            chosen = logits.float().sigmoid().gather(1, experts)
            return sigmoid_weights(chosen, self._factor, normalizes=self._normalizes)
        if self._family.softmax_of_chosen:
            return logits.gather(1, experts).softmax(dim=-1)
        weights = logits.softmax(dim=-1, dtype=torch.float32).gather(1, experts)
        if self._normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=_LEAST_SUM)
        return weights * self._factor


def sigmoid_weights(scores: Tensor, factor: float = 1.0, *, normalizes: bool = True) -> Tensor:
    """Return the weights of experts with these sigmoids [R, n], perhaps divided by their sum."""
    if normalizes:
        scores = scores / (scores.sum(dim=-1, keepdim=True) + _LEAST_SIGMOIDS)
    return scores * factor


def index_dtype(experts: int) -> torch.dtype:
    """Return an integer dtype for numbers of experts."""
    return torch.uint8 if experts <= 256 else torch.int16


class _WithLoss(torch.autograd.Function):
    """Return `values`; the backward pass treats the scalar `loss` as a summand of the total loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_ones((), dtype=torch.float32)


def rows_of(plan: ScoringPlan, values: Tensor) -> Tensor:
    """Return this rank's rows [R, ...] of `values` [T, ...]; padding repeats some token.

    A row takes the value of a token that is not a sequence's last, if it has one: generators do not compute last tokens.
    """
    tree = plan.tree
    last = np.cumsum(plan.lengths) - 1
    others = np.delete(np.arange(len(tree.rows)), last)
    sources = tree.computed.copy()
    sources[tree.rows[others]] = others
    return values.index_select(0, on_device(plan.deal.mine(sources), values.device))


def row_weights(plan: ScoringPlan, device: torch.device) -> Tensor:
    """Return the number of tokens of each row, [R] fp32; 0 for padding."""
    return on_device(plan.deal.mine(np.bincount(plan.tree.rows)), device).float()


def tokens_of(plan: ScoringPlan, values: Tensor) -> Tensor:
    """Return integers of all tokens [T, ...] from this rank's rows [R, ...]. Collective if ranks share them."""
    deal = plan.deal
    tokens = plan.tree.rows
    if deal.group is not None:  # as bytes, since not every backend sends int16
        values = all_gather_replicated(values.view(torch.uint8), deal.group).view(values.dtype)
    rows = deal.owner(tokens) * deal.rows + deal.place(tokens)
    return values.index_select(0, on_device(rows, values.device))


def expert_counts(
    batch: Batch, routers: int, experts: int, layout: Layout, device: torch.device
) -> Tensor:
    """Count how often each router chose each expert on all ranks, without filler: [L, E] int64. Collective."""
    counts = torch.zeros(routers * experts, dtype=torch.int64, device=device)
    starts = torch.arange(routers, device=device)[:, None] * experts
    for micro, is_filler in zip(batch.microbatches, batch.is_filler, strict=True):
        if micro.experts is not None and not is_filler:
            places = micro.experts.to(device).long() + starts
            counts += torch.bincount(places.flatten(), minlength=len(counts))
    if layout.world > 1:
        dist.all_reduce(counts)
        counts //= layout.sharing
    return counts.view(routers, experts)


def balance_factors(counts: Tensor, coefficient: float, chosen: int) -> Tensor:
    """Return c E f_e / (N L), [E] fp32 (see `Routing.balance`), from counts [L, E]."""
    choices = counts.sum(dim=0)
    rows = (choices.sum() / chosen).clamp(min=1)
    return coefficient * len(choices) * choices / rows.square()

"""For tests of mixtures: routers written by hand, and transformers' own load-balancing loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from contracts.engine import CLIP, examples_that_begin_alike, score_by_hand
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from burnish.distributed.collectives import gather_objects
from burnish.engines.base import Engine
from burnish.families import FAMILIES
from burnish.models.meta_init import router_sizes
from burnish.models.names import model_shards, regions
from burnish.models.routing import router_of
from burnish.records import Batch
from support.models.tiny import VOCAB

LAYERS, EXPERTS, CHOSEN = 2, 4, 2
"""Of the tiny Mixtral and the tiny GLM-4.5."""
WEIGHT = 0.2
"""Of the load-balancing loss."""


class PrescribedRouter(nn.Module):
    """In the place of a router: sends tokens where `experts` [T, k] says."""

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        replaced = getattr(replaced, "wg", replaced)
        bias = getattr(replaced, "bias", None)
        self.weight, self.bias = replaced.weight, 0.0 if bias is None else bias
        self.normalizes: bool = getattr(
            replaced, "norm_topk_prob", not hasattr(replaced, "topk_method")
        )
        self.factor: float = getattr(replaced, "routed_scaling_factor", 1.0)
        self.by_sigmoid = False
        self.experts: Tensor | None = None

    def forward(self, hidden: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.experts is not None
        logits = hidden.view(-1, self.weight.shape[1]) @ self.weight.T + self.bias
        scores = (logits - logits.detach().amax(-1, keepdim=True)).exp()
        if self.by_sigmoid:
            scores = 1 / (1 + (-logits).exp())
        chosen = torch.stack([row[e] for row, e in zip(scores, self.experts, strict=True)])
        if self.normalizes or not self.by_sigmoid:
            chosen = chosen / (chosen if self.normalizes else scores).sum(-1, keepdim=True)
        return logits, chosen * self.factor, self.experts


def routers(model: PreTrainedModel) -> list[Any]:
    """The modules that route."""
    layers = [layer.mlp for layer in model.model.layers]
    return [router_of(each) for each in layers if hasattr(each, "experts")]


def prescribe(model: PreTrainedModel) -> list[PrescribedRouter]:
    """Replace the routers of a plain model."""
    made = []
    for layer in model.model.layers:
        for name in ("gate", "router"):
            if hasattr(layer.mlp, name):
                made.append(PrescribedRouter(getattr(layer.mlp, name)))
                made[-1].by_sigmoid = by_sigmoid(model)
                setattr(layer.mlp, name, made[-1])
    return made


def by_sigmoid(model: PreTrainedModel) -> bool:
    """Its routers are DeepSeek-V3's."""
    return any(name.endswith("e_score_correction_bias") for name, _ in model.named_buffers())


Routed = list[list[tuple[Tensor, Tensor]]]
"""By router and call, logits [T, E] and experts [T, k]."""


def record_routed(model: PreTrainedModel) -> Routed:
    """Those of all calls to come."""
    found: Routed = []
    for router in routers(model):
        found.append([])
        router.register_forward_hook(
            lambda _, __, out, mine=found[-1]: mine.append((out[0], out[2]))
        )
    return found


def balancing_loss(model: PreTrainedModel, routed: Routed) -> Tensor:
    """transformers' own, of all tokens; that of the paper if routers choose with a bias or within groups."""
    of_layers = tuple(torch.cat([logits for logits, _ in calls]) for calls in routed)
    _, count, chosen = router_sizes(model.config)
    family = FAMILIES[model.config.model_type]
    if family.router_bias or hasattr(model.config, "topk_method"):
        score = torch.sigmoid if by_sigmoid(model) else torch.exp
        shares = torch.cat([(each / each.sum(-1, keepdim=True)) for each in map(score, of_layers)])
        experts = torch.cat([each for calls in routed for _, each in calls])
        load = torch.bincount(experts.flatten(), minlength=count) / len(shares)
        return count * torch.dot(load, shares.mean(0))
    loss = load_balancing_loss_func(of_layers, count, chosen)
    assert isinstance(loss, Tensor)
    return loss


def experts_of_others() -> list[Tensor]:
    """By sequence, [T, L, k]; where two begin alike they go to the same ones."""
    generator = torch.Generator().manual_seed(1)
    made = [
        torch.rand(len(e.token_ids), LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :CHOSEN]
        for e in examples_that_begin_alike(VOCAB)
    ]
    made[0][:8] = made[2][:8]
    return made


def with_experts(batch: Batch, experts: Sequence[Tensor]) -> Batch:
    micros = [
        replace(micro, experts=torch.cat([experts[n] for n in numbers if n >= 0] or [experts[3]]))
        for micro, numbers in zip(batch.microbatches, batch.examples, strict=True)
    ]
    return replace(batch, microbatches=tuple(micros))


def recorded(engine: Engine, batch: Batch) -> dict[int, Tensor]:
    """The experts of each sequence, from all ranks."""
    mine = {}
    outputs = engine.forward(batch, experts=True)
    for micro, numbers, output in zip(batch.microbatches, batch.examples, outputs, strict=True):
        parts = output.experts.split(micro.cu_seqlens.diff().tolist())
        mine |= {number: part for number, part in zip(numbers, parts, strict=True) if number >= 0}
    return {n: e for held in gather_objects(mine, engine.layout) for n, e in held.items()}


def checkpoint_name(name: str, path: Path) -> str:
    """What a model's checkpoint calls one of its parameters."""
    family = FAMILIES[AutoConfig.from_pretrained(path).model_type]
    return name.replace(".mlp.gate.", f".{family.experts_module}.gate.")


def by_hand(path: Path, experts: Sequence[Tensor] | None) -> dict[str, Any]:
    """One step's numbers by plain transformers: with these experts, or with its own and the load-balancing loss."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    made = prescribe(model) if experts else []
    routed = record_routed(model)
    tokens = sum(int(example.loss_mask.sum()) for example in examples_that_begin_alike(VOCAB))
    total, logprobs = torch.zeros(()), []
    for number, example in enumerate(examples_that_begin_alike(VOCAB)):
        for layer, router in enumerate(made):
            router.experts = experts[number][:, layer] if experts else None
        scored = score_by_hand(model, example)
        mask = torch.from_numpy(example.loss_mask)
        total = total + torch.where(mask, -scored[0] - 0.01 * scored[1], 0.0).sum() / tokens
        logprobs.append(scored[0].detach())
    aux = balancing_loss(model, routed)
    if experts is None:
        total = total + WEIGHT * aux
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    shards = model_shards(model, gradients, parts=regions(model)) if experts is None else ()
    own = [
        torch.stack([calls[number][1] for calls in routed], dim=1)
        for number in range(len(examples_that_begin_alike(VOCAB)))
    ]
    return {
        "loss": float(total.detach()),
        "norm": float(norm),
        "logprobs": logprobs,
        "routers": {n: g for n, g in gradients.items() if n.endswith("gate.weight")},
        "gradients": {shard.spec.name: shard.tensor.clone() for shard in shards},
        "aux": float(aux.detach()),
        "own": own,
    }

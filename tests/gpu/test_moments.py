"""AdamW whose moments rest in bf16: on every device the steps of the paper's formula, one rounding after each, beside the weights or in the arena."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.ranks.devices import DEVICES
from torch import Tensor

from burnish.config.schema import OptimConfig
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout
from burnish.engines import offload as resting
from burnish.engines.optim.optimizer import SLOTS, ShardedOptimizer

OPTIM = OptimConfig(moments="bf16", betas=(0.9, 0.95), weight_decay=0.1)
SHAPES = {"matrix": (300, 70), "other": (90, 70), "vector": (70,)}
DECAYED = ("matrix", "other")
STEPS, LR = 4, 1e-2
Tensors = dict[str, Tensor]


def noise(seed: int) -> Tensors:
    """Numbers of all sizes, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * torch.logspace(-4, 1, shape[-1])
        for name, shape in SHAPES.items()
    }


def by_the_formula() -> tuple[Tensors, dict[str, Tensors]]:
    """Weights and moments after the steps: arXiv 1711.05101, algorithm 2, in fp64 but for the moments between steps."""
    weights = {name: tensor.double() for name, tensor in noise(0).items()}
    slots = {slot: {n: w.bfloat16().zero_() for n, w in weights.items()} for slot in SLOTS}
    for step in range(1, STEPS + 1):
        for name, gradient in noise(step).items():
            corrected = []
            for slot, beta, power in zip(SLOTS, OPTIM.betas, (1, 2), strict=True):
                moment = beta * slots[slot][name].double() + (1 - beta) * gradient.double() ** power
                slots[slot][name] = moment.bfloat16()
                corrected.append(moment / (1 - beta**step))
            mean, square = corrected
            decay = OPTIM.weight_decay if name in DECAYED else 0.0
            weights[name] *= 1 - LR * decay
            weights[name] -= LR * mean / (square.sqrt() + OPTIM.eps)
    return weights, slots


def by_the_torch_engine(weights: Tensors, arena: Arena | None) -> dict[str, Tensors]:
    model = torch.nn.ParameterDict(weights)
    optimizer = ShardedOptimizer(model, (), OPTIM, Layout(), arena)
    for step in range(1, STEPS + 1):
        for name, gradient in noise(step).items():
            model[name].grad = gradient.to(weights[name].device)
        optimizer.step(LR)
    return optimizer.slots()


def by_the_megatron_engine(weights: Tensors, arena: Arena | None) -> dict[str, Tensors]:
    """With the AdamW that Megatron takes on this machine: TransformerEngine's, Apex's or torch's."""
    pytest.importorskip("megatron.core")
    from burnish.engines.megatron.distributed_optimizer import prepare_slots, step_offloaded

    Adam = pytest.importorskip("megatron.core.optimizer").Adam  # warns when imported by itself
    if Adam is not torch.optim.AdamW and weights["vector"].device.type != "cuda":
        pytest.skip(f"{Adam.__module__} needs CUDA")
    groups = [
        {"params": [w for n, w in weights.items() if (n in DECAYED) is decays], "weight_decay": wd}
        for decays, wd in ((True, OPTIM.weight_decay), (False, 0.0))
    ]
    inner = Adam(groups, lr=LR, betas=OPTIM.betas, eps=OPTIM.eps)
    prepare_slots(inner, arena, torch.bfloat16)
    for step in range(1, STEPS + 1):
        for name, gradient in noise(step).items():
            weights[name].grad = gradient.to(weights[name].device)
        step_offloaded(inner, step - 1)
    return {slot: {n: inner.state[w][slot] for n, w in weights.items()} for slot in SLOTS}


@pytest.mark.parametrize("in_arena", [False, True])
@pytest.mark.parametrize("stepped", [by_the_torch_engine, by_the_megatron_engine])
@pytest.mark.parametrize("device", DEVICES)
def test_steps_are_the_formulas(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    stepped: Callable[[Tensors, Arena | None], dict[str, Tensors]],
    in_arena: bool,
) -> None:
    monkeypatch.setattr(resting, "WAVE", 10_000)  # so that a step takes several
    weights = {name: tensor.to(device) for name, tensor in noise(0).items()}
    slots = stepped(weights, Arena(device) if in_arena else None)
    exact, rounded = by_the_formula()
    for name, weight in weights.items():
        # Of elements whose moment lay between two numbers of bf16, fp32 may have found the other one.
        apart = (weight.cpu().double() - exact[name]).abs()
        assert float((apart > 2e-6 * (1 + exact[name].abs())).double().mean()) < 1e-3, name
        assert float(apart.max()) < STEPS * LR / 2**7, name
        for slot in SLOTS:
            found = slots[slot][name]
            assert found.dtype is torch.bfloat16
            assert found.device.type == ("cpu" if in_arena else device.type)
            found, wanted = found.cpu().float(), rounded[slot][name].float()
            torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0.0)
            assert float((found != wanted).double().mean()) < 1e-3, (slot, name)

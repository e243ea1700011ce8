"""Where Liger's kernels would be used, and that engines stay right with kernels that write over their inputs as Liger's do.

The kernels themselves need CUDA: `tests/gpu/test_liger.py`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from contracts.engine import make_examples, train, train_by_hand
from support.models.adapters import LORA, plain_adapted
from support.models.engines import CPU, make_engine
from support.models.tiny import FAMILIES, VOCAB, save_tiny, tiny_config
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from burnish.distributed.processes import process_group
from burnish.engines.torch import torch_engine
from burnish.errors import UsageError, install
from burnish.models.kernels import liger
from burnish.models.kernels.fused import FusedRMSNorm, rms_norm
from burnish.models.kernels.liger import Kernels, liger_kernels, use_kernels
from burnish.models.meta_init import build_on_meta
from burnish.models.names import regions


class InPlace(torch.autograd.Function):
    """activation(gate) * up, which leaves its gradients where gate and up were."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        saved = ctx.saved_tensors
        with torch.enable_grad():
            own = [each.detach().clone().requires_grad_() for each in saved]
            found = torch.autograd.grad(ctx.activation(own[0]) * own[1], own, gradients[0])
        for held, gradient in zip(saved, found, strict=True):
            held.data.copy_(gradient)
        return saved[0], saved[1], None


def norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight + offset, epsilon)


KERNELS = Kernels(
    {
        "silu": lambda gate, up: InPlace.apply(gate, up, functional.silu),
        "gelu_pytorch_tanh": lambda g, u: InPlace.apply(
            g, u, lambda x: functional.gelu(x, approximate="tanh")
        ),
    },
    norm,
)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_which_modules_are_replaced(family: str) -> None:
    model = build_on_meta(tiny_config(family))
    plain = regions(model)
    use_kernels(model, KERNELS)
    assert regions(model) == plain
    layers = model.config.num_hidden_layers
    found = Counter(type(module).__name__ for module in model.modules())
    norms = {"gemma3_text": 6 * layers + 1, "olmo2": 4 * layers + 1}
    own = [m for m in model.modules() if isinstance(m, FusedRMSNorm) and m.norm is not rms_norm]
    assert len(own) == norms.get(family, 0)
    assert found["GatedMLP"] == {"mixtral": 0, "qwen3_moe": 1}.get(family, layers)


@pytest.mark.parametrize("changes", [{"hidden_act": "relu"}, {"hidden_act": "gelu"}])
def test_gates_that_it_has_no_kernel_for_stay(changes: dict[str, str]) -> None:
    model = build_on_meta(tiny_config("llama", **changes))
    use_kernels(model, KERNELS)
    assert "GatedMLP" not in {type(module).__name__ for module in model.modules()}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"activation_checkpointing": "selective"}),
        ("qwen3", {"activation_checkpointing": "selective", "activation_offload": True}),
        ("gemma3_text", {"activation_checkpointing": "full"}),
        ("olmo2", {}),
        ("qwen3_moe", {"activation_offload": True}),
    ],
)
def test_engines_train_as_plain_transformers_with_kernels_that_write_over_their_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch_engine, "has_liger", lambda device: True)
    monkeypatch.setattr(liger, "liger_kernels", lambda: KERNELS)
    path = save_tiny(tmp_path / "m", family, torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    wanted = train_by_hand(plain, make_examples(VOCAB))
    with process_group(CPU, 60) as layout:
        found = train(make_engine(layout, path, **settings), make_examples(VOCAB), 2)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=5e-6)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=2e-5)


def test_an_adapter_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "has_liger", lambda device: True)
    monkeypatch.setattr(liger, "liger_kernels", lambda: KERNELS)
    path = save_tiny(tmp_path / "m", "llama", torch.float32)
    wanted = train_by_hand(plain_adapted(path), make_examples(VOCAB))
    with process_group(CPU, 60) as layout:
        found = train(make_engine(layout, path, lora=LORA), make_examples(VOCAB), 3)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=5e-6)


def test_compiled_engines_do_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "has_liger", lambda device: True)
    monkeypatch.setattr(liger, "liger_kernels", pytest.fail)
    path = save_tiny(tmp_path / "m", "llama", torch.float32)
    with process_group(CPU, 60) as layout:
        make_engine(layout, path, compile=True)


def test_they_are_for_cuda_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "find_spec", lambda name: None)
    assert not torch_engine.has_liger(torch.device("cuda"))
    monkeypatch.setattr(torch_engine, "find_spec", lambda name: ModuleSpec(name, None))
    assert torch_engine.has_liger(torch.device("cuda"))
    assert not torch_engine.has_liger(CPU)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    with pytest.raises(UsageError) as caught:
        liger_kernels()
    assert install("liger") in str(caught.value)

"""Drawing on a device that has no fp64, which stands in for Ascend's NPUs: the same tokens as anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from burnish.rollout.base import Sampling
from burnish.rollout.builtin.sampling import Drawn, draw, uniforms

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 4},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.8, "min_p": 0.15},
]


CPU = torch.device("cpu")
DEVICE = torch.device("mps")
"""Has no fp64 either, and torch knows its name everywhere; npu it knows beside torch_npu only."""


class OnDevice(Tensor):
    """A tensor that counts as on `DEVICE`."""


class Machine(TorchFunctionMode):
    """Has a `DEVICE`, played by the CPU: without fp64, and what lies there meets only what lies there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            return DEVICE if isinstance(args[0], OnDevice) else CPU
        if func is Tensor.to and args[1] in (DEVICE, CPU):
            return args[0].as_subclass(OnDevice if args[1] == DEVICE else Tensor)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        kinds = {type(tensor) for tensor in tensors if tensor.ndim}
        if len(kinds) > 1:
            raise RuntimeError(f"{func.__name__} was given tensors of two devices")
        plain = tree_map_only(Tensor, lambda t: t.as_subclass(Tensor), (args, kwargs))
        result = func(*plain[0], **plain[1])
        if kinds != {OnDevice}:
            return result
        if any(
            isinstance(t, Tensor) and t.is_floating_point() and t.itemsize > 4
            for t in tree_leaves(result)
        ):
            raise RuntimeError(f"{func.__name__} gave fp64 on a device that has none")
        return tree_map_only(Tensor, lambda t: t.as_subclass(OnDevice), result)


@pytest.fixture
def machine() -> Iterator[None]:
    with Machine():
        yield


@pytest.mark.usefixtures("machine")
def test_the_stand_in_refuses_fp64_and_what_lies_elsewhere() -> None:
    there = torch.ones(3).to(DEVICE)
    assert there.device == DEVICE
    assert (there + 1).to(CPU).tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="gave fp64"):
        there.double()
    with pytest.raises(RuntimeError, match="two devices"):
        there + torch.ones(3)


def drawn(device: Any, logits: Tensor, options: dict[str, Any]) -> Drawn:
    keys, counts = torch.full((len(logits),), -11), torch.arange(len(logits))
    numbers = uniforms(keys.to(device), counts.to(device))
    assert numbers.device == CPU
    return draw(logits.clone().to(device), Sampling(1, **options), numbers)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("vocab", [5, 64, 1000])
def test_tokens_and_log_probs_are_those_of_fp64(options: dict[str, Any], vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(300, vocab) * 2
    wanted, found = (drawn(device, logits, options) for device in (CPU, DEVICE))
    for name in ("tokens", "sampled_logprobs", "logprobs"):
        there = getattr(found, name)
        assert there.device == DEVICE, name
        assert torch.equal(there.to(CPU), getattr(wanted, name)), name
    assert len(wanted.tokens.unique()) > 1

"""Log-probs on devices beside the definition."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from burnish.distributed.device import missing_compiler
from burnish.models.logprobs import LogitTransform, LogprobOptions, token_logprobs


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5, softcap=3.0)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("chunk", [64, 200])
def test_values_and_gradients_equal_the_definition(
    device: torch.device, transform: LogitTransform, dtype: torch.dtype, bound: float, chunk: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, 64, generator=generator).to(dtype) for size in (200, 20_008)]
    targets = torch.randint(20_008, (200,), generator=generator)
    upstream = torch.randn(2, 200, generator=generator)
    hidden, weight = (each.clone().to(device).requires_grad_() for each in drawn)
    options = LogprobOptions(chunk, temperature=0.7, transform=transform)
    found = token_logprobs(hidden, weight, targets.to(device), options)
    (torch.stack(found) * upstream.to(device)).sum().backward()

    plain = [each.double().requires_grad_() for each in drawn]
    logits = plain[0] @ plain[1].T
    rounded = logits + (logits.to(dtype).double() - logits).detach()
    wanted = definition(rounded, targets, *options.factors)
    (torch.stack(wanted) * upstream.double()).sum().backward()
    pairs = [*zip(found, wanted, strict=True)]
    pairs += [(hidden.grad, plain[0].grad), (weight.grad, plain[1].grad)]
    for ours, theirs in pairs:
        assert (ours.cpu().double() - theirs).norm() <= bound * theirs.norm()


def test_cuda_uses_the_kernels(device: torch.device) -> None:
    if device.type != "cuda" or not find_spec("triton"):
        pytest.skip("no Triton kernels here")
    assert not missing_compiler()


def definition(
    logits: torch.Tensor, columns: torch.Tensor, scale: float, bound: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    z = logits * scale if bound is None else bound * torch.tanh(scale * logits)
    logp = z.log_softmax(dim=-1)
    return logp.gather(1, columns[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

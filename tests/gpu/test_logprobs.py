"""Log-probs on devices beside the definition; and Triton's kernels, where it is installed, in its interpreter.

The interpreter has to be chosen before Triton is imported, so this file is also a program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from burnish.models.logprobs import LogitTransform, LogprobOptions, missing_compiler, token_logprobs


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


@pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
def test_the_kernels_are_right_in_the_interpreter() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, __file__], env=env, check=True)


def definition(
    logits: torch.Tensor, columns: torch.Tensor, scale: float, bound: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    z = logits * scale if bound is None else bound * torch.tanh(scale * logits)
    logp = z.log_softmax(dim=-1)
    return logp.gather(1, columns[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def _interpreted() -> None:
    from burnish.models.kernels.triton_logprobs import softmax_sums, write_gradients

    torch.manual_seed(0)
    columns, upstream = torch.tensor([0, 9_000, 4, 8_191, 8_192]), torch.randn(2, 5)
    for bound in (None, 3.0):
        for uses_entropy in (True, False):
            logits = (4 * torch.randn(5, 9_001)).requires_grad_()
            logprobs, entropy = definition(logits, columns, 0.5, bound)
            sums = softmax_sums(logits.detach(), columns, 0.5, bound)
            top, total, dot, chosen = sums
            torch.testing.assert_close(chosen - total.log(), logprobs.detach())
            torch.testing.assert_close(total.log() - dot / total, entropy.detach())
            absent = softmax_sums(logits.detach(), torch.full((5,), -1), 0.5, bound)
            assert torch.equal(absent[:3], sums[:3])
            assert (absent[3] == -torch.inf).all()
            (logprobs @ upstream[0] + uses_entropy * (entropy @ upstream[1])).backward()
            written, factor = logits.detach().clone(), 0.5 * (bound or 1)
            known = [total.log() + top, factor * upstream[0]]
            known += [entropy.detach(), factor * upstream[1]] if uses_entropy else []
            write_gradients(written, columns, torch.stack(known), 0.5, bound)
            torch.testing.assert_close(written, logits.grad, rtol=1e-4, atol=1e-7)


if __name__ == "__main__":
    _interpreted()

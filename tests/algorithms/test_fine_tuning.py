"""Losses of fine-tuning against numpy, with weights and functions of one's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.algorithms.fine_tuning import sft_loss
from burnish.errors import UsageError


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["nll", "dft"])
def test_losses_are_their_formulas(make_case: Any, name: str, weighted: bool) -> None:
    case = make_case()
    factors = np.random.default_rng(1).uniform(0, 3, len(case.micro.loss_mask))
    micro = case.micro
    if weighted:
        micro = replace(micro, weights=torch.tensor(factors, dtype=torch.float32))
    loss, stats = sft_loss(name)(case.outputs, micro)
    loss.backward()
    trained = [t for tokens in case.sequences() for t in tokens]
    logprobs = case.outputs.logprobs.detach().double().numpy()[trained]
    # DFT's weight p is a constant of the gradient, so both gradients are those of -log p, times p or 1.
    scale = np.exp(logprobs) if name == "dft" else np.ones(len(trained))
    scale = scale * (factors[trained] if weighted else 1.0) / micro.num_tokens
    np.testing.assert_allclose(loss.item(), -(scale * logprobs).sum(), rtol=1e-6)
    gradient = case.outputs.logprobs.grad.numpy()
    np.testing.assert_allclose(gradient[trained], -scale, rtol=1e-5)
    assert not np.delete(gradient, trained).any()
    assert stats["tokens"].value() == len(trained)
    if name != "nll":
        np.testing.assert_allclose(stats["nll"].value(), -logprobs.mean(), rtol=1e-6)


def test_a_function_of_ones_own_is_tried_first(tmp_path: Path, make_case: Any) -> None:
    file = tmp_path / "losses.py"
    file.write_text(
        "def half(logprobs, micro):\n    return -logprobs / 2\n"
        "def summed(logprobs, micro):\n    return -logprobs.sum()\n"
        "def fails(logprobs, micro):\n    return 1 / 0\n"
        "def stops(logprobs, micro):\n    return -logprobs.detach()\n"
    )
    case = make_case()
    half = sft_loss(f"{file}:half")(case.outputs, case.micro)[0]
    torch.testing.assert_close(2 * half, sft_loss()(case.outputs, case.micro)[0])
    for name in (f"{file}:summed", f"{file}:fails", f"{file}:stops", "dtf"):
        with pytest.raises(UsageError, match=r"method\.loss"):
            sft_loss(name)

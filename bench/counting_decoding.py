"""Count what an accelerator is asked to do to draw one token of each completion, without one.

    python -m bench.counting_decoding [--json]

The built-in generator's step with a cache in blocks, on the simulated accelerator of `bench.planning_imagined`; see `bench.counting` for
what counts. Models of one and of two layers are compared, so the table has kernels of a layer, and those of the rest of a step. CUDA records
all of them, and replays them by one call.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from functools import partial
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from bench.planning_cases import SHAPES
from bench.planning_imagined import NAME, imagined_accelerator
from burnish.check.call_counter import CallCounter
from burnish.rollout.base import Sampling
from burnish.rollout.builtin.decoding import SlotPrompt, SlotSequence
from burnish.rollout.builtin.forward import InferenceModel
from burnish.rollout.builtin.fused_steps import FusedSteps
from burnish.rollout.builtin.kv_cache import PromptCache
from burnish.rollout.builtin.paged_decoding import PagedDecoding, Pages, has_pages
from burnish.rollout.running import StopRule

MOST = (10, 50)
"""Kernels of a layer, and of the rest of a step, that it is to stay below."""
_ROWS = 64
_PROMPT = 300


def _yes(device: torch.device) -> bool:
    return True


class _Kernels:
    """Stand-ins for Triton's kernels, each a call of torch that counts as one."""

    @staticmethod
    def rotate_and_write(
        joined: Tensor, _: object, __: object, ___: object, ____: object, pools: tuple[Tensor, ...]
    ) -> Tensor:
        return joined[:, : joined.shape[1] - 2 * pools[0].shape[1]].neg()

    @staticmethod
    def silu_gate(joined: Tensor) -> Tensor:
        return joined.chunk(2, dim=-1)[0].neg()

    @staticmethod
    def uniform_numbers(keys: Tensor, counts: Tensor) -> Tensor:
        return keys.to(torch.float64)

    @staticmethod
    def invert(masses: Tensor, sums: Tensor, numbers: Tensor, width: int) -> tuple[Tensor, Tensor]:
        tokens = numbers.long()
        return tokens, tokens.view(torch.float64)


def count_step(size: str, layers: int) -> Counter[str]:
    """Count the kernels of a step of a model with so many layers."""
    hf = AutoConfig.for_model("qwen3", **{**SHAPES[size], "num_hidden_layers": layers})
    sampling = Sampling(64)
    pages = Pages(_ROWS, 512, 1 + 2 * _ROWS)
    builtin = "burnish.rollout.builtin"
    triton = mock.patch.multiple(f"{builtin}.paged_decoding", compiles_triton=_yes)
    draws = mock.patch.multiple(
        f"{builtin}.sampling", compiles_triton=_yes, _kernels=lambda: _Kernels
    )
    steps = mock.patch(
        "burnish.rollout.builtin.fused_steps.FusedSteps", partial(FusedSteps, kernels=_Kernels)
    )
    norm = mock.patch("torch.nn.functional.rms_norm", lambda rows, *_: rows.neg())
    with imagined_accelerator() as device, torch.no_grad(), triton, draws, steps, norm:
        model = InferenceModel(hf, device=device, dtype=torch.bfloat16)
        rule = StopRule(sampling, (), None)
        prompt = SlotPrompt(np.zeros(_PROMPT, np.int64), (0, 0))
        waiting = [
            SlotSequence(key=row, drawn=0, max_tokens=64, tokens=[], prompt=prompt)
            for row in range(_ROWS)
        ]
        decoding = PagedDecoding(model, waiting, sampling, rule, _ROWS, None, pages=pages)
        prompts = PromptCache([_PROMPT], device)
        tokens = torch.zeros(_PROMPT, dtype=torch.int64, device=device)
        model.forward(tokens, tokens, prompts, None)
        assert has_pages(prompts)
        decoding._cache.place(range(_ROWS), prompts, [0] * _ROWS)
        decoding._cache.grow(_ROWS)
        with CallCounter(NAME) as counting:
            decoding._compute_packed(_ROWS)
    counts = counting.counts
    assert (counts.copies, counts.reads) == (0, 0), counts
    return counts.forward


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--most", type=int, default=0, help="print so many operators of each")
    arguments = parser.parse_args()
    one, two = (count_step("Qwen3-0.6B", layers) for layers in (1, 2))
    layer = two - one
    rest = one - layer
    print(f"a layer {layer.total()}  the rest {rest.total()}  at most {MOST}")
    for kernels in (layer, rest):
        for name, times in kernels.most_common(arguments.most):
            print(f"      {times:6} {name}")
    if arguments.json:
        print(json.dumps([layer.total(), rest.total()]))


if __name__ == "__main__":
    main()

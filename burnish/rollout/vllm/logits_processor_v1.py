"""Draw tokens inside vLLM as the built-in generator does.

vLLM samples greedily and reports processed logits. A logits processor draws each row's token and leaves two logits: the drawn
token's, −(its sampled log-prob), and its neighbour's, the raw log-prob. Only the first is positive, so vLLM takes it and reports
both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from burnish.records import Floats
from burnish.rollout.base import Sampling, not_finite
from burnish.rollout.builtin.sampling import Drawn
from burnish.rollout.inference_engine import draw_groups, draw_settings

# The key of the processor's arguments in `SamplingParams.extra_args`.
_ARGUMENT = "burnish"
# Stands for a log-prob of 0, because the drawn token's logit must be above its neighbour's.
_LEAST = 1e-37


def request_params(sampling: Sampling, key: int, drawn: int, room: int) -> SamplingParams:
    """Return vLLM's parameters for at most `room` tokens of a completion with this key and number of `drawn` tokens."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=room,
        logprobs=2,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        extra_args={_ARGUMENT: [key, drawn, *draw_settings(sampling)]},
    )


def arguments_of(params: SamplingParams) -> tuple[int, int, Sampling] | None:
    """Return a request's key, drawn tokens and sampling; None if it is not Burnish's."""
    arguments = (params.extra_args or {}).get(_ARGUMENT)
    return arguments and (arguments[0], arguments[1], Sampling(1, *arguments[2:]))


def read_draws(reported: Sequence[float], tokens: int) -> tuple[Floats, Floats]:
    """Return sampled and raw log-probs of the first `tokens` tokens from vLLM's flat list. Raises `BurnishError` for NaN."""
    table = np.array(reported[: 3 * tokens], dtype=np.float32).reshape(-1, 3)
    if not np.isfinite(table).all():
        raise not_finite()
    # A row has the drawn token's logit, then the two largest logits. The first of these is the drawn token's again.
    chosen = table[:, 0]
    return np.where(chosen > _LEAST, -chosen, np.float32(0)), table[:, 2]


def leave_two(logits: Tensor, drawn: Drawn) -> None:
    """Leave two logits around each drawn token."""
    chosen = drawn.tokens[:, None]
    neighbour = (chosen + 1) % logits.shape[-1]
    logits.fill_(-torch.inf)
    logits.scatter_(1, neighbour, drawn.logprobs[:, None].clamp(max=0))
    logits.scatter_(1, chosen, -drawn.sampled_logprobs[:, None].clamp(max=-_LEAST))


class DrawingProcessor(LogitsProcessor):
    """Draws for vLLM's model runner V1, which has a row per request."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._requests: dict[int, tuple[int, int, Sampling, list[int]]] = {}
        """By row: key, tokens drawn before, sampling, and vLLM's own list of the tokens so far."""
        self._outputs: list[list[int]] = []
        self._drawn: list[int] = []
        self._groups: list[tuple[Sampling, Tensor]] = []
        self._keys = torch.zeros(0, dtype=torch.int64)

    def is_argmax_invariant(self) -> bool:
        """Return False: drawing changes the largest logit."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests as they come, go and move."""
        if not process_dict_updates(self._requests, batch_update, _request_of):
            return
        rows: dict[Sampling, list[int]] = {}
        keys = [0] * (max(self._requests, default=-1) + 1)
        self._outputs = [[] for _ in keys]
        self._drawn = [0] * len(keys)
        for row, (key, drawn, sampling, output) in self._requests.items():
            rows.setdefault(sampling, []).append(row)
            keys[row] = key
            self._drawn[row] = drawn
            self._outputs[row] = output
        self._groups = [
            (sampling, torch.tensor(own).to(self._device)) for sampling, own in rows.items()
        ]
        self._keys = torch.tensor(keys, dtype=torch.int64).to(self._device)

    def apply(self, logits: Tensor) -> Tensor:
        """Draw a token for every row."""
        counts = np.array([*map(len, self._outputs)], np.int64) + np.array(self._drawn, np.int64)
        drawn = torch.from_numpy(counts).to(self._device)
        draw_groups(logits, self._groups, self._keys, drawn, leave_two)
        return logits


def _request_of(
    params: SamplingParams, _: list[int] | None, output: list[int]
) -> tuple[int, int, Sampling, list[int]] | None:
    arguments = arguments_of(params)
    return None if arguments is None else (*arguments, output)

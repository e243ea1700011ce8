"""Draw tokens in vLLM's model runner V2, the default on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from burnish.rollout.base import Sampling
from burnish.rollout.inference_engine import draw_groups
from burnish.rollout.vllm.logits_processor_v1 import arguments_of, leave_two


class SlotDrawingProcessor(LogitsProcessor):
    """Draws for requests that stay in one slot."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._states = req_states
        self._keys = np.zeros(req_states.max_num_reqs, np.int64)
        self._drawn = np.zeros(req_states.max_num_reqs, np.int64)
        self._kinds = np.full(req_states.max_num_reqs, -1)
        """By slot: index of the request's sampling, or -1 if the request is not Burnish's."""
        self._samplings: list[Sampling] = []

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Record a request's key and sampling."""
        arguments = arguments_of(sampling_params)
        self._kinds[req_idx] = -1
        if arguments is None:
            return False
        self._keys[req_idx], self._drawn[req_idx], sampling = arguments
        if sampling not in self._samplings:
            self._samplings.append(sampling)
        self._kinds[req_idx] = self._samplings.index(sampling)
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Draw a token for every row; `ctx.pos` is the position of the token before it."""
        slots = ctx.idx_mapping_np
        kinds = self._kinds[slots]
        groups = [
            (self._samplings[kind], torch.from_numpy(np.flatnonzero(kinds == kind)))
            for kind in np.unique(kinds[kinds >= 0])
        ]
        before = self._drawn[slots] - self._states.prompt_len.np[slots] + 1
        settled = torch.from_numpy(np.stack((self._keys[slots], before)))
        keys, offsets = settled.to(logits.device, non_blocking=True)
        draw_groups(logits, groups, keys, ctx.pos + offsets, leave_two)
        return logits

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
        device = logits.device
        kinds = self._kinds[slots]
        groups = [
            (self._samplings[kind], _on(np.flatnonzero(kinds == kind), device))
            for kind in np.unique(kinds[kinds >= 0])
        ]
        prompts = self._states.prompt_len.gpu[ctx.idx_mapping]
        counts = (ctx.pos + 1 - prompts).long() + _on(self._drawn[slots], device)
        draw_groups(logits, groups, _on(self._keys[slots], device), counts, leave_two)
        return logits


def _on(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)

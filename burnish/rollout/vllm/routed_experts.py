"""Record the experts of each token in vLLM's workers.

vLLM 0.32 returns them itself from model runner V2, which CPUs lack. Routers store them by slot of vLLM's cache, so a shared
prefix keeps its experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from burnish.models.routing import index_dtype
from burnish.records.samples import Experts


def begin_recording(worker: Any) -> None:
    """Have a worker's routers record their choices. Raises `ValueError` if they cannot."""
    routers = _routers(worker)
    if not routers:
        raise ValueError("the model's kernels do not report which experts they choose")
    slots = worker.model_runner.kv_cache_config.num_blocks * _block_size(worker)
    dtype = index_dtype(routers[0].global_num_experts)
    room = torch.zeros(slots + 1, len(routers), routers[0].top_k, dtype=dtype)
    for number, router in enumerate(routers):
        router.set_capture_fn(partial(_record, room[:, number]))


def read_experts(worker: Any, counts: Mapping[str, int]) -> list[Experts]:
    """Return experts [count, L, k] of the first tokens of requests in vLLM's last step."""
    columns = [router.capture_fn.args[0] for router in _routers(worker)]
    requests, size = worker.model_runner.requests, _block_size(worker)
    blocks = {name.partition("-")[0]: each.block_ids[0] for name, each in requests.items()}
    found = []
    for name, count in counts.items():
        held = np.array(blocks[name][: -(-count // size)])
        slots = (held[:, None] * size + np.arange(size)).ravel()[:count]
        if len(slots) < count or not held.all():
            raise ValueError("vLLM does not keep all tokens of a completion")
        index = torch.from_numpy(slots)
        found.append(torch.stack([column[index] for column in columns], dim=1).numpy())
    return found


def _record(room: Tensor, chosen: Tensor) -> None:
    """Store a router's experts [n, k] in their tokens' slots, padding's in the last."""
    mapping: Any = get_forward_context().slot_mapping
    slots = next(iter(mapping.values()), None)
    if slots is not None:
        room[slots[: len(chosen)]] = chosen[: len(slots)].to(room.dtype)


def _block_size(worker: Any) -> int:
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec
    if len(groups) != 1 or getattr(spec, "sliding_window", None):
        raise ValueError("vLLM forgets tokens outside of a window, and with them their experts")
    return int(spec.block_size)


def _routers(worker: Any) -> list[Any]:
    runners = [each for each in worker.get_model().modules() if hasattr(each, "router")]
    found = [each.router for each in runners if hasattr(each.router, "set_capture_fn")]
    return list(dict.fromkeys(found))

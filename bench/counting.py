"""Count what an accelerator is asked to do in a training step, without one.

    python -m bench.counting [--json] [--size Qwen3-8B] [--ranks N]

Models of full size train one step on the simulated accelerator of `bench.planning_imagined`. Per micro-batch the table has: kernels of the
forward and of the backward pass, copies from the host, and reads by the host, which wait for all work that is queued. One call of torch counts
as one kernel, and views and collectives as none, so kernels of FSDP2's casts count, and parts of one composed call do not. Two steps, of one and of two
micro-batches, are compared, so what happens once a step does not count. The last line of each method has bytes of collectives: of a
micro-batch, and of a step before its first matrix product and after its last, where nothing hides them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from bench.planning_cases import SHAPES
from bench.planning_imagined import NAME, imagined_accelerator
from burnish.algorithms.fine_tuning import sft_loss
from burnish.algorithms.loss import policy_loss_fn
from burnish.config.schema import RunConfig
from burnish.data.batching import make_batch
from burnish.distributed.layout import Layout
from burnish.engines.factory import make_engine
from burnish.models.meta_init import count_flops
from burnish.records import Example

MOST = {"sft": (910, 1570), "grpo": (1000, 1575)}
"""Kernels of a forward and a backward pass that these steps are to stay below on eight ranks."""
_TOKENS = 32768
_FREE = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view", "prim::")


@dataclass
class Counts:
    """What a micro-batch costs, or two steps whose difference it is."""

    forward: Counter[str] = field(default_factory=Counter)
    """Kernels by operator."""
    backward: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    """Copies from the host's memory."""
    reads: int = 0
    """Times that the host reads a number of the device."""
    exchanged: Counter[str] = field(default_factory=Counter)
    """Bytes of the whole tensors in collectives, by operator."""
    before: list[int] = field(default_factory=list)
    """Bytes of each collective before the step's first matrix product."""
    after: list[int] = field(default_factory=list)
    """Bytes of each collective after the step's last."""

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.forward - other.forward,
            self.backward - other.backward,
            self.copies - other.copies,
            self.reads - other.reads,
            self.exchanged - other.exchanged,
            self.before,
            self.after,
        )


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts in `counts` what happens in its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()
        self._multiplies = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        there = [x.device.type == NAME for x in given]
        if func is torch.ops.aten._local_scalar_dense.default or "nonzero" in func.name():
            self.counts.reads += any(there)
        elif given and not any(there) and any(x.device.type == NAME for x in made):
            self.counts.copies += 1
        elif any(there) and not all(x.device.type == NAME for x in made):
            self.counts.reads += 1
        elif func.namespace == "c10d":
            self._exchange(func.name(), max(x.nbytes for x in given))
        elif any(x.device.type == NAME for x in (*given, *made)) and not _is_free(func):
            if func.name().startswith("aten::mm"):
                self._multiplies = True
                self.counts.after.clear()
            in_backward = torch._C._current_graph_task_id() >= 0
            kernels = self.counts.backward if in_backward else self.counts.forward
            kernels[func.name()] += 1
        return result

    def _exchange(self, name: str, size: int) -> None:
        self.counts.exchanged[name] += size
        (self.counts.after if self._multiplies else self.counts.before).append(size)


def _is_free(func: Any) -> bool:
    """Return whether a call launches no kernel: it makes a view, or memory that nobody has written."""
    views = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
    return views or func.name().startswith(_FREE)


def settings(size: str, method: str) -> RunConfig:
    """Return a run's configuration: everything but the model is as by default."""
    family = "qwen3_moe" if "A3B" in size else "qwen3"
    fresh = {"model_type": family, **SHAPES[size]}
    return RunConfig.model_validate(
        {"model": {"fresh": fresh}, "engine": {"precision": "bf16"}, "optim": {"lr": 1e-5}}
    )


def examples(method: str, microbatches: int, vocabulary: int) -> list[Example]:
    """Return sequences of SFT, or groups of eight completions of one prompt. Their tokens are drawn alike, so few are equal."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(microbatches * 4):
        if method == "sft":
            length = _TOKENS // 4
            found.append(Example(rng.integers(3, vocabulary, length), np.arange(length) > 0))
            continue
        prompt = rng.integers(3, vocabulary, 256)
        for _ in range(8):
            length = _TOKENS // 32
            rest = rng.integers(3, vocabulary, length - len(prompt))
            ids = np.concatenate([prompt, rest])
            mask = np.arange(length) >= len(prompt)
            zeros = np.zeros(length, dtype=np.float32)
            found.append(Example(ids, mask, advantages=zeros, old_logprobs=zeros))
    return found


def count_step(config: RunConfig, method: str, microbatches: int, ranks: int) -> Counts:
    """Count one training step's work on the simulated accelerator."""
    fresh = dict(config.model.fresh) if isinstance(config.model.fresh, dict) else {}
    hf = AutoConfig.for_model(fresh.pop("model_type"), **fresh)
    loss = sft_loss() if method == "sft" else policy_loss_fn(config.algorithm, 1024)
    layout = Layout(world=ranks)
    with imagined_accelerator() as device:
        engine = make_engine(hf, config.engine, config.optim, layout=layout, device=device)
        given = examples(method, microbatches, hf.vocab_size)
        batch = make_batch(given, Layout(), _TOKENS, count_flops(hf))
        assert len(batch.microbatches) == microbatches
        with Counting() as counting:
            engine.forward_backward(batch, loss)
        engine.close()
    return counting.counts


def count(size: str, method: str, ranks: int) -> Counts:
    """Count a micro-batch's work on one of so many ranks."""
    config = settings(size, method)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        return count_step(config, method, 2, ranks) - count_step(config, method, 1, ranks)
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", choices=SHAPES, default="Qwen3-0.6B", help="the model")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that share the weights")
    parser.add_argument("--most", type=int, default=0, help="print so many operators of each")
    arguments = parser.parse_args()
    found = {}
    for method in MOST:
        counts = count(arguments.size, method, arguments.ranks)
        found[method] = {
            "kernels": [counts.forward.total(), counts.backward.total()],
            "copies": counts.copies,
            "reads": counts.reads,
            "exchanged": counts.exchanged,
            "before": counts.before,
            "after": counts.after,
        }
        print(
            f"{method:5} forward {counts.forward.total():5}  backward {counts.backward.total():5}  "
            f"copies {counts.copies:3}  reads {counts.reads:3}  at most {MOST[method]}"
        )
        sizes = [sum(counts.exchanged.values()), sum(counts.before), sum(counts.after)]
        total, before, after = (f"{size / 1e9:.2f} GB" for size in sizes)
        print(f"      collectives {total}, before products {before}, after them {after}")
        for kernels in (counts.forward, counts.backward):
            for name, times in kernels.most_common(arguments.most):
                print(f"      {times:6} {name}")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

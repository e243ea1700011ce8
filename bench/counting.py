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

import numpy as np
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from bench.planning_cases import SHAPES
from bench.planning_imagined import NAME, imagined_accelerator
from burnish.algorithms.fine_tuning import sft_loss
from burnish.algorithms.loss import policy_loss_fn
from burnish.check.call_counter import CallCounter, CallCounts
from burnish.config.schema import RunConfig
from burnish.data.batching import make_batch
from burnish.distributed.layout import Layout
from burnish.engines.factory import make_engine
from burnish.models.meta_init import count_flops
from burnish.records import Example

MOST = {"sft": (760, 1100), "grpo": (850, 1160)}
"""Kernels of a forward and a backward pass that these steps are to stay below on eight ranks."""
_TOKENS = 32768


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
    for group in range(microbatches * 4):
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
            # In one group of four all rewards are equal.
            advantages = zeros + np.float32(group % 4 > 0)
            found.append(Example(ids, mask, advantages=advantages, old_logprobs=zeros))
    return found


def count_step(config: RunConfig, method: str, microbatches: int, ranks: int) -> CallCounts:
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
        with CallCounter(NAME) as counting:
            engine.forward_backward(batch, loss)
        engine.close()
    return counting.counts


def count(size: str, method: str, ranks: int) -> CallCounts:
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

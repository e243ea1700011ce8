from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.engine import (
    LR,
    STEPS,
    assert_relative,
    cut,
    loss,
    make_examples,
    require_learnt,
    score_by_hand,
    train,
    train_by_hand,
    whole,
)
from support.models.engines import CPU, OPTIM, make_engine
from support.models.tiny import VOCAB, save_tiny, tiny_config
from support.ranks.processes import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from burnish.boxes.shards import Shard
from burnish.config.schema import EngineConfig, LoraConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.engines.base import Part
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.errors import BurnishError
from burnish.models.loading import FreshSource, SafetensorsSource
from burnish.models.lora.adapter import FreshAdapter
from burnish.tracking.stats import Stats

EACH_TENSOR = {
    "llama": {"weights": 1e-6, "slots": 1e-6, "gradients": 2e-6},
    "qwen3_moe": {"weights": 2e-6, "slots": 4e-6, "gradients": 1e-5},
}
"""What layouts may differ by in any one tensor. Seen: 4e-8, 6e-7 and 8e-7; 7e-7, 2e-6 and 3.4e-6.

The largest are norms of 16 or 32 elements, whose gradients (4e-4) are what is left of larger ones that
cancel. As one vector all weights, and all of each slot, agree to 1e-6 in both families.
"""


def train_rank(layout: Layout, path: Path, per_micro: int, replicas: int = 1) -> dict[str, Any]:
    engine = make_engine(layout, path, replicas=replicas)
    return train(engine, make_examples(VOCAB), per_micro)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.nightly)])
def test_steps_are_those_of_a_plain_model_however_a_batch_is_cut(
    tmp_path: Path, family: str
) -> None:
    path = save_tiny(tmp_path / "m", family, torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    wanted = train_by_hand(oracle, make_examples(VOCAB))
    first: dict[str, Any] = {}
    for world, per_micro, replicas in ((1, 6, 1), (1, 1, 1), (2, 2, 1), (4, 1, 1), (4, 1, 2)):
        ranks = run_ranks(train_rank, world, path, per_micro, replicas)
        for rank in ranks:
            assert rank["losses"] == pytest.approx(wanted["losses"], rel=2e-6)
            assert rank["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        assert sum(rank["predictions"] for rank in ranks) == wanted["predictions"]
        merged = {k: v for rank in ranks for k, v in rank["logprobs"].items()}
        assert len(merged) == len(make_examples(VOCAB))
        for number, (logprobs, entropy) in wanted["logprobs"].items():
            assert_relative(merged[number][0], logprobs, 2e-5, f"log-probs of example {number}")
            assert_relative(merged[number][1], entropy, 2e-5, f"entropy of example {number}")
        tensors = {kind: together(ranks, kind) for kind in EACH_TENSOR[family]}
        first = first or ranks[0] | tensors
        for rank in ranks:
            assert rank["losses"] == pytest.approx(first["losses"], rel=1e-6)
            assert rank["norms"] == pytest.approx(first["norms"], rel=1e-6)
        for kind, tolerance in EACH_TENSOR[family].items():
            for name, tensor in first[kind].items():
                what = f"{kind} of {name} on {world} / {replicas}"
                assert_relative(tensors[kind][name], tensor, tolerance, what)
        for kind, prefix in FLAT:
            found, expected = (flat(held[kind], prefix) for held in (tensors, first))
            assert_relative(found, expected, 1e-6, f"{kind} {prefix} on {world} / {replicas}")
            if family != "qwen3_moe":  # its experts are fused in the oracle's parameters
                expected = flat(wanted[kind], prefix)
                assert_relative(
                    found, expected, 4e-6, f"{kind} {prefix} against plain transformers"
                )


FLAT = (("weights", "model"), ("slots", "exp_avg/"), ("slots", "exp_avg_sq/"))
"""What is compared as one vector, by the beginning of the names."""


def flat(tensors: dict[str, Tensor], prefix: str) -> Tensor:
    """The tensors whose names begin so, as one vector."""
    chosen = [tensors[name] for name in sorted(tensors) if name.startswith(prefix)]
    return torch.cat([tensor.flatten() for tensor in chosen])


def together(ranks: list[dict[str, Any]], key: str) -> dict[str, Tensor]:
    shapes = {name: shape for rank in ranks for name, shape in rank["shapes"].items()}
    return whole([rank[key] for rank in ranks], shapes)


def bf16_rank(layout: Layout, path: Path) -> tuple[list[float], set[torch.dtype]]:
    engine = make_engine(layout, path, precision="bf16")
    result = train(engine, make_examples(VOCAB), 3)
    kinds = {s.tensor.dtype for part in Part for s in engine.shards(part)}
    return result["losses"], kinds


def test_bf16_compute_keeps_fp32_state_and_stays_close(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    wanted = train_by_hand(oracle, make_examples(VOCAB))["losses"]
    for world in (1, 2):
        for losses, kinds in run_ranks(bf16_rank, world, path):
            require_learnt(losses, wanted)
            assert kinds == {torch.float32}


class Operations(TorchDispatchMode):
    """Counts torch's operations by name, collectives among them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(
    layout: Layout, path: Path, settings: dict[str, Any]
) -> list[tuple[int, int, int]]:
    """For a batch in one, two and four micro-batches: how many those are, reduce-scatters, and all-reduces."""
    engine, counts = make_engine(layout, path, **settings), []
    for number in (1, 2, 4):
        examples = make_examples(VOCAB, [5] * 4 * layout.data_size)
        batch = cut(examples, layout, 4 // number)
        engine.forward_backward(batch, loss)
        with Operations() as called:
            engine.forward_backward(batch, loss)
        scattered, reduced = (
            sum(count for name, count in called.counts.items() if name.startswith(f"c10d::{kind}"))
            for kind in ("_reduce_scatter_base", "allreduce")
        )
        counts.append((len(batch.microbatches), scattered, reduced))
    return counts


def count_of_each(
    layout: Layout, path: Path, replicas: int
) -> dict[bool, list[tuple[int, int, int]]]:
    """The counts with `reduce_each_microbatch` and without."""
    common = {"replicas": replicas}
    return {
        each: count_collectives(layout, path, common | {"reduce_each_microbatch": each})
        for each in (True, False)
    }


def shared_rank(layout: Layout, path: Path) -> tuple[int, float, float]:
    """How many process groups a second engine adds that is given the first one's, and the losses of both."""
    engine = make_engine(layout, path)
    before = len(torch.distributed.distributed_c10d._world.pg_names)
    hf_config, config = AutoConfig.from_pretrained(path), EngineConfig(precision="fp32")
    other = TorchEngine(hf_config, config, OPTIM, layout=layout, device=CPU, beside=engine)
    other.load(SafetensorsSource(path), Part.WEIGHTS)
    added = len(torch.distributed.distributed_c10d._world.pg_names) - before
    batch = cut(make_examples(VOCAB), layout, 3)
    mine, others = (e.forward_backward(batch, loss).values_by_name() for e in (engine, other))
    return added, mine["loss"], others["loss"]


def test_engines_of_one_layout_share_their_process_groups(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "llama", torch.float32)
    for added, one, other in run_ranks(shared_rank, 2, path):
        assert added == 0
        assert one == other


@pytest.mark.parametrize(
    ("world", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.nightly)]
)
def test_gradients_are_reduced_in_each_micro_batch_or_once(
    tmp_path: Path, world: int, replicas: int
) -> None:
    """Over the copies of the model once in any case. Before each micro-batch the ranks agree on a number of rows of the embeddings."""
    path = save_tiny(tmp_path / "m", "llama", torch.float32)
    for each, counts in run_ranks(count_of_each, world, path, replicas)[0].items():
        scattered, reduced = counts[0][1:]
        assert scattered > 0
        assert counts == [
            (n, n * scattered if each else scattered, reduced + n - 1) for n in (1, 2, 4)
        ]


@pytest.fixture
def alone():
    with process_group(CPU, 60.0) as layout:
        yield layout


def test_temperature_divides_the_logits(tmp_path: Path, alone: Layout) -> None:
    path = save_tiny(tmp_path / "m", "llama", torch.float32)
    engine = make_engine(alone, path, optim=None)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.lm_head.weight.data /= 0.7
    examples = make_examples(VOCAB)[:1]
    output = engine.forward(cut(examples, alone, 1, temperature=0.7))[0]
    torch.testing.assert_close(output.logprobs, score_by_hand(model, examples[0])[0].detach())


def poisoned(outputs: Any, micro: Any) -> tuple[Tensor, Stats]:
    return outputs.logprobs.sum() * float("nan"), Stats()


def test_non_finite_steps_are_skipped_counted_and_fatal_when_repeated(
    tmp_path: Path, alone: Layout
) -> None:
    path = save_tiny(tmp_path / "m", "llama", torch.float32)
    engine = make_engine(alone, path, max_skipped_steps=2)
    batch = cut(make_examples(VOCAB), alone, 3)
    before = [shard.tensor.clone() for shard in engine.shards(Part.WEIGHTS)]

    def step(of: Any) -> dict[str, float]:
        engine.forward_backward(batch, of)
        return engine.optim_step(LR).values_by_name()

    assert step(poisoned)["skipped"] == 1
    assert engine.steps == 0
    for shard, kept in zip(engine.shards(Part.WEIGHTS), before, strict=True):
        assert torch.equal(shard.tensor, kept)
    assert step(loss)["skipped"] == 0  # forgets the bad one
    assert engine.steps == 1
    assert step(poisoned)["skipped"] == 1
    with pytest.raises(BurnishError, match=r"(?s)2.*optim\.lr"):
        step(poisoned)


def test_a_frozen_engine_says_so_when_asked_to_train(tmp_path: Path, alone: Layout) -> None:
    engine = make_engine(alone, save_tiny(tmp_path / "m", "llama"), optim=None)
    batch = cut(make_examples(VOCAB), alone, 3)
    with pytest.raises(BurnishError):
        engine.forward_backward(batch, loss)


class Copy:
    """A source of shards from memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def fill(self, shards: Any) -> None:
        for shard in shards:
            shard.tensor.copy_(self._tensors[shard.spec.name][shard.box.slices])


def resume_rank(layout: Layout, path: Path, tensors: dict[str, Tensor], steps: int) -> list[float]:
    engine = make_engine(layout, path)
    for part in Part:
        engine.load(Copy(tensors), part)
    engine.steps = steps
    return train(engine, make_examples(VOCAB), 3)["losses"]


def test_what_shards_describe_is_all_that_resuming_elsewhere_needs(
    tmp_path: Path, alone: Layout
) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    engine = make_engine(alone, path)
    first = train(engine, make_examples(VOCAB), 3)
    tensors = together([first], "weights") | together([first], "slots")
    wanted = train(engine, make_examples(VOCAB), 3)["losses"]
    for losses in run_ranks(resume_rank, 2, path, tensors, STEPS):
        assert losses == pytest.approx(wanted, rel=1e-6)


def test_an_engine_describes_the_whole_of_its_state_once(tmp_path: Path, alone: Layout) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    engine = make_engine(alone, path)
    weights: list[Shard] = list(engine.shards(Part.WEIGHTS))
    saved = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert {s.spec.name for s in weights} == set(saved) - {"lm_head.weight"}
    names = [s.spec.name for s in engine.shards(Part.TRAINING)]
    assert len(names) == len(set(names)) == 2 * len(weights)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_closing_frees_the_model(tmp_path: Path, alone: Layout, lora: LoraConfig | None) -> None:
    hf_config = tiny_config("qwen3")
    config = EngineConfig(precision="bf16", activation_offload=True)
    engine = TorchEngine(hf_config, config, OPTIM, layout=alone, device=CPU, lora=lora)
    engine.load(FreshAdapter(1) if lora else FreshSource(hf_config, 1), Part.WEIGHTS)
    engine.load(FreshSource(hf_config, 1), Part.FROZEN)
    engine.forward_backward(cut(make_examples(VOCAB), alone, 3), loss)
    engine.optim_step(LR)
    model = weakref.ref(engine._scorer.model)
    engine.close()
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_parking_frees_memory_and_changes_nothing(
    tmp_path: Path, alone: Layout, lora: LoraConfig | None
) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    hf_config, config = (
        AutoConfig.from_pretrained(path),
        EngineConfig(precision="bf16", logprob_chunk=5),
    )
    batch, sizes = cut(make_examples(VOCAB), alone, 3), []
    engines = [
        TorchEngine(hf_config, config, OPTIM, layout=alone, device=CPU, lora=lora) for _ in range(2)
    ]
    for engine in engines:
        engine.load(FreshAdapter(1) if lora else FreshSource(hf_config, 1), Part.WEIGHTS)
        engine.load(FreshSource(hf_config, 1), Part.FROZEN)
        engine.forward_backward(batch, loss)
        engine.optim_step(LR)
        engine.forward_backward(batch, loss)
        engine.forward(batch)
    parked = engines[0]
    storages = [s.tensor.untyped_storage() for part in Part for s in parked.shards(part)]
    held = sum({each._cdata: each.nbytes() for each in storages}.values())
    for _ in range(2):
        with parked.offloaded():
            assert {storage.nbytes() for storage in storages} == {0}
            sizes.append(parked.mesh.arena.used)
        assert parked.mesh.arena.used == 0
    with pytest.raises(InterruptedError), parked.offloaded():
        raise InterruptedError
    assert sizes[0] == sizes[1] > held, "the gradients are there too"
    norms = [engine.optim_step(LR).values_by_name()["grad_norm"] for engine in engines]
    assert norms[0] == norms[1] > 0
    for part in Part:
        for mine, theirs in zip(*(engine.shards(part) for engine in engines), strict=True):
            assert torch.equal(mine.tensor, theirs.tensor)
    losses = [e.forward_backward(batch, loss).values_by_name()["loss"] for e in engines]
    assert losses[0] == losses[1]


def test_a_pass_before_a_step_leaves_no_weights_of_before_it(tmp_path: Path, alone: Layout) -> None:
    path = save_tiny(tmp_path / "m", "qwen3", torch.float32)
    batch, found = cut(make_examples(VOCAB), alone, 3), []
    for between in (False, True):
        engine = make_engine(alone, path)
        engine.forward_backward(batch, loss)
        if between:
            engine.forward(batch)
        engine.optim_step(0.1)
        found.append([each.logprobs for each in engine.forward(batch)])
    assert all(map(torch.equal, *found))

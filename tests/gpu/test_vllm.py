"""vLLM on one device against the built-in generator on the CPU, and asleep between steps.

A process has one engine at a time on a GPU, because only one can sleep. Heads have 32 numbers and more, as vLLM's kernels want.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contracts.generator import (
    GeneratorContract,
    assert_same,
    chosen,
    logits_by_hand,
    make_requests,
)
from support.models.adapters import published_beside
from support.models.generators import builtin, make_generator
from support.models.tiny import tiny_model
from support.ranks.devices import CPU, DEVICES
from support.runs.device_runs import finish_run, start_run
from support.runs.training_files import RL, make_files, metrics
from transformers import PreTrainedModel

from burnish.boxes.shards import Publication
from burnish.config.schema import LoraConfig
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, UsageError
from burnish.models.names import model_shards
from burnish.records import Completion, Request
from burnish.rollout.base import Generator, Sampling
from burnish.rollout.vllm.vllm_generator import VllmGenerator

pytest.importorskip("vllm", exc_type=ImportError)
pytestmark = [
    pytest.mark.filterwarnings("default"),  # vLLM has its own
    pytest.mark.slow,
]
SAMPLINGS = [
    Sampling(24, seed=3, step=2),
    Sampling(24, temperature=0.7, top_k=12, top_p=0.9, min_p=0.05, seed=4),
    Sampling(24, temperature=0.0),
]
LORA = LoraConfig(rank=4, alpha=8.0, publish="adapter")
WIDE: dict[str, Any] = {"hidden_size": 128, "head_dim": 64}


def made(family: str = "qwen3", seed: int = 0, **changes: Any) -> PreTrainedModel:
    return tiny_model(family, seed, **{"hidden_size": 128, "head_dim": 32, **changes})


class Engines:
    """Engines on a device; on a GPU the last one."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._held = device, dict[Any, VllmGenerator]()
        if device == CPU:
            self.of(made("qwen3_moe").config)  # first, as only then are there groups for mixtures

    def of(self, config: Any, dtype: torch.dtype = torch.float32, **options: Any) -> VllmGenerator:
        """One for a configuration, perhaps with weights of a model before."""
        key = config.to_json_string(), dtype, repr(options)
        if key not in self._held:
            if self.device != CPU:
                self.close()
            given = {"slots": 8, "eos_token_ids": (), "decode": None, **options}
            self._held[key] = VllmGenerator(
                config, layout=Layout(), device=self.device, dtype=dtype, **given
            )
        return self._held[key]

    def loaded(self, model: PreTrainedModel, version: int = 1, **options: Any) -> VllmGenerator:
        """One with a model's weights."""
        engine = self.of(model.config, **options)
        engine.load_weights(Publication(model_shards(model)), version)
        return engine

    def close(self) -> None:
        """End all engines."""
        if self._held:
            self._held.popitem()[1].close()  # which closes the groups of all
        self._held.clear()


@pytest.fixture(scope="module", params=DEVICES)
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    held = Engines(request.param)
    yield held
    held.close()


def free(device: torch.device) -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def distance(groups: Sequence[Sequence[Completion]], requests: Any, model: Any) -> float:
    """How far log-probs are from those of plain transformers in fp32, relative to their norm."""
    found, wanted = [], []
    for request, group in zip(requests, groups, strict=True):
        for each in group:
            found.append(each.logprobs)
            theirs = logits_by_hand(model, request, each).log_softmax(-1)
            wanted.append(chosen(theirs, each))
    ours, theirs = np.concatenate(found), np.concatenate(wanted)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


class TestDense:
    """In fp32, with a tied head."""

    def test_samples_what_the_built_in_generator_does_before_and_after_new_weights(
        self, engines: Engines
    ) -> None:
        """Prompts longer than a block of vLLM's prefix cache, then the first weights again."""
        requests = make_requests((1, 33, 70, 40), samples=4)
        for version, seed in enumerate((0, 1, 0)):
            model = made(seed=seed)
            ours, oracle = engines.loaded(model, version), builtin(model, slots=16)
            for sampling in SAMPLINGS:
                found = ours.generate(requests, sampling)
                assert_same(found, oracle.generate(requests, sampling), atol=2e-5)
                assert {c.weights_version for c in chain(*found)} == {version}

    def test_sleeps_without_memory_and_wakes_with_new_or_the_same_weights(
        self, engines: Engines
    ) -> None:
        """What others leave in the memory of its cache does no harm."""
        requests, models = make_requests((40, 3, 70)), [made(seed=seed) for seed in (2, 3)]
        ours = engines.loaded(models[0])
        wanted = [builtin(model, slots=16).generate(requests, SAMPLINGS[0]) for model in models]
        assert_same(ours.generate(requests, SAMPLINGS[0]), wanted[0], atol=2e-5)
        for version, which in enumerate((1, 0, 0), start=2):
            gpu = engines.device != CPU
            awake = free(engines.device) if gpu else 0
            ours.release()
            ours.release()
            if gpu:
                with pytest.raises(UsageError):
                    ours.generate(requests, Sampling(2))
                freed = free(engines.device) - awake
                print(f"asleep {freed >> 20} MiB more are free")
                assert freed > 256 << 20
                torch.full((freed // 8,), torch.nan, device=engines.device)
            ours.load_weights(Publication(model_shards(models[which])), version)
            if gpu:
                assert free(engines.device) < awake + (64 << 20)
            assert_same(ours.generate(requests, SAMPLINGS[0]), wanted[which], atol=2e-5)

    def test_checksums_are_those_of_the_weights(self, engines: Engines) -> None:
        for seed in (0, 1):
            model = made(seed=seed)
            ours = engines.loaded(model)
            wanted = {shard.spec.name: shard.checksum() for shard in model_shards(model)}
            found = [(spec.name, digest) for spec, digest in ours.checksums()]
            assert dict(found) == wanted
            assert len(found) == len(wanted) + 1

    def test_new_weights_in_the_middle_of_completions_draw_the_rest(self, engines: Engines) -> None:
        first, second = made(seed=1), made(seed=2)
        ours, steps = engines.loaded(first), 0

        def watch(ended: int) -> None:
            nonlocal steps
            steps += 1
            if steps == 4:
                ours.load_weights(Publication(model_shards(second)), 5)

        requests, sampling = make_requests((40, 3), samples=1), Sampling(8)
        found = [each for (each,) in ours.generate(requests, sampling, watch)]
        before = [each for (each,) in builtin(first, slots=16).generate(requests, sampling)]
        assert [each.versions.tolist() for each in found] == [[1] * 4 + [5] * 4] * 2
        for request, one, other in zip(requests, found, before, strict=True):
            np.testing.assert_array_equal(one.token_ids[:4], other.token_ids[:4])
            want = chosen(logits_by_hand(second, request, one).log_softmax(-1), one)
            np.testing.assert_allclose(one.logprobs[4:], want[4:], atol=2e-5)

    def test_logits_that_are_not_finite_are_refused(self, engines: Engines) -> None:
        """And are forgotten with the weights that made them."""
        model, requests = made(), [Request(0, np.array([5, 6]), samples=2)]
        with torch.no_grad():
            model.get_input_embeddings().weight[5] = torch.nan
        ours = engines.loaded(model)
        with pytest.raises(BurnishError, match="finite"):
            ours.generate(requests, Sampling(4))
        engines.loaded(made())
        wanted = builtin(made(), slots=16).generate(requests, Sampling(4))
        assert_same(ours.generate(requests, Sampling(4)), wanted)


class TestContract(GeneratorContract):
    """Of one engine with 8 slots, which start with a GPU's kernels for their count."""

    @pytest.fixture(autouse=True)
    def _engines(self, engines: Engines) -> None:
        self.engines = engines

    def make(
        self, model: PreTrainedModel, *, slots: int = 4, eos: Sequence[int] = (), version: int = 1
    ) -> Generator:
        engine = self.engines.loaded(model, version)
        engine._eos_token_ids = tuple(eos)
        return engine

    def model(self, family: str = "qwen3") -> PreTrainedModel:
        if family != "qwen3":
            pytest.skip("another engine takes seconds to start")
        return made()


class TestUntied:
    def test_samples_what_the_built_in_generator_does(self, engines: Engines) -> None:
        requests = make_requests((1, 33, 70))
        for seed in (0, 1):
            model = made("llama", seed)
            ours = engines.loaded(model)
            for sampling in SAMPLINGS:
                wanted = builtin(model, slots=16).generate(requests, sampling)
                assert_same(ours.generate(requests, sampling), wanted, atol=2e-5)
            told = {spec.name: digest for spec, digest in ours.checksums()}
            assert told == {shard.spec.name: shard.checksum() for shard in model_shards(model)}


class TestMixture:
    def test_samples_what_the_built_in_generator_does(self, engines: Engines) -> None:
        requests = make_requests((1, 33, 70), samples=2)
        for version, seed in enumerate((0, 1)):
            model = made("qwen3_moe", seed)
            ours = engines.loaded(model, version)
            for sampling in SAMPLINGS:
                wanted = builtin(model, slots=16).generate(requests, sampling)
                assert_same(ours.generate(requests, sampling), wanted, atol=2e-5)
            told = {spec.name: digest for spec, digest in ours.checksums()}
            assert told == {shard.spec.name: shard.checksum() for shard in model_shards(model)}
            ours.release()

    def test_experts_are_those_of_the_built_in_generator(self, engines: Engines) -> None:
        """Of prefixes that others have read, too, and of completions that end before their limit."""
        requests, model = make_requests((40, 70, 20)), made("qwen3_moe")
        ours = engines.loaded(model, experts=True)
        oracle = builtin(model, slots=16)
        for sampling in (
            Sampling(30, seed=5, experts=True),
            Sampling(30, experts=True, stop_token_ids=tuple(range(3, 20))),
        ):
            found, wanted = (each.generate(requests, sampling) for each in (ours, oracle))
            assert_same(found, wanted, atol=2e-5)
            for one, other in zip(chain(*found), chain(*wanted), strict=True):
                assert one.experts is not None
                assert one.experts.dtype == np.uint8
                np.testing.assert_array_equal(one.experts, other.experts)


class TestBf16:
    def test_logprobs_are_near_plain_transformers_in_fp32(self, engines: Engines) -> None:
        """Before and after new weights, and after sleep."""
        requests = make_requests((1, 33, 70), samples=2)
        for seed in (0, 1):
            model = made(seed=seed, **WIDE)
            ours = engines.loaded(model, dtype=torch.bfloat16)
            found = ours.generate(requests, Sampling(20, seed=1))
            far = distance(found, requests, model)
            print(f"bf16: {far:.4f} of the norm")
            assert 1e-5 < far < 5e-2
            ours.release()
            ours.load_weights(Publication(model_shards(model)), 2)
            assert_same(ours.generate(requests, Sampling(20, seed=1)), found, atol=1e-6)


class TestAdapter:
    def test_beside_the_model_it_is_computed_with_as_if_merged(self, engines: Engines) -> None:
        """Its model sleeps in the CPU's memory and is read once."""
        requests, config = make_requests((40, 3, 70), samples=2), made(**WIDE).config
        ours = engines.of(config, torch.bfloat16, lora=LORA)
        oracle = make_generator(config, Layout(), "bf16", lora=LORA)
        seen = []
        for version, factor in enumerate((1.0, -2.0, -2.0)):
            weights = published_beside(made(**WIDE), LORA, factor)
            oracle.load_weights(weights, version)
            fixed = weights.fixed if version == 0 else ()
            ours.load_weights(Publication(weights.changing, fixed), version)
            merged = made(**WIDE)
            merged.load_state_dict(
                {
                    shard.spec.name: shard.part(shard.box)
                    for shard in published_beside(made(**WIDE), LORA, factor, merged=True).changing
                },
                strict=False,
            )
            found = ours.generate(requests, Sampling(20, seed=1))
            far = distance(found, requests, merged)
            print(f"adapter: {far:.4f} of the norm")
            assert far < 5e-2
            wanted = {shard.spec.name: shard.checksum() for shard in oracle._model.shards()}
            told = {spec.name: digest for spec, digest in ours.checksums()}
            assert told == wanted
            seen.append(found)
            ours.release()
        assert_same(seen[2], seen[1], atol=1e-6)
        with pytest.raises(AssertionError):
            assert_same(seen[1], seen[0], atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_two_processes_map_the_weights_of_two_ranks_beside_them(
    tmp_path: Path, device: torch.device
) -> None:
    """On GPUs they map memory of the first one, which is the own device of one process and a peer of the other."""
    if device != CPU and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    work = make_files(tmp_path)
    rollout = {**RL["rollout"], "engine": "vllm", "place": "child", "check_every": 1}
    settings = {
        **RL,
        "name": "shared",
        "model": {**RL["model"], "fresh": {**RL["model"]["fresh"], **WIDE}},
        "engine": {"precision": "bf16"},
        "rollout": {**rollout, "tensor_parallel": 2, "max_disagreement": 0.1},
        "steps": 3,
    }
    (work / "shared.json").write_text(json.dumps(settings))
    command = ["rl", "shared.json", "--processes", "2"]
    finish_run(start_run(work, "shared", device, command), work, "shared")
    assert [row["step"] for row in metrics(work / "runs" / "shared") if row["step"]] == [1, 2, 3]
    assert f"over shared memory ({device.type})" in (work / "shared.txt").read_text()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_draws_with_it_to_the_end(
    tmp_path: Path, device: torch.device, precision: str
) -> None:
    """Beside the trainer on one device, which share it in turns; the guard finds no difference."""
    work = make_files(tmp_path)
    fresh = {**RL["model"]["fresh"], "hidden_size": 128, "head_dim": 64}
    rollout = {**RL["rollout"], "engine": "vllm", "place": "child", "check_every": 1}
    settings = {
        **RL,
        "name": "drawn",
        "model": {**RL["model"], "fresh": fresh},
        "engine": {"precision": precision},
        "rollout": {**rollout, "max_disagreement": 1e-4 if precision == "fp32" else 0.1},
        "steps": 3,
    }
    (work / "drawn.json").write_text(json.dumps(settings))
    finish_run(start_run(work, "drawn", device, ["rl", "drawn.json"]), work, "drawn")
    rows = [row for row in metrics(work / "runs" / "drawn") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3]
    far = [row["rollout/mismatch_kl"] for row in rows]
    print(precision, "mismatch", far)
    assert max(map(abs, far)) < (1e-6 if precision == "fp32" else 1e-2)

"""SGLang's generator against the built-in one, with a stand-in made from SGLang's source (tests/support/services/fake_sglang)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from contracts.generator import GeneratorContract, assert_same, make_requests
from support.models.generators import builtin
from support.models.tiny import MIXTURES, tiny_config, tiny_model
from transformers import PreTrainedModel

from burnish.boxes.box import whole
from burnish.boxes.shards import Publication, Shard, TensorSpec
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, IncompatibleError, MissingError, UsageError
from burnish.models.names import model_shards
from burnish.records import Request
from burnish.rollout.base import Sampling
from burnish.rollout.sglang.sglang_generator import SglangGenerator

pytestmark = pytest.mark.nightly

FAKE = Path(__file__).parents[1] / "support/services/fake_sglang"
CPU = torch.device("cpu")
SAMPLINGS = [
    Sampling(12, seed=3, step=2),
    Sampling(12, temperature=0.7, top_k=12, top_p=0.9, min_p=0.05, seed=4),
    Sampling(12, temperature=0.0),
]


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SglangGenerator]]:
    """The generators of a test, which are closed after it."""
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    found: list[SglangGenerator] = []
    yield found
    for each in found:
        each.close()


def start(made: list[SglangGenerator], model: PreTrainedModel, **options: Any) -> SglangGenerator:
    """One without weights."""
    defaults = {"layout": Layout(), "device": CPU, "slots": 8, "eos_token_ids": (), "decode": None}
    made.append(SglangGenerator(model.config, dtype=torch.float32, **{**defaults, **options}))
    return made[-1]


def loaded(
    made: list[SglangGenerator], model: PreTrainedModel, version: int = 1, **options: Any
) -> SglangGenerator:
    generator = start(made, model, **options)
    generator.load_weights(Publication(model_shards(model)), version)
    return generator


class TestContract(GeneratorContract):
    @pytest.fixture(autouse=True)
    def _made(self, made: list[SglangGenerator]) -> None:
        self.made = made

    def make(
        self, model: PreTrainedModel, *, slots: int = 4, eos: Sequence[int] = (), version: int = 1
    ) -> SglangGenerator:
        return loaded(self.made, model, version, slots=slots, eos_token_ids=eos)

    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "olmo2"])
    def test_checksums_are_those_of_the_weights_and_a_tied_head_counts(self, family: str) -> None:
        """A tied head is the embedding itself."""
        model = tiny_model(family)
        found = [(spec.name, digest) for spec, digest in self.make(model).checksums()]
        assert found == [(s.spec.name, s.checksum()) for s in model_shards(model)]


@pytest.mark.parametrize("family", ["qwen3", *MIXTURES])
def test_the_built_in_generator_samples_the_same_before_and_after_new_weights(
    made: list[SglangGenerator], family: str
) -> None:
    requests = make_requests((1, 33), samples=2)
    models = tiny_model(family, 0), tiny_model(family, 1)
    ours = start(made, models[0])
    for version, model in enumerate(models):
        ours.load_weights(Publication(model_shards(model)), version)
        oracle = builtin(model, slots=16)
        for sampling in SAMPLINGS:
            found = ours.generate(requests, sampling)
            assert_same(found, oracle.generate(requests, sampling))
            assert {c.weights_version for c in chain(*found)} == {version}


def letters(ids: Sequence[int]) -> str:
    """A text of one letter per token, of few letters."""
    return "".join("abcdefg"[token % 7] for token in ids)


def test_stop_strings_and_ids_end_as_the_built_in_generator_ends(
    made: list[SglangGenerator],
) -> None:
    model, requests = tiny_model(), make_requests(samples=3)
    sampling = Sampling(20, stop_strings=("cd", "gfa"), stop_token_ids=(11, 12), seed=1)
    oracle = builtin(model, slots=16, eos=(5,), decode=letters).generate(requests, sampling)
    assert {c.stop_reason for c in chain(*oracle)} == {"stop", "length"}
    ours = loaded(made, model, eos_token_ids=(5,), decode=letters)
    assert_same(ours.generate(requests, sampling), oracle)
    assert not ours._manager.rid_to_state


def test_a_completion_that_ends_ends_no_other(made: list[SglangGenerator]) -> None:
    """SGLang ends all requests whose names begin like the one that it is to end."""
    model, requests = tiny_model(), make_requests((5,), samples=14)
    sampling = Sampling(16, stop_strings=("a", "b"), seed=2)
    (wanted,) = builtin(model, slots=16, decode=letters).generate(requests, sampling)
    assert len(wanted[1].token_ids) < max(len(each.token_ids) for each in wanted[10:])
    ours = loaded(made, model, slots=14, decode=letters)
    assert_same(ours.generate(requests, sampling), [wanted])


def test_a_sequence_may_have_as_many_tokens_as_the_model_has_positions(
    made: list[SglangGenerator],
) -> None:
    model, request = tiny_model(), make_requests((100,), samples=1)
    ours, sampling = loaded(made, model), Sampling(28)
    assert_same(
        ours.generate(request, sampling), builtin(model, slots=16).generate(request, sampling)
    )


def test_new_weights_in_the_middle_of_completions_draw_the_rest(
    made: list[SglangGenerator],
) -> None:
    """SGLang reads again what completions have. It makes some more tokens before a pause gets to it."""
    first, second = tiny_model(seed=1), tiny_model(seed=2)
    ours, told = loaded(made, first, slots=2, decode=letters), 0

    def watch(ended: int) -> None:
        nonlocal told
        told += 1
        if told == 3:
            ours.load_weights(Publication(model_shards(second)), 5)

    requests = make_requests((40, 3, 5, 33), samples=1)
    # A text that never comes has every token told at once.
    sampling = Sampling(12, stop_strings=("z",))
    found = [each for (each,) in ours.generate(requests, sampling, watch)]
    before = [
        each for (each,) in builtin(first, slots=16, decode=letters).generate(requests, sampling)
    ]
    after = builtin(second, slots=16, decode=letters).generate(requests, sampling)
    switched = [int((each.versions == 1).sum()) for each in found]
    assert 0 < switched[0] < 12, switched
    assert switched[2:] == [0, 0]
    assert_same([[each] for each in found[2:]], after[2:])
    for request, one, other, count in zip(requests, found, before, switched, strict=True):
        np.testing.assert_array_equal(one.token_ids[:count], other.token_ids[:count])
        np.testing.assert_allclose(one.logprobs[:count], other.logprobs[:count], atol=1e-5)
        with torch.no_grad():
            ids = torch.from_numpy(np.concatenate([request.token_ids, one.token_ids]))[None]
            want = second(ids).logits[0, len(request.token_ids) - 1 : -1].log_softmax(-1)
        picked = want.gather(1, torch.from_numpy(one.token_ids)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(one.logprobs[count:], picked[count:], atol=1e-5)


def test_whoever_watches_can_end_it_and_ask_again(made: list[SglangGenerator]) -> None:
    ours = loaded(made, tiny_model(), slots=4)

    def stop(count: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ours.generate(make_requests(), Sampling(6), stop)
    assert not ours._manager.rid_to_state
    ended: list[int] = []
    ours.generate(make_requests(), Sampling(6), ended.append)
    assert sum(ended) == sum(request.samples for request in make_requests())


def test_logits_that_are_not_finite_are_refused(made: list[SglangGenerator]) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = torch.nan
    ours = loaded(made, model)
    with pytest.raises(BurnishError, match="finite"):
        ours.generate([Request(0, np.array([5, 6]), samples=2)], Sampling(4))


ONE = torch.ones(1)


@pytest.mark.parametrize("fault", ["missing", "unknown", "twice"])
def test_weights_that_do_not_fit_are_named_and_leave_none(
    made: list[SglangGenerator], fault: str
) -> None:
    model, name = tiny_model(), "model.layers.1.self_attn.k_proj.weight"
    ours, shards = loaded(made, model), list(model_shards(tiny_model(seed=1)))
    index = next(i for i, shard in enumerate(shards) if shard.spec.name == name)
    other = {
        "missing": [],
        "unknown": [Shard(TensorSpec("model.x", (1,), torch.float32), whole((1,)), ONE)],
        "twice": [shards[index]] * 2,
    }[fault]
    with pytest.raises(IncompatibleError, match="model.x" if fault == "unknown" else name):
        ours.load_weights(Publication([*shards[:index], *other, *shards[index + 1 :]]), 2)
    with pytest.raises(UsageError):
        ours.generate(make_requests(), Sampling(4))
    ours.load_weights(Publication(model_shards(model)), 3)
    assert_same(
        ours.generate(make_requests(), Sampling(9)),
        builtin(model, slots=16).generate(make_requests(), Sampling(9)),
    )


def test_checksums_show_a_tensor_that_keeps_old_weights(made: list[SglangGenerator]) -> None:
    models = tiny_model(seed=0), tiny_model(seed=1)
    ours = loaded(made, models[0])
    views = ours._manager.scheduler.model.views
    name = "model.layers.0.self_attn.v_proj.weight"
    old = views[name].clone()
    ours.load_weights(Publication(model_shards(models[1])), 2)
    views[name].copy_(old)
    wanted = {shard.spec.name: shard.checksum() for shard in model_shards(models[1])}
    assert [s.name for s, digest in ours.checksums() if wanted[s.name] != digest] == [name]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free and all bytes of an accelerator that is not there."""
    found = [80 << 30, 80 << 30]
    for index, name in enumerate(("free_memory", "total_memory")):
        monkeypatch.setattr(f"burnish.rollout.inference_engine.{name}", lambda _, i=index: found[i])
    return found


@pytest.mark.parametrize(("held", "share"), [(0, 0.8), (10, 0.571), (20, 0.4), (60, 0.4)])
def test_weights_and_cache_leave_room_to_a_trainer(
    made: list[SglangGenerator], memory: list[int], held: int, share: float
) -> None:
    """SGLang's share is of what is free when it starts. A trainer takes three times as much as before its first step."""
    memory[0] -= held << 30
    ours = start(made, tiny_model(), device=torch.device("cuda", 1))
    assert ours._manager.args.mem_fraction_static == share
    assert 3 * held + share * (80 - held) <= 80 or share == 0.4
    assert start(made, tiny_model())._manager.args.mem_fraction_static is None


def test_memory_is_given_back_until_new_weights_come(
    made: list[SglangGenerator], memory: list[int]
) -> None:
    """On the CPU: the stand-in does not ask for the device."""
    model, requests = tiny_model(), make_requests((5, 9), samples=2)
    ours = loaded(made, model, device=torch.device("cuda", 1))
    assert ours._manager.args.base_gpu_id == 1
    ours.release()
    ours.release()
    assert ours._manager.scheduler.offloaded == {"weights", "kv_cache", "cuda_graph"}
    with pytest.raises(UsageError):
        ours.generate(requests, Sampling(4))
    ours.load_weights(Publication(model_shards(model)), 2)
    found = ours.generate(requests, Sampling(6))
    assert_same(found, builtin(model, slots=16).generate(requests, Sampling(6)))


def test_sigterm_stays_with_whoever_had_it(made: list[SglangGenerator]) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        ours = loaded(made, tiny_model())
        ours.generate(make_requests(samples=1), Sampling(2))
        os.kill(os.getpid(), signal.SIGTERM)
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_experts_are_refused(made: list[SglangGenerator]) -> None:
    ours = loaded(made, tiny_model("qwen3_moe"))
    with pytest.raises(UsageError, match=r"algorithm\.router_replay"):
        ours.generate(make_requests(), Sampling(4, experts=True))


def test_no_sglang_and_an_old_one(
    made: list[SglangGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = SimpleNamespace(config=tiny_config())
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(MissingError, match=r"\[sglang\]"):
        start(made, model)
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.22.post1"))
    with pytest.raises(IncompatibleError, match=r"(?s)0\.5\.22.*0\.5\.23"):
        start(made, model)

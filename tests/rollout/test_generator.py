from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, product
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
    take_turns,
)
from support.models.generators import builtin
from support.models.tiny import (
    BOUNDED_STATES,
    FAMILIES,
    MIXTURES,
    WITH_STATE,
    tiny_config,
    tiny_model,
)
from support.nightly import by_day
from support.ranks.processes import run_ranks
from torch import Tensor
from transformers import PreTrainedModel

from burnish.boxes.box import Box
from burnish.boxes.shards import Publication, Shard
from burnish.config.schema import MOST_SLOTS
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, UsageError
from burnish.families import family_of
from burnish.models.names import model_shards
from burnish.records import Completion, Request
from burnish.rollout.base import Generator, Sampling
from burnish.rollout.builtin import decoding as builtin_decoding
from burnish.rollout.builtin.forward import FusedForward, ModuleForward
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.rollout.builtin.kv_cache import PromptCache

CPU = torch.device("cpu")
PLAIN: dict[str, Any] = {
    "layout": Layout(),
    "device": CPU,
    "dtype": torch.float32,
    "eos_token_ids": (),
}


class TestContract(GeneratorContract):
    @pytest.fixture(
        autouse=True,
        params=[
            "prompts shared",
            pytest.param("prompts in every row", marks=pytest.mark.nightly),
        ],
    )
    def _cache(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """The cache of CPUs without matrix units, and that of all other devices."""
        units = request.param == "prompts in every row"
        monkeypatch.setattr(builtin_decoding, "has_matrix_units", lambda device: units)

    def make(self, model: PreTrainedModel, **options: Any) -> Generator:
        return builtin(model, **options)


def test_automatic_slots_are_as_many_as_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("qwen3")
    config = model.config
    asked: list[int] = []

    class Watched(builtin_decoding.Decoding):
        def __init__(self, model: Any, requests: Any, how: Any, rule: Any, slots: int, *_: Any):
            asked.append(slots)
            super().__init__(model, requests, how, rule, slots)

    monkeypatch.setattr("burnish.rollout.builtin.generator.Decoding", Watched)
    token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    slot = 9 * token + 5 * 4 * config.vocab_size
    requests = [Request(0, np.array([1, 2, 3, 4, 5]), samples=2)]
    found = []
    for room in (40 * slot, 10**12, 0):
        monkeypatch.setattr(
            "burnish.rollout.builtin.generator.free_memory", lambda device, room=room: room / 0.8
        )
        found += builtin(model, slots="auto").generate(requests, Sampling(max_tokens=4))
    assert asked == [32, MOST_SLOTS, 1]
    texts = [[completion.token_ids.tolist() for completion in group] for group in found]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(("units", "slots", "kept"), [(False, 64, 6), (True, 64, 6), (False, 2, 2)])
def test_turns_read_only_what_is_new_as_far_as_memory_goes(
    units: bool, slots: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtin_decoding, "has_matrix_units", lambda device: units)
    generator = builtin(tiny_model("qwen3"), slots=slots)
    read: list[int] = []
    forward = generator._model.forward
    generator._model.forward = lambda ids, *rest: read.append(len(ids)) or forward(ids, *rest)
    sampling = Sampling(30, keeps=True)
    requests = make_requests((20, 20), samples=3)
    said = generator.generate([replace(each, max_tokens=10) for each in requests], sampling)
    assert sum(read) == 2 * 20 + 6 * 9
    following = [
        Request(asked.prompt_key, np.append(asked.token_ids, [*each.token_ids, 5]), 1, n, turn=1)
        for asked, group in zip(requests, said, strict=True)
        for n, each in enumerate(group)
    ]
    # Two slots hold 2 · (20 + 10) tokens, and a conversation has 29 that were read.
    read.clear()
    generator.generate([replace(each, max_tokens=10) for each in following], sampling)
    assert sum(read) == kept * 2 + (6 - kept) * 31 + 6 * 9
    generator.forget()
    assert generator._turns is None


@pytest.mark.parametrize(("units", "slots"), [(False, 64), (True, 3)])
def test_turns_join_those_that_run(
    units: bool, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows is drawn as if it were asked for alone, whenever it comes."""
    monkeypatch.setattr(builtin_decoding, "has_matrix_units", lambda device: units)
    model = tiny_model("qwen3")
    sampling = Sampling(12, seed=4, keeps=True)
    generator = builtin(model, slots=slots, eos=range(3, 20))
    delayed: list[Request] = []
    running: list[tuple[Request, Completion]] = []

    def follow(ended: Sequence[tuple[Request, Completion]], idle: bool) -> list[Request]:
        running.extend(ended)
        for asked, said in ended:
            if asked.turn < 2:
                ids = np.concatenate([asked.token_ids, said.token_ids, [7, 8]])
                delayed.append(replace(asked, token_ids=ids, turn=asked.turn + 1))
        ready = delayed[: 1 + idle]
        del delayed[: len(ready)]
        return ready

    groups = generator.generate(make_requests((1, 5, 23)), sampling, follow=follow)
    assert len(running) == sum(map(len, groups)) == 3 * 9
    alone = builtin(model, eos=range(3, 20))
    for asked, said in running:
        assert_same([[said]], alone.generate([asked], replace(sampling, keeps=False)))


@pytest.mark.parametrize("family", ["mistral", *by_day(WITH_STATE, ("lfm2",))])
def test_turns_of_models_with_windows_and_states_are_drawn_as_if_read_anew(family: str) -> None:
    model = tiny_model(family)
    kept, anew = (
        [each for _, each in take_turns(builtin(model), Sampling(12, keeps=keeps))]
        for keeps in (True, False)
    )
    assert_same([kept], [anew])


@pytest.mark.parametrize(
    ("family", "units"),
    [
        *product(WITH_STATE, (False, True)),
        *by_day(
            product(BOUNDED_STATES, (False, True)), [("nemotron_h", False), ("falcon_h1", False)]
        ),
    ],
)
def test_layers_with_state_continue_each_completion(
    family: str, units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions of one prompt and of others end at different times, and move into each other's slots."""
    monkeypatch.setattr(builtin_decoding, "has_matrix_units", lambda device: units)
    model = tiny_model(family)
    requests = make_requests((1, 5, 23, 5, 2, 40))
    groups = builtin(model, eos=range(3, 20)).generate(requests, Sampling(20))
    lengths = {len(completion.token_ids) for group in groups for completion in group}
    assert len(lengths) > 4
    for request, group in zip(requests, groups, strict=True):
        for each in group:
            logprobs = logits_by_hand(model, request, each).log_softmax(-1)
            np.testing.assert_allclose(each.logprobs, chosen(logprobs, each), atol=1e-5)


@pytest.mark.parametrize("family", by_day(BOUNDED_STATES, ["nemotron_h"]))
def test_greedy_tokens_of_bounded_states_are_the_likeliest_of_one_pass(family: str) -> None:
    model = tiny_model(family)
    requests = make_requests((1, 1, 5, 40), samples=1)
    groups = builtin(model).generate(requests, Sampling(20, temperature=0.0))
    for request, (each,) in zip(requests, groups, strict=True):
        logprobs = logits_by_hand(model, request, each).log_softmax(-1)
        np.testing.assert_allclose(each.logprobs, logprobs.amax(-1), atol=1e-5)


def test_no_more_prompts_are_read_ahead_than_there_are_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []

    class Watched(PromptCache):
        def __init__(self, lengths: Sequence[int], *more: Any) -> None:
            read.append(len(lengths))
            super().__init__(lengths, *more)

    monkeypatch.setattr(builtin_decoding, "PromptCache", Watched)
    builtin(tiny_model("lfm2"), slots=2).generate(make_requests(samples=1), Sampling(2))
    assert read == [2, 2, 1]


class TestForward:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_plain_families_run_fused_and_the_others_by_module(self, family: str) -> None:
        model = builtin(tiny_model(family))._model
        fused = family_of(family).has_llama_layers and family not in MIXTURES
        kind = FusedForward if fused else ModuleForward
        assert type(model.forward) is kind

    @pytest.mark.parametrize(
        ("family", "changes"),
        [
            *(
                (family, {})
                for family in (
                    f for f in FAMILIES if family_of(f).has_llama_layers and f not in MIXTURES
                )
            ),
            ("llama", {"attention_bias": True, "mlp_bias": True}),
            ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
            ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
            (
                "llama",
                {
                    "rope_parameters": {
                        "rope_type": "llama3",
                        "rope_theta": 10000.0,
                        "factor": 4.0,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 16,
                    }
                },
            ),
        ],
    )
    def test_fused_is_the_modules(self, family: str, changes: dict[str, Any]) -> None:
        generator = builtin(tiny_model(family, **changes))
        requests, sampling = make_requests(), Sampling(20)
        fused = generator.generate(requests, sampling)
        assert type(generator._model.forward) is FusedForward
        generator._model.forward = ModuleForward(generator._model.module)
        assert_same(fused, generator.generate(requests, sampling))

    @pytest.mark.parametrize("units", [False, True])
    def test_bf16_stays_near_the_modules(
        self, units: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both round at different places; the log-probs of the same tokens differ by bf16's grain."""
        monkeypatch.setattr(builtin_decoding, "has_matrix_units", lambda device: units)
        model = tiny_model("qwen3")
        requests = make_requests()
        groups = builtin(model, dtype=torch.bfloat16).generate(requests, Sampling(20))
        differences = []
        for request, group in zip(requests, groups, strict=True):
            for completion in group:
                ids = np.concatenate([request.token_ids, completion.token_ids])
                with torch.no_grad():
                    logits = model(torch.from_numpy(ids)[None]).logits[0, -21:-1]
                picked = logits.log_softmax(-1).numpy()[np.arange(20), completion.token_ids]
                differences.append(np.abs(picked - completion.logprobs))
        assert np.mean(differences) < 0.03
        assert np.max(differences) < 0.3


class TestSchedule:
    def test_a_prompt_is_read_once_for_all_its_samples(self) -> None:
        generator = builtin(tiny_model(), slots=2)
        seen: list[int] = []
        forward_of_model = generator._model.forward

        def forward(token_ids: Tensor, *others: Any) -> Tensor:
            seen.append(len(token_ids))
            return forward_of_model(token_ids, *others)

        generator._model.forward = forward
        generator.generate(make_requests((9, 30), samples=5), Sampling(4))
        assert seen[0] == 39
        assert set(seen[1:]) == {2}
        assert len(seen) - 1 == 5 * 3

    @pytest.mark.parametrize("behind", [0, 1])
    def test_no_completion_is_computed_that_is_known_to_have_ended(
        self, behind: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every token but the first of each completion costs one row of one step, and its end one more at most where it is read late."""
        monkeypatch.setattr(builtin_decoding, "steps_behind", lambda device: behind)
        generator = builtin(tiny_model(), slots=5, eos=range(3, 12))
        rows: list[int] = []
        forward_of_model = generator._model.forward

        def forward(token_ids: Tensor, *others: Any) -> Tensor:
            rows.append(len(token_ids))
            return forward_of_model(token_ids, *others)

        generator._model.forward = forward
        groups = generator.generate(make_requests(samples=6), Sampling(30))
        made = sum(len(c.token_ids) - 1 for group in groups for c in group)
        surplus = sum(rows[1:]) - made
        assert surplus == 0 if behind == 0 else 0 < surplus <= sum(len(group) for group in groups)
        busy = [count for count in rows[1:] if count == 5]
        assert len(busy) > len(rows) / 2
        assert rows[1:] == sorted(rows[1:], reverse=True), "slots are refilled while any waits"

    def test_prompts_are_read_in_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        requests, sampling = make_requests((30, 5, 8, 40, 3)), Sampling(6)
        whole = builtin(tiny_model(), slots=3).generate(requests, sampling)
        monkeypatch.setattr(builtin_decoding, "_PREFILL_TOKENS", 36)
        assert_same(builtin(tiny_model(), slots=3).generate(requests, sampling), whole)

    def test_attention_is_not_cudnns_which_plans_every_shape_anew(self) -> None:
        generator = builtin(tiny_model())
        forward_of_model, asked = generator._model.forward, []

        def forward(*given: Any) -> Tensor:
            asked.append(torch.backends.cuda.cudnn_sdp_enabled())
            return forward_of_model(*given)

        generator._model.forward = forward
        before = torch.backends.cuda.cudnn_sdp_enabled()
        generator.generate(make_requests(), Sampling(3))
        assert set(asked) == {False}
        assert torch.backends.cuda.cudnn_sdp_enabled() == before

    def test_what_was_read_is_let_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Memory follows the slots, not the prompts: what has been read is kept until its last completion starts."""
        living, most = weakref.WeakSet[PromptCache](), [0]

        def counted(*given: Any) -> PromptCache:
            cache = PromptCache(*given)
            living.add(cache)
            most.append(len(living))
            return cache

        monkeypatch.setattr(builtin_decoding, "PromptCache", counted)
        monkeypatch.setattr(builtin_decoding, "_PREFILL_TOKENS", 8)
        requests = make_requests((8, 5, 7, 4, 8, 6, 3, 5, 6), samples=3)
        builtin(tiny_model(), slots=2).generate(requests, Sampling(4))
        assert len(most) > 8
        assert max(most) == 2, "the one being read, and the one before, of which one may still wait"
        assert not living

    def test_reading_a_step_later_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The accelerator's way of decoding, run on the CPU: what is drawn after the end is dropped."""
        requests, sampling = make_requests(samples=4), Sampling(29, top_k=20)
        model, eos = tiny_model("mistral"), range(3, 9)
        one = builtin(model, eos=eos).generate(requests, sampling)
        monkeypatch.setattr(builtin_decoding, "steps_behind", lambda device: 1)
        assert_same(builtin(model, eos=eos).generate(requests, sampling), one)

    def test_long_completions_outgrow_the_first_memory(self) -> None:
        model = tiny_model(max_position_embeddings=1024)
        (request,) = make_requests((300,), samples=1)
        (group,) = builtin(model).generate([request], Sampling(150))
        ids = np.concatenate([request.token_ids, group[0].token_ids])
        with torch.no_grad():
            logprobs = model(torch.from_numpy(ids)[None]).logits[0, 299:-1].log_softmax(-1)
        want = logprobs.numpy()[np.arange(150), group[0].token_ids]
        np.testing.assert_allclose(group[0].logprobs, want, atol=2e-5)


class TestStopStrings:
    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"<{int(i)}>" for i in ids)

    def test_ends_with_the_token_that_completes_the_string(self) -> None:
        model, requests = tiny_model(), make_requests(samples=2)
        free = list(chain(*builtin(model).generate(requests, Sampling(20))))
        one, two, three = free[0].token_ids[4:7]
        stop = f"{one}><{two}><{three}>"
        stopped = builtin(model, decode=self.decode).generate(
            requests, Sampling(20, stop_strings=(stop, "nowhere"))
        )
        for before, after in zip(free, chain(*stopped), strict=True):
            at = self.decode(before.token_ids).find(stop)
            if at < 0:
                np.testing.assert_array_equal(after.token_ids, before.token_ids)
                assert after.stop_reason == "length"
            else:
                assert self.decode(after.token_ids).endswith(stop)
                np.testing.assert_array_equal(
                    after.token_ids, before.token_ids[: len(after.token_ids)]
                )
                assert after.stop_reason == "stop"
        assert len(stopped[0][0].token_ids) == 7

    def test_need_a_decode_function(self) -> None:
        with pytest.raises(UsageError):
            builtin(tiny_model()).generate(make_requests(), Sampling(4, stop_strings=("x",)))

    def test_must_not_be_empty(self) -> None:
        with pytest.raises(UsageError):
            builtin(tiny_model(), decode=self.decode).generate(
                make_requests(), Sampling(4, stop_strings=("",))
            )


class TestWeights:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_new_weights_replace_the_old(self, dtype: torch.dtype) -> None:
        first, second = tiny_model(seed=1), tiny_model(seed=2)
        requests, sampling = make_requests(), Sampling(8)
        generator = builtin(first, version=1, dtype=dtype)
        old = generator.generate(requests, sampling)
        generator.load_weights(Publication(model_shards(second)), 2)
        new = generator.generate(requests, sampling)
        assert_same(new, builtin(second, dtype=dtype).generate(requests, sampling))
        assert (old[0][0].weights_version, new[0][0].weights_version) == (1, 2)

    def test_may_be_replaced_between_steps(self) -> None:
        """A completion says which weights drew which token; those before the change are as without it."""
        first, second = tiny_model(seed=1), tiny_model(seed=2)
        generator, steps = builtin(first, version=1, slots=2), 0

        def watch(ended: int) -> None:
            nonlocal steps
            steps += 1
            if steps == 3:
                generator.load_weights(Publication(model_shards(second)), 5)

        requests, sampling = make_requests(samples=1), Sampling(8)
        made = [each for (each,) in generator.generate(requests, sampling, watch)]
        before = [each for (each,) in builtin(first).generate(requests, sampling)]
        after = [each for (each,) in builtin(second).generate(requests, sampling)]
        assert [each.versions.tolist() for each in made[:2]] == [[1] * 4 + [5] * 4] * 2
        assert [each.weights_version for each in made] == [1, 1, 5, 5, 5]
        for one, other in zip(made[:2], before[:2], strict=True):
            np.testing.assert_array_equal(one.token_ids[:4], other.token_ids[:4])
            np.testing.assert_allclose(one.logprobs[:4], other.logprobs[:4], atol=1e-5)
            assert (one.logprobs[4:] != other.logprobs[4:]).all()
        assert_same([made[2:]], [after[2:]])

    def test_leave_the_device_until_they_come_again(self) -> None:
        """On a CPU a generator keeps them, so its model is asked."""
        generator = BuiltinGenerator(tiny_config(), slots=4, **PLAIN)
        model = generator._model
        first, second = tiny_model(seed=1), tiny_model(seed=2)
        weights = [Publication(model_shards(each)) for each in (first, second)]
        generator.load_weights(weights[0], 1)
        assert model.release()
        assert not any(p.untyped_storage().nbytes() for p in model.module.parameters())
        generator.load_weights(weights[1], 2)
        requests, sampling = make_requests(), Sampling(8)
        wanted = builtin(second).generate(requests, sampling)
        assert_same(generator.generate(requests, sampling), wanted)
        generator.release()
        assert_same(generator.generate(requests, sampling), wanted)

    def test_of_a_second_version_replace_a_copy_in_another_order(self) -> None:
        """A processor with bf16 units has its own copy of the weights of its products."""
        first, second = tiny_model(seed=1), tiny_model(seed=2)
        generator = builtin(first, dtype=torch.bfloat16)
        generator.load_weights(Publication(model_shards(second)), 2)
        requests, sampling = make_requests(), Sampling(8)
        made = generator.generate(requests, sampling)
        wanted = builtin(second, dtype=torch.bfloat16, version=2).generate(requests, sampling)
        assert_same(made, wanted)

    def test_are_needed(self) -> None:
        generator = BuiltinGenerator(tiny_config(), slots=2, **PLAIN)
        with pytest.raises(UsageError):
            generator.generate(make_requests(), Sampling(2))

    def test_that_are_not_finite_are_noticed(self) -> None:
        model = tiny_model()
        with torch.no_grad():
            model.model.norm.weight.fill_(torch.nan)
        for temperature in (0.0, 1.0):
            with pytest.raises(BurnishError):
                builtin(model).generate(make_requests(), Sampling(2, temperature=temperature))

    def test_come_from_all_ranks(self) -> None:
        alone = builtin(tiny_model()).generate(make_requests(), Sampling(6))
        for groups in run_ranks(_generate_from_halves, 2):
            assert_same(groups, alone)

    def test_cannot_be_used_after_close(self) -> None:
        generator = builtin(tiny_model())
        generator.close()
        with pytest.raises(UsageError):
            generator.generate(make_requests(), Sampling(2))

    @pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3_text"])
    def test_frees_the_weights_when_it_is_closed(self, family: str) -> None:
        """At once: not only when cycles are next collected."""
        generator = builtin(tiny_model(family))
        generator.generate(make_requests(), Sampling(2))
        weights = [weakref.ref(weight) for weight in generator._model.module.parameters()]
        gc.collect()
        gc.disable()
        try:
            generator.close()
            assert [weight() for weight in weights] == [None] * len(weights)
        finally:
            gc.enable()


def _generate_from_halves(layout: Layout) -> list[list[Completion]]:
    """Each rank gives the half of the rows that it holds."""
    model = tiny_model()

    def half(shard: Shard) -> Shard:
        rows = -(-shard.spec.shape[0] // layout.world)
        start = min(layout.rank * rows, shard.spec.shape[0])
        stop = min(start + rows, shard.spec.shape[0])
        tail = shard.spec.shape[1:]
        box = Box((start, *[0] * len(tail)), (stop - start, *tail))
        return Shard(shard.spec, box, shard.tensor[start:stop])

    generator = BuiltinGenerator(model.config, slots=4, **{**PLAIN, "layout": layout})
    generator.load_weights(Publication(map(half, model_shards(model))), 1)
    requests: list[Request] = make_requests()
    return generator.generate(requests, Sampling(6))

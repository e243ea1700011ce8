"""What every generator owes, whatever makes the tokens: plain transformers' numbers, and draws that depend on nothing else.

An implementation's tests subclass `GeneratorContract` and say how to make one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from support.models.tiny import FAMILIES, VOCAB, tiny_model
from support.nightly import by_day
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from burnish.errors import UsageError
from burnish.models.names import model_shards
from burnish.records import Completion, Request
from burnish.rollout.base import Generator, RunningRequest, Sampling


def make_requests(
    lengths: Sequence[int] = (1, 5, 23, 2, 40), samples: int = 3, seed: int = 0
) -> list[Request]:
    """Prompts of random tokens, of very different lengths."""
    rng = np.random.default_rng(seed)
    return [
        Request(100 + index, rng.integers(3, VOCAB, length), samples)
        for index, length in enumerate(lengths)
    ]


@torch.no_grad()
def logits_by_hand(model: PreTrainedModel, request: Request, completion: Completion) -> Tensor:
    """What plain transformers predicts each token of the completion from: [tokens, V] fp32."""
    ids = np.concatenate([request.token_ids, completion.token_ids])
    logits: Tensor = model(torch.from_numpy(ids)[None]).logits[0].float()
    return logits[len(request.token_ids) - 1 : -1]


def warped(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs of the distribution that transformers would draw from."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    scores: Tensor = steps(torch.zeros(len(logits), 1, dtype=torch.int64), logits.clone())
    return scores.log_softmax(-1)


def chosen(logprobs: Tensor, completion: Completion) -> np.ndarray[Any, Any]:
    """The log-prob of each token of the completion."""
    picked = logprobs.gather(1, torch.from_numpy(completion.token_ids)[:, None])[:, 0]
    return np.asarray(picked.numpy())


def assert_same(
    ours: Sequence[Sequence[Completion]],
    theirs: Sequence[Sequence[Completion]],
    atol: float = 1e-5,
) -> None:
    """The same tokens and ends; log-probs to fp32's accuracy, or `atol`."""
    assert [len(group) for group in ours] == [len(group) for group in theirs]
    for group, other in zip(ours, theirs, strict=True):
        for one, two in zip(group, other, strict=True):
            np.testing.assert_array_equal(one.token_ids, two.token_ids)
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=atol)
            np.testing.assert_allclose(one.sampled_logprobs, two.sampled_logprobs, atol=atol)
            assert one.stop_reason == two.stop_reason


def rest(completion: Completion, count: int) -> Completion:
    """What is left of it after so many tokens."""
    return replace(
        completion,
        token_ids=completion.token_ids[count:],
        logprobs=completion.logprobs[count:],
        sampled_logprobs=completion.sampled_logprobs[count:],
    )


def take_turns(
    generator: Generator, sampling: Sampling, turns: int = 3, samples: int = 3
) -> list[tuple[Request, Completion]]:
    """Each turn of conversations that hear some tokens after each turn, with the request for it."""
    rng = np.random.default_rng(1)
    requests = make_requests((1, 5, 23, 40), samples)
    said = []
    for turn in range(turns):
        groups = generator.generate(requests, sampling)
        following = []
        for request, group in zip(requests, groups, strict=True):
            for number, completion in enumerate(group):
                said.append((request, completion))
                heard = rng.integers(3, VOCAB, 1 + len(said) % 4)
                ids = np.concatenate([request.token_ids, completion.token_ids, heard])
                sample = request.first_sample + number
                following.append(Request(request.prompt_key, ids, 1, sample, turn=turn + 1))
        # Some conversations end before the others.
        requests = following[: len(following) - 2 * (turn + 1)]
    generator.forget()
    return said


class GeneratorContract:
    """Test methods; `make` gives a generator that holds the weights of a plain fp32 model as `version`."""

    def make(
        self, model: PreTrainedModel, *, slots: int = 4, eos: Sequence[int] = (), version: int = 1
    ) -> Generator:
        raise NotImplementedError

    def model(self, family: str = "qwen3") -> PreTrainedModel:
        """A tiny model of a family; an implementation may want other sizes, or skip the test."""
        return tiny_model(family)

    @pytest.mark.parametrize("family", by_day(FAMILIES, ("qwen3", "mixtral")))
    def test_logprobs_are_those_of_plain_transformers(self, family: str) -> None:
        model, requests = self.model(family), make_requests()
        groups = self.make(model).generate(requests, Sampling(20, seed=1))
        for request, group in zip(requests, groups, strict=True):
            assert len(group) == request.samples
            for completion in group:
                want = chosen(
                    logits_by_hand(model, request, completion).log_softmax(-1), completion
                )
                np.testing.assert_allclose(completion.logprobs, want, atol=1e-5)
                np.testing.assert_allclose(completion.sampled_logprobs, want, atol=1e-5)
                assert len(completion.token_ids) == 20
                assert completion.stop_reason == "length"

    def test_times_are_in_order_where_they_are_known(self) -> None:
        before = time.time()
        groups = self.make(self.model("qwen3"), slots=2).generate(make_requests(), Sampling(9))
        found = [completion for group in groups for completion in group]
        for times in filter(None, (completion.times for completion in found)):
            asked, first, last = times
            assert before <= asked < first <= last <= time.time()

    @pytest.mark.parametrize(
        "options",
        [
            {"temperature": 0.6},
            {"temperature": 1.7},
            {"top_k": 5},
            {"top_p": 0.8},
            {"min_p": 0.1},
            {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
        ],
    )
    def test_sampled_logprobs_are_those_of_the_distribution_drawn_from(
        self, options: dict[str, Any]
    ) -> None:
        model, requests, sampling = self.model(), make_requests(), Sampling(16, **options)
        for request, group in zip(
            requests, self.make(model).generate(requests, sampling), strict=True
        ):
            for completion in group:
                logits = logits_by_hand(model, request, completion)
                drawn_from = chosen(warped(logits, sampling), completion)
                assert np.isfinite(drawn_from).all()
                np.testing.assert_allclose(completion.sampled_logprobs, drawn_from, atol=2e-5)
                raw = chosen(logits.log_softmax(-1), completion)
                np.testing.assert_allclose(completion.logprobs, raw, atol=1e-5)

    @pytest.mark.parametrize("family", by_day(FAMILIES, ("qwen3", "mixtral")))
    def test_greedy_is_greedy_search_of_transformers(self, family: str) -> None:
        model, requests = self.model(family), make_requests(samples=2)
        groups = self.make(model).generate(requests, Sampling(12, temperature=0.0))
        for request, group in zip(requests, groups, strict=True):
            ids = torch.from_numpy(request.token_ids)[None]
            model.generation_config.eos_token_id = None
            want = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
            )[0, ids.shape[1] :].numpy()
            for completion in group:
                np.testing.assert_array_equal(completion.token_ids, want)
                np.testing.assert_array_equal(completion.sampled_logprobs, np.zeros(12))

    def test_completions_do_not_depend_on_slots_order_or_company(self) -> None:
        model, sampling = self.model(), Sampling(24, top_p=0.97, seed=5, step=3)
        requests, eos = make_requests(), range(3, 9)
        together = self.make(model, slots=64, eos=eos).generate(requests, sampling)
        lengths = {len(c.token_ids) for group in together for c in group}
        assert len(lengths) > 3, "the completions should end at different times"
        for slots in (1, 2, 7):
            assert_same(
                self.make(model, slots=slots, eos=eos).generate(requests, sampling), together
            )
        generator = self.make(model, eos=eos)
        assert_same(generator.generate(requests[::-1], sampling)[::-1], together)
        assert_same([generator.generate([r], sampling)[0] for r in requests], together)

    def test_samples_of_a_prompt_may_be_drawn_in_several_calls(self) -> None:
        generator, sampling = self.make(self.model()), Sampling(10, seed=2)
        (request,) = make_requests((6,), samples=5)
        key, ids = request.prompt_key, request.token_ids
        parts = [Request(key, ids, 2), Request(key, ids, 0), Request(key, ids, 3, first_sample=2)]
        groups = generator.generate(parts, sampling)
        assert_same(
            [[c for group in groups for c in group]], generator.generate([request], sampling)
        )

    @pytest.mark.parametrize("family", by_day(FAMILIES, ("qwen3",)))
    def test_turns_of_conversations_are_drawn_as_if_they_were_read_anew(self, family: str) -> None:
        model = self.model(family)
        generator = self.make(model, eos=range(3, 9))
        sampling = Sampling(12, seed=4, keeps=True)
        turns = take_turns(generator, sampling)
        for request, completion in turns:
            want = chosen(logits_by_hand(model, request, completion).log_softmax(-1), completion)
            np.testing.assert_allclose(completion.logprobs, want, atol=1e-5)
        again, anew = (
            [completion for _, completion in take_turns(generator, how)]
            for how in (sampling, replace(sampling, keeps=False))
        )
        found = [completion for _, completion in turns]
        assert_same([found], [again], atol=0)
        assert_same([found], [anew])

    def test_a_completion_goes_on_after_tokens_that_were_drawn_before(self) -> None:
        """With the same draws: it ends as one that nothing interrupted."""
        model, sampling = self.model(), Sampling(20, top_p=0.97, seed=5, step=3)
        generator, rng = self.make(model, eos=range(3, 9)), np.random.default_rng(1)
        whole, parts, left = [], [], []
        for request in make_requests():
            (group,) = generator.generate([request], sampling)
            for number, each in enumerate(group):
                cut = rng.integers(len(each.token_ids))
                ids = np.concatenate([request.token_ids, each.token_ids[:cut]])
                parts.append(Request(request.prompt_key, ids, 1, number, drawn=int(cut)))
                left.append([rest(each, cut)])
                whole.append(each)
        assert len({len(each.token_ids) for each in whole}) > 3
        assert_same(generator.generate(parts, sampling), left)

    def make_in_flight(self, model: PreTrainedModel) -> Generator:
        return self.make(model)  # type: ignore[return-value]

    def test_what_it_has_so_far_is_the_beginning_of_the_whole(self) -> None:
        sampling, heard = Sampling(12, seed=4), list[list[RunningRequest]]()
        generator = self.make_in_flight(self.model())
        assert generator.so_far() == []
        requests = make_requests()
        groups = generator.generate(
            requests, sampling, lambda ended: heard.append(generator.so_far())
        )
        wanted = {each.prompt_key: group for each, group in zip(requests, groups, strict=True)}
        running = [each for parts in heard for each in parts]
        for each in running:
            assert each.sampling == sampling
            for one, two in zip(each.completions, wanted[each.request.prompt_key], strict=True):
                count = len(one.token_ids)
                assert one.stop_reason == (two.stop_reason if count == 12 else None)
                for name in ("token_ids", "logprobs", "sampled_logprobs"):
                    np.testing.assert_array_equal(getattr(one, name), getattr(two, name)[:count])
        assert len({len(c.token_ids) for each in running for c in each.completions}) > 1

    def test_seed_step_prompt_and_sample_each_change_the_draw(self) -> None:
        generator = self.make(self.model())
        (request,) = make_requests((6,), samples=2)
        other = Request(request.prompt_key + 1, request.token_ids)
        base = Sampling(16, seed=1, step=1)
        first, second = generator.generate([request], base)[0]
        drawn = [first, second, generator.generate([other], base)[0][0]]
        others = Sampling(16, seed=2, step=1), Sampling(16, seed=1, step=2)
        drawn += [generator.generate([request], sampling)[0][0] for sampling in others]
        assert len({tuple(completion.token_ids) for completion in drawn}) == len(drawn)

    def test_ends_at_eos_and_stop_ids_and_keeps_them(self) -> None:
        model, requests = self.model(), make_requests(samples=8)
        free = self.make(model).generate(requests, Sampling(30))
        stopped = self.make(model, eos=(7, 8)).generate(
            requests, Sampling(30, stop_token_ids=(9, 10, 11))
        )
        reasons = set()
        for one, two in zip(chain(*free), chain(*stopped), strict=True):
            hits = [i for i, token in enumerate(one.token_ids) if token in (7, 8, 9, 10, 11)]
            end = hits[0] + 1 if hits else 30
            np.testing.assert_array_equal(two.token_ids, one.token_ids[:end])
            assert len(two.logprobs) == len(two.sampled_logprobs) == end
            assert two.stop_reason == ("stop" if hits else "length")
            reasons.add(two.stop_reason)
        assert reasons == {"stop", "length"}

    def test_one_token(self) -> None:
        groups = self.make(self.model()).generate(make_requests(), Sampling(1))
        assert {len(c.token_ids) for group in groups for c in group} == {1}

    def test_nothing_asked_nothing_made(self) -> None:
        generator = self.make(self.model())
        assert generator.generate([], Sampling(4)) == []
        assert generator.generate(make_requests((3, 4), samples=0), Sampling(4)) == [[], []]

    def test_who_watches_hears_of_every_completion_and_can_end_it(self) -> None:
        generator = self.make(self.model(), slots=4)
        ended: list[int] = []
        generator.generate(make_requests(), Sampling(6), ended.append)
        assert sum(ended) == sum(request.samples for request in make_requests())
        assert len(ended) > 1

        def stop(count: int) -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):
            generator.generate(make_requests(), Sampling(6), stop)
        generator.generate(make_requests(), Sampling(6))  # and can be asked again

    def test_the_version_of_the_weights_is_on_every_completion(self) -> None:
        groups = self.make(self.model(), version=17).generate(make_requests(), Sampling(2))
        assert {c.weights_version for group in groups for c in group} == {17}

    @pytest.mark.parametrize("family", by_day(FAMILIES, ("qwen3", "mixtral")))
    def test_checksums_are_those_of_the_weights_and_a_tied_head_counts(self, family: str) -> None:
        model = self.model(family)
        found = [(spec.name, digest) for spec, digest in self.make(model).checksums()]
        wanted = {shard.spec.name: shard.checksum() for shard in model_shards(model)}
        assert dict(found) == wanted
        assert len(found) == len(wanted) + model.config.tie_word_embeddings

    def test_refuses_an_empty_prompt(self) -> None:
        with pytest.raises(UsageError, match="prompt 9"):
            self.make(self.model()).generate(
                [Request(9, np.array([], dtype=np.int64))], Sampling(4)
            )

    def test_refuses_more_tokens_than_the_model_has_positions(self) -> None:
        with pytest.raises(UsageError, match=r"(?s)40.*89"):
            self.make(self.model()).generate(make_requests(), Sampling(89))

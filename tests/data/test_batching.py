from dataclasses import replace
from itertools import pairwise

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws

from burnish.data import batching
from burnish.data.batching import make_batch, outlines_of
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.models.flops import ModelFlops
from burnish.records import Example

FLOPS = ModelFlops(per_token=1.0, attention={})


def example(length, trained=None, start=0, **more):
    """Ids count up from `start`; the last `trained` tokens are trained on (all but the first by default)."""
    keep = length - 1 if trained is None else trained
    mask = np.arange(length) >= length - keep
    return Example(np.arange(start, start + length, dtype=np.int64), mask, **more)


def of_all_ranks(examples, ranks, budget, **options):
    return [
        make_batch(examples, Layout(rank, ranks), budget, FLOPS, **options) for rank in range(ranks)
    ]


@st.composite
def batches(draw):
    budget = draw(st.integers(30, 120))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=25))
    trained = [draw(st.integers(0, n - 1)) for n in lengths]
    examples = [
        example(n, t, 1000 * i) for i, (n, t) in enumerate(zip(lengths, trained, strict=True))
    ]
    return examples, draw(st.integers(1, 4)), budget


@draws(80)
@given(batches())
def test_the_ranks_together_hold_every_example_once(case):
    examples, ranks, budget = case
    parts = of_all_ranks(examples, ranks, budget)
    assert len({len(part.microbatches) for part in parts}) == 1
    held = [i for part in parts for micro in part.examples for i in micro if i >= 0]
    assert sorted(held) == list(range(len(examples)))
    for part in parts:
        for micro, items in zip(part.microbatches, part.examples, strict=True):
            check_micro_batch(micro, items, examples, budget)


def check_micro_batch(micro, items, examples, budget):
    total = len(micro.input_ids)
    bounds = micro.cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    assert total <= budget
    assert (bounds[0], bounds[-1]) == (0, total)
    if items == (-1,):
        assert total == 2
        assert not micro.loss_mask.any()
        return
    assert len(items) == len(lengths)
    for index, (start, stop) in zip(items, pairwise(bounds), strict=True):
        assert micro.input_ids[start:stop].tolist() == examples[index].token_ids.tolist()
        assert micro.loss_mask[start:stop].tolist() == examples[index].loss_mask.tolist()


@draws(80)
@given(batches(), st.randoms(use_true_random=False))
def test_the_counts_are_of_the_whole_however_it_is_cut(case, random):
    examples, ranks, budget = case
    masks = [e.loss_mask for e in examples]
    want = (sum(m.sum() for m in masks), sum(m.any() for m in masks), sum(len(m) for m in masks))
    shuffled = random.sample(examples, len(examples))
    for part in [
        *of_all_ranks(examples, ranks, budget),
        make_batch(shuffled, Layout(), 1000, FLOPS),
    ]:
        assert (part.num_tokens, part.num_sequences, part.total_tokens) == want
        assert {(m.num_tokens, m.num_sequences) for m in part.microbatches} == {want[:2]}
    parts = of_all_ranks(shuffled, ranks, budget)
    assert sum(int(m.loss_mask.sum()) for part in parts for m in part.microbatches) == want[0]


def test_types_are_as_the_record_says():
    batch = make_batch([example(3), example(2)], Layout(), 10, FLOPS, temperature=0.7)
    micro = batch.microbatches[0]
    types = {name: getattr(micro, name).dtype for name in ("input_ids", "cu_seqlens", "loss_mask")}
    assert types == {
        "input_ids": torch.int64,
        "cu_seqlens": torch.int32,
        "loss_mask": torch.bool,
    }
    assert micro.temperature == 0.7
    assert (micro.advantages, micro.old_logprobs, micro.ref_logprobs) == (None, None, None)
    assert batch.examples == ((0, 1),)


def test_examples_are_not_outlined_again(monkeypatch):
    """What all ranks were told of them is enough."""
    examples = [example(length, start=length) for length in (5, 9, 4)]
    want = make_batch(examples, Layout(), 10, FLOPS)
    outlines = outlines_of(dict(enumerate(examples)))
    monkeypatch.setattr("burnish.data.batching.outlines_of", None)
    found = make_batch(examples, Layout(), 10, FLOPS, outlines=outlines)
    assert found.examples == want.examples
    for mine, other in zip(found.microbatches, want.microbatches, strict=True):
        assert torch.equal(mine.input_ids, other.input_ids)


def test_a_batch_shares_no_memory_with_its_examples():
    """One example alone in a micro-batch too."""
    only = example(3)
    make_batch([only], Layout(), 10, FLOPS).microbatches[0].input_ids.zero_()
    assert only.token_ids.tolist() == [0, 1, 2]


def test_values_of_reinforcement_learning_travel_along():
    values = {
        name: np.arange(3, dtype=np.float64) + shift
        for shift, name in enumerate(["advantages", "old_logprobs", "ref_logprobs"])
    }
    parts = of_all_ranks([example(3, **values)], 2, 10)
    held = next(part for part in parts if part.examples == ((0,),)).microbatches[0]
    filler = next(part for part in parts if part.examples == ((-1,),)).microbatches[0]
    for name, value in values.items():
        assert getattr(held, name).tolist() == value.tolist()
        assert getattr(held, name).dtype == torch.float32
        assert getattr(filler, name).tolist() == [0, 0]


def test_filler_goes_to_as_many_experts_as_other_tokens():
    experts = np.zeros((3, 2, 4), dtype=np.uint8)
    parts = of_all_ranks([example(3, experts=experts)], 2, 10)
    filler = next(part for part in parts if part.examples == ((-1,),)).microbatches[0]
    assert filler.experts.tolist() == [[[0, 1, 2, 3]] * 2] * 2


def answers(prompt, *lengths):
    """Examples with one prompt of ten tokens, whose answers are trained on."""
    return [
        replace(
            example(10 + n, trained=n, start=100 * prompt),
            token_ids=np.concatenate(
                [np.arange(10) + 100 * prompt, np.full(n, 5000 + i, dtype=np.int64)]
            ),
        )
        for i, n in enumerate(lengths)
    ]


def test_samples_of_a_prompt_stay_together():
    examples = [e for prompt in range(16) for e in answers(prompt, 5, 9, 7, 3)]
    for ranks in (1, 2):
        parts = of_all_ranks(examples, ranks, 300)
        homes = {
            i: (rank, number)
            for rank, part in enumerate(parts)
            for number, micro in enumerate(part.examples)
            for i in micro
        }
        assert sorted(homes) == list(range(64))
        for prompt in range(16):
            assert len({homes[4 * prompt + sample] for sample in range(4)}) == 1


def test_a_group_is_parted_where_ranks_would_wait():
    parts = of_all_ranks(answers(0, *[10] * 8), 4, 100)
    assert [len(part.examples[0]) for part in parts] == [2, 2, 2, 2]


def test_the_model_decides_what_is_even():
    """Where attention is nearly all there is, one long example weighs as much as many short ones."""
    examples = [example(80), *(example(20, start=1000 * i) for i in range(1, 17))]
    long = ModelFlops(per_token=1.0, attention={None: 1000})
    for flops, least in ((FLOPS, 7), (long, 1)):
        parts = [make_batch(examples, Layout(rank, 2), 1000, flops) for rank in range(2)]
        assert min(len(part.examples[0]) for part in parts) == least
        assert len({part.imbalance for part in parts}) == 1
        assert 1 <= parts[0].imbalance < 1.03


def test_one_that_follows_its_prompt_costs_its_own_tokens():
    """Four samples of a prompt of 10 tokens cost 10 + 4 tokens, not 44."""
    examples = [*answers(0, 1, 1, 1, 1), example(686, start=3000), example(700, start=2000)]
    parts = of_all_ranks(examples, 2, 1000)
    assert sorted(part.examples[0] for part in parts) == [(0, 1, 2, 3, 4), (5,)]
    assert parts[0].imbalance == pytest.approx(1.0)


def test_fillers_only_where_examples_run_out():
    parts = of_all_ranks([example(5), example(9), example(4)], 4, 100)
    assert sorted(part.examples[0][0] for part in parts) == [-1, 0, 1, 2]
    assert {part.num_sequences for part in parts} == {3}


def test_a_batch_with_nothing_to_train_on_counts_zero():
    batch = make_batch([example(4, trained=0), example(1)], Layout(), 10, FLOPS)
    assert (batch.num_tokens, batch.num_sequences, batch.total_tokens) == (0, 0, 5)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "examples"),
        (
            [example(3), example(12), example(11)],
            r"(?s)example 1 .*batch\.tokens_per_device=12",
        ),
        ([example(3), example(12)], "example 1 "),
        ([example(3), example(0)], "example 1 "),
        ([example(3, trained=3)], "example 0 "),
        (
            [example(3), replace(example(3), loss_mask=np.zeros(2, bool))],
            "example 1: loss_mask",
        ),
        (
            [example(3), example(3, advantages=np.zeros(3))],
            "advantages",
        ),
        ([example(3, old_logprobs=np.zeros(3)), example(2)], "old_logprobs"),
        ([example(3, ref_logprobs=np.zeros(4))], "example 0: ref_logprobs"),
    ],
)
def test_unusable_examples_are_named(examples, message):
    for rank in (0, 1):
        with pytest.raises(UsageError, match=message):
            make_batch(examples, Layout(rank, 2), 10, FLOPS)


@draws(60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=300),
    st.integers(1, 40),
)
@hypothesis.example([(0, 1)] * 300, 1000)
@hypothesis.example([(0, 1)] * 5 + [(1, 1)] * 130, 1000)
def test_neighbours_with_one_prompt_stay_together_up_to_a_limit(examples, limit):
    names, lengths = np.array(examples).T
    wanted, tokens, run = [], 0, 0
    for place, (name, length) in enumerate(examples):
        tokens += length
        run = run + 1 if place and name == examples[place - 1][0] else 0
        stays = run % 128 > 0 and tokens <= limit
        tokens = tokens if stays else length
        wanted.append(stays)
    found = batching._follows(np.zeros_like(names), names, lengths, limit)
    assert found.tolist() == wanted

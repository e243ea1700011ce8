"""Ranks get the tokens that they train on, and of all others numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks.processes import run_ranks
from support.ranks.traffic import Traffic

from burnish.algorithms.base import load_advantage
from burnish.config.schema import RunConfig
from burnish.distributed.collectives import deliver, gather_objects
from burnish.distributed.layout import Layout
from burnish.distributed.meeting import in_groups
from burnish.methods.parts.policy_update import PolicyUpdate
from burnish.models.flops import ModelFlops
from burnish.records import Batch, Completion, Prompt, Rollout, TokenOutputs
from burnish.records.rollout_table import RolloutTable
from burnish.records.samples import StopReason
from burnish.runs.rollout_transfer import arriving, on_main

COSTS = ModelFlops(per_token=1.0, attention={})
SAMPLES, LONGEST = 4, 600
LAYOUTS = [{}, {"tensor": 2}, {"sequence": 2}, {"pipeline": 2}, {"pipeline": 2, "tensor": 2}]
KL = {"coef": 0.1, "place": "reward", "estimator": "k1"}
CLIP_COV = {"name": "clip_cov", "cov_low": 0, "cov_high": 2, "cov_ratio": 0.01}
SETTINGS: list[dict[str, Any]] = [
    {"algorithm": {"old_logprobs": "rollout", "mask_truncated": True}},
    {"algorithm": {"router_replay": "rollout"}, "batch": {"minibatches": 2}},
    {
        "algorithm": {
            "advantage": {"name": "gae", "gamma": 0.99, "lam": 0.9},
            "kl": KL,
            "mask_truncated": True,
        },
        "batch": {"minibatches": 2},
    },
    {
        "algorithm": {"advantage": "reinforce_plus_plus", "kl": KL, "policy_loss": "kl_cov"},
        "batch": {"epochs": 2},
    },
    {"algorithm": {"policy_loss": CLIP_COV}},
    {"algorithm": {"advantage": "grpo", "kl": KL, "top_entropy": 0.2}},
]


OWN = {"algorithm": {"advantage": "support.runs.advantages:less_the_largest_penalty", "kl": KL}}
"""The one function that needs tokens of other ranks."""


def groups_of(count: int, samples: int = SAMPLES) -> list[list[Rollout]]:
    """Of prompts of which some are equal, with completions of all lengths, one of them empty."""
    rng = np.random.default_rng(7)
    found = []
    for index in range(count):
        asked = np.arange(40 + index % 3, dtype=np.int64)
        prompt = Prompt(index, asked, f"{index}?", None, index, "here", {"row": index})
        group = []
        for sample in range(samples):
            length = int(rng.integers(0 if index == 1 else 1, LONGEST))
            ids = rng.integers(0, 100_000, length)
            numbers = rng.normal(size=(2, length)).astype(np.float32)
            experts = rng.integers(0, 8, (max(0, len(asked) + length - 1), 2, 2)).astype(np.uint8)
            reason: StopReason = "length" if sample == 3 else "stop"
            made = Completion(ids, *numbers, reason, index, experts, ((index + 1, 1),))
            group.append(Rollout(prompt, sample, made, f"{ids}", float(rng.normal())))
        found.append(group)
    return found


def divided(groups: list[list[Rollout]], layout: Layout) -> RolloutTable:
    """What a rank knows of groups that ranks made in turns."""
    tables = [RolloutTable.of(groups[rank :: layout.world], rank) for rank in range(layout.world)]
    told = [table.encoded() for table in tables]
    pairs = [RolloutTable.merged(told[first : first + 2]) for first in range(0, len(told), 2)]
    heard = RolloutTable.gathered(pairs, tables[layout.rank])
    numbers = [n for rank in range(layout.world) for n in range(rank, len(groups), layout.world)]
    return heard.take(np.argsort(numbers))


def engine_of(layout: Layout, salt: int = 0) -> Any:
    """Says of a token what its id says, however the batch is cut."""

    def forward(batch: Batch, **_: Any) -> list[TokenOutputs]:
        ids = [(micro.input_ids * (7 + salt)).float() for micro in batch.microbatches]
        return [TokenOutputs(-(x % 97) / 50, x % 89 / 10, (x % 31 - 15) / 7) for x in ids]

    return SimpleNamespace(layout=layout, forward=forward)


def updates(layout: Layout, settings: Mapping[str, Any], groups: RolloutTable) -> list[Batch]:
    batch = {"prompts": len(groups), "tokens_per_device": 2000, **settings.get("batch", {})}
    config = RunConfig.model_validate(
        {**settings, "batch": batch, "rollout": {"n": SAMPLES, "max_response_length": LONGEST}}
    )
    critic = SimpleNamespace(engine=engine_of(layout, 2))
    reference = engine_of(layout, 1).forward
    advantage = load_advantage(config.algorithm.advantage)
    update = PolicyUpdate(engine_of(layout), reference, critic, COSTS, config, advantage)
    return update.with_logprobs(update.assign_credit(groups, update.minibatches(groups)).batches, 0)


CASES = list(product(range(len(LAYOUTS)), range(len(SETTINGS))))
BY_DAY = [case for case in CASES if sum(case) % 3 == 0]
"""Every layout and all settings, each pair of numbers a case."""


def train_on_what_arrives(
    layout: Layout, cases: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """Of each case, the bytes that a rank received, the tokens that it trains on, and all."""
    found = []
    for degrees, number in cases:
        here, settings = replace(layout, **LAYOUTS[degrees]), SETTINGS[number]
        groups = groups_of(24)
        wanted = updates(here, settings, RolloutTable.of(groups))
        with Traffic(here) as traffic:
            batches = updates(here, settings, divided(groups, here))
        for mine, theirs in zip(batches, wanted, strict=True):
            require_equal(mine, theirs)
        own = sum(len(each.input_ids) for batch in batches for each in batch.microbatches)
        found.append((traffic.received, own, sum(batch.total_tokens for batch in batches)))
    return found


def require_equal(mine: Batch, theirs: Batch) -> None:
    assert mine.examples == theirs.examples
    for one, other in zip(mine.microbatches, theirs.microbatches, strict=True):
        for field in fields(one):
            value, wanted = getattr(one, field.name), getattr(other, field.name)
            if isinstance(wanted, torch.Tensor):
                assert value.dtype == wanted.dtype
                assert torch.equal(value, wanted), field.name
            else:
                assert value == wanted, field.name


@pytest.mark.parametrize("cases", [BY_DAY, pytest.param(CASES, marks=pytest.mark.nightly)], ids=len)
def test_a_rank_receives_what_it_trains_on_and_the_batch_is_the_same(
    cases: Sequence[tuple[int, int]],
) -> None:
    for of_rank in run_ranks(train_on_what_arrives, 4, cases):
        for (degrees, settings), told in zip(cases, of_rank, strict=True):
            received, own, everything = told
            # Token, log-prob and an eighth for the mask; two experts in two routers.
            each = 8.125 + (4 if settings == 1 else 0)
            if "mask_truncated" in SETTINGS[settings]["algorithm"]:
                each *= 1.5  # some are only scored
            limit = each * own * 1.1 + 25_000
            assert received <= limit, (LAYOUTS[degrees], settings, received, own)
            shares = 4 // prod(LAYOUTS[degrees].values())
            assert own <= everything / shares * 1.2


FIELDS = ("advantages", "returns", "old_values", "old_logprobs", "selected")


def computed(layout: Layout) -> list[dict[int, dict[str, list[float]]]]:
    """By case: what this rank has of the tokens of its rollouts, beside what the generator said."""
    found = []
    for settings in (*SETTINGS, OWN):
        arrays: dict[int, dict[str, list[float]]] = {}
        for batch in updates(layout, settings, divided(groups_of(8), layout)):
            for field in FIELDS:
                tensors = [getattr(micro, field) for micro in batch.microbatches]
                if any(each is None for each in tensors):
                    continue
                for number, row in batch.by_example([each.numpy() for each in tensors]).items():
                    arrays.setdefault(number, {})[field] = row.tolist()
        found.append(arrays)
    return found


@pytest.fixture(scope="module")
def of_one() -> list[dict[int, dict[str, list[float]]]]:
    return computed(Layout())


@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_ranks_computes_the_same_of_every_token(
    world: int, of_one: list[dict[int, dict[str, list[float]]]]
) -> None:
    of_ranks = run_ranks(computed, world)
    for case, wanted in enumerate(of_one):
        found: dict[int, dict[str, list[float]]] = {}
        for rank in of_ranks:
            found |= rank[case]
        assert found == wanted, (*SETTINGS, OWN)[case]
    assert all(row["advantages"] for row in of_one[-1].values())


def test_what_is_computed_is_the_formula_over_the_whole_step(
    of_one: list[dict[int, dict[str, list[float]]]],
) -> None:
    """Of PPO with a critic and KL in the reward, where truncated completions count for the spread alone."""
    rows: dict[int, Any] = {}
    flat = [each for group in groups_of(8) for each in group]
    for number, each in enumerate(flat):
        ids = torch.from_numpy(each.completion.token_ids)
        own, other, critic = (
            engine_of(Layout(), salt).forward(
                SimpleNamespace(microbatches=[SimpleNamespace(input_ids=ids)])
            )[0]
            for salt in range(3)
        )
        values = critic.values.double().numpy()
        rewards = -0.1 * (own.logprobs - other.logprobs).clamp(-20, 20).double().numpy()
        rewards[-1:] += each.reward
        above, following = np.zeros(len(ids)), 0.0
        for t in reversed(range(len(ids))):
            behind = values[t + 1] if t + 1 < len(ids) else 0.0
            following = rewards[t] + 0.99 * behind - values[t] + 0.99 * 0.9 * following
            above[t] = following
        rows[number] = above, above + values, values, own.logprobs.numpy()
    whole = np.concatenate([above for above, *_ in rows.values()])
    for number, each in enumerate(flat):
        is_trained = len(each.completion.token_ids) and each.completion.stop_reason != "length"
        assert (number in of_one[2]) == bool(is_trained)
        if not is_trained:
            continue
        above, *others = rows[number]
        wanted = [(above - whole.mean()) / (whole.std(ddof=1) + 1e-6), *others]
        start = len(each.prompt.token_ids)
        for field, array in zip(FIELDS, wanted, strict=False):
            found = of_one[2][number][field][start:]
            np.testing.assert_allclose(found, array, rtol=1e-5, atol=2e-6, err_msg=field)


def write_on_main(layout: Layout) -> list[str]:
    """Texts on this rank after rank 0 was to get all."""
    groups = divided(groups_of(6), layout)
    return [each.text for group in on_main(groups, layout) for each in group]


def test_rank_0_gets_all_texts_and_nobody_else_does() -> None:
    wanted = [each.text for group in groups_of(6) for each in group]
    main, *others = run_ranks(write_on_main, 3)
    assert main == wanted
    for rank, texts in enumerate(others, start=1):
        own = [i // SAMPLES % 3 == rank for i in range(len(wanted))]
        assert texts == [text if mine else "" for text, mine in zip(wanted, own, strict=True)]


def stream_to_main(layout: Layout) -> tuple[list[tuple[int, str, str, Any, bool]], int]:
    """What arrives in rounds of few tokens, in an order, and the bytes that this rank received."""
    table = divided(groups_of(6), layout)
    order, whole = range(len(table.owners) - 1, -1, -1), {2, 9}
    with pytest.MonkeyPatch.context() as patch, Traffic(layout) as traffic:
        patch.setattr("burnish.runs.rollout_transfer._ROUND_TOKENS", 1000)
        with arriving(table, order, whole, layout) as incoming:
            found = [
                (n, e.text, e.prompt.text, e.prompt.answer, e.completion.token_ids[0] >= 0)
                for n, e in incoming
                if len(e.completion.token_ids)
            ]
    return found, traffic.received


def test_texts_stream_to_rank_0_and_tokens_only_where_they_are_asked_for() -> None:
    flat = [each for group in groups_of(6) for each in group]
    (main, _), *others = run_ranks(stream_to_main, 3)
    own = {n for n in range(len(flat)) if n // SAMPLES % 3 == 0}
    assert main == [
        (n, flat[n].text, flat[n].prompt.text, flat[n].prompt.answer, n in own | {2, 9})
        for n in reversed(range(len(flat)))
        if len(flat[n].completion.token_ids)
    ]
    assert all(received < 4000 for _, received in others)


def send_in_a_grid(layout: Layout) -> bool:
    """Each rank writes to some others, one letter to several of them; all arrive, over any dims."""
    rng = np.random.default_rng(3)
    letters = [
        (sender, sorted(set(rng.integers(0, layout.world, 4).tolist()))) for sender in range(8)
    ] * 3
    wanted = sorted(
        f"{number}" for number, (_, receivers) in enumerate(letters) if layout.rank in receivers
    )
    for most in (16, 2, 4):
        here = in_groups(layout, timedelta(seconds=60), mesh=0, most=most)
        mine = [
            (receivers, f"{number}".encode())
            for number, (sender, receivers) in enumerate(letters)
            if sender == here.rank
        ]
        assert sorted(each.decode() for each in deliver(mine, here)) == wanted
    return len(set(gather_objects("".join(wanted), layout))) > 1


def test_parcels_reach_their_receivers_over_a_grid() -> None:
    assert run_ranks(send_in_a_grid, 8) == [True] * 8


def named(rollout: Rollout) -> dict[str, Any]:
    """What all ranks know of a rollout."""
    prompt, made = rollout.prompt, rollout.completion
    return {
        **{name: getattr(prompt, name) for name in ("index", "source")},
        **{name: getattr(made, name) for name in ("stop_reason", "later_versions")},
        **{name: getattr(rollout, name) for name in SCORES},
        "asked": len(prompt.token_ids),
        "is_chat": prompt.messages is not None,
        "versions": made.versions.tolist(),
        "experts": made.experts is not None and (made.experts.shape, made.experts.dtype),
    }


SCORES = ("sample", "reward", "reward_parts", "greedy_reward", "reward_error")


def test_numbers_of_others_are_those_of_their_rollouts() -> None:
    """In tables of ranks that made a different number of rollouts, of different kinds."""
    groups = groups_of(5)
    groups[1] = [
        replace(each, reward_parts={"b": 1.5, "a": float(n)}) for n, each in enumerate(groups[1])
    ]
    groups[2] = [replace(each, reward_parts={"a": 0.5}, greedy_reward=0.25) for each in groups[2]]
    groups[3] = groups[3][:3]
    groups[3][1] = replace(groups[3][1], reward_error="a: slow", reward_parts={})
    shares = [groups[:2], [], groups[2:4], groups[4:]]
    tables = [RolloutTable.of(some, rank) for rank, some in enumerate(shares)]
    table = RolloutTable.gathered([each.encoded() for each in tables], tables[2])
    for mine, theirs in zip(table, groups, strict=True):
        assert [*map(named, mine)] == [*map(named, theirs)]
    assert table.owners.tolist() == [0] * 8 + [2] * 7 + [3] * 4
    for number, each in enumerate(table.rollouts):
        assert (each.owner == 2) == bool(each.text)
        assert (each.owner == 2) == (8 <= number < 15)
        assert each.owner == 2 or (each.completion.token_ids == -1).all()
        assert each.owner == 2 or np.isnan(each.completion.logprobs).all()
    values, there = table.part("a")
    assert values[there].tolist() == [0, 1, 2, 3, 0.5, 0.5, 0.5, 0.5]
    assert [name for name in table.rows if "/" in name] == ["part/b", "part/a"]
    assert table.failed.tolist() == [13]
    turned = RolloutTable.joined([table.take([3]), table.take([]), table.take([1, 2])])
    wanted = [groups[n] for n in (3, 1, 2)]
    assert [[named(one) for one in each] for each in turned] == [
        [named(one) for one in each] for each in wanted
    ]
    assert turned.by_group(turned.part("a")[0]) == [[0, 0, 0], [0, 1, 2, 3], [0.5] * 4]
    assert [each.text for each in turned.rollouts] == [
        one.text if n > 1 else "" for n, each in zip((3, 1, 2), wanted, strict=True) for one in each
    ]
    greedy = turned.with_rewards(turned.rewards + 1, turned.rewards)
    assert [each.reward - 1 for each in greedy.rollouts] == pytest.approx(turned.rewards)
    assert [each.greedy_reward for each in greedy.rollouts] == turned.rewards.tolist()
    assert set(RolloutTable.of(groups).owners.tolist()) == {-1}
    assert set(RolloutTable.of(groups, 0).owners.tolist()) == {0}

"""Ranks get the tokens that they train on, and of all others numbers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import timedelta
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from traffic import Traffic

from burnish.config.schema import RunConfig
from burnish.distributed.collectives import deliver, gather_objects
from burnish.distributed.layout import Layout
from burnish.distributed.processes import in_groups
from burnish.models.flops import ModelFlops
from burnish.records import Batch, Completion, Prompt, Rollout
from burnish.records.samples import StopReason
from burnish.train.collect import DrawnBatch
from burnish.train.owners import Groups, arriving, heard, on_main, owned, tell
from burnish.train.policy_update import PolicyUpdate

COSTS = ModelFlops(per_token=1.0, attention={})
SAMPLES, LONGEST = 4, 600
LAYOUTS = [{}, {"tensor": 2}, {"sequence": 2}, {"pipeline": 2}, {"pipeline": 2, "tensor": 2}]
SETTINGS = [
    {"algorithm": {"old_logprobs": "rollout", "mask_truncated": True}},
    {"algorithm": {"router_replay": "rollout"}, "batch": {"minibatches": 2}},
]


def groups_of(count: int, samples: int = SAMPLES) -> Groups:
    """Of prompts of which some are equal, with completions of all lengths, one of them empty."""
    rng = np.random.default_rng(7)
    found: Groups = []
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


def divided(groups: Groups, layout: Layout) -> Groups:
    """What a rank knows of groups that ranks made in turns."""
    owners = [number % layout.world for number in range(len(groups))]
    return [
        owned([group], owner)[0] if owner == layout.rank else heard(tell([group]), owner)[0]
        for owner, group in zip(owners, groups, strict=True)
    ]


def updates(layout: Layout, settings: Mapping[str, Any], groups: Groups) -> list[Batch]:
    batch = {"prompts": len(groups), "tokens_per_device": 2000, **settings.get("batch", {})}
    config = RunConfig.model_validate(
        {**settings, "batch": batch, "rollout": {"n": SAMPLES, "max_response_length": LONGEST}}
    )
    update = PolicyUpdate(SimpleNamespace(layout=layout), None, None, COSTS, config)
    return update.minibatches(groups, update.assign_credit(groups))


def train_on_what_arrives(layout: Layout) -> list[tuple[int, int, int]]:
    """Of each case, the bytes that a rank received, the tokens that it trains on, and all."""
    found = []
    for degrees in LAYOUTS:
        here = replace(layout, **degrees)
        for settings in SETTINGS:
            groups = groups_of(24)
            wanted = updates(here, settings, groups)
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


@pytest.mark.parametrize("world", [4])
def test_a_rank_receives_what_it_trains_on_and_the_batch_is_the_same(world: int) -> None:
    for cases in run_ranks(train_on_what_arrives, world):
        for number, (received, own, everything) in enumerate(cases):
            degrees, settings = divmod(number, len(SETTINGS))
            # Token, log-prob and an eighth for the mask; two experts in two routers.
            each = 8.125 + (4 if settings == 1 else 0)
            assert received <= each * own * 1.1 + 10_000, (LAYOUTS[degrees], received, own)
            shares = 4 // prod(LAYOUTS[degrees].values())
            assert own <= everything / shares * 1.2


def write_on_main(layout: Layout) -> list[str]:
    """Texts on this rank after rank 0 was to get all, in a batch too."""
    groups = divided(groups_of(6), layout)
    batch = DrawnBatch(3, groups[:4], groups[4:]).on_main(layout)
    flat = on_main([each for group in groups for each in group], layout)
    assert [each.text for each in flat] == [
        each.text for group in (*batch.groups, *batch.left_out) for each in group
    ]
    return [each.text for each in flat]


def test_rank_0_gets_all_texts_and_nobody_else_does() -> None:
    wanted = [each.text for group in groups_of(6) for each in group]
    main, *others = run_ranks(write_on_main, 3)
    assert main == wanted
    for rank, texts in enumerate(others, start=1):
        own = [i // SAMPLES % 3 == rank for i in range(len(wanted))]
        assert texts == [text if mine else "" for text, mine in zip(wanted, own, strict=True)]


def stream_to_main(layout: Layout) -> tuple[list[tuple[int, str, str, Any, bool]], int]:
    """What arrives in rounds of few tokens, in an order, and the bytes that this rank received."""
    flat = [each for group in divided(groups_of(6), layout) for each in group]
    order, whole = range(len(flat) - 1, -1, -1), {2, 9}
    with pytest.MonkeyPatch.context() as patch, Traffic(layout) as traffic:
        patch.setattr("burnish.train.owners._ROUND_TOKENS", 1000)
        found = [
            (n, each.text, each.prompt.text, each.prompt.answer, each.completion.token_ids[0] >= 0)
            for n, each in arriving(flat, order, whole, layout)
            if len(each.completion.token_ids)
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


def test_numbers_of_others_are_those_of_their_rollouts() -> None:
    groups = groups_of(3)
    told = heard(tell(groups), 5)
    assert tell(told) == tell(groups)
    for mine, theirs in zip(told, groups, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.owner == 5
            assert (one.completion.token_ids == -1).all()
            assert np.isnan(one.completion.logprobs).all()
            assert (one.completion.versions == other.completion.versions).all()

"""From scored groups to what a step trains on, without a model: which groups, with which rewards, in which batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import isnan, nan
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support.models.tokenizers import char_tokenizer
from support.ranks.processes import run_ranks

from burnish.algorithms.base import ScoredRollouts, load_advantage
from burnish.config.algorithm import AdvantageConfig, AdvantageName
from burnish.config.schema import RewardConfig, RunConfig
from burnish.data.loader import Loader
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.methods.parts.generators import make_collector
from burnish.methods.parts.policy_update import PolicyUpdate
from burnish.methods.parts.rollouts import Collector, GroupSampler, compared_rewards
from burnish.models.flops import ModelFlops
from burnish.records import Batch, Completion, Prompt, Request, Rollout, TokenOutputs
from burnish.records.rollout_table import RolloutTable
from burnish.records.samples import StopReason
from burnish.rewards.overview import RewardFailures
from burnish.tracking.progress import Progress

LIMIT = 8
"""Tokens of the longest completion."""
COSTS = ModelFlops(per_token=1.0, attention={})


def configured(**sections: Any) -> RunConfig:
    common = {"rollout": {"n": 2, "max_response_length": LIMIT}, "batch": {"prompts": 2}}
    return RunConfig.model_validate({**common, **sections})


def made(config: RunConfig, engine: Any = None) -> PolicyUpdate:
    """Without a critic or a reference; the engine is asked for nothing but its layout, if none is given."""
    engine = engine or SimpleNamespace(layout=Layout())
    return PolicyUpdate(
        engine, None, None, COSTS, config, load_advantage(config.algorithm.advantage)
    )


def prompt(index: int) -> Prompt:
    return Prompt(index, np.arange(2) + index, f"{index}=", None, None, "", {})


PROMPTS = [prompt(i) for i in range(4)]


def rollout(index: int, reward: float, length: int, stop: StopReason = "stop") -> Rollout:
    numbers = np.linspace(-1, 0, length, dtype=np.float32)
    completion = Completion(np.arange(length), numbers, numbers, stop, weights_version=0)
    return Rollout(PROMPTS[index], 0, completion, "", reward=reward)


class Script:
    """A collector whose every prompt earns what was written down for it: (reward, length) of each sample."""

    def __init__(
        self, told: Sequence[Sequence[tuple[float, int]]], layout: Layout | None = None
    ) -> None:
        self.told, self.layout = told, layout or Layout()

    def offloaded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def collect(self, prompts: Sequence[Prompt], *_: object) -> RolloutTable:
        told = {p.index: self.told[p.index] for p in prompts}
        return RolloutTable.of([[rollout(i, *each) for each in told[i]] for i in told])


def collected(
    told: Sequence[Sequence[tuple[float, int]]], config: RunConfig
) -> tuple[RolloutTable, RolloutTable]:
    loader = Loader(len(told), 0, shuffle=False)
    batch = GroupSampler(config, Script(told), PROMPTS[: len(told)], loader).sample(step=0)
    return batch.groups, batch.left_out


def rewards(groups: RolloutTable) -> dict[int, list[float]]:
    """By prompt."""
    return {group[0].prompt.index: [each.reward for each in group] for group in groups}


def test_unequal_lengths_alone_keep_no_group() -> None:
    """DAPO, equation 8: 0 < correct < G is asked of the answers, whatever the penalty for their lengths."""
    algorithm = {"dynamic_sampling": {"enabled": True}, "overlong": {"buffer": 4}}
    told = [
        [(1, 2), (1, LIMIT)],  # all right, one of them at the limit
        [(0, 1), (1, LIMIT)],
        [(0, 6), (0, 7)],  # all wrong
        [(1, 6), (0, 1)],
    ]
    chosen, left_out = collected(told, configured(algorithm=algorithm))
    assert rewards(chosen) == {1: [0, 0], 3: [0.5, 0]}
    assert rewards(left_out) == {0: [1, 0], 2: [-0.5, -0.75]}


class InParts(Script):
    """Rewards of two parts, (right, well written) in place of (reward, length)."""

    def collect(self, prompts: Sequence[Prompt], *_: object) -> RolloutTable:
        told = {p.index: self.told[p.index] for p in prompts}
        groups = [
            [
                replace(
                    rollout(i, right + 0.1 * form, 3), reward_parts={"numeric": right, "form": form}
                )
                for right, form in told[i]
            ]
            for i in told
        ]
        return RolloutTable.of(groups)


@pytest.mark.parametrize(("part", "kept"), [(None, [0, 1]), ("numeric", [2, 3]), ("form", [0, 1])])
def test_dynamic_sampling_compares_the_part_that_it_is_told(
    part: str | None, kept: list[int]
) -> None:
    """Right and wrong alone, as DAPO has it, or what is added to that."""
    told = [[(1, 0), (1, 1)], [(0, 1), (0, 0)], [(1, 1), (0, 1)], [(1, 0), (0, 0)]]
    functions = [{"function": "numeric"}, {"function": "f.py:form", "weight": 0.1}]
    config = configured(
        algorithm={"dynamic_sampling": {"enabled": True, "part": part}},
        reward={"functions": functions},
    )
    loader = Loader(len(told), 0, shuffle=False)
    batch = GroupSampler(config, InParts(told), PROMPTS, loader).sample(step=0)
    assert list(rewards(batch.groups)) == kept


def test_a_part_that_no_answer_has_is_refused_and_one_that_some_have_compares_those() -> None:
    dynamic = {"dynamic_sampling": {"enabled": True, "part": "score/right"}}
    config = configured(algorithm=dynamic, reward={"functions": [{"function": "f.py:score"}]})
    parts = [{"score": 1.0}, {"score": 1.0, "score/right": 0.0}, {"score": 1.0, "score/right": 1.0}]
    group = [replace(rollout(0, 1, 3), reward_parts=each) for each in parts]
    table, names = RolloutTable.of([group]), config.reward.part_names
    assert [each.tolist() for each in compared_rewards(table, "score/right", names)] == [
        [0, 1],
        [0, 0],
    ]
    failed = replace(group[0], reward_error="score: it raised")
    assert not compared_rewards(RolloutTable.of([[failed]]), "score/right", names)[0].size
    with pytest.raises(UsageError, match=r"part: score/right\n.*want: .*score\n"):
        compared_rewards(RolloutTable.of([group[:1]]), "score/right", names)


def test_a_function_that_applies_to_no_answer_is_a_part_all_the_same() -> None:
    config = configured(
        algorithm={"dynamic_sampling": {"enabled": True, "part": "score"}},
        reward={"functions": [{"function": "f.py:score"}]},
    )
    groups = [[replace(rollout(0, 0, 3), reward_parts={})]]
    assert not compared_rewards(RolloutTable.of(groups), "score", config.reward.part_names)[0].size


def test_dynamic_sampling_compares_what_is_left_of_a_group() -> None:
    told = [
        [(nan, 2), (1, 3), (0, 2)],
        [(nan, 2), (1, 3), (1, 2)],  # alike, but for one that failed
        [(1, 2), (nan, 2), (nan, 2)],  # one says nothing alone
        [(1, 2), (0, 2), (0, 3)],
    ]
    dynamic = {"algorithm": {"dynamic_sampling": {"enabled": True}}}
    chosen, left_out = collected(told, configured(**dynamic, rollout={"n": 3}))
    assert list(rewards(chosen)) == [0, 3]
    assert list(rewards(left_out)) == [1, 2]


class Greedy(Script):
    """Whose greedy completion of the first prompt has no reward."""

    def collect(self, prompts: Sequence[Prompt], key: int, samples: int, *_: object) -> Any:
        table = super().collect(prompts)
        if samples > 1:
            return table
        missing = {0: replace(rollout(0, nan, 1), reward_error="judge: out")}
        return RolloutTable.of([[missing.get(p.index, rollout(p.index, 0.5, 1))] for p in prompts])


def test_a_prompt_whose_greedy_completion_has_no_reward_is_dropped() -> None:
    config = configured(algorithm={"advantage": "remax"}, reward={"max_failed_share": 1.0})
    loader = Loader(2, 0, shuffle=False)
    told = Greedy([[(1, 2), (0, 3)], [(1, 2), (nan, 3)]])
    groups = GroupSampler(config, told, PROMPTS[:2], loader).sample(step=0).groups
    assert groups.is_scored.tolist() == [False, False, True, False]
    assert groups.rollout(0).reward_error == "greedy completion: judge: out"
    update = made(config)
    credit = update.assign_credit(groups, update.minibatches(groups))
    assert credit.advantages.tolist() == [0, 0, 0.5, 0]


def test_a_failed_group_says_nothing_of_how_hard_a_prompt_is() -> None:
    heard: list[tuple[list[int], list[bool]]] = []

    class Listening(Loader):
        def update(self, indices: Sequence[int], are_alike: Sequence[bool]) -> None:
            heard.append((list(indices), list(are_alike)))

    told = [[(1, 2), (1, 2)], [(nan, 2), (1, 2)], [(nan, 2), (nan, 2)], [(1, 2), (0, 2)]]
    config = configured(batch={"prompts": 4}, reward={"max_failed_share": 1.0})
    GroupSampler(config, Script(told), PROMPTS, Listening(4, 0, shuffle=False)).sample(step=0)
    assert heard == [([0, 3], [True, False])]


def own_advantage(scored: ScoredRollouts) -> Any:
    """A user's, by token, which looks at all rollouts and parts."""
    level = scored.rewards.mean() + np.nansum(scored.parts["numeric"]) + len(scored.rewards)
    return [
        np.full(length, reward - level)
        for reward, length in zip(scored.rewards, scored.lengths, strict=True)
    ]


class Models:
    """A policy, a reference and a critic whose numbers are a function of the tokens."""

    layout = Layout()

    def __init__(self, slope: float) -> None:
        self.slope = slope
        self.engine = self

    def forward(self, batch: Batch, **_: object) -> list[TokenOutputs]:
        numbers = [micro.input_ids * self.slope - 1.0 for micro in batch.microbatches]
        return [TokenOutputs(logprobs=each, entropy=each, values=each) for each in numbers]


@pytest.mark.parametrize("place", ["none", "reward", "loss"])
@pytest.mark.parametrize("advantage", [*get_args(AdvantageName), "own"])
def test_a_rollout_without_a_reward_leaves_no_trace(advantage: str, place: str) -> None:
    """Advantages, targets, masks and global counts are those of a step that never sampled it, to the bit."""
    algorithm = {"advantage": "grpo" if advantage == "own" else advantage, "mask_truncated": True}
    if place != "none":
        algorithm["kl"] = {"coef": 0.25, "place": place}
    functions = [{"function": "numeric"}, {"function": "f.py:form", "weight": 0.5}]
    config = configured(
        algorithm=algorithm,
        reward={"functions": functions},
        batch={"prompts": 5, "minibatches": 2, "tokens_per_device": 16},
    )
    rng = np.random.default_rng(5)
    whole = []
    for index, (size, lost) in enumerate([(4, [1]), (3, [0, 1, 2]), (4, [0, 3]), (3, [1, 2])]):
        group = []
        for sample in range(size):
            right, form, length = rng.normal(), rng.normal(), 2 + sample + index
            stop: StopReason = "length" if sample == 2 else "stop"
            one = rollout(index, nan if sample in lost else right + 0.5 * form, length, stop)
            parts = {"numeric": right} | ({"form": form} if sample else {})
            group.append(replace(one, sample=sample, reward_parts=parts, greedy_reward=0.25))
        whole.append(group)
    left = [[each for each in group if not isnan(each.reward)] for group in whole]
    found = []
    for groups in (whole, [group for group in left if group]):
        table, policy = RolloutTable.of(groups), Models(0.125)
        kind = (
            own_advantage if advantage == "own" else load_advantage(AdvantageConfig(name=advantage))
        )
        update = PolicyUpdate(policy, Models(0.25).forward, Models(0.5), COSTS, config, kind)
        found.append((table, update.assign_credit(table, update.minibatches(table))))
    (table, credit), (_, wanted) = found
    numbers = np.flatnonzero(table.is_scored)
    assert credit.advantages[numbers].tolist() == wanted.advantages.tolist()
    assert wanted.advantages.any()
    assert not np.delete(credit.advantages, numbers).any()
    assert credit.kl == wanted.kl
    assert credit.stats.values_by_name() == wanted.stats.values_by_name()
    assert len(credit.batches) == len(wanted.batches) == 2
    for batch, other in zip(credit.batches, wanted.batches, strict=True):
        assert (batch.num_tokens, batch.num_sequences) == (other.num_tokens, other.num_sequences)
        assert len(batch.microbatches) == len(other.microbatches)
        for micro, same in zip(batch.microbatches, other.microbatches, strict=True):
            for name in ("input_ids", "loss_mask", "advantages", "returns", "old_values"):
                one, two = getattr(micro, name), getattr(same, name)
                assert (one is two is None) or torch.equal(one, two)


def test_without_dynamic_sampling_every_group_is_kept_and_shaped() -> None:
    told = [[(1, 2), (1, LIMIT)], [(0, 5), (1, 6)]]
    chosen, left_out = collected(told, configured(algorithm={"overlong": {"buffer": 4}}))
    assert rewards(chosen) == {0: [1, 0], 1: [-0.25, 0.5]}
    assert not len(left_out)


def test_the_last_prompts_of_an_epoch_are_a_smaller_step() -> None:
    told = [[(1, 2), (0, 3)]] * 3
    loader = Loader(3, 0, shuffle=False, by_epoch=True)
    sampler = GroupSampler(configured(), Script(told), PROMPTS[:3], loader)
    found = [rewards(sampler.sample(step).groups) for step in range(3)]
    assert [list(each) for each in found] == [[0, 1], [2], [0, 1]]


class Unreadable(Loader):
    """Rows of which one rank cannot read the next."""

    def take(self, count: int) -> list[int]:
        raise UsageError("the network is gone")


class Counted:
    """A data set that remembers which prompts it has made."""

    lengths = np.full(len(PROMPTS), 2)

    def __init__(self) -> None:
        self.made: list[int] = []

    def __getitem__(self, index: int) -> Prompt:
        self.made.append(index)
        return PROMPTS[index]


def _made(layout: Layout) -> tuple[list[int], list[int]]:
    def generate(requests: Sequence[Request], *_: object) -> list[list[Completion]]:
        return [[rollout(0, 0, 3).completion] * each.samples for each in requests]

    generator: Any = SimpleNamespace(called_by_rank0=False, generate=generate)
    heard, progress = RewardFailures(RewardConfig()), Progress(enabled=False)
    score = lambda rollouts, check: rollouts  # noqa: E731
    collector = Collector(generator, str, score, layout, lambda: None, progress, heard)
    config, dataset = configured(batch={"prompts": len(PROMPTS)}), Counted()
    loader = Loader(len(PROMPTS), 0, shuffle=False)
    batch = GroupSampler(config, collector, dataset, loader).sample(step=0)
    return dataset.made, [group[0].prompt.index for group in batch.groups]


def test_a_rank_makes_only_the_prompts_that_it_answers() -> None:
    (one, all_of_one), (other, all_of_other) = run_ranks(_made, 2)
    assert (len(one), sorted(one + other)) == (2, [0, 1, 2, 3])
    assert all_of_one == all_of_other == [0, 1, 2, 3]


@pytest.mark.parametrize("place", ["child", "servers"])
def test_a_device_s_cache_is_emptied_for_a_generator_beside_it_alone(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    monkeypatch.setattr("burnish.methods.parts.rollouts.empty_cache", lambda: did.append("emptied"))
    generator = SimpleNamespace(called_by_rank0=True)
    monkeypatch.setattr(
        "burnish.methods.parts.generators.make_generator", lambda foundation: generator
    )
    config = configured(rollout={"place": place})
    foundation: Any = SimpleNamespace(config=config, tokenizer=char_tokenizer(), layout=Layout())
    pool: Any = SimpleNamespace(score=None, environments=None)
    progress = Progress(enabled=False)
    collector = make_collector(foundation, pool, lambda: None, progress, None)

    @contextmanager
    def offloaded() -> Iterator[None]:
        did.append("offloaded")
        yield
        did.append("restored")

    engine: Any = SimpleNamespace(offloaded=offloaded)
    for parks in ((), (engine,)):
        with replace(collector, offloads=parks).offloaded():
            did.append("generated")
    emptied = ["emptied"] * (place == "child")
    assert did == ["generated", "offloaded", *emptied, "generated", "restored"]


def _sampled(layout: Layout) -> str:
    told = [[(1, 2), (0, 3)]] * 4
    loader = (Unreadable if layout.rank == 1 else Loader)(len(told), 0, shuffle=False)
    try:
        config = configured(data={"train": ["prompts.jsonl"], "streaming": 1}, steps=4)
        GroupSampler(config, Script(told, layout), PROMPTS, loader).sample(step=0)
    except UsageError as error:
        return error.problem
    return ""


def test_streamed_rows_that_one_rank_cannot_read_end_all() -> None:
    assert ["network" in problem for problem in run_ranks(_sampled, 2)] == [True, True]


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_completion_cut_at_its_limit_is_learned_from_like_any_other(advantage: str) -> None:
    config = configured(algorithm={"advantage": advantage})
    ended = [[rollout(0, 1, 3), rollout(0, 0, LIMIT)], [rollout(1, 0, 2), rollout(1, 1, LIMIT)]]
    cut = [[_cut(each) for each in group] for group in ended]
    found = []
    for groups in map(RolloutTable.of, (ended, cut)):
        update = made(config)
        credit = update.assign_credit(groups, update.minibatches(groups))
        (batch,) = credit.batches
        found.append((credit.advantages, batch))
    (first, one), (second, other) = found
    assert first.any()
    assert np.array_equal(first, second)
    assert (one.num_tokens, one.num_sequences) == (other.num_tokens, other.num_sequences)
    for micro, same in zip(one.microbatches, other.microbatches, strict=True):
        for name in ("input_ids", "loss_mask", "advantages"):
            assert torch.equal(getattr(micro, name), getattr(same, name))


@pytest.mark.parametrize(
    ("updates", "kept", "scored"),
    [
        ({}, "recompute", 0),
        ({"minibatches": 2}, "recompute", 2),
        ({"epochs": 2}, "recompute", 1),
        ({"epochs": 2}, "rollout", 0),
    ],
)
def test_the_policy_is_scored_before_the_first_of_several_updates(
    updates: dict[str, int], kept: str, scored: int
) -> None:
    asked: list[Batch] = []

    def forward(batch: Batch, *, experts: bool) -> list[TokenOutputs]:
        asked.append(batch)
        return [TokenOutputs(micro.input_ids - 100.0) for micro in batch.microbatches]

    engine = SimpleNamespace(layout=Layout(), forward=forward)
    config = configured(batch={"prompts": 2, **updates}, algorithm={"old_logprobs": kept})
    group, other = [rollout(0, 1, 3), rollout(0, 0, 4)], [rollout(1, 0, 2), rollout(1, 1, 4)]
    groups = RolloutTable.of([group, other])
    update = made(config, engine)
    batches = update.assign_credit(groups, update.minibatches(groups)).batches
    measured = update.with_logprobs(batches, 0)
    assert asked == batches[:scored]
    for micro in measured[0].microbatches:
        assert (micro.old_logprobs is None) == (kept == "recompute" and not scored)
        assert not scored or torch.equal(micro.old_logprobs, micro.input_ids - 100.0)


def test_selected_tokens_are_those_of_the_whole_mini_batch_in_any_cut() -> None:
    """Of 13 tokens, the 3 of highest entropy, however few fit into a micro-batch."""
    group, other = [rollout(0, 1, 3), rollout(0, 0, 4)], [rollout(1, 0, 2), rollout(1, 1, 4)]
    groups = RolloutTable.of([group, other])
    found = []
    for tokens in (64, 8):
        config = configured(
            batch={"prompts": 2, "tokens_per_device": tokens}, algorithm={"top_entropy": 0.23}
        )

        def forward(batch: Batch, *, experts: bool) -> list[TokenOutputs]:
            return [
                TokenOutputs(micro.input_ids * -1.0, micro.input_ids + micro.advantages)
                for micro in batch.microbatches
            ]

        update = made(config, SimpleNamespace(layout=Layout(), forward=forward))
        batches = update.assign_credit(groups, update.minibatches(groups)).batches
        (batch,) = update.with_logprobs(batches, 0)
        assert (len(batch.microbatches) > 1) == (tokens == 8)
        found.append(batch.by_example([micro.selected.numpy() for micro in batch.microbatches]))
        for micro in batch.microbatches:
            assert not (micro.selected & ~micro.loss_mask).any()
    assert found[0].keys() == found[1].keys()
    assert all(np.array_equal(mask, found[1][number]) for number, mask in found[0].items())
    assert sum(mask.sum() for mask in found[0].values()) == 3


def test_each_epoch_has_all_mini_batches_in_an_order_of_its_own() -> None:
    config = configured(batch={"prompts": 8, "minibatches": 8, "epochs": 4}, seed=3)
    batches = list("abcdefgh")  # which ones is all that matters
    found = made(config).in_epochs(batches, 5)
    epochs = [found[i : i + 8] for i in range(0, 32, 8)]
    assert epochs[0] == batches
    assert all(sorted(each) == batches for each in epochs)
    assert len({tuple(each) for each in epochs}) == 4
    assert made(config).in_epochs(batches, 5) == found
    for other in (
        made(config).in_epochs(batches, 6),
        made(configured(**{**config.model_dump(), "seed": 4})).in_epochs(batches, 5),
    ):
        assert other[:8] == batches
        assert other[8:] != found[8:]


def _cut(each: Rollout) -> Rollout:
    """The same at its limit, where it is as long as that."""
    at_limit = len(each.completion.token_ids) == LIMIT
    return replace(
        each, completion=replace(each.completion, stop_reason="length" if at_limit else "stop")
    )

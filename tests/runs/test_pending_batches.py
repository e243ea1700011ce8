"""Batches that are drawn before their steps: which weights draw them, where they wait, and that nothing interrupted changes them."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints.states import committed
from support.faults.bit_flips import flip
from support.models.tiny import save_classifier
from support.nightly import by_day
from support.runs.collectors import Collected
from support.runs.same_runs import assert_same
from support.runs.training_files import MIXTURE, RL, At, burnish, done, outcome, ranks, rollouts

from burnish.api import run_method
from burnish.boxes.shards import Publication
from burnish.checkpoint.manifest import Commit, Manifest
from burnish.checkpoint.steps import CommittedStep, verify
from burnish.config.schema import RewardConfig, RunConfig
from burnish.data.loader import Loader
from burnish.errors import BurnishError, IncompatibleError
from burnish.methods.parts.rollouts import RolloutQueue
from burnish.methods.table import METHODS
from burnish.records import Completion, Prompt, Rollout
from burnish.records.rollout_table import RolloutTable
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.rollout.in_flight import SampleKey
from burnish.runs.drawn_batch import DrawnBatch
from burnish.runs.pending_batches import ahead_files, read_ahead

NOTHING = Publication([])


class Behind(BuiltinGenerator):
    """A generator that draws with the weights before the last `lag` that it was given: the oracle of a loop that knows nothing of `ahead`."""

    lag: ClassVar[int]

    def load_weights(self, weights: Publication, version: int) -> None:
        copied = [replace(shard, tensor=shard.tensor.clone()) for shard in weights.changing]
        given = (*vars(self).get("given", ()), (Publication(copied), version))[-self.lag - 1 :]
        vars(self)["given"] = given
        super().load_weights(*given[0])


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "corrected": (2, {"algorithm": {"mismatch_cap": 2.0, "mismatch_reject": "token"}}),
    "rollout": (3, {"algorithm": {"old_logprobs": "rollout"}}),
    "everything": (
        2,
        {
            "batch": {**RL["batch"], "minibatches": 2},
            "algorithm": {"dynamic_sampling": {"enabled": True}, "kl": {"coef": 0.1}},
            "rollout": {**RL["rollout"], "n": 2},
        },
    ),
    "critic": (
        2,
        {
            "algorithm": {"advantage": "gae", "kl": {"coef": 0.1, "place": "reward"}},
            "critic": {"warmup_steps": 2},
            "engine": {**RL["engine"], "offload_during_rollout": True},
        },
    ),
    "remax": (1, {"algorithm": {"advantage": "remax"}}),
    "replayed": (
        1,
        {
            "model": {**RL["model"], "fresh": MIXTURE},
            "algorithm": {"router_replay": "rollout"},
            "batch": {**RL["batch"], "minibatches": 2},
        },
    ),
    "judged": (1, {"reward": {"models": [{"path": "judge"}]}}),
    "at_once": (9, {}),
}
"""How far ahead, and settings."""
KINDS = ("mean", "max")


@pytest.mark.parametrize("case", by_day(CASES, ["everything"]))
@pytest.mark.nightly
def test_a_batch_is_drawn_with_the_weights_of_so_many_steps_before(
    work: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The run is that of a loop without `ahead` whose generator lags: to the bit, in all that it writes."""
    monkeypatch.chdir(work)
    if case == "judged":
        save_classifier(work / "judge")
    lag, settings = CASES[case]
    waiting = settings.get("critic", {}).get("warmup_steps", 0)
    quiet = {"data": {**RL["data"], "validation": []}, "evaluation": {}}
    common = {**RL, **settings, **quiet}
    rollout = {**common["rollout"], "ahead": lag}
    run_method(
        METHODS["rl"], RunConfig.model_validate({**common, "name": case, "rollout": rollout})
    )
    monkeypatch.setattr("burnish.rollout.builtin.generator.BuiltinGenerator", Behind)
    monkeypatch.setattr(Behind, "lag", lag, raising=False)
    run_method(METHODS["rl"], RunConfig.model_validate({**common, "name": f"{case}_behind"}))
    found, wanted = (outcome(work / "runs" / name) for name in (case, f"{case}_behind"))
    for each in (found, wanted):  # where nothing is stale, a loop without `ahead` says nothing
        rows = json.loads(each.pop("metrics"))
        lags = [row.pop(f"rollout/staleness/{kind}", 0.0) for row in rows for kind in KINDS]
        each |= {"rows": rows, "lags": lags}
    assert found == wanted
    assert max(found["lags"]) == min(lag, RL["steps"] - 1 - waiting)


class Weights:
    """Stands for a generator: knows the version of what it has."""

    def __init__(self, called_by_rank0: bool) -> None:
        self.called_by_rank0, self.version = called_by_rank0, -1

    def load_weights(self, weights: Publication, version: int) -> None:
        self.version = version

    def release(self) -> None:
        pass


def batch_of(step: int, *groups: list[list[Rollout]]) -> DrawnBatch:
    """Of groups to train on, and perhaps of others."""
    kept, left_out = (RolloutTable.of(each, 0) for each in (*groups, [])[:2])
    return DrawnBatch(step, kept, left_out)


@dataclass
class Scripted:
    """Stands for `GroupSampler`: a batch says which weights drew its first and its last token, and is the next that was not drawn."""

    config: Any
    collector: Collected
    loader: Loader
    delays: list[float]

    def sample(self, step: int) -> DrawnBatch:
        assert step == self.loader.cursor  # prompts in the order of the data
        self.loader.cursor += 1
        first = self.collector.generator.version
        time.sleep(self.delays[step % len(self.delays)])
        last = self.collector.generator.version
        drawn = rollout_of(np.arange(2), first)
        later = () if last == first else ((last, 1),)
        completion = replace(drawn.completion, later_versions=later)
        return batch_of(step, [[replace(drawn, completion=completion)]])


def queue_of(
    total: int, ahead: int, cursor: int, place: str, delays: Sequence[float] = (0.0,)
) -> tuple[RolloutQueue, Scripted]:
    """A queue whose generator is inside, or elsewhere, perhaps with new weights in flight."""
    rollout = SimpleNamespace(ahead=ahead, in_flight=place == "in flight")
    critic, reward = SimpleNamespace(warmup_steps=0), RewardConfig()
    config = SimpleNamespace(rollout=rollout, critic=critic, reward=reward)
    collector = Collected(Weights(called_by_rank0=place != "inside"))
    sampler = Scripted(config, collector, Loader(1, 0, shuffle=False, cursor=cursor), list(delays))
    return RolloutQueue(sampler, total), sampler  # type: ignore[arg-type]


def versions(total: int, starts: Sequence[tuple[int, int]], place: str) -> list[int]:
    """The weights that drew each step's batch, in a run of several starts: how many steps until it is killed, and `ahead`."""
    found: list[int] = []
    pending: tuple[DrawnBatch, ...] = ()
    for steps, ahead in starts:
        step = len(found)
        queue, sampler = queue_of(total, ahead, step + len(pending), place)
        with closing(queue):
            queue.restore(pending, {})
            queue.publish(NOTHING, step)
            for number in range(step, min(step + steps, total)):
                batch = queue.take(number)
                (made,) = batch.groups.rollouts
                assert made.completion.later_versions == ()
                found.append(made.completion.weights_version)
                queue.publish(NOTHING, number + 1)
                pending = queue.pending()
                numbers = [number + 1 + i for i in range(len(pending))]
                assert [each.step for each in pending] == numbers
                assert sampler.loader.cursor == number + 1 + len(pending)
                stats = queue.stats(batch).values_by_name()
                assert stats.get("rollout/staleness/max", 0.0) == number - found[-1]
            if step + steps < total:  # killed in the next step, after it drew
                queue.take(step + steps)
    return found


PLACES = st.sampled_from(["inside", "elsewhere"])
STARTS = st.lists(st.integers(1, 4), max_size=4)


@given(st.integers(1, 12), st.integers(0, 5), STARTS, PLACES)
def test_the_schedule_is_a_function_of_the_settings(
    total: int, ahead: int, starts: list[int], place: str
) -> None:
    script = [*((steps, ahead) for steps in starts), (total, ahead)]
    assert versions(total, script, place) == [max(0, step - ahead) for step in range(total)]


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=4),
    PLACES,
)
def test_with_another_ahead_a_run_first_trains_on_what_is_drawn(
    total: int, starts: list[tuple[int, int]], place: str
) -> None:
    """No batch is staler than the largest `ahead` so far, and each is drawn as early as its start may draw it."""
    found = versions(total, [*starts, (total, 0)], place)
    drawn, step = 0, 0
    for steps, ahead in [*starts, (total, 0)]:
        for number in range(step, min(step + steps, total)):
            for due in range(drawn, min(number + ahead, total - 1) + 1):
                assert found[due] == number
                drawn = due + 1
        step += steps
    assert found == sorted(found)


@settings(deadline=None)
@given(
    st.integers(2, 12),
    st.integers(1, 4),
    st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=1),
    st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=1),
    st.integers(1, 12),
)
def test_in_flight_no_token_is_staler_than_so_many_steps(
    total: int, ahead: int, draws: list[float], learns: list[float], killed: int
) -> None:
    """Whatever ends first. Batches come in order, none is lost and none comes twice, also after a kill."""
    step, pending = 0, tuple[DrawnBatch, ...]()
    while step < total:
        queue, sampler = queue_of(total, ahead, step + len(pending), "in flight", draws)
        with closing(queue):
            queue.restore(pending, {})
            queue.publish(NOTHING, step)
            for number in range(step, min(step + killed, total)):
                batch = queue.take(number)
                assert batch.step == number
                time.sleep(learns[number % len(learns)])
                (made,) = batch.groups.rollouts
                assert made.completion.versions.min() >= number - ahead
                assert (np.diff(made.completion.versions) >= 0).all()
                stats = queue.stats(batch).values_by_name()
                assert stats["rollout/staleness/max"] == number - made.completion.weights_version
                queue.publish(NOTHING, number + 1)
                pending = queue.pending()
                assert sampler.loader.cursor == number + 1 + len(pending)
                step = number + 1


@dataclass
class Failing(Scripted):
    """One that can draw no batch after that of step 1."""

    failed: threading.Event = field(default_factory=threading.Event)

    def sample(self, step: int) -> DrawnBatch:
        if step < 2:
            return super().sample(step)
        self.failed.set()
        raise BurnishError("no generator is left")


def test_in_flight_what_cannot_be_drawn_ends_no_step_that_was_made() -> None:
    """The step is saved; the one that needs the batch says what failed."""
    sampler = Failing(**vars(queue_of(4, 2, 0, "in flight")[1]))
    with closing(RolloutQueue(sampler, 4)) as queue:  # type: ignore[arg-type]
        queue.publish(NOTHING, 0)
        queue.take(0)
        assert sampler.failed.wait(60)
        queue.publish(NOTHING, 1)
        assert [each.step for each in queue.pending()] == [1]
        assert queue.take(1).step == 1
        queue.publish(NOTHING, 2)
        with pytest.raises(BurnishError, match="no generator"):
            queue.take(2)


def rollout_of(tokens: Any, version: int = 0, **changes: Any) -> Rollout:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 7
    made = Completion(np.array(tokens, np.int64), logprobs, logprobs / 3, "stop", version)
    prompt = Prompt(7, np.array([3, 1, 2]), "a", [{"role": "user"}], 5, "sums", {"a": 1})
    return replace(Rollout(prompt, 0, made, "x"), **changes)


def step_of(number: int, ahead: int) -> CommittedStep:
    commit = Commit("0.1", "ab", number, "", 0, healthy=True)
    manifest = Manifest("ab", number, 1, {})
    return CommittedStep(Path(f"step-{number:08d}"), commit, manifest, {"ahead": ahead})


NUMBERS = st.floats(allow_nan=True)
TEXTS = st.text(st.characters(exclude_categories=[]), max_size=4)


@st.composite
def groups_of(draw: st.DrawFn, routed: bool) -> list[list[Rollout]]:
    groups = []
    for index in range(draw(st.integers(0, 3))):
        ids = np.arange(draw(st.integers(1, 4)), dtype=np.int64)
        answer = draw(st.none() | TEXTS)
        prompt = Prompt(index, ids, draw(TEXTS), None, answer, draw(TEXTS), {})
        group = []
        for sample in range(draw(st.integers(1, 3))):
            tokens = np.array(draw(st.lists(st.integers(0, 1 << 20), max_size=4)), np.int64)
            numbers = st.floats(width=32)
            both = [np.array([draw(numbers) for _ in tokens], dtype=np.float32) for _ in range(2)]
            rows = len(ids) + len(tokens) - 1
            experts = np.arange(rows * 6, dtype=np.uint8).reshape(rows, 3, 2)
            reason = draw(st.sampled_from(["stop", "length"]))
            version = draw(st.integers(0, 9))
            made = Completion(tokens, *both, reason, version, experts if routed and rows else None)
            parts = draw(st.dictionaries(TEXTS, NUMBERS, max_size=2))
            end = draw(st.sampled_from([None, "done"]))  # only conversations have one, and metrics
            metrics = draw(st.dictionaries(TEXTS, NUMBERS, max_size=2)) if end else {}
            rollout = Rollout(
                prompt,
                sample,
                made,
                draw(TEXTS),
                draw(NUMBERS),
                parts,
                metrics=metrics,
                end=end,
                greedy_reward=draw(st.none() | NUMBERS),
                reward_error=draw(st.none() | TEXTS),
            )
            group.append(rollout)
        groups.append(group)
    return groups


def plain(value: Any) -> Any:
    """A record as values that compare, NaN with NaN."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, DrawnBatch | Rollout | Completion | Prompt):
        return [plain(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, list | RolloutTable):
        return [plain(each) for each in value]
    return repr(value)


def unfinished(completion: Completion) -> Completion:
    return replace(completion, stop_reason=None, later_versions=((11, 1), (12, 3)))


@given(st.data(), st.booleans())
def test_what_is_written_is_read(data: st.DataObject, routed: bool) -> None:
    batches = [
        batch_of(number, data.draw(groups_of(routed)), data.draw(groups_of(routed)))
        for number in range(4, 4 + data.draw(st.integers(0, 2)))
    ]
    ended, unended = (data.draw(groups_of(routed=end and routed)) for end in (True, False))
    begun = {
        SampleKey(step, key, each.sample, data.draw(st.booleans()), "ab"): end(each.completion)
        for step, groups, end in ((7, ended, lambda one: one), (9, unended, unfinished))
        for key, group in enumerate(groups)
        for each in group
    }
    read, partial = read_ahead(step_of(4, len(batches)), ahead_files(batches, begun))
    assert plain(list(read)) == plain(batches)
    assert partial.keys() == begun.keys()
    assert [plain(partial[key]) for key in begun] == [plain(each) for each in begun.values()]
    torch.from_numpy(
        np.concatenate(
            [np.zeros(0), *(r.completion.logprobs for b in read for r in b.groups.rollouts)]
        )
    )


def damages() -> Iterator[tuple[str, dict[str, bytes]]]:
    begun = {SampleKey(5, 3, 1, greedy=False, prompt="ab"): unfinished(rollout_of([4]).completion)}
    files = ahead_files([batch_of(4, [[rollout_of([1, 2])]], [[rollout_of([])]])], begun)
    lines, tensors, begun_lines, begun_tensors = sorted(files)
    text = files[begun_lines].decode()
    for old, new in (
        ('"sample": 1', '"sample": true'),
        ('"greedy": false', '"greedy": 0'),
        ('"prompt": "ab"', '"prompt": 1'),
        ('"tokens": 1', '"tokens": 2'),
        ('"stop_reason": null', '"stop_reason": "tired"'),
        ("[12, 3]", "[12]"),
        (text, text + text),
    ):
        assert old in text
        yield f"begun {new}", files | {begun_lines: text.replace(old, new, 1).encode()}
    yield "begun cut", files | {begun_tensors: files[begun_tensors][:-1]}
    yield "begun half", {name: data for name, data in files.items() if name != begun_tensors}
    yield "begun without lines", {name: data for name, data in files.items() if name != begun_lines}
    text = files[lines].decode()
    for old, new in (
        ('"tokens": 2', '"tokens": 3'),
        ('"tokens": 2', '"tokens": -2'),
        ('"tokens": 2', '"tokens": 2.0'),
        ('"stop_reason": "stop"', '"stop_reason": "tired"'),
        ('"reward": 0.0', '"reward": "many"'),
        ('"reward": 0.0', '"reward": 0'),
        ('"reward_parts": {}', '"reward_parts": {"a": null}'),
        ('"kept": true', '"kept": 1'),
        ('"kept": true', '"kept": true, "more": 1'),
        ('"index": 7', '"index": 7, "index": 8'),
        ('{"index"', '["index"'),
    ):
        assert old in text
        yield new, files | {lines: text.replace(old, new, 1).encode()}
    for old, new in (("I32", "F32"), ("I32", "I64"), ("token_ids", "token_idz")):
        yield new, files | {tensors: files[tensors].replace(old.encode(), new.encode(), 1)}
    yield "cut", files | {tensors: files[tensors][:-1]}
    yield "half", {name: data for name, data in files.items() if name != tensors}
    yield "more", files | {"ahead/notes.txt": b""}
    yield "later", {name.replace("5", "6"): data for name, data in files.items()}


@pytest.mark.parametrize(
    ("what", "files"), list(damages()), ids=lambda each: each if isinstance(each, str) else ""
)
def test_anything_else_is_refused(what: str, files: dict[str, bytes]) -> None:
    with pytest.raises(BurnishError):
        read_ahead(step_of(4, 1), files)


def test_files_and_state_have_to_agree() -> None:
    with pytest.raises(IncompatibleError):
        read_ahead(step_of(4, 1), {})
    with pytest.raises(IncompatibleError):
        read_ahead(step_of(4, 0), ahead_files([batch_of(4, [[rollout_of([1])]])], {}))
    assert read_ahead(step_of(4, 0), {}) == ((), {})


AHEAD = ["rl", "rl.yaml", "rollout.ahead=2", "checkpoint.save_every=1", "checkpoint.keep_last=9"]
TAKE = "burnish.methods.parts.rollouts:RolloutQueue.take"


def drawn_by(run: Path) -> list[int]:
    """The version that drew each step's batch."""
    found = [{row["weights_version"] for row in rollouts(run, step)} for step in range(1, 7)]
    assert all(len(each) == 1 for each in found)
    return [version for each in found for version in each]


@pytest.fixture(scope="module")
def in_peace(work: Path) -> Path:
    return done(work, *AHEAD, "name=peace")


@pytest.mark.nightly
def test_killed_after_every_step(work: Path, in_peace: Path) -> None:
    assert drawn_by(in_peace) == [0, 0, 0, 1, 2, 3]
    argv = [*AHEAD, "name=killed"]
    for step in range(6):
        at = (
            At(TAKE, 2, signal.SIGKILL)
            if step < 5
            else At("burnish.runs.run:Run._complete", 1, signal.SIGKILL)
        )
        code, output = burnish(work, *argv, at=at)
        assert code == -signal.SIGKILL, output
        assert committed(work / "runs/killed/checkpoints")[-1].step == step + 1
    assert outcome(done(work, *argv)) == outcome(in_peace)


@pytest.mark.parametrize(
    ("later", "wanted"),
    [
        (1, [0, 0, 0, 1, 2, 4]),
        (0, [0, 0, 0, 1, 2, 5]),
        (4, [0, 0, 0, 1, 2, 3]),
    ],
)
@pytest.mark.nightly
def test_it_goes_on_with_another_number(
    work: Path, in_peace: Path, later: int, wanted: list[int]
) -> None:
    argv = [*AHEAD, f"name=changed_{later}"]
    code, output = burnish(work, *argv, at=At(TAKE, 4, signal.SIGTERM))
    assert code == 128 + signal.SIGTERM, output
    stopped = committed(work / f"runs/changed_{later}/checkpoints")[-1]
    files = [f"ahead/batch-{n:08d}.{kind}" for n in (4, 5) for kind in ("jsonl", "safetensors")]
    assert [name for name in sorted(stopped.manifest.files) if name.startswith("ahead/")] == files
    run = done(work, *argv, f"rollout.ahead={later}")
    assert drawn_by(run) == wanted
    rows = [
        [(r["prompt_index"], r["sample"]) for r in rollouts(each, 5)] for each in (run, in_peace)
    ]
    assert rows[0] == rows[1]


@pytest.mark.nightly
def test_a_step_with_batches_is_checked_set_aside_exported_and_shown(
    work: Path, in_peace: Path
) -> None:
    peace = outcome(in_peace)
    argv = [*AHEAD, "name=damaged"]
    burnish(work, *argv, at=At(TAKE, 5, signal.SIGTERM))
    steps = work / "runs/damaged/checkpoints"
    code, said = burnish(work, "ckpt", "show", str(steps / "step-00000004"), "--json")
    assert code == 0, said
    shown = json.loads(said)
    assert shown["sets"]["ahead/batch"]["tensors"] == 8
    assert shown["state"]["ahead"] == 2
    code, said = burnish(work, "ckpt", "export", str(steps / "step-00000004"), "exported")
    assert code == 0, said
    assert not (work / "exported/ahead").exists()
    for number, name in ((4, "batch-00000005.jsonl"), (3, "batch-00000004.safetensors")):
        step = steps / f"step-{number:08d}"
        assert list(verify(step)) == []
        flip(step / "ahead" / name)
        (problem,) = verify(step)
        assert name in str(problem)
        code, _ = burnish(work, "ckpt", "verify", str(step))
        assert code == 3
    assert outcome(done(work, *argv)) == peace
    aside = sorted(path.name for path in (steps / "quarantine").iterdir())
    assert aside == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize(("first", "second"), by_day([(2, 1), (1, 2)], []))
def test_two_processes_and_one_share_batches(
    work: Path, in_peace: Path, first: int, second: int
) -> None:
    """What two drew ahead one trains on, and the other way round."""
    argv = [*AHEAD, f"name=shared_{first}"]
    started = ranks(work, argv, first, at=At(TAKE, 4, signal.SIGTERM))
    assert [each.wait() for each in started] == [128 + signal.SIGTERM] * first
    assert_same(done(work, *argv, world=second), in_peace)


@pytest.mark.nightly
def test_another_machine_gets_the_batches_from_the_mirror(work: Path, in_peace: Path) -> None:
    argv = [*AHEAD, "name=moved", f"checkpoint.mirror=file://{work}/far"]
    code, said = burnish(work, *argv, at=At(TAKE, 4, signal.SIGTERM))
    assert code == 128 + signal.SIGTERM, said
    shutil.rmtree(work / "runs/moved")
    found, peace = outcome(done(work, *argv)), outcome(in_peace)
    late = {name for name in peace if name.startswith("rollouts/")} - found.keys()
    assert found == {name: x for name, x in peace.items() if name not in late}
    assert len(late) < len(list((in_peace / "rollouts").iterdir()))

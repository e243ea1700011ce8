"""What retention keeps: every predicate by hand and by brute force, and on a disk."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints.states import committed, save_once

from burnish.checkpoint.retention import (
    Retention,
    StepFacts,
    best,
    completed,
    holding_pins,
)
from burnish.config.schema import KeepBestConfig
from burnish.files.storage import LocalStorage

MIXED = [
    StepFacts(10, True, {"val/loss": 3.0, "val/reward": 0.1}),
    StepFacts(20, True, {"val/loss": 1.0}),
    StepFacts(30, False, {"val/loss": 0.0, "val/reward": 9.0}),
    StepFacts(40, True, {"val/loss": 1.0, "val/reward": 0.3}),
    StepFacts(50, True, {"val/loss": "NaN", "val/reward": True}),
    StepFacts(60, True),
]


def test_best():
    assert best(MIXED, kept_best("val/loss", "min")) == {
        40
    }  # the newer of equals, an unhealthy one never
    assert best(MIXED, kept_best("val/loss", "min", 2)) == {20, 40}
    assert best(MIXED, kept_best("val/loss", "max")) == {10}
    assert best(MIXED, kept_best("val/reward", "max", 5)) == {10, 40}  # true is no number
    assert best(MIXED, kept_best("val/other", "max")) == set()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_best(value):
    steps = [StepFacts(1, True, {"m": value}), StepFacts(2, True, {"m": 1.0})]
    assert best(steps, kept_best("m", "max")) == best(steps, kept_best("m", "min")) == {2}


def kept_best(metric, mode, count=1):
    return KeepBestConfig(metric=metric, mode=mode, count=count)


FACTS = st.dictionaries(
    st.integers(0, 40),
    st.tuples(st.booleans(), st.none() | st.integers(-3, 3)),
).map(
    lambda found: [
        StepFacts(step, healthy, {} if value is None else {"m": value})
        for step, (healthy, value) in found.items()
    ]
)
POLICIES = st.builds(
    Retention,
    st.integers(1, 4),
    st.integers(0, 7),
    st.just(KeepBestConfig())
    | st.builds(kept_best, st.just("m"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
)


@given(FACTS, POLICIES, st.sets(st.integers(0, 40), max_size=4))
def test_nothing_goes_that_anything_keeps(steps, policy, pins):
    gone = set(policy.outlived(steps, pins))
    healthy = sorted(each.step for each in steps if each.healthy)
    assert not gone & set(healthy[-policy.keep_last :])
    assert not gone & pins
    assert all(step < healthy[-1] for step in gone)
    for each in steps:
        newer = [step for step in healthy if step > each.step]
        wanted = policy.keep_every and each.healthy and each.step % policy.keep_every == 0
        if policy.keep_best.metric and each.healthy and "m" in each.measured:
            sign = 1 if policy.keep_best.mode == "max" else -1
            mine = (sign * each.measured["m"], each.step)
            rivals = [(sign * r.measured["m"], r.step) for r in steps if r.healthy and r.measured]
            wanted = wanted or sum(rival > mine for rival in rivals) < policy.keep_best.count
        goes = len(newer) >= policy.keep_last and not wanted and each.step not in pins
        assert (each.step in gone) == goes


@given(FACTS, POLICIES)
def test_what_was_decided_stays_decided(steps, policy):
    """Retention run again, as after a crash in its middle, removes nothing more."""
    gone = policy.outlived(steps)
    assert policy.outlived([each for each in steps if each.step not in gone]) == []


@given(FACTS, POLICIES, st.integers(0, 40))
def test_an_unhealthy_step_evicts_nothing(steps, policy, step):
    others = [each for each in steps if each.step != step]
    with_it = policy.outlived([*others, StepFacts(step, False, {"m": 99})])
    assert set(with_it) - {step} == set(policy.outlived(others))


def steps_in(root):
    return [step.step for step in committed(root)]


def fill(root):
    for step, loss in enumerate([5.0, 1.0, 2.0, 4.0, 3.0], start=1):
        save_once(root, step, state={"measured": {"val/loss": loss}})


def test_the_best_are_found_on_disk(tmp_path):
    fill(tmp_path)
    policy = Retention(1, keep_best=kept_best("val/loss", "min", 2))
    assert policy.apply(tmp_path, LocalStorage()) is None
    assert steps_in(tmp_path) == [2, 3, 5]
    assert list((tmp_path / "trash").iterdir()) == []
    assert policy.apply(tmp_path, LocalStorage()) is None
    assert steps_in(tmp_path) == [2, 3, 5]


def test_pins_are_kept(tmp_path):
    fill(tmp_path)
    with holding_pins(tmp_path, LocalStorage()) as pins:
        pins[1] = "the first"
    Retention(2).apply(tmp_path, LocalStorage())
    assert steps_in(tmp_path) == [1, 4, 5]


def test_damaged_pins_keep_everything(tmp_path, caplog):
    fill(tmp_path)
    (tmp_path / "pins.json").write_text('{"format": 1, "pins"')
    assert Retention(1).apply(tmp_path, LocalStorage()) is None
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]
    assert "pins.json" in caplog.text


@pytest.mark.parametrize("state", [{}, {"measured": None}, {"measured": [1]}])
def test_steps_that_were_not_measured_are_not_best(tmp_path, state):
    save_once(tmp_path, 1, state=state)
    save_once(tmp_path, 2, state={"measured": {"val/loss": 7.0}})
    save_once(tmp_path, 3, state=state)
    Retention(1, keep_best=kept_best("val/loss", "min")).apply(tmp_path, LocalStorage())
    assert steps_in(tmp_path) == [2, 3]


def test_a_best_step_that_is_damaged_is_not_best(tmp_path, caplog):
    fill(tmp_path)
    (tmp_path / "step-00000002" / "state.json").unlink()
    Retention(1, keep_best=kept_best("val/loss", "min")).apply(tmp_path, LocalStorage())
    assert steps_in(tmp_path) == [3, 5]
    assert "state.json" in caplog.text


def test_later_steps_know_of_validations_that_came_after_the_save():
    later = StepFacts(60, True, {"m": 2.0}, {"50": {"m": 9.0}, "40": "what?", "10": {"m": 1.0}})
    steps = completed([StepFacts(40), StepFacts(50), later])
    assert [each.measured for each in steps] == [{}, {"m": 9.0}, {"m": 2.0}]
    assert best(steps, kept_best("m", "max")) == {50}

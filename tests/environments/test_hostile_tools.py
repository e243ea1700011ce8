"""Environments that crash, flood and lie, in real processes: they lose their own conversation, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.nightly import by_day
from support.services import hostile as attacks
from support.services.hostile import ANSWERS, DEADLY, HARMLESS

from burnish.config.environment import EnvironmentConfig
from burnish.environments.base import Action
from burnish.environments.pool import EnvironmentPool

HOSTILE = Path(attacks.__file__)
KEYS = [(0, 0), (0, 1), (0, 2)]


def pool_of(name, timeout=60.0):
    config = EnvironmentConfig(function=f"{HOSTILE}:{name}", workers=1, timeout_seconds=timeout)
    return EnvironmentPool(config)


def say(pool, *texts):
    answers = pool.step({key: Action(text, text) for key, text in zip(KEYS, texts, strict=True)})
    return [answers[key] for key in KEYS]


def heard(answer):
    return None if answer.observation is None else answer.observation.messages[0]["content"]


def play(pool, attack):
    """Three conversations, one of which attacks in its second turn: what is heard of each, turn by turn, and its error."""
    pool.begin({key: ({}, 7) for key in KEYS})
    first = [*map(heard, say(pool, "a", "b", "c"))]
    answers = say(pool, "a", attack, "c")
    third = pool.step({KEYS[0]: Action("d", "d")})
    last = heard(third[KEYS[0]])
    pool.end(KEYS)
    return first, [*map(heard, answers)], last, answers[1].error


@pytest.fixture(scope="module")
def hostile():
    with pool_of("Hostile") as pool:
        yield pool


@pytest.mark.parametrize("attack", by_day([*DEADLY, *ANSWERS], ["nan", "deep", "too large"]))
def test_an_attack_costs_its_own_conversation(hostile, attack):
    first, second, last, error = play(hostile, attack)
    assert (first, second, last) == (["1"] * 3, ["2", None, "2"], "3")
    assert 0 < len(error) < 5000


@pytest.mark.parametrize("attack", by_day(HARMLESS, []))
def test_other_harm_costs_nothing(attack):
    with pool_of("Hostile") as pool:
        first, second, last, error = play(pool, attack)
        assert (first, second, last) == (["1"] * 3, ["2"] * 3, "3")
        assert error is None
        assert play(pool, "nan")[2] == "3"  # and the process still serves


def test_half_a_character_is_replaced(hostile):
    hostile.begin({key: ({}, 7) for key in KEYS})
    _, answer, _ = say(hostile, "a", "half", "c")
    assert answer.observation.messages == [{"role": "user", "content": "a?b", "name": "?"}]
    hostile.end(KEYS)


@pytest.mark.nightly
@pytest.mark.parametrize("attack", ["wait", "cancel"])
def test_a_coroutine_that_never_ends_costs_its_own_conversation(attack):
    with pool_of("Endless", timeout=10.0) as pool:
        pool.begin({key: ({}, 7) for key in KEYS})
        answers = say(pool, "a", attack, "c")
        assert [heard(answer) for answer in answers] == ["here", None, "here"]


@pytest.mark.nightly
def test_nothing_is_left_running():
    """A child of a tool that has a session of its own ends with the pool."""
    with pool_of("Hostile") as pool:
        play(pool, "child")
        (worker,) = pool._workers.values()
        children = _children(worker._process.pid)
        assert children
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _children(pid):
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in listed]

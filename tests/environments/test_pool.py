"""Processes of environments, among them those that hang, die and forget."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest
from support.ranks.waiting import until_gone

from burnish.config.environment import EnvironmentConfig
from burnish.environments.base import Action
from burnish.environments.calls import Begin, Step
from burnish.environments.pool import EnvironmentPool
from burnish.errors import UsageError

TALKERS = Path(__file__).with_name("talkers.py")
KEYS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def pool_of(name, **settings):
    workers = settings.pop("workers", 1)
    timeout = settings.pop("timeout_seconds", 60.0)
    config = EnvironmentConfig(
        function=f"{TALKERS}:{name}", workers=workers, timeout_seconds=timeout, kwargs=settings
    )
    return EnvironmentPool(config)


def say(pool, *texts):
    answers = pool.step({key: Action(text, text) for key, text in zip(KEYS, texts, strict=False)})
    return [answers[key] for key in KEYS[: len(texts)]]


def begun(**settings):
    pool = pool_of("Counting", first=0, **settings)
    pool.begin({key: ({}, 7) for key in KEYS})
    return pool


@pytest.fixture
def counting():
    with begun() as pool:
        yield pool


def contents(answers):
    return [answer.observation and answer.observation.messages[0]["content"] for answer in answers]


def test_conversations_have_their_own_state(counting):
    assert contents(say(counting, "a", "b")) == ["1", "1"]
    assert contents(say(counting, "a")) == ["2"]
    assert contents(say(counting, "a", "b", "c")) == ["3", "2", "1"]


@pytest.mark.parametrize(
    ("how", "timeout"), [("die", 60.0), pytest.param("hang", 10.0, marks=pytest.mark.nightly)]
)
def test_a_lost_process_costs_one_conversation_only(how, timeout):
    with begun(timeout_seconds=timeout) as pool:
        assert contents(say(pool, "a", "b", "c", "d")) == ["1"] * 4
        answers = say(pool, "a", how, "c", "d")
        assert contents(answers) == ["2", None, "2", "2"]
        assert answers[1].error is not None
        assert contents(say(pool, "a")) == ["3"]


@pytest.mark.parametrize(("how", "timeout"), [("drop", 60.0), ("cling", 10.0)])
@pytest.mark.nightly
def test_an_environment_that_does_not_close_costs_no_conversation(how, timeout):
    with pool_of("Clinging", first=0, timeout_seconds=timeout) as pool:
        pool.begin({key: ({}, 7) for key in KEYS})
        assert contents(say(pool, "a", "b", "c", how)) == ["1"] * 4
        pool.end(KEYS[3:])
        pool.end(KEYS[2:3])
        assert contents(say(pool, "a", "b")) == ["2", "2"]
        pool.end(KEYS[1:2])
        assert contents(say(pool, "a")) == ["3"]


@pytest.mark.nightly
def test_what_a_tool_started_in_a_session_of_its_own_ends_with_its_process():
    with begun() as pool:
        (pid,) = contents(say(pool, "leave"))
        assert Path(f"/proc/{pid}").exists()
    until_gone(int(pid))


@pytest.mark.nightly
def test_an_environment_that_does_not_repeat_is_not_gone_on_with():
    with pool_of("Forgetful") as pool:
        pool.begin({key: ({}, 7) for key in KEYS})
        say(pool, "a", "b", "c")
        answers = say(pool, "die", "b", "c")
        assert contents(answers) == [None, None, None]
        assert all(answer.error for answer in answers)


@pytest.mark.parametrize("what", ["fail", "nonsense", "nothing", "nan"])
def test_what_is_no_answer_is_a_failure(counting, what):
    failed, other = say(counting, what, "b")
    assert failed.observation is None
    assert failed.error
    assert contents([other]) == ["1"]


@pytest.mark.nightly
def test_a_flood_is_cut(counting):
    (answer,) = say(counting, "flood")
    assert len(answer.observation.messages[0]["content"]) == 1 << 20


def test_coroutines_of_a_wave_run_at_the_same_time():
    with pool_of("Waiting") as pool:
        pool.begin({key: ({}, 7) for key in KEYS})
        assert [a.observation.rewards["reward"] for a in say(pool, *"abcd")] == [4.0] * 4


@pytest.mark.parametrize("name", ["Untyped", "NoEnvironment", "Missing"])
def test_a_class_that_cannot_be_used_is_refused(name):
    with pytest.raises(UsageError):
        pool_of(name)


def test_arguments_that_the_class_does_not_take_are_refused():
    with pytest.raises(UsageError):
        pool_of("Counting", last=3)


def test_tools_are_described_by_types_and_docstrings():
    with pool_of("Calculator") as pool:
        first = pool.described.tools[0]["function"]
    assert first["name"] == "multiply"
    assert first["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "The first number.",
    }


def test_a_class_describes_tools_that_depend_on_its_arguments():
    with pool_of("Described", tool="look") as pool:
        assert [each["function"]["name"] for each in pool.described.tools] == ["look"]


def test_a_worker_whose_trainer_waits_no_longer_ends_without_a_word():
    trainer, worker = Pipe()
    with worker, trainer:
        numbers = str(worker.fileno()), str(os.getpid())
        argv = [sys.executable, "-m", "burnish.environments.worker", *numbers]
        child = subprocess.Popen(argv, pass_fds=[worker.fileno()], stderr=subprocess.PIPE)
        worker.close()
        trainer.send((f"{TALKERS}:Waiting", {}, "", sys.argv, sys.path))
        trainer.recv()
        trainer.send([Begin((0, 0), {}, 0), Step((0, 0), Action("x", "x"))])
        assert trainer.recv().error is None
        trainer.close()
        assert child.communicate() == (None, b"")
    assert child.returncode == 0

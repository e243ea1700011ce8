"""The pool against functions of every temper, in a file as a user would write it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
from support.ranks.waiting import until_gone

from burnish.config.schema import RewardConfig, RewardFunctionConfig
from burnish.errors import MissingError, UsageError
from burnish.records import Rollout
from burnish.rewards.pool import RewardPool, _Worker

HOW_A_PROCESS_ENDS = {
    "kill": "signal SIGKILL",
    "exit": "exit status 7",
    "segfault": "signal SIGSEGV",
    "memory": "MemoryError",
}

SOURCE = """
import asyncio, os, pathlib, signal, subprocess, sys, time

def end(how):
    if how == "exit":
        os._exit(7)
    if how == "memory":
        raise MemoryError
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSEGV)

def end_if_guilty(completions, how, guilty, mark=None, count=None):
    if count:
        with open(count, "a") as file:
            file.write("x")
    if guilty in completions and not (mark and os.path.exists(mark)):
        if mark:
            pathlib.Path(mark).touch()
        end(how)

def ends_with(completions, how, guilty, mark=None, count=None):
    end_if_guilty(completions, how, guilty, mark, count)
    return [float(each) for each in completions]

def ends_one_with(solution_str, how, guilty, mark=None):
    end_if_guilty([solution_str], how, guilty, mark)
    return float(solution_str)

async def async_ends_with(solution_str, how, guilty, mark=None):
    await asyncio.sleep(0.01)
    return ends_one_with(solution_str, how, guilty, mark)

def ends_with_columns(completions, level, lengths, guilty):
    assert len(level) == len(completions) and lengths == [1, 2, 3]
    assert all(x is None or x == int(c) for x, c in zip(level, completions))
    end_if_guilty(completions, "kill", guilty)
    return [100.0 + (x or 0) for x in level]

def numbers_everything(solution_str):
    return {"score": 1, "x" * 500: 1} | {f"{solution_str}-{i}": i for i in range(2000)}

def unreachable(solution_str):
    raise OSError(solution_str + " cannot reach https://user:hunter2@judge.example/score")

def opens(solution_str, api_key):
    if solution_str == "raise":
        raise ValueError("there is no key " + api_key)
    return float(api_key == "hunter2")

def length(completions, **kwargs):
    return [float(len(c)) for c in completions]

def score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == ground_truth
    return {"score": float(right), "acc": right, "source": data_source}

def temper(solution_str):
    if solution_str == "raise":
        raise RuntimeError("the judge is out")
    if solution_str == "hang":
        while True:
            pass
    if solution_str == "sleep":
        time.sleep(1000)
    if solution_str == "die":
        os._exit(7)
    if solution_str == "nan":
        return float("nan")
    return 1.0

def talkative(solution_str):
    raise RuntimeError("word " * 10_000)

def strips(completions):
    return [float(len(text.strip())) for text in completions]

def leaves_a_session(solution_str, pid_file):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(pid_file, "w").write(str(child.pid))
    return 1.0

def all_raise(completions):
    raise RuntimeError("the judge is out")

def wrong_length(completions):
    return [1.0]

def odd_only(completions):
    return [1.0 if len(c) % 2 else None for c in completions]

async def judge(solution_str):
    await asyncio.sleep(0.01)
    return 2.0

barrier = asyncio.Barrier(8)

async def meet(solution_str):
    await barrier.wait()
    return float(solution_str)

under_way = 0

async def most_under_way(solution_str):
    global under_way
    under_way += 1
    seen = under_way
    await asyncio.sleep(0.01)
    under_way -= 1
    return float(seen)

async def block(solution_str):
    if solution_str == "block":
        time.sleep(1000)
    if solution_str == "never":
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
    return 1.0

async def async_temper(solution_str):
    if solution_str == "think":
        await asyncio.sleep(0.01)
    if solution_str == "hang":
        await asyncio.sleep(1000)
    if solution_str == "raise":
        raise RuntimeError("the judge is out")
    if solution_str == "cancel":
        asyncio.current_task().cancel()
        await asyncio.sleep(1000)
    if solution_str == "exit":
        sys.exit(3)
    return 1.0

def slow_first(solution_str):
    time.sleep(0.3 if solution_str == "0" else 0)
    return float(solution_str)

def how_many(completions):
    if "sleep" in completions:
        time.sleep(1000)
    return [float(len(completions))] * len(completions)

def needs_level(completions, level):
    return [float(x) for x in level]

def process(completions):
    print("printing is fine")
    return [float(os.getpid())] * len(completions)

def torch_is_imported(completions):
    return [float("torch" in sys.modules or "transformers" in sys.modules)] * len(completions)

def dies_and_leaves_a_child(solution_str):
    if os.fork() == 0:
        os.setsid()
        time.sleep(20)
    os._exit(7)

def returns_twice(solution_str):
    os.fork()
    return float(solution_str)

def child_hangs(solution_str, pid_file):
    child = subprocess.Popen(["sleep", "1000"])
    with open(pid_file, "w") as file:
        file.write(str(child.pid))
    child.wait()
"""

MakePool = Callable[..., RewardPool]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    source = tmp_path / "user_rewards.py"
    source.write_text(SOURCE)
    pools = []

    def make(
        *names: str, kwargs: dict | None = None, per_call: int | None = None, **settings
    ) -> RewardPool:
        functions = [
            RewardFunctionConfig(
                function=name
                if name in ("exact_match", "numeric", "regex")
                else f"{source}:{name}",
                weight=weight,
                kwargs=kwargs or {},
                per_call=per_call,
            )
            for weight, name in enumerate(names, 1)
        ]
        settings = {"workers": 2, "timeout_seconds": 20.0} | settings
        pools.append(RewardPool(RewardConfig(functions=functions, **settings)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def texts(make_rollout) -> Callable[..., list[Rollout]]:
    return lambda *said: [make_rollout(text, sample=i) for i, text in enumerate(said)]


@pytest.mark.parametrize("on_error", ["drop", 0.0])
def test_what_an_environment_lost_has_no_reward(make_pool, texts, on_error) -> None:
    fine, lost = texts("4", "4")
    lost = replace(lost, reward_error="environment: no connection")
    scored = make_pool("exact_match", on_error=on_error).score([fine, lost])
    assert [each.reward for each in scored] == [1, pytest.approx(math.nan, nan_ok=True)]
    assert scored[1].reward_error == "environment: no connection"


def test_weighted_sum_of_functions_of_both_signatures(make_pool, texts) -> None:
    pool = make_pool("exact_match", "length", "score")
    right, wrong = pool.score(texts("4", "five"))
    assert dict(right.reward_parts) == {"exact_match": 1, "length": 1, "score": 1, "score/acc": 1}
    assert right.reward == 1 * 1 + 2 * 1 + 3 * 1
    assert dict(wrong.reward_parts) == {"exact_match": 0, "length": 4, "score": 0, "score/acc": 0}
    assert wrong.reward == 2 * 4
    assert right.reward_error is wrong.reward_error is None
    assert (right.text, wrong.text) == ("4", "five")


def test_each_call_is_known_with_its_time_and_its_error(make_pool, texts, monkeypatch) -> None:
    monkeypatch.setattr("burnish.rewards.pool._MAX_TIMEOUTS", 0)
    pool = make_pool("exact_match", "length", "temper", timeout_seconds=0.5, workers=1)
    before = time.time()
    scored = pool.score(texts("fine", "sleep", "sleep", "sleep"))
    after = time.time()
    for rollout in scored:
        exact, length, temper = rollout.calls
        assert [exact.name, length.name, temper.name] == ["exact_match", "length", "temper"]
        assert exact.value == rollout.reward_parts["exact_match"]
        assert length.value == rollout.reward_parts["length"]
        for call in (exact, length):
            assert before <= call.began <= call.began + call.seconds <= after
            assert call.error is None
    late = [r.calls[2] for r in scored if r.calls[2].error and r.calls[2].began]
    assert len(late) == 1, "after which the function is given up"
    assert all(0.5 <= call.seconds < after - before for call in late)
    never = [r.calls[2] for r in scored if r.calls[2].began is None]
    assert len(never) in (2, 3)
    assert all(call.value is None and call.error for call in late + never)


def test_no_rollouts(make_pool) -> None:
    assert make_pool("exact_match", "length", "score").score([]) == []


def test_built_in_functions_start_no_process(make_pool, texts, monkeypatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    pool = make_pool("exact_match", "numeric")
    assert [r.reward for r in pool.score(texts("4", "4.0"))] == [3, 2]


def test_the_error_of_one_rollout_is_its_own(make_pool, texts) -> None:
    pool = make_pool("temper", timeout_seconds=1.0, on_error=-1.0)
    said = ["fine", "raise", "hang", "sleep", "nan", "die", "fine"]
    scored = pool.score(texts(*said))
    errors = dict(zip(said, (r.reward_error for r in scored), strict=True))
    assert errors["fine"] is None
    assert "temper: RuntimeError: the judge is out" in errors["raise"]
    assert "user_rewards.py:" in errors["raise"]
    assert errors["hang"] == errors["sleep"]
    assert "temper: " in errors["hang"]
    assert " 1 s" in errors["hang"]
    assert "nan" in errors["nan"]
    assert "exit status 7" in errors["die"]
    assert [r.reward for r in scored] == [1, -1, -1, -1, -1, -1, 1]
    # The killed workers have been replaced.
    assert [r.reward for r in pool.score(texts("fine", "fine", "fine"))] == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("all_raise", "all_raise: RuntimeError: the judge is out"),
        ("wrong_length", "wrong_length: "),
    ],
)
def test_the_error_of_a_batch_is_every_rollouts(make_pool, texts, name: str, error: str) -> None:
    for rollout in make_pool("exact_match", name).score(texts("4", "4", "4")):
        assert rollout.reward_error.startswith(error)
        assert dict(rollout.reward_parts) == {"exact_match": 1}
        assert math.isnan(rollout.reward)
    pool = make_pool("exact_match", name, on_error=0.25)
    for rollout in pool.score(texts("4", "4", "4")):
        assert rollout.reward_error.startswith(error)
        assert dict(rollout.reward_parts) == {"exact_match": 1, name: 0.25}
        assert rollout.reward == 1 + 2 * 0.25


def test_errors_of_several_functions_are_all_told(make_pool, texts) -> None:
    (rollout,) = make_pool("all_raise", "temper").score(texts("nan"))
    assert "all_raise: RuntimeError" in rollout.reward_error
    assert "; temper: " in rollout.reward_error


def test_a_deadline_bounds_the_wait_and_kills_what_the_function_started(
    make_pool, texts, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    pool = make_pool("child_hangs", kwargs={"pid_file": str(pid_file)}, timeout_seconds=2.0)
    (rollout,) = pool.score(texts("x"))
    assert "2 s" in rollout.reward_error
    until_gone(int(pid_file.read_text()))


@pytest.mark.nightly
def test_a_child_of_a_dead_worker_is_not_waited_for(make_pool, texts) -> None:
    """It has a copy of the connection, which therefore stays open."""
    (rollout,) = make_pool("dies_and_leaves_a_child", timeout_seconds=15.0).score(texts("x"))
    assert "exit status 7" in rollout.reward_error


@pytest.mark.nightly
def test_a_process_that_a_function_forks_answers_nothing(make_pool, texts) -> None:
    pool = make_pool("returns_twice")
    for numbers in ("12", "34", "56"):
        assert [each.reward for each in pool.score(texts(*numbers))] == [*map(float, numbers)]


def test_a_worker_has_the_arguments_and_the_modules_of_its_run(
    tmp_path: Path, texts, monkeypatch
) -> None:
    for folder, number in (("lib", 1.0), ("", 100.0)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "shadowed_of_test.py").write_text(f"NUMBER = {number}\n")
    (tmp_path / "script.py").write_text(
        "import sys, shadowed_of_test\n"
        "def score(solution_str): return float(sys.argv[1]) + shadowed_of_test.NUMBER\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", "0.5"])
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    functions = [RewardFunctionConfig(function="script.py:score")]
    with RewardPool(RewardConfig(functions=functions)) as pool:
        assert pool.score(texts("a"))[0].reward == 1.5


@pytest.mark.nightly
def test_a_pattern_that_backtracks_for_ever_meets_its_deadline(make_pool, texts) -> None:
    pool = make_pool("regex", kwargs={"pattern": "(a+)+b"}, timeout_seconds=1.0)
    hangs, matches = pool.score(texts("a" * 60, "aab"))
    assert hangs.reward_error.startswith("regex: ")
    assert matches.reward == 1


@pytest.mark.nightly
def test_a_function_that_hangs_on_everything_is_given_up(make_pool, texts, monkeypatch) -> None:
    monkeypatch.setattr("burnish.rewards.pool._MAX_TIMEOUTS", 2)
    pool = make_pool("temper", "score", timeout_seconds=1.0, workers=2, on_error=-1.0)
    scored = pool.score(texts(*["sleep"] * 40))
    errors = [rollout.reward_error for rollout in scored]
    late = errors.count("temper: no answer within 1 s")
    assert 4 <= late <= 5  # two may be late at once
    given_up = "temper: given up: call after call: no answer within 1 s"
    assert errors.count(given_up) == 40 - late
    assert {rollout.reward_parts["temper"] for rollout in scored} == {-1.0}
    assert {rollout.reward_parts["score"] for rollout in scored} == {
        0.0
    }  # the other function goes on
    assert [r.reward_error for r in pool.score(texts("fine"))] == [None]  # and it is tried again


@pytest.mark.nightly
def test_a_function_that_ends_its_process_on_everything_is_given_up(
    make_pool, texts, monkeypatch
) -> None:
    monkeypatch.setattr("burnish.rewards.pool._MAX_TIMEOUTS", 1)
    pool = make_pool("temper", workers=1, timeout_seconds=100.0)
    errors = [rollout.reward_error for rollout in pool.score(texts(*["die"] * 9))]
    assert sum("given up" in error for error in errors) == 8


@pytest.mark.nightly
def test_a_process_that_ends_once_changes_no_reward(make_pool, texts, tmp_path: Path) -> None:
    """However it ends, also for calls about many completions and for async functions."""
    said = [str(i) for i in range(8)]
    for how in HOW_A_PROCESS_ENDS:
        for name in ("ends_with", "ends_one_with", "async_ends_with"):
            mark = tmp_path / f"{name}-{how}"
            pool = make_pool(name, kwargs={"how": how, "mark": str(mark), "guilty": "5"})
            for _ in range(2):
                scored = pool.score(texts(*said))
                assert [each.reward_error for each in scored] == [None] * 8, (how, name)
                assert [each.reward for each in scored] == [*range(8)]
            assert mark.exists()
            pool.close()


@pytest.mark.nightly
def test_only_the_completion_fails_whose_process_ends_always(make_pool, texts, caplog) -> None:
    said = [str(i) for i in range(9)]
    for how, told in HOW_A_PROCESS_ENDS.items():
        for name in ("ends_with", "ends_one_with", "async_ends_with"):
            pool = make_pool(name, kwargs={"how": how, "guilty": "5"}, concurrency=4)
            errors = [each.reward_error for each in pool.score(texts(*said))]
            assert errors == [None] * 5 + [f"{name}: its process ended ({told})"] + [None] * 3
            pool.close()
    assert any("ends_with ended (signal SIGKILL)" in each.message for each in caplog.records)


@pytest.mark.nightly
def test_parts_of_a_call_have_their_own_columns(make_pool, make_rollout) -> None:
    """A column that some rows lack is None there, and stays beside its completion in each part."""
    rollouts = [
        make_rollout(str(i), sample=i, columns={"level": i} if i % 2 else {}) for i in range(9)
    ]
    kwargs = {"guilty": "4", "lengths": [1, 2, 3]}
    for per_call in (None, 4):
        pool = make_pool("ends_with_columns", kwargs=kwargs, per_call=per_call)
        scored = pool.score(rollouts)
        assert [each.reward_error is None for each in scored] == [i != 4 for i in range(9)]
        odd = [each.reward_parts["ends_with_columns"] for each in scored if each.sample % 2]
        assert odd == [101, 103, 105, 107]
        pool.close()


@pytest.mark.nightly
def test_a_function_that_ends_most_of_its_processes_is_asked_a_bounded_number_of_times(
    make_pool, texts, tmp_path: Path
) -> None:
    """Each guilty completion of a call about 64 costs about as many processes as halves lead to it."""
    mark = tmp_path / "mark"
    kwargs = {"how": "exit", "guilty": "x", "count": str(mark)}
    pool = make_pool("ends_with", kwargs=kwargs, workers=1)
    said = ["0"] * 64
    said[10] = said[50] = "x"
    errors = [each.reward_error for each in pool.score(texts(*said))]
    assert [i for i, error in enumerate(errors) if error] == [10, 50]
    assert len(mark.read_text()) <= 3 + 2 * 6 + 2 * 6 + 1
    mark.unlink()
    errors = [each.reward_error for each in pool.score(texts(*["x"] * 64))]
    assert all(errors)
    assert any("given up" in error for error in errors)
    assert len(mark.read_text()) < 64


@pytest.mark.nightly
def test_an_idle_worker_that_is_killed_costs_no_reward(make_pool, texts) -> None:
    pool = make_pool("process", workers=1)
    (first,) = pool.score(texts("a"))
    os.kill(int(first.reward), signal.SIGKILL)
    (second,) = pool.score(texts("a"))
    assert second.reward_error is None
    assert second.reward != first.reward


def test_a_password_in_the_url_of_an_error_is_hidden(make_pool, texts) -> None:
    (rollout,) = make_pool("unreachable").score(texts("x" * 480))
    assert "judge.example" in make_pool("unreachable").score(texts(""))[0].reward_error
    assert "hunter2" not in rollout.reward_error


def test_a_function_gets_a_key_from_the_environment_and_its_errors_do_not_tell_it(
    make_pool, texts, monkeypatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "hunter2")
    pool = make_pool("opens", kwargs={"api_key": "$JUDGE_KEY"})
    right, failed = pool.score(texts("a", "raise"))
    assert right.reward == 1.0
    assert "there is no key" in failed.reward_error
    assert "hunter2" not in failed.reward_error
    assert "hunter2" not in str(failed.calls)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UsageError, match="JUDGE_KEY"):
        make_pool("opens", kwargs={"api_key": "$JUDGE_KEY"})


def test_the_text_of_an_error_is_clipped(make_pool, texts) -> None:
    (rollout,) = make_pool("talkative").score(texts("x"))
    assert 100 < len(rollout.reward_error) < 1000


def test_a_function_is_tried_on_a_ground_truth(make_pool, make_rollout) -> None:
    chat = make_rollout(messages=[{"role": "user", "content": "2+2="}]).prompt
    make_pool("score").require_answer(chat, "row 0")
    with pytest.raises(UsageError, match="row 0") as caught:
        make_pool("strips").require_answer(chat, "row 0")
    assert 'completion[-1]["content"]' in str(caught.value.do)
    make_pool("odd_only").require_answer(replace(chat, answer=""), "row 0")  # None is an answer


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_program_with_a_session_of_its_own_ends_with_the_worker(
    make_pool, texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a worker that ends as soon as it may."""
    release = _Worker.release

    def release_and_wait(worker: _Worker) -> None:
        release(worker)
        worker._process.wait()

    monkeypatch.setattr(_Worker, "release", release_and_wait)
    pid_file = tmp_path / "pid"
    pool = make_pool("leaves_a_session", kwargs={"pid_file": str(pid_file)}, timeout_seconds=30.0)
    pool.score(texts("x"))
    pool.close()
    until_gone(int(pid_file.read_text()))


@pytest.mark.nightly
def test_a_function_that_hangs_on_all_samples_of_a_prompt_is_not_given_up(
    make_pool, texts, monkeypatch
) -> None:
    monkeypatch.setattr("burnish.rewards.pool._MAX_TIMEOUTS", 2)
    pool = make_pool("temper", timeout_seconds=0.5, workers=1)
    scored = pool.score(texts(*["fine"] * 4, *["sleep"] * 4, *["fine"] * 8))
    errors = [rollout.reward_error for rollout in scored]
    late = "temper: no answer within 0.5 s"
    assert errors == [None] * 4 + [late] * 4 + [None] * 8


def test_answers_keep_the_order_of_rollouts(make_pool, texts) -> None:
    pool = make_pool("slow_first", workers=3)
    said = [str(i) for i in range(20)]
    rollouts = texts(*said)
    scored = pool.score(rollouts)
    assert [r.reward for r in scored] == list(range(20))
    backwards = pool.score(rollouts[::-1])
    assert [r.reward for r in backwards] == [r.reward for r in scored[::-1]]


def test_none_from_a_trl_function_is_no_part_of_the_reward(make_pool, texts) -> None:
    first, second = make_pool("exact_match", "odd_only", on_error=9.0).score(texts("4", "42"))
    assert dict(first.reward_parts) == {"exact_match": 1, "odd_only": 1}
    assert dict(second.reward_parts) == {"exact_match": 0}
    assert second.reward_error is None
    assert (first.reward, second.reward) == (1 + 2 * 1, 0)


def test_a_rollout_that_no_function_judges_is_an_error(make_pool, texts) -> None:
    one, two = make_pool("odd_only").score(texts("4", "42"))
    assert (one.reward_error, one.reward) == (None, 1)
    assert "None" in two.reward_error
    assert math.isnan(two.reward)
    one, two = make_pool("odd_only", on_error=-3.0).score(texts("4", "42"))
    assert one.reward_error is None
    assert "None" in two.reward_error
    assert two.reward == -3.0


def test_async_functions(make_pool, texts) -> None:
    assert [r.reward for r in make_pool("judge").score(texts("a", "b", "c"))] == [2, 2, 2]


def test_all_calls_of_an_async_function_wait_beside_each_other(make_pool, texts) -> None:
    """None of the eight can end before all have begun."""
    pool = make_pool("meet", "slow_first", workers=1)
    for _ in range(2):
        scored = pool.score(texts(*"01234567"))
        assert [dict(r.reward_parts) for r in scored] == [
            {"meet": i, "slow_first": i} for i in range(8)
        ]


def test_an_async_call_has_its_own_deadline_and_its_own_error(make_pool, texts) -> None:
    pool = make_pool("async_temper", timeout_seconds=0.5, workers=1, on_error=-1.0)
    said = ["fine", "hang", "raise", "cancel", "exit", "fine"]
    errors = [rollout.reward_error for rollout in pool.score(texts(*said))]
    assert errors[0] is errors[5] is None
    assert errors[1].startswith("async_temper: ")
    assert "0.5 s" in errors[1]
    assert errors[2].startswith("async_temper: RuntimeError: the judge is out (")
    assert errors[3].startswith("async_temper: CancelledError")
    assert errors[4].startswith("async_temper: SystemExit: 3")
    assert [r.reward for r in pool.score(texts("fine", "fine"))] == [1, 1]


def test_so_many_calls_of_an_async_function_are_under_way_at_one_time(make_pool, texts) -> None:
    pool = make_pool("most_under_way", concurrency=3)
    seen = [rollout.reward for rollout in pool.score(texts(*"abcdefghij"))]
    assert max(seen) == 3


def test_the_deadline_of_an_async_call_counts_from_its_own_begin(make_pool, texts) -> None:
    """These wait for each other, and those that hang come first: calls are mixed."""
    pool = make_pool("async_temper", concurrency=1, timeout_seconds=0.5)
    errors = [rollout.reward_error for rollout in pool.score(texts(*["think", "hang"] * 2))]
    assert [error and "0.5 s" in error for error in errors] == [None, True] * 2


@pytest.mark.nightly
def test_a_blocked_event_loop_costs_only_the_calls_that_had_begun(
    make_pool, texts, monkeypatch
) -> None:
    monkeypatch.setattr("burnish.rewards.pool._LATE_SECONDS", 4.0)
    pool = make_pool("block", concurrency=4, timeout_seconds=0.5)
    said = ["fine"] * 22
    said[1], said[17] = "block", "never"  # of calls that are mixed the third and the ninth
    errors = [rollout.reward_error for rollout in pool.score(texts(*said))]
    assert errors[1] == errors[17]
    assert "0.5 s" in errors[1]
    assert sum(error is not None for error in errors) <= 2 + 3  # and who had begun beside it
    assert [r.reward_error for r in pool.score(texts("fine"))] == [None]


@pytest.mark.nightly
def test_an_async_function_that_always_hangs_is_given_up(make_pool, texts, monkeypatch) -> None:
    monkeypatch.setattr("burnish.rewards.pool._MAX_TIMEOUTS", 2)
    pool = make_pool("async_temper", concurrency=8, workers=2, timeout_seconds=0.5)
    errors = [rollout.reward_error for rollout in pool.score(texts(*["hang"] * 400))]
    late = errors.count("async_temper: no answer within 0.5 s")
    given_up = "async_temper: given up: call after call: no answer within 0.5 s"
    assert (late >= 16, errors.count(given_up)) == (True, 400 - late)
    assert errors.count(given_up) > 0


def test_a_call_about_all_completions_can_be_divided(make_pool, texts) -> None:
    pool = make_pool("how_many", per_call=2, timeout_seconds=1.0)
    scored = pool.score(texts("a", "b", "c", "sleep", "d"))
    assert str([r.reward for r in scored]) == "[2.0, 2.0, nan, nan, 1.0]"
    late = "how_many: no answer within 1 s for 2 completions"
    assert [r.reward_error for r in scored] == [None, None, late, late, None]


def test_names_of_further_numbers_are_bounded_and_that_is_said_once(
    make_pool, texts, caplog
) -> None:
    pool = make_pool("numbers_everything")
    names = set[str]()
    for round_ in range(3):
        scored = pool.score(texts(*(f"{round_}-{i}" for i in range(4))))
        assert all(each.reward_error is None for each in scored)
        assert all(each.reward_parts["numbers_everything"] == 1 for each in scored)
        names |= {name for each in scored for name in each.reward_parts}
    assert len(names) == 101
    assert max(map(len, names)) <= 100
    assert len([each for each in caplog.records if "too many" in each.message]) == 1


def test_the_same_function_twice_has_two_parts(make_pool, texts) -> None:
    (rollout,) = make_pool("exact_match", "exact_match").score(texts("4"))
    assert dict(rollout.reward_parts) == {"exact_match": 1, "exact_match_2": 1}


def test_workers_are_kept_are_other_processes_and_import_nothing_heavy(make_pool, texts) -> None:
    pool = make_pool("process", "torch_is_imported", workers=1)
    (first,), (second,) = pool.score(texts("a")), pool.score(texts("a"))
    assert first.reward_parts["process"] == second.reward_parts["process"] != os.getpid()
    assert first.reward_parts["torch_is_imported"] == 0


def test_close_ends_the_workers(make_pool, texts) -> None:
    with make_pool("process") as pool:
        (rollout,) = pool.score(texts("a"))
    with pytest.raises(ProcessLookupError):
        os.kill(int(rollout.reward_parts["process"]), 0)


@pytest.mark.nightly
def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    source = tmp_path / "user_rewards.py"
    source.write_text(SOURCE)
    script = (
        "import os, signal\n"
        "from burnish.config.schema import RewardConfig\n"
        "from burnish.rewards.pool import RewardPool, _Call\n"
        f"config = RewardConfig(functions=[{{'function': {f'{source}:process'!r}}}], workers=1)\n"
        "calls = [_Call(0, {'completions': ['a']}, 1)]\n"
        "pid = int(RewardPool(config)._run(calls, lambda: None)[0].value)\n"
        "print(pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    until_gone(int(done.stdout.split()[-1]))


def test_a_wait_ends_with_what_its_check_raises_and_leaves_no_late_answers(
    make_pool, texts
) -> None:
    """The deadline is beyond every patience: only the check can end this."""
    pool = make_pool("temper", workers=1, timeout_seconds=100_000.0)
    looks = iter([None, None, KeyboardInterrupt()])

    def check() -> None:
        if error := next(looks):
            raise error

    with pytest.raises(KeyboardInterrupt):
        pool.score(texts("sleep", "fine"), check)
    assert [r.reward for r in pool.score(texts("fine"))] == [1]


def test_a_function_that_cannot_be_used_is_refused_at_once(make_pool, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        make_pool("lenght")
    assert "'length'" in str(caught.value)
    with pytest.raises(UsageError, match="'scale'"):
        make_pool("score", kwargs={"scale": 2})
    with pytest.raises(UsageError, match="'case'"):
        make_pool("exact_match", kwargs={"case": True})


@pytest.mark.parametrize(
    ("source", "have"),
    [
        ("import os; os._exit(3)", "exit status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV"),
    ],
)
@pytest.mark.nightly
def test_a_module_that_ends_the_process(tmp_path: Path, source: str, have: str) -> None:
    (tmp_path / "ends.py").write_text(source)
    config = RewardConfig(functions=[RewardFunctionConfig(function=f"{tmp_path}/ends.py:f")])
    with pytest.raises(UsageError, match=have):
        RewardPool(config)


@pytest.mark.nightly
def test_a_module_that_ends_the_process_once_is_imported_again(tmp_path: Path, texts) -> None:
    """Also between calls, when a worker that died is replaced."""
    (tmp_path / "once.py").write_text(
        "import os, pathlib\n"
        f"mark = pathlib.Path({str(tmp_path)!r}) / 'mark'\n"
        "if not mark.exists():\n    mark.touch()\n    os._exit(3)\n"
        "def pid(solution_str): return float(os.getpid())\n"
    )
    config = RewardConfig(functions=[{"function": f"{tmp_path}/once.py:pid"}], workers=1)
    with RewardPool(config) as pool:
        (first,) = pool.score(texts("a"))
        (tmp_path / "mark").unlink()
        os.kill(int(first.reward), signal.SIGKILL)
        (second,) = pool.score(texts("a"))
    assert first.reward_error is second.reward_error is None
    assert first.reward != second.reward


def test_a_module_that_hangs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("burnish.rewards.pool._START_SECONDS", 1.0)
    (tmp_path / "hangs.py").write_text("while True: pass")
    config = RewardConfig(functions=[RewardFunctionConfig(function=f"{tmp_path}/hangs.py:f")])
    with pytest.raises(UsageError):
        RewardPool(config)


def test_a_column_that_the_data_lacks(make_pool, make_rollout) -> None:
    pool = make_pool("exact_match", "needs_level")
    pool.check_columns(["level", "answer"], "data.train")
    with pytest.raises(MissingError) as caught:
        pool.check_columns(["answer"], "data.validation")
    assert "data.validation" in str(caught.value)
    (scored,) = pool.score([make_rollout(columns={"level": 3})])
    assert scored.reward_parts["needs_level"] == 3


def test_calls_cost_messages_not_processes(make_pool, texts, monkeypatch) -> None:
    pool = make_pool("score", "length", workers=1)
    rollouts = texts(*["4"] * 128)
    monkeypatch.setattr("subprocess.Popen", None)
    for _ in range(2):
        assert all(r.reward == 1 + 2 for r in pool.score(rollouts))


def test_a_worker_whose_trainer_waits_no_longer_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef slow(completions, **columns):\n    time.sleep(0.3)\n    return [1.0]\n"
    )
    trainer, worker = Pipe()
    with open(os.devnull, "r+b") as stack, worker, trainer:
        files = worker.fileno(), stack.fileno()
        numbers = map(str, (files[0], os.getpid(), files[1]))
        argv = [sys.executable, "-m", "burnish.rewards.worker", *numbers]
        child = subprocess.Popen(argv, pass_fds=files, stderr=subprocess.PIPE)
        worker.close()
        trainer.send(([(f"{tmp_path}/slow.py:slow", {})], 1, 9.0, sys.argv, sys.path))
        assert len(trainer.recv()) == 1
        trainer.send((0, [(0, {"completions": ["x"]}, 1)]))
        trainer.close()
        assert child.communicate() == (None, b"")
    assert child.returncode == 0

import io
import logging
import math
import re
from pathlib import Path

import pytest
from contracts.tracker import TrackerContract

from burnish.tracking.console import ConsoleTracker, duration
from burnish.tracking.logs import rank_log
from burnish.tracking.spans import Spans

RL = {
    "reward/mean": 0.8123,
    "actor/pg_loss": -0.00123,
    "actor/ppo_kl": 1.2e-5,
    "actor/entropy": 0.41,
    "actor/grad_norm": 0.83,
    "actor/lr": 1e-6,
    "response_length/mean": 132.3,
    "perf/tokens_per_s": 12345.0,
    "timing_s/step": 3.42,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(steps: dict[int, dict[str, float]], **options: object) -> list[str]:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream=stream, **options)  # type: ignore[arg-type]
    for step, values in steps.items():
        tracker.log(step, values)
    tracker.close()
    return stream.getvalue().splitlines()


class TestConsoleTracker(TrackerContract):
    def open(self, directory: Path, resume_step: int | None = None) -> ConsoleTracker:
        return ConsoleTracker(stream=io.StringIO())


def test_a_step_of_reinforcement_learning() -> None:
    (line,) = lines({12: RL}, total_steps=500)
    assert line == (
        "step  12/500  reward  0.812  loss -1.2e-3  grad 0.830  lr 1.0e-6  len  132"
        "  tok/s 12.3k   3.42s  eta 27m49s"
    )


def test_a_step_of_conversations_has_turns_and_failures() -> None:
    talks = RL | {"environment/turns": 3.18, "environment/failed": 2.0, "reward/errors": 2.0}
    quiet = talks | {"environment/failed": 0.0, "reward/errors": 0.0}
    both = talks | {"reward/errors": 5.0}
    shown = lines({1: talks, 2: quiet, 3: both})
    assert "turns 3.2  failed 2  loss" in shown[0]
    assert "errors" not in shown[0]
    assert "turns 3.2  loss" in shown[1]
    assert "errors 5  turns 3.2  failed 2" in shown[2]


def test_the_log_has_the_numbers_of_every_step(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    spans = Spans()
    with rank_log(path, 0, spans, "text"):
        logging.getLogger("burnish").info("begun")
        for spans.step in (1, 2, 3):
            shown = lines({spans.step: RL | {"val/reward": 0.5}}, total_steps=9, every=3, width=30)  # fmt: skip
            assert len(shown) == 1 + (spans.step != 2)
    written = path.read_text().splitlines()[1:]
    assert [line.split(" step ")[1].split()[0] for line in written] == ["1", "2", "3"]
    for line in written:
        assert " info rank 0 " in line
        numbers = line.partition(" burnish: ")[2].split("  ")
        assert {"reward 0.812", "ent 0.410", "len 132", "3.42s", "val/reward 0.500"} <= {*numbers}
    lines({4: RL})
    assert len(path.read_text().splitlines()) == 4  # the run has ended


def test_lines_stand_under_each_other_however_small_a_number_is() -> None:
    first, second = lines({12: RL, 13: RL | {"actor/pg_loss": 0.018}}, total_steps=500)
    labels = ("loss", "grad", "lr", "len", "tok/s", "eta")
    assert [first.index(label) for label in labels] == [second.index(label) for label in labels]


def test_the_last_line_has_the_fields_of_the_others() -> None:
    many = RL | {"reward/errors": 6.0}
    shown = lines({499: many, 500: many}, total_steps=500)
    others, last = (line.partition("  eta ")[0] for line in shown)
    assert last == others.replace("499/500", "500/500")
    assert shown[1].endswith("  eta 0s")


def test_a_validation_has_a_line_of_its_own() -> None:
    shown = lines({0: {"val/x": 0.25, "timing_s/step": 1.0}, 7: RL | {"val/x": 0.5}})
    assert shown[0] == "step 0  val/x 0.250"
    assert shown[1].startswith("step 7  reward  0.812")
    assert shown[2:] == ["step 7  val/x 0.500"]


def test_lines_of_every_third_step() -> None:
    steps = {step: {"train/loss": 2.0} for step in range(1, 9)} | {5: {"val/loss": 1.0}}
    shown = lines(steps, total_steps=8, every=3)
    assert [line[:8] for line in shown] == [f"step {n}/8" for n in (1, 3, 5, 6, 8)]


def test_errors_of_reward_functions_are_shown_where_there_are_any() -> None:
    (line,) = lines({3: {"reward/mean": 0.5, "reward/errors": 0.0}})
    assert line == "step 3  reward  0.500"
    (line,) = lines({3: {"reward/mean": 0.5, "reward/errors": 17.0}})
    assert line == "step 3  reward  0.500  errors 17"


def test_a_step_shows_what_it_has() -> None:
    assert lines({3: {"actor/loss": 2.5, "other/thing": 1.0}}) == ["step 3  loss   2.500"]
    assert lines({0: {"val/mean@1": 0.25}}) == ["step 0  val/mean@1 0.250"]
    assert lines({0: {"val/mean@1": 0.25, "val/math/mean@1": 0.5}}) == ["step 0  val/mean@1 0.250"]
    assert lines({0: {}}) == ["step 0"]


@pytest.mark.parametrize("width", [40, 80, 100, 120])
def test_a_line_is_never_longer_than_its_width(width: int) -> None:
    values = RL | {f"val/{name}@4": 0.5 for name in ("mean", "pass", "maj")}
    shown = lines({123456: values}, total_steps=1_000_000, width=width)
    assert len(shown) == 2
    for line in shown:
        assert len(line) <= width
        assert line.startswith("step  123456/1000000")


def test_a_line_is_as_wide_as_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        ConsoleTracker(stream=stream).log(1, RL)
    shown = re.sub(r"\x1b\[\d+m", "", terminal.getvalue())
    assert len(shown.rstrip("\n")) <= 60 < len(file.getvalue())


def test_the_time_left_is_that_of_recent_steps() -> None:
    steps = {step: {"timing_s/step": 100.0 if step == 1 else 2.0} for step in range(1, 31)}
    shown = lines(steps, total_steps=40)
    assert shown[0].endswith("eta 1h05m")  # 39 steps of 100 s
    assert shown[-1].endswith("eta 20s")  # 10 steps of 2 s


def test_numbers_that_are_not_finite_are_shown() -> None:
    (line,) = lines({1: {"actor/loss": math.nan, "actor/grad_norm": math.inf}})
    assert line == "step 1  loss     nan  grad   inf"


def test_only_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        ConsoleTracker(stream=stream).log(1, RL)
    assert "\x1b[" in terminal.getvalue()
    assert "\x1b" not in file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.6, "1m00s"), (200, "3m20s"), (7500, "2h05m"), (371000, "4d07h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tracking.made_rollouts import made_rollout

from burnish.records import Rollout
from burnish.tracking import report
from burnish.tracking.report import choose_examples
from burnish.tracking.rollouts import read_rollouts, write_rollouts


def write(directory: Path, step: int, rewards: dict[int, list[float]]) -> None:
    """Rollouts with these rewards by prompt; a completion says where it is from."""
    rollouts: list[Rollout] = [
        made_rollout(index, sample, reward=reward, text=f"{step}/{index}/{sample}")
        for index, group in rewards.items()
        for sample, reward in enumerate(group)
    ]
    write_rollouts(directory, step, rollouts, [0.0] * len(rollouts))


def test_best_and_worst_are_of_the_newest_step_one_a_prompt(tmp_path: Path) -> None:
    write(tmp_path, 1, {9: [9.0, -9.0]})
    write(tmp_path, 2, {0: [0.5, 0.1], 1: [0.9, 0.8], 2: [0.3, math.nan], 3: [0.2, 0.2]})
    found = choose_examples(tmp_path, count=2)
    assert found is not None
    assert found["step"] == 2
    assert [row["completion"] for row in found["best"]] == ["2/1/0", "2/0/0"]
    assert [row["completion"] for row in found["worst"]] == ["2/2/1", "2/0/1"]  # NaN is worst


def test_changed_most_compares_the_same_prompt_early_and_late(tmp_path: Path) -> None:
    write(tmp_path, 1, {0: [0.0, 0.0], 1: [1.0, 1.0], 2: [0.5, 0.5]})
    write(tmp_path, 5, {0: [0.5, 0.5], 3: [1.0, 0.0]})
    write(tmp_path, 9, {0: [1.0, 0.8, 0.0], 1: [0.0, 0.0], 2: [0.5, 0.5]})
    found = choose_examples(tmp_path)
    assert found is not None
    assert [(early["completion"], late["completion"]) for early, late, *_ in found["changed"]] == [
        ("1/1/0", "9/1/0"),
        ("1/0/0", "9/0/1"),  # the sample nearest to the mean
    ]
    assert [tuple(means) for _, _, *means in found["changed"]] == [
        (1.0, 0.0),
        (0.0, pytest.approx(0.6)),
    ]


def test_no_rollouts_are_no_examples(tmp_path: Path) -> None:
    assert choose_examples(tmp_path / "rollouts") is None
    write(tmp_path, 1, {})
    assert choose_examples(tmp_path) is None


def test_long_texts_are_shortened_in_the_middle(tmp_path: Path) -> None:
    write_rollouts(tmp_path, 1, [made_rollout(text="a" * 5000 + "b" * 5000)], [0.0])
    found = choose_examples(tmp_path)
    assert found is not None
    text = found["best"][0]["completion"]
    assert len(text) < 3100
    assert "7,000 characters left out" in text
    assert text.startswith("aaa")
    assert text.endswith("bbb")


def test_a_long_run_is_read_from_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 11):
        write(tmp_path, step, {step: [1.0]})
    size = (tmp_path / "step-00000001.jsonl").stat().st_size
    monkeypatch.setattr(report, "READ_BYTES", int(4.5 * size))
    read: list[str] = []

    def noted(path: Path) -> Iterator[dict[str, Any]]:
        read.append(path.stem)
        return read_rollouts(path)

    monkeypatch.setattr(report, "read_rollouts", noted)
    choose_examples(tmp_path)
    assert read == [f"step-{step:08d}" for step in (10, 1, 9, 2)]

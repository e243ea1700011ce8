import json
import math
from pathlib import Path

import pytest
from tracking.made_rollouts import made_rollout

from burnish.errors import CorruptError
from burnish.tracking.rollouts import (
    discard_rollouts_after,
    read_rollouts,
    rollout_files,
    rollouts_path,
    write_rollouts,
)


def test_a_row_has_everything(tmp_path: Path) -> None:
    path = write_rollouts(tmp_path / "rollouts", 10, [made_rollout(5, 2, stop="length")], [0.5])
    assert path == tmp_path / "rollouts" / "step-00000010.jsonl"
    assert list(read_rollouts(path)) == [
        {
            "step": 10,
            "prompt_index": 5,
            "sample": 2,
            "prompt": "2+2=",
            "completion": "4",
            "answer": "4",
            "reward": 1.0,
            "reward_parts": {"exact": 1.0},
            "reward_error": None,
            "advantage": 0.5,
            "stop_reason": "length",
            "length": 3,
            "weights_version": 7,
            "source": "sums",
        }
    ]


def test_the_order_they_were_made_in_does_not_matter(tmp_path: Path) -> None:
    rollouts = [
        made_rollout(index, sample, text=f"{index}.{sample}")
        for index in (3, 1)
        for sample in (1, 0)
    ]
    advantages = [0.1, 0.2, 0.3, 0.4]
    one = write_rollouts(tmp_path / "a", 1, rollouts, advantages).read_bytes()
    two = write_rollouts(tmp_path / "b", 1, rollouts[::-1], advantages[::-1]).read_bytes()
    assert one == two
    assert [json.loads(line)["completion"] for line in one.splitlines()] == [
        "1.0",
        "1.1",
        "3.0",
        "3.1",
    ]


def test_any_text_and_number_can_be_written(tmp_path: Path) -> None:
    texts = [
        "",
        "line\nline\r\u2028\x85 end",
        "日本語 🙂",
        "lone \ud800 surrogate",
        "\x00</script>",
    ]
    rollouts = [made_rollout(i, text=text, reward=math.nan) for i, text in enumerate(texts)]
    path = write_rollouts(tmp_path, 1, rollouts, [math.inf] * len(texts))
    rows = list(read_rollouts(path))
    assert [row["completion"] for row in rows] == texts
    assert {row["reward"] for row in rows} == {"NaN"}
    assert {row["advantage"] for row in rows} == {"Infinity"}
    assert "日本語 🙂" in path.read_text("utf-8")


def test_every_rollout_needs_its_advantage(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="zip"):
        write_rollouts(tmp_path, 1, [made_rollout()], [])
    assert list(tmp_path.iterdir()) == []


def test_files_of_later_steps_are_discarded(tmp_path: Path) -> None:
    for step in (5, 10, 100_000_000):
        write_rollouts(tmp_path, step, [], [])
        write_rollouts(tmp_path, step, [made_rollout()], None)
    (tmp_path / "step-notes.jsonl").write_text("mine")
    assert [step for step, _ in rollout_files(tmp_path)] == [5, 10, 100_000_000]
    discard_rollouts_after(tmp_path, 5)
    assert rollout_files(tmp_path) == [(5, rollouts_path(tmp_path, 5))]
    validation = rollouts_path(tmp_path, 5, "validation")
    assert rollout_files(tmp_path, "validation") == [(5, validation)]
    assert [row["advantage"] for row in read_rollouts(validation)] == [None]
    assert (tmp_path / "step-notes.jsonl").exists()
    assert rollout_files(tmp_path / "nowhere") == []


@pytest.mark.parametrize("line", ["{half", "[1]", '{"completion": "x"}'])
def test_a_line_that_is_no_rollout_is_named(tmp_path: Path, line: str) -> None:
    path = write_rollouts(tmp_path, 1, [made_rollout()], [0.0])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(CorruptError, match=r"(?s)step-00000001\.jsonl.*line 2"):
        list(read_rollouts(path))

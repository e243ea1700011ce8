import gzip
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.runs.rollouts import made_rollout, table_of

from burnish.errors import CorruptError
from burnish.records import Rollout
from burnish.tracking.rollouts import (
    EXTREMES,
    RANDOMS,
    blocks,
    chosen,
    discard_rollouts_after,
    rank,
    read_rollouts,
    rollout_files,
    rollouts_path,
    texts_of_tokens,
    thin_rollouts,
    write_rollouts,
)


def written(directory: Path, step: int, rollouts: list[Rollout], *given: Any) -> Path:
    """The file of the rollouts that are kept longest."""
    write_rollouts(directory, step, table_of(rollouts), *given)
    return rollouts_path(directory, step)


def test_a_row_has_everything(tmp_path: Path) -> None:
    path = written(tmp_path / "rollouts", 10, [made_rollout(5, 2, stop="length")], [0.5])
    assert path == tmp_path / "rollouts" / "step-00000010.jsonl.gz"
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


def test_chosen_rows_have_the_other_columns(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "2+2?"}]
    columns = {
        "prompt": messages[1:],
        "question": "2+2?",
        "answer": "4",
        "level": 3,
        "é": "x" * 5000,
        "image": {"bytes": b"\xff", "size": np.int64(2)},
        "tests": ["a", {"b": math.nan}],
    }
    made = [made_rollout(index) for index in range(40)]
    given = [
        replace(each, prompt=replace(each.prompt, messages=messages, columns=columns))
        for each in made
    ]
    rows = [*read_rollouts(written(tmp_path, 1, given, [0.0] * 40))]
    rest = [*read_rollouts(rollouts_path(tmp_path, 1, rest=True))]
    assert len(rows) + len(rest) == 40
    assert rest
    assert not any("columns" in row for row in rest)
    for row in rows:
        assert row["columns"].pop("é") == "x" * 2000 + " … 3,000 more characters"
        assert row["columns"] == {
            "level": "3",
            "image": '{"bytes": "bytes", "size": "int64"}',
            "tests": '["a", {"b": NaN}]',
        }


def test_order_and_choice_are_those_of_sorted_pairs() -> None:
    """With rewards that occur often, infinite ones, and NaN, which is the least."""
    rng = np.random.default_rng(0)
    places = [(i, sample) for i in (7, -1, 2**40, 3) for sample in range(20)]
    rng.shuffle(places)
    rewards = rng.choice([0.0, 1.0, 0.5, math.nan, math.inf, -math.inf], len(places)).tolist()
    made = [made_rollout(*place, reward=each) for place, each in zip(places, rewards, strict=True)]
    for count in (0, 1, 9, 80):
        table = table_of(made[:count])
        order = sorted(range(count), key=lambda i: tuple(places[i]))
        assert table.order == order
        ranked = sorted(order, key=lambda i: rank({"reward": rewards[i]}))
        others = ranked[EXTREMES:-EXTREMES]
        drawn = random.Random(5 if count else 0).sample(others, min(RANDOMS, len(others)))
        want = {*ranked[:EXTREMES], *ranked[-EXTREMES:], *drawn}
        assert chosen(5, table) == want


def test_the_order_they_were_made_in_does_not_matter(tmp_path: Path) -> None:
    rollouts = [made_rollout(i, sample, text=f"{i}.{sample}") for i in (3, 1) for sample in (1, 0)]
    advantages = [0.1, 0.2, 0.3, 0.4]
    one = written(tmp_path / "a", 1, rollouts, advantages)
    two = written(tmp_path / "b", 1, rollouts[::-1], advantages[::-1])
    assert one.read_bytes() == two.read_bytes()
    rows = [(row["completion"], row["advantage"]) for row in read_rollouts(one)]
    assert rows == [("1.0", 0.4), ("1.1", 0.3), ("3.0", 0.2), ("3.1", 0.1)]


def test_best_worst_and_random_ones_are_kept_apart(tmp_path: Path) -> None:
    rollouts = [made_rollout(i, reward=reward) for i, reward in enumerate([*range(99), math.nan])]
    path = written(tmp_path, 1, rollouts, [0.0] * 100)
    rest = rollouts_path(tmp_path, 1, rest=True)
    assert rollout_files(tmp_path) == [(1, path), (1, rest)]
    kept = [row["prompt_index"] for row in read_rollouts(path)]
    others = [row["prompt_index"] for row in read_rollouts(rest)]
    assert len(kept) == 2 * EXTREMES + RANDOMS
    assert sorted(kept + others) == list(range(100))
    assert {0, 1, 2, 99, *range(95, 99)} <= set(kept)
    write_rollouts(tmp_path, 1, table_of(rollouts[:3]), [0.0] * 3)
    assert not rest.exists()


def test_tokens_have_texts_and_numbers(tmp_path: Path) -> None:
    rollouts = [made_rollout(i) for i in range(40)]
    pieces = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:]}

    def texts(ids: list[int]) -> list[str]:
        return texts_of_tokens(
            ids, lambda held: b"".join(pieces[i] for i in held).decode("utf-8", "replace")
        )

    numbers = {"advantages": {i: np.full(3, i, np.float32) for i in range(40)}}
    path = written(tmp_path, 1, rollouts, [0.0] * 40, texts, numbers)
    for row in read_rollouts(path):
        each = [float(row["prompt_index"])] * 3
        assert row["tokens"] == {"texts": ["a", "é", ""], "logprobs": [0.0] * 3, "advantages": each}
    rest = rollouts_path(tmp_path, 1, rest=True)
    assert not any("tokens" in row for row in read_rollouts(rest))


def test_tokens_lack_numbers_that_were_not_computed(tmp_path: Path) -> None:
    """As those of a completion that was cut, with `algorithm.mask_truncated`."""
    numbers = {"advantages": {0: np.ones(3, np.float32)}}
    rollouts = [made_rollout(0), made_rollout(1)]
    path = written(tmp_path, 1, rollouts, [1.0, 1.0], lambda ids: ["a"] * len(ids), numbers)
    one, other = (row["tokens"] for row in read_rollouts(path))
    assert one["advantages"] == [1.0] * 3
    assert other.keys() == {"texts", "logprobs"}


def test_too_many_are_thinned_from_the_oldest(tmp_path: Path) -> None:
    rollouts = [made_rollout(i, text=f"{i}" * 50) for i in range(40)]
    for step in range(1, 6):
        write_rollouts(tmp_path, step, table_of(rollouts), [0.0] * 40)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    chosen, rest = (rollouts_path(tmp_path, 1, rest=r).name for r in (False, True))
    thin_rollouts(tmp_path, sum(sizes.values()))
    assert len(list(tmp_path.iterdir())) == 10
    thin_rollouts(tmp_path, sum(sizes.values()) - sizes[rest] - 1)
    left = {path.name for path in tmp_path.iterdir()}
    assert sizes.keys() - left == {rollouts_path(tmp_path, step, rest=True).name for step in (1, 2)}
    thin_rollouts(tmp_path, 1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {chosen, *(rollouts_path(tmp_path, 5, rest=r).name for r in (False, True))}


def test_a_row_is_read_from_its_block(tmp_path: Path) -> None:
    texts = [f"{i} " * 40_000 for i in range(10)]
    path = written(tmp_path, 1, [made_rollout(i, text=t) for i, t in enumerate(texts)], [0.0] * 10)
    found = list(blocks(path))
    assert len(found) > 2
    assert b"".join(text for _, text in found) == gzip.decompress(path.read_bytes())
    for start, text in found:
        assert next(blocks(path, start)) == (start, text)


def test_any_text_and_number_can_be_written(tmp_path: Path) -> None:
    texts = [
        "",
        "line\nline\r\u2028\x85 end",
        "日本語 🙂",
        "lone \ud800 surrogate",
        "\x00</script>",
    ]
    rollouts = [made_rollout(i, text=text, reward=math.nan) for i, text in enumerate(texts)]
    path = written(tmp_path, 1, rollouts, [math.inf] * len(texts))
    rows = list(read_rollouts(path))
    assert [row["completion"] for row in rows] == texts
    assert {row["reward"] for row in rows} == {"NaN"}
    assert {row["advantage"] for row in rows} == {"Infinity"}
    assert "日本語 🙂".encode() in gzip.decompress(path.read_bytes())


def test_every_rollout_needs_its_advantage(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="zip"):
        write_rollouts(tmp_path, 1, table_of([made_rollout()]), [])
    assert list(tmp_path.iterdir()) == []


def test_files_of_later_steps_are_discarded(tmp_path: Path) -> None:
    for step in (5, 10, 100_000_000):
        write_rollouts(tmp_path, step, table_of([]), [])
        write_rollouts(tmp_path, step, table_of([made_rollout()]), None)
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
    path = written(tmp_path, 1, [made_rollout()], [0.0])
    before = path.stat().st_size
    path.write_bytes(path.read_bytes() + gzip.compress(f"{line}\n".encode()))
    with pytest.raises(CorruptError, match=rf"(?s)step-00000001\.jsonl.*byte {before}"):
        list(read_rollouts(path))


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:30] + b"x" * 9 + data[39:], lambda data: b"{}"])  # fmt: skip
def test_damaged_bytes_are_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = written(tmp_path, 1, [made_rollout()], [0.0])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptError, match=r"step-00000001\.jsonl"):
        list(read_rollouts(path))

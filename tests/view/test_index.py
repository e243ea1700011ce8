"""The index of rollouts: pages, filters and orders beside plain Python, and files that change, vanish or break."""

from __future__ import annotations

import gzip
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws
from support.runs.rollout_files import row, write

import burnish.view.index
from burnish.errors import CorruptError, MissingError, UsageError
from burnish.tracking.rollouts import Kind, thin_rollouts
from burnish.view.index import RolloutFilter, RolloutIndex

Wrote = dict[tuple[Kind, int, bool], list[dict[str, Any]]]

REWARDS = st.sampled_from([0.0, 1.0, -1.0, 0.25, "NaN", "Infinity", "-Infinity"])
TEXTS = st.sampled_from(
    ["", "a", "Straße", "STRASSE", 'say "hi"\n', "\\u0041", "naïve", "\ud800x", "😀"]
)
ROWS = st.lists(
    st.builds(
        row,
        st.integers(0, 3),
        st.integers(0, 2),
        reward=REWARDS,
        length=st.integers(0, 4),
        source=st.sampled_from(["s", "t", "\ud800"]),
        prompt=TEXTS,
        completion=TEXTS,
    ),
    max_size=5,
)
FILES = st.dictionaries(
    st.tuples(st.sampled_from(["step", "validation"]), st.integers(0, 3), st.booleans()),
    ROWS,
    max_size=8,
)
FILTERS = st.builds(
    RolloutFilter,
    kind=st.sampled_from(["step", "validation"]),
    from_step=st.integers(0, 2),
    to_step=st.integers(0, 4),
    prompt=st.none() | st.integers(0, 4),
    source=st.none() | st.sampled_from(["s", "t", "\ud800", "none"]),
    text=st.just("") | st.sampled_from(["A", "strasse", '"HI"\n', "u0041", "Ï", "😀", "x"]),
    min_reward=st.none() | st.sampled_from([0.0, 1.0, -math.inf]),
    max_reward=st.none() | st.sampled_from([0.0, 0.25, math.inf]),
    min_length=st.none() | st.integers(0, 5),
    max_length=st.none() | st.integers(0, 5),
    sort=st.sampled_from(["place", "reward", "-reward", "length", "-length", "step"]),
)


@contextmanager
def index_of(directory: Path) -> Iterator[RolloutIndex]:
    with closing(RolloutIndex(directory)) as found:
        yield found


def pages(
    index: RolloutIndex, wanted: RolloutFilter, cursor: str | None = "", limit: int = 50
) -> list[dict[str, Any]]:
    """The rows of all pages, or those after a cursor."""
    found: list[dict[str, Any]] = []
    while cursor is not None:
        page = index.page(wanted, cursor, limit)
        assert len(page.rows) <= limit
        for identity, each in page.rows:
            assert index.row(identity)["completion"] == each["completion"]
        found += [each for _, each in page.rows]
        cursor = page.next
    return found


def expected(files: Wrote, wanted: RolloutFilter) -> list[dict[str, Any]]:
    """What a reader of all files finds."""
    found: list[tuple[Any, dict[str, Any]]] = []
    for step in sorted({step for kind, step, _ in files if kind == wanted.kind}, reverse=True):
        both = [
            *files.get((wanted.kind, step, False), []),
            *files.get((wanted.kind, step, True), []),
        ]
        for each in sorted(both, key=lambda each: (each["prompt_index"], each["sample"])):
            found.append((len(found), {**each, "kind": wanted.kind, "step": step}))

    def fits(each: dict[str, Any]) -> bool:
        reward, length = float(each["reward"]), each["length"]
        texts = (each["prompt"].casefold(), each["completion"].casefold())
        return all(
            (
                wanted.from_step <= each["step"] <= wanted.to_step,
                wanted.prompt in (None, each["prompt_index"]),
                wanted.source in (None, each["source"]),
                wanted.min_reward is None or reward >= wanted.min_reward,
                wanted.max_reward is None or reward <= wanted.max_reward,
                wanted.min_length is None or length >= wanted.min_length,
                wanted.max_length is None or length <= wanted.max_length,
                any(wanted.text.casefold() in text for text in texts),
            )
        )

    def key(place_and_row: tuple[int, dict[str, Any]]) -> tuple[float, ...]:
        place, each = place_and_row
        reward = float(each["reward"])
        # NaN is above -inf and below all others.
        by = {"reward": (math.nextafter(-math.inf, 0) if math.isnan(reward) else reward,)}
        return (
            *by.get(wanted.sort.strip("-"), ()),
            *((each["length"],) if "length" in wanted.sort else ()),
            place,
        )

    found.sort(key=key, reverse=wanted.sort in ("step", "-reward", "-length"))
    return [each for _, each in found if fits(each)]


@draws(150)
@given(files=FILES, wanted=FILTERS, limit=st.integers(1, 4))
def test_pages_have_what_a_reader_of_all_files_finds(
    files: Wrote, wanted: RolloutFilter, limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("run") / "rollouts"
    for (kind, step, rest), rows in files.items():
        write(directory, step, rows, kind, rest=rest)
    right = expected(files, wanted)
    with index_of(directory) as index:
        assert pages(index, wanted, limit=limit) == right
        wait_for(index, wanted.kind)
        assert pages(index, wanted, limit=limit) == right
        page = index.page(wanted)
        assert page.total == (None if wanted.text else len(right))
        assert page.unread == 0


def wait_for(index: RolloutIndex, kind: Kind | None = None) -> dict[str, Any]:
    """The facets when the newest steps are indexed."""
    while (facets := index.facets(kind))["indexed"] < 1:
        time.sleep(0.001)
    return facets


def test_facets(tmp_path: Path) -> None:
    directory = tmp_path / "rollouts"
    write(directory, 1, [row(0, reward=0.5, length=1), row(1, reward="NaN", length=9, source="t")])
    write(directory, 5, [row(0, reward=2.5), row(1, reward="Infinity")], rest=True)
    write(directory, 4, [row(reward=-1.0)], "validation")
    with index_of(directory) as index:
        found = wait_for(index)
        assert (found["steps"], found["validations"]) == ([1, 5, 2], [4])
        assert found["sources"] == ["s", "t"]
        assert wait_for(index, "validation")["sources"] == ["s"]


def test_without_files_there_is_nothing(tmp_path: Path) -> None:
    with index_of(tmp_path / "rollouts") as index:
        page = index.page(RolloutFilter())
        assert (page.rows, page.next, page.total) == ([], None, 0)
        assert index.facets()["steps"] is None


def test_a_run_that_only_validates(tmp_path: Path) -> None:
    write(tmp_path / "rollouts", 4, [row()], "validation")
    with index_of(tmp_path / "rollouts") as index:
        assert index.kind() == "validation"


def look_again(index: RolloutIndex) -> None:
    """As if a second had passed since the index looked at the directory."""
    index._next_look = 0.0


def test_files_that_come_change_and_vanish(tmp_path: Path) -> None:
    directory = tmp_path / "rollouts"
    for step in (1, 2, 3):
        write(directory, step, [row(n, completion=f"{step}") for n in range(3)])
        write(directory, step, [row(n, 1, completion=f"{step}") for n in range(3)], rest=True)
    with index_of(directory) as index:
        wait_for(index)
        first = index.page(RolloutFilter(), limit=4)
        thin_rollouts(directory, 1)  # all that it may
        with pytest.raises(MissingError):
            index.row("step-00000002.rest:0:0")
        rest = pages(index, RolloutFilter(), first.next)
        assert {(each["step"], each["sample"]) for each in rest} == {(3, 0), (3, 1), (1, 0)}
        look_again(index)
        assert len(pages(index, RolloutFilter())) == 3 + 6
        write(directory, 4, [row(completion="4")])
        write(directory, 3, [row(completion="again")])
        look_again(index)
        found = [each["completion"] for each in pages(index, RolloutFilter())]
        assert found[:2] == ["4", "again"]
        assert found.count("again") == 1
        assert index.page(RolloutFilter()).total == len(found)


def test_damage_is_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    directory = tmp_path / "rollouts"
    whole = write(directory, 1, [row(n) for n in range(6)])
    cut = write(directory, 2, [row(n) for n in range(6)])
    cut.write_bytes(cut.read_bytes()[:-5])
    write(
        directory,
        3,
        [row(0), row(1, reward=[]), {"step": 3}, row("x"), row(2, length=math.inf), row(2)],
    )  # type: ignore[arg-type]
    flipped = bytearray(whole.read_bytes())
    flipped[40] ^= 255
    (directory / "step-00000004.jsonl.gz").write_bytes(flipped)
    (directory / "step-00000005.jsonl.gz").write_bytes(b"")
    (directory / "step-00000006.jsonl.gz").symlink_to(whole)
    os.mkfifo(directory / "step-00000007.jsonl.gz")
    with index_of(directory) as index:
        facets = wait_for(index)
        assert len(facets["problems"]) == 3
        steps = [each["step"] for each in pages(index, RolloutFilter())]
        assert steps == [3] * 2 + [2] * 4 + [1] * 6
        with pytest.raises(CorruptError):
            index.row("step-00000004:0:0")
        with pytest.raises(CorruptError):
            index.row("step-00000001:3:0")  # within a block
        for wrong in (
            "step-00000001:0:7",
            "step-00000006:0:0",
            "step-00000009:0:0",
            "../x:0:0",
            "",
            "step-1:0",
        ):
            with pytest.raises(MissingError):
                index.row(wrong)


def test_hostile_json_is_damage(tmp_path: Path) -> None:
    directory = tmp_path / "rollouts"
    path = write(directory, 1, [row()])
    nested = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    path.write_bytes(
        path.read_bytes() + gzip.compress(nested) + gzip.compress(b"9" * 10_000 + b"\n")
    )
    with index_of(directory) as index:
        assert len(wait_for(index)["problems"]) == 1
        assert len(pages(index, RolloutFilter())) == 1


@pytest.mark.parametrize("cursor", ["x", "1", "1,2,3", f"{2**80},0", "1,x"])
def test_a_cursor_that_is_none(tmp_path: Path, cursor: str) -> None:
    with index_of(tmp_path / "rollouts") as index, pytest.raises(UsageError):
        index.page(RolloutFilter(), cursor)


def test_only_the_newest_steps_are_read_in_advance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order by reward has the newest steps of those asked for; the order of steps has all."""
    monkeypatch.setattr(burnish.view.index, "NEWEST_STEPS", 3)
    monkeypatch.setattr(burnish.view.index, "_STEPS_KEPT", 6)
    directory = tmp_path / "rollouts"
    for step in range(1, 11):
        write(directory, step, [row(n, reward=float(step)) for n in range(2)])
    with index_of(directory) as index:
        facets = wait_for(index)
        assert facets["steps"] == [1, 10, 10]
        assert facets["older"] == 7
        by_reward = RolloutFilter(sort="reward")
        assert [each["step"] for each in pages(index, by_reward)] == [8, 8, 9, 9, 10, 10]
        page = index.page(by_reward)
        assert (page.total, page.unread, page.newest) == (6, 7, 10)
        older = RolloutFilter(sort="-reward", to_step=5)
        assert [each["step"] for each in pages(index, older)] == [5, 5, 4, 4, 3, 3]
        assert (index.page(older).total, index.page(older).unread) == (6, 2)
        one = RolloutFilter(sort="step", prompt=1)
        assert [each["step"] for each in pages(index, one, limit=3)] == [*range(1, 11)]
        assert len(pages(index, RolloutFilter(text="YES"))) == 20
        assert wait_for(index)["older"] == 7
        assert len(index._steps) <= 6


def test_a_search_that_takes_long_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burnish.view.index, "_SEARCH_SECONDS", 0.0)
    directory = tmp_path / "rollouts"
    for step in range(1, 6):
        write(directory, step, [row(n) for n in range(3)] if step % 2 else [])
    with index_of(directory) as index:
        for wanted in (RolloutFilter(text="yes"), RolloutFilter(text="no", sort="step")):
            pages_found = []
            cursor: str | None = ""
            while cursor is not None:
                page = index.page(wanted, cursor)
                pages_found.append([each["step"] for _, each in page.rows])
                cursor = page.next
            assert len(pages_found) > 5
            right = [5, 5, 5, 3, 3, 3, 1, 1, 1] if wanted.text == "yes" else []
            assert [step for each in pages_found for step in each] == right


def test_several_threads_share_an_index(tmp_path: Path) -> None:
    directory = tmp_path / "rollouts"
    for step in range(30):
        write(directory, step, [row(n, reward=float(step)) for n in range(10)])
    found: list[int] = []
    with index_of(directory) as index:

        def look() -> None:
            wait_for(index)
            found.append(len(pages(index, RolloutFilter(sort="reward"), limit=7)))

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [300] * 4


def test_answers_of_pairs_are_ordered_by_margin(tmp_path: Path) -> None:
    margins = {0: 0.5, 1: -2.0, 2: 1.5}
    rows = [
        {**row(prompt, sample, reward=float(prompt)), "reward_parts": {"margin": margin}}
        for prompt, margin in margins.items()
        for sample in range(2)
    ]
    write(tmp_path / "pairs", 3, rows, kind="validation")
    with index_of(tmp_path / "pairs") as index:
        for sort, order in {"margin": [1, 0, 2], "-margin": [2, 0, 1]}.items():
            found = pages(index, RolloutFilter(kind="validation", sort=sort), limit=4)
            assert [each["prompt_index"] for each in found] == [p for p in order for _ in range(2)]
        assert index.facets()["pairs"]
    write(tmp_path / "others", 1, [row(0, 0)])
    with index_of(tmp_path / "others") as index:
        list(index.page(RolloutFilter()).rows)
        assert not index.facets()["pairs"]

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.checkpoint.retention import PINS, PINS_LIMIT, holding_pins, read_pins
from burnish.errors import CorruptError
from burnish.files.storage import LocalStorage

LOCAL = LocalStorage()


def test_without_a_file_nothing_is_pinned(tmp_path: Path) -> None:
    assert read_pins(tmp_path, LOCAL) == {}
    assert read_pins(tmp_path / "absent", LOCAL) == {}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.integers(0, 10**18 - 1), st.text(st.characters(codec="utf-8")), max_size=5)
)
def test_pins_come_back_sorted(tmp_path: Path, pins: dict[int, str]) -> None:
    with holding_pins(tmp_path, LOCAL) as held:
        held.clear()
        held.update(pins)
    assert list(read_pins(tmp_path, LOCAL).items()) == sorted(pins.items())


def unpin_and_fail(root: Path) -> None:
    with holding_pins(root, LOCAL) as pins:
        del pins[3]
        raise ZeroDivisionError


def test_an_error_in_the_block_changes_nothing(tmp_path: Path) -> None:
    with holding_pins(tmp_path, LOCAL) as pins:
        pins[3] = "best"
    with pytest.raises(ZeroDivisionError):
        unpin_and_fail(tmp_path)
    assert read_pins(tmp_path, LOCAL) == {3: "best"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": 2, "pins": {}}',
        '{"format": 1, "pins": []}',
        '{"format": 1, "pins": {"-1": "x"}}',
        '{"format": 1, "pins": {"01": "x"}}',
        '{"format": 1, "pins": {"1": null}}',
        '{"format": 1, "pins": {"1": "x", "1": "y"}}',
        " " * (PINS_LIMIT + 1),
    ],
)
def test_a_file_that_is_none_pins_everything(tmp_path: Path, text: str) -> None:
    (tmp_path / PINS).write_text(text)
    with pytest.raises(CorruptError) as caught:
        read_pins(tmp_path, LOCAL)
    assert PINS in str(caught.value)
    with pytest.raises(CorruptError), holding_pins(tmp_path, LOCAL) as pins:
        pins[1] = "x"
    assert (tmp_path / PINS).read_text() == text


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text(json.dumps({"format": 1, "pins": {}}))
    (tmp_path / PINS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptError):
        read_pins(tmp_path, LOCAL)


def pin_many(root: Path, first: int) -> None:
    for step in range(first, first + 20):
        with holding_pins(root, LOCAL) as pins:
            pins[step] = "x"


def test_pins_of_several_processes_are_all_kept(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=pin_many, args=(tmp_path, 100 * n)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert len(read_pins(tmp_path, LOCAL)) == 60

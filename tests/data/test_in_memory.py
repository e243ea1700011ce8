"""Rows given from Python are files of the cache: the same rows, one file for the same content."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.api import load_config
from burnish.data.in_memory import stored
from burnish.data.sources import load_rows
from burnish.errors import UsageError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(
    st.fixed_dictionaries({"prompt": st.text(min_size=1), "extra": VALUES}), min_size=1, max_size=5
)


@given(rows=ROWS)
def test_rows_come_back_as_they_are(rows: list[dict[str, Any]]) -> None:
    path = stored(rows, "data.train")
    assert path == stored(tuple(map(dict, rows)), "data.train")
    assert load_rows([path]).span(0, len(rows)) == rows


def test_a_list_of_rows_may_stand_alone_or_in_its_section() -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    table = datasets.Dataset.from_list(rows)
    columns = {"prompt": ["1+1=", "1+2="], "answer": ["2", "3"]}
    for given_rows in (rows, table, columns, pa.table(columns), pandas.DataFrame(columns)):
        (alone,) = load_config(data=given_rows).data.train
        both = load_config({"data": {"train": given_rows}}, **{"data.validation": rows[:1]}).data
        assert both.train == [alone]
        assert load_rows([alone]).span(0, 2) == rows
        assert load_rows(list(both.validation)).span(0, 1) == rows[:1]


def test_files_and_rows_may_be_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    table = datasets.Dataset.from_list([{"prompt": "b"}])
    train = load_config(data=[str(tmp_path / "a.jsonl"), table]).data.train
    assert train[0] == str(tmp_path / "a.jsonl")
    assert load_rows([train[1]]).span(0, 1) == [{"prompt": "b"}]


def test_numbers_and_arrays_of_numpy_are_lists_and_numbers() -> None:
    row = {"prompt": "a", "answer": np.int64(3), "scores": np.array([0.5, 1.0])}
    rows = load_rows([stored([row], "data.train")]).span(0, 1)
    assert rows == [{"prompt": "a", "answer": 3, "scores": [0.5, 1.0]}]


def test_missing_values_of_pandas_are_null() -> None:
    columns = {"prompt": ["a", None], "score": [math.nan, 1.5], "turns": [[{"role": "user"}], None]}
    table = pandas.DataFrame(columns).assign(day=[pandas.NaT, pandas.NA], number=[1, 2])
    first, second = load_rows([stored(table, "data.train")]).span(0, 2)
    nothing = dict.fromkeys(["score", "day"])
    assert first == nothing | {"prompt": "a", "turns": [{"role": "user"}], "number": 1}
    assert second == {"prompt": None, "score": 1.5, "turns": None, "day": None, "number": 2}


def test_a_value_that_is_not_json_is_named_with_row_and_column() -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "wide": [b"x"], "high": 1}]
    with pytest.raises(UsageError) as error:
        stored(rows, "data.train")
    assert "row 1 " in str(error.value)
    assert "wide" in str(error.value)
    assert "high" not in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), {1, 2}, b"x"])
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(UsageError):
        stored([{"prompt": value}], "data.train")


@pytest.mark.parametrize(
    "columns", [{"prompt": ["a", "b"], "answer": ["c"]}, {"prompt": "a"}, {}], ids=str
)
def test_a_mapping_that_is_no_table_is_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        load_config({"data": {"train": columns}})

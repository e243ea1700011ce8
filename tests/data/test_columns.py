import pytest

from burnish.data.columns import text_of, value_at
from burnish.data.messages import messages_of
from burnish.errors import UsageError


def test_nested_columns_are_found_where_the_first_row_has_none(rows_of):
    assert rows_of([{"a": None}, {"a": {"b": 1}}]).has("a.b")
    mixed = rows_of([{"a": {"b": 1}}, {"a": "text"}], "mixed.jsonl")
    assert mixed.has("a.b")
    assert not mixed.has("a.c")


def test_values_are_reached_through_dots():
    row = {"a": {"b": {"c": 3}}, "x.y": 4, "none": None}
    assert value_at(row, "a.b.c") == 3
    assert value_at(row, "x.y") == 4
    assert value_at(row, "none.b") is None
    assert value_at(row, "a.gone") is None


def test_nulls_that_arrow_adds_are_taken_out_of_messages():
    raw = [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "b", "calls": [{"f": "g", "x": None}]},
    ]
    assert messages_of(raw, "row 0") == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "calls": [{"f": "g"}]},
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "row 3"),
        ("text", "row 3"),
        ([], "row 3"),
        ([{"from": "stranger", "value": "x"}], "(?s)message 0 of row 3.*stranger"),
        ([{"role": 5, "content": "x"}], "(?s)message 0 of row 3.*5"),
        ([{"role": "User", "content": "x"}], "(?s)message 0 of row 3.*role user"),
        ([{"role": "gpt", "content": "x"}], "(?s)message 0 of row 3.*role assistant"),
        ([{"role": "user", "content": 5}], "(?s)message 0 of row 3.*5"),
        ([{"role": "user", "content": "x"}, {"role": None, "content": "x"}], "message 1 of row 3"),
        ([{"role": "user", "content": None}], "message 0 of row 3"),
        (["x"], "message 0 of row 3"),
    ],
)
def test_what_is_not_messages_is_named(value, message):
    with pytest.raises(UsageError, match=message):
        messages_of(value, "row 3")


@pytest.mark.parametrize(
    "calls",
    ["x", [1], [{"a": 1}], [{"function": {"name": "f", "arguments": "not json"}}]],
)
def test_tool_calls_that_cannot_be_read_are_named(calls):
    with pytest.raises(UsageError, match=r"(?s)message 0 of row 3.*tool_calls"):
        messages_of([{"role": "assistant", "tool_calls": calls}], "row 3")


def test_turns_of_sharegpt_are_messages():
    names = {"system": "system", "human": "user", "gpt": "assistant", "tool": "tool"}
    turns = [{"from": name, "value": name, "weight": None, "id": 1} for name in names]
    assert messages_of(turns, "row 0") == [
        {"role": role, "content": name, "id": 1} for name, role in names.items()
    ]


def test_what_is_not_text_is_named():
    assert text_of("x", "body", "row 1") == "x"
    with pytest.raises(UsageError, match=r"(?s)row 1.*'body'"):
        text_of(None, "body", "row 1")

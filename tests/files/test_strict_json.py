from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.errors import CorruptError
from burnish.files.strict_json import clipped, encode_json, parse_json, shortened

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_round_trip(value):
    assert parse_json(encode_json(value), "file") == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"a": 1, "a": 2}',
        b'{"b": {"a": 1, "a": 2}}',
        b"[NaN]",
        b"[Infinity]",
        b"[-Infinity]",
        b"[1e999]",
        b"[-1e400]",
        b"\xff",
        b"[" * 100_000,
        b"1" * 5000,
        b"{} {}",
    ],
)
def test_anything_else_is_corrupt(data):
    with pytest.raises(CorruptError, match="JSON"):
        parse_json(data, "the file")


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {"a": float("-inf")}])
def test_what_json_has_no_word_for_is_not_written(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_json(value)


def test_a_hostile_value_does_not_fill_the_screen():
    assert shortened("ab") == "'ab'"
    assert shortened("x" * 10**6) == "'" + "x" * 199 + "…"
    assert clipped("x" * 10**6) == "x" * 200 + "…"

from __future__ import annotations

import pytest

from burnish.config.document import one_line, write_yaml
from burnish.config.parsing import parse_document, parse_value
from burnish.config.schema import RewardModelConfig
from burnish.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("1_000", 1000),
        ("+7", 7),
        ("007", "007"),
        ("0x10", "0x10"),
        ("no", "no"),
        ("On", "On"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("e5", "e5"),
        ("-", [None]),
        ("[a, 1]", ["a", 1]),
        ("{a: 1}", {"a": 1}),
        (".inf", float("inf")),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    found = parse_value(text, "x").values
    assert found == value
    assert type(found) is type(value)


def test_numbers_are_kept_as_they_are_written() -> None:
    found = parse_value("{a: [1_0, x], b: 1e3, c: true, d: null}", "x", "s")
    assert found.written == {"s.a[0]": "1_0", "s.b": "1e3", "s.c": "true"}


def test_lines_of_keys_and_items() -> None:
    document = parse_document("a: 1\nb:\n  c: 2\n  d:\n  - x\n  - e: 3\n", "f.yaml")
    assert document.values == {"a": 1, "b": {"c": 2, "d": ["x", {"e": 3}]}}
    assert document.lines == {
        "a": 1,
        "b": 2,
        "b.c": 3,
        "b.d": 4,
        "b.d[0]": 5,
        "b.d[1]": 6,
        "b.d[1].e": 6,
    }


def test_merged_keys_keep_the_line_they_were_written_on() -> None:
    text = "a: &base\n  x: 1\n  y: 2\nb:\n  <<: *base\n  y: 3\n"
    document = parse_document(text, "f.yaml")
    assert document.values["b"] == {"x": 1, "y": 3}
    assert document.lines["b.x"] == 2
    assert document.lines["b.y"] == 6


@pytest.mark.parametrize("text", ["", "# nothing but a remark\n", "---\n", "null"])
def test_an_empty_document_has_no_values(text: str) -> None:
    assert parse_document(text, "f.yaml").values == {}


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("a: 1\nb: [1\nc: 2\n", ["f.yaml:3", "have: c: 2", "do:"]),
        ("a: 1\n\tb: 2\n", ["f.yaml:2", "b: 2"]),
        ("a: 'x", ["f.yaml:1"]),
        ("a: 1\n---\nb: 1\n", ["f.yaml:2"]),
        ("a: !!python/object:os.system {}\n", ["f.yaml:1", "python/object"]),
        ("a: *b\n", ["f.yaml:1"]),
        ("a: 1\nb: \x07\n", ["f.yaml:2", "'\\x07'"]),
        ("? [a]\n: 1\n", ["f.yaml:1"]),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", ["f.yaml:4", " b ", "2 and 4"]),
        ("a: 1\na: 1\n", ["f.yaml:2", " a ", "1 and 2"]),
        ("a: [{b: 1, b: 2}]", ["f.yaml:1", " b "]),
        ("a: &x\n  b: *x\n", ["f.yaml:2", "alias"]),
        ("- a\n", ["f.yaml"]),
        ("hello", ["f.yaml"]),
        ("a: 1\nb: !!int abc", ["f.yaml:2", "int"]),
        ("a: !!bool abc", ["f.yaml:1", "bool"]),
        ("a: !!float abc", ["f.yaml:1", "float"]),
        ("a: !!timestamp 2020-01-01", ["f.yaml:1", "timestamp"]),
        ("a: !!set {b}", ["f.yaml:1", "set"]),
        ("a: " + "1" * 6000, ["f.yaml:1", "int"]),
        ("a: 9223372036854775808", ["f.yaml:1", "int"]),
        ("a: &x [*x]", ["f.yaml:1", "alias"]),
        ('b: 1\na: "x\\0"', ["f.yaml:2", "x00"]),
        ('a: "\\ud800"', ["f.yaml:1", "ud800"]),
        ("a: &x {<<: *x}", ["f.yaml:1", "alias"]),
    ],
)
def test_broken_documents_name_the_line(text: str, facts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_document(text, "f.yaml")
    for fact in facts:
        assert fact in str(caught.value)


def bomb(line: str) -> str:
    """Nine lines, each of which names the one before nine times."""
    lines = [line.format(key="a", last="")]
    lines += [
        line.format(key=chr(98 + n), last=", ".join(["*" + chr(97 + n)] * 9)) for n in range(9)
    ]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        bomb("{key}: &{key} [{last}]"),
        bomb("{key}: &{key} {{{key}: x, <<: [{last}]}}"),
        "a: " + "x" * 10_000_000,
        "a: [" + "1," * 50_000 + "]",
        "[" * 3000 + "]" * 3000,
        "{a: " * 3000,
        "- " * 3000,
        "? " * 3000,
    ],
    ids=["aliases", "merges", "long", "items", "lists", "mappings", "dashes", "keys"],
)
def test_hostile_text_is_refused_before_it_grows(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_document(text, "f.yaml")
    assert len(str(caught.value)) < 500


def test_written_texts_stay_on_one_line() -> None:
    text = write_yaml({"a": "first\nsecond " + "long " * 100})
    assert text.count("\n") == 1
    assert parse_document(text, "x").values["a"].startswith("first\nsecond long")


def test_what_stands_behind_a_key_is_one_line() -> None:
    nested = {"a": [{"b": [1, "c: d"]}], "e": None}
    assert parse_document(f"x: {one_line(nested)}", "x").values["x"] == nested
    assert one_line([RewardModelConfig(path="judge")]).startswith("[{path: judge,")

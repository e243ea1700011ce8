"""Read YAML text as plain values, with the line of every key.

Unlike PyYAML's `safe_load`, refuse a duplicate key, and use YAML 1.2's core schema. Length, depth, number of values and size of
numbers are bounded against hostile text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from burnish.config.document import CoreLoader
from burnish.errors import UsageError

MOST_CHARACTERS = 200_000
"""Most characters of a text."""
_MOST_VALUES = 10_000
"""Most values in a text. An alias counts with all its values, wherever it occurs."""
_DEEPEST = 100
_LARGEST = 1 << 63
"""Whole numbers are smaller than this."""
_LONGEST_SHOWN = 80
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""NUL, which no path may contain, and surrogates, which no UTF-8 file may contain. YAML's escapes can write both."""


def _constructors() -> dict[str | None, Any]:
    """Return PyYAML's constructors of plain data, and one that refuses other tags."""
    plain = {
        f"tag:yaml.org,2002:{tag}" for tag in ("null", "bool", "int", "float", "str", "seq", "map")
    }
    known = yaml.SafeLoader.yaml_constructors
    return {tag: known[tag] for tag in (None, *plain)}


class _Loader(CoreLoader):
    """Reads bounded plain data."""

    yaml_constructors = _constructors()

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.name = source
        self._depth = 0
        self._composed = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse a text that is too deep, or too large with all aliases expanded."""
        is_alias = self.check_event(yaml.AliasEvent)
        mark = self.current_event.start_mark
        self._depth += 1
        self._composed += 1
        if self._depth > _DEEPEST or self._composed > _MOST_VALUES:
            raise self._too_large(mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and node not in self._sizes:
            problem = "an alias inside its own value"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if node is not None and node not in self._sizes:
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            if isinstance(node, yaml.MappingNode):
                parts = [part for pair in parts for part in pair]
            self._sizes[node] = 1 + sum(self._sizes[part] for part in parts)
            if self._sizes[node] > _MOST_VALUES:
                raise self._too_large(mark)
        return node

    def _too_large(self, mark: yaml.Mark) -> UsageError:
        return UsageError(
            f"{self.name}:{mark.line + 1} is too large for settings",
            have=f"more than {_MOST_VALUES} values, or more than {_DEEPEST} levels",
            want="fewer, with every alias expanded",
            do="check that this is the configuration you mean",
        )

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Refuse a value that does not fit its tag, a text outside Unicode, and a whole number over 64 bits."""
        problem = f"not a valid {node.tag.rpartition(':')[2]}, or more than 64 bits"
        try:
            value = super().construct_object(node, deep)
        except (ValueError, KeyError):  # `!!int abc`, `!!bool abc`, more digits than `int` takes
            value = _LARGEST
        if isinstance(value, str) and (match := _NO_TEXT.search(value)):
            value = _LARGEST
            problem = f"a text with the character {match[0]!a}"
        if isinstance(value, int) and abs(value) >= _LARGEST:
            mark: Any = node.start_mark
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a duplicate key. Merged keys are added afterwards."""
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                raise UsageError(
                    f"{self.name}:{line} sets {key.value} a second time",
                    have=f"{key.value} on lines {lines[key.value]} and {line}",
                    want="every key once",
                    do="remove one of them",
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


class NotYAMLError(UsageError):
    """A text is not YAML."""

    reason = ""
    """Why, without the place."""


@dataclass(frozen=True, slots=True)
class Document:
    """The content of a YAML text."""

    values: Any
    """Its plain value."""
    lines: Mapping[str, int]
    """1-based line of every key and list item, by path (`rollout.n`, `reward.functions[0].weight`)."""
    written: Mapping[str, str]
    """Numbers and truth values as the text spells them, by path."""


def parse_document(text: str, source: str) -> Document:
    """Read one YAML document whose top level is a mapping.

    `source` names the text in errors. Raises `UsageError` with the line.
    """
    document = parse_value(text, source)
    if not isinstance(document.values, dict | None):
        raise UsageError(
            f"{source} does not hold settings",
            have=f"a {'list' if isinstance(document.values, list) else 'single value'} at the top level",
            want="a mapping",
            do="write `key: value` lines; `burnish config explain` lists the keys",
        )
    return replace(document, values=document.values or {})


def parse_value(text: str, source: str, path: str = "") -> Document:
    """Read one value, such as an override of `path`. Raises `NotYAMLError`, or `UsageError` for what settings do not take."""
    if len(text) > MOST_CHARACTERS:
        raise UsageError(
            f"{source} is too long for settings",
            have=f"more than {MOST_CHARACTERS} characters",
            want="fewer",
            do="check that this is the configuration you mean",
        )
    try:
        loader = _Loader(text, source)
        node = loader.get_single_node()
        if node is None:
            return Document(None, {}, {})
        value = loader.construct_object(node, deep=True)
        below = list(_below(node, path))
        return Document(
            value,
            {name: first.start_mark.line + 1 for name, first, _ in below},
            {
                name: each.value
                for name, _, each in [(path, node, node), *below]
                if isinstance(each, yaml.ScalarNode) and not each.tag.endswith((":str", ":null"))
            },
        )
    except yaml.reader.ReaderError as error:
        raise UsageError(
            f"{source}:{text.count(chr(10), 0, error.position) + 1} holds a character that YAML does not allow",
            have=f"the character {text[error.position]!r}",
            want="printable text",
            do="remove it",
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else 0
        rows = text.splitlines() or [""]
        reason = error.problem or error.context or ""
        refused = NotYAMLError(
            f"{source}:{line + 1} is not YAML: {reason}",
            have=rows[min(line, len(rows) - 1)].strip()[:_LONGEST_SHOWN] or "the end of the text",
            want="`key: value` lines, indented with spaces",
            do=f"correct line {line + 1} or the one before it",
        )
        refused.reason = reason
        raise refused from error


def _below(node: yaml.Node, path: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield path, first node and value of everything below a node, once merged keys are in place."""
    if isinstance(node, yaml.MappingNode):
        inner = [
            (f"{path}.{key.value}" if path else str(key.value), key, value)
            for key, value in node.value
        ]
    elif isinstance(node, yaml.SequenceNode):
        inner = [(f"{path}[{index}]", item, item) for index, item in enumerate(node.value)]
    else:
        inner = []
    for name, first, value in inner:
        yield name, first, value
        yield from _below(value, name)

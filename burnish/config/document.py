"""YAML text to plain values and back, with the line of every key.

Unlike PyYAML's `safe_load`, a duplicate key is refused, and scalars follow YAML 1.2's core schema: `1e-6` is a number, `no`, `on`,
`1:30` and `2024-01-01` are texts; numbers may have underscores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from burnish.errors import UsageError

_SCALARS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's table: first character of a plain scalar ("" for an empty one) to tag and pattern."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_characters in _SCALARS:
        compiled = re.compile(rf"(?:{pattern})\Z")
        for first in first_characters:
            table.setdefault(first.strip("\0"), []).append((tag, compiled))
    return table


class _Loader(yaml.SafeLoader):
    """Reads plain data only, with the core schema's scalars."""

    yaml_implicit_resolvers = _resolvers()


class _Dumper(yaml.SafeDumper):
    """Quotes just what `_Loader` would otherwise read as something else."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value out in full wherever it occurs."""
        return True

    def serialize(self, node: yaml.Node) -> None:
        """Start a line for every key of the outermost mapping."""
        if isinstance(node, yaml.MappingNode):
            node.flow_style = False
        super().serialize(node)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Keep every text on one line, so that a comment can follow it."""
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


@dataclass(frozen=True, slots=True)
class Document:
    """What a YAML file says."""

    values: Mapping[str, Any]
    """Its top-level mapping; empty for an empty file."""
    lines: Mapping[str, int]
    """1-based line of every key and list item, by path (`rollout.n`, `reward.functions[0].weight`)."""


def parse_document(text: str, source: str) -> Document:
    """Read one YAML document whose top level is a mapping.

    `source` names the text in errors. Raises `UsageError` with the line for broken YAML, a duplicate key, or anything but a mapping.
    """
    node, value, lines = _parse(text, source)
    if value is None:
        return Document({}, {})
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(
            f"{source} does not hold settings",
            have=f"a {'list' if isinstance(value, list) else 'single value'} at the top level",
            want="a mapping",
            do="write `key: value` lines; `burnish config explain` lists the keys",
        )
    return Document(value, lines)


def parse_value(text: str, source: str) -> Any:
    """Read the value of a command-line override. Raises `UsageError` naming `source`."""
    return _parse(text, source)[1]


def write_yaml(value: Any) -> str:
    """YAML that `parse_document` reads back equal; innermost lists and mappings on one line."""
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=float("inf"),
    )
    return text


def _parse(text: str, source: str) -> tuple[yaml.Node | None, Any, dict[str, int]]:
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, None, lines
            _Lines(loader, source, lines).visit(node, "", ())
            return node, loader.construct_document(node), lines
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UsageError(
            f"{source}:{line} holds a character that YAML does not allow",
            have=f"the character {text[error.position]!r}",
            want="printable text",
            do="remove it",
        ) from error
    except yaml.MarkedYAMLError as error:
        raise _broken(error, text, source) from error


def _broken(error: yaml.MarkedYAMLError, text: str, source: str) -> UsageError:
    mark = error.problem_mark or error.context_mark
    index = mark.line if mark else 0
    rows = text.splitlines() or [""]
    row = rows[min(index, len(rows) - 1)].strip()
    return UsageError(
        f"{source}:{index + 1} is not YAML: {error.problem or error.context}",
        have=row or "the end of the text",
        want="`key: value` lines, indented with spaces",
        do=f"correct line {index + 1} or the one before it",
    )


class _Lines:
    """Notes the line of every path in a node tree, refusing keys given twice."""

    def __init__(self, loader: _Loader, source: str, lines: dict[str, int]) -> None:
        self.loader = loader
        self.source = source
        self.lines = lines

    def visit(self, node: yaml.Node, path: str, above: tuple[yaml.Node, ...]) -> None:
        """`above` holds the nodes that contain this one; meeting one again is a cycle of aliases."""
        if node in above:
            raise UsageError(
                f"{self.source}:{node.start_mark.line + 1} contains itself",
                have=f"an alias in {path} to a value around it",
                want="values without cycles",
                do="write the value out",
            )
        if isinstance(node, yaml.MappingNode):
            self._refuse_twice(node, path)
            self.loader.flatten_mapping(node)
            for key, value in node.value:
                name = f"{path}.{key.value}" if path else str(key.value)
                self.lines[name] = key.start_mark.line + 1
                self.visit(value, name, (*above, node))
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                name = f"{path}[{index}]"
                self.lines[name] = item.start_mark.line + 1
                self.visit(item, name, (*above, node))

    def _refuse_twice(self, node: yaml.MappingNode, path: str) -> None:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                name = f"{path}.{key.value}" if path else key.value
                raise UsageError(
                    f"{self.source}:{line} sets {name} a second time",
                    have=f"{name} on lines {seen[key.value]} and {line}",
                    want="every key once",
                    do="remove one of them",
                )
            seen[key.value] = line

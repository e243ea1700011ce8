"""Read YAML text as plain values, with the line of every key, and write it.

Unlike PyYAML's `safe_load`, a duplicate key is refused, and scalars follow YAML 1.2's core schema: `1e-6` is a number, `no`, `on`,
`1:30` and `2024-01-01` are texts. Numbers may have underscores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from burnish.config.schema import RunConfig, Section
from burnish.errors import CorruptError, UsageError

_SCALARS = (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", [*"-+0123456789"]),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        [*"-+0123456789."],
    ),
    ("merge", r"<<", ["<"]),
)
"""Tag, pattern and first characters of plain scalars that are not texts."""


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return PyYAML's table: first character of a plain scalar ("" for an empty one) to tag and pattern."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_characters in _SCALARS:
        for first in first_characters:
            row = (f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"))
            table.setdefault(first, []).append(row)
    return table


class _Loader(yaml.SafeLoader):
    """Reads plain data with the core schema's scalars, and every key once."""

    yaml_implicit_resolvers = _resolvers()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is given twice. Merged keys are added afterwards."""
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
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


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
    value, lines = _parse(text, source)
    if not isinstance(value, dict | None):
        raise UsageError(
            f"{source} does not hold settings",
            have=f"a {'list' if isinstance(value, list) else 'single value'} at the top level",
            want="a mapping",
            do="write `key: value` lines; `burnish config explain` lists the keys",
        )
    return Document(value or {}, lines)


def parse_value(text: str, source: str) -> Any:
    """Read the value of a command-line override. Raises `UsageError` naming `source`."""
    return _parse(text, source)[0]


def write_yaml(value: Any) -> str:
    """Return YAML that `parse_document` reads back equal, with innermost lists and mappings on one line."""
    text: str = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=float("inf"),
    )
    return text


def dump_yaml(config: RunConfig, comments: Mapping[str, str] | None = None) -> str:
    """Return the whole configuration as YAML that `load_config` reads back equal.

    `comments` maps dotted keys to a remark behind each setting, aligned.
    """
    rows, remarks = list(_rows(config, "", "")), comments or {}
    commented = [len(text) for text, name in rows if name in remarks and len(text) <= 60]
    width = max(commented, default=0)
    lines = [
        f"{text:<{width}}  # {remarks[name]}" if name in remarks else text for text, name in rows
    ]
    return "\n".join(lines) + "\n"


def _rows(section: Section, prefix: str, indent: str) -> Iterator[tuple[str, str]]:
    """Yield lines of YAML, each with the dotted key of the setting that starts on it, or ""."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield f"{indent}{name}:", ""
            yield from _rows(value, f"{prefix}{name}.", indent + "  ")
            continue
        plain = section.model_dump(include={name})
        for number, line in enumerate(write_yaml(plain).rstrip("\n").split("\n")):
            yield indent + line, "" if number else prefix + name


def recorded(path: Path) -> RunConfig:
    """Read a configuration as `dump_yaml` wrote it. Raises `CorruptError` for a file that was changed since."""
    try:
        return RunConfig.model_validate(parse_document(path.read_text(), str(path)).values)
    except (ValidationError, UsageError, UnicodeDecodeError) as error:
        raise CorruptError(
            f"{path} is not as the run wrote it",
            have=" ".join(str(error).split())[:300],
            want="the configuration that began the run",
            do="restore the file, or give the run another name",
        ) from error


def _parse(text: str, source: str) -> tuple[Any, dict[str, int]]:
    """Return the value, and the line of every path in it."""
    try:
        loader = _Loader(text)
        loader.name = source
        node = loader.get_single_node()
        if node is None:
            return None, {}
        return loader.construct_object(node, deep=True), dict(_lines(node, ""))
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
        raise UsageError(
            f"{source}:{line + 1} is not YAML: {error.problem or error.context}",
            have=rows[min(line, len(rows) - 1)].strip() or "the end of the text",
            want="`key: value` lines, indented with spaces",
            do=f"correct line {line + 1} or the one before it",
        ) from error


def _lines(node: yaml.Node, path: str) -> Iterator[tuple[str, int]]:
    """Yield every path below a constructed node, where merged keys are in place, with its 1-based line."""
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
        yield name, first.start_mark.line + 1
        yield from _lines(value, name)

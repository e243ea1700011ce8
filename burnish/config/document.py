"""Write a configuration as YAML, and read it back.

By YAML 1.2's core schema `1e-6` is a number, `no`, `on`, `1:30` and `2024-01-01` are texts. Numbers may have underscores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic_core import to_jsonable_python

from burnish.config.algorithm import FORMULAS
from burnish.config.schema import RunConfig
from burnish.config.section import Section
from burnish.errors import CorruptError, refusing

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

_MOVED = {
    "engine.park": "engine.offload_during_rollout",
    "critic.gamma": "algorithm.advantage.gamma",
    "critic.lam": "algorithm.advantage.lam",
    "algorithm.dual_clip": "algorithm.policy_loss.dual_clip",
    "algorithm.sapo_temperature_pos": "algorithm.policy_loss.temperature_pos",
    "algorithm.sapo_temperature_neg": "algorithm.policy_loss.temperature_neg",
    "algorithm.cov_ratio": "algorithm.policy_loss.cov_ratio",
    "algorithm.cov_low": "algorithm.policy_loss.cov_low",
    "algorithm.cov_high": "algorithm.policy_loss.cov_high",
    "algorithm.cov_penalty": "algorithm.policy_loss.cov_penalty",
}
"""Former and present key of settings that files of earlier versions hold."""


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return PyYAML's table: a plain scalar's first character to tag and pattern."""
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_characters in _SCALARS:
        for first in first_characters:
            row = (f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"))
            table.setdefault(first, []).append(row)
    return table


class CoreLoader(yaml.SafeLoader):
    """Reads plain data with the core schema's scalars."""

    yaml_implicit_resolvers = _resolvers()


class _Dumper(yaml.SafeDumper):
    """Quotes only what `CoreLoader` would misread."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value out in full wherever it occurs."""
        return True

    def serialize(self, node: yaml.Node) -> None:
        """Begin a new line for every outermost key."""
        if isinstance(node, yaml.MappingNode):
            node.flow_style = False
        super().serialize(node)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Write a text on one line, before its comment."""
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def write_yaml(value: Any, *, flow: bool | None = None) -> str:
    """Return YAML that `parse_document` reads back equal. Innermost collections (with `flow`, all) take one line."""
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
        width=float("inf"),
    )


def one_line(value: object) -> str:
    """Return a value on one line, sections as mappings."""
    plain = {"": to_jsonable_python(value, fallback=str)}
    return write_yaml(plain, flow=True).partition(": ")[2].strip()


def dump_yaml(config: RunConfig, comments: Mapping[str, str] | None = None) -> str:
    """Return a configuration as YAML that `load_config` reads back equal.

    `comments` maps dotted keys to remarks behind their values.
    """
    rows = list(_rows(config, "", ""))
    remarks = comments or {}
    commented = [len(text) for text, name in rows if name in remarks and len(text) <= 60]
    width = max(commented, default=0)
    lines = [
        f"{text:<{width}}  # {remarks[name]}" if name in remarks else text for text, name in rows
    ]
    return "\n".join(lines) + "\n"


def _rows(section: Section, prefix: str, indent: str) -> Iterator[tuple[str, str]]:
    """Yield lines, each with the dotted key that starts on it, or ""."""
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    for name, value in {**fields, **(section.model_extra or {})}.items():
        if isinstance(value, Section):
            yield f"{indent}{name}:", ""
            yield from _rows(value, f"{prefix}{name}.", indent + "  ")
            continue
        plain = section.model_dump(include={name})
        for number, line in enumerate(write_yaml(plain).rstrip("\n").split("\n")):
            yield indent + line, "" if number else prefix + name


def dotted(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by dotted names."""
    if not isinstance(value, dict):
        yield key[1:], value
        return
    for name, inner in value.items():
        yield from dotted(inner, f"{key}.{name}")


def recorded(path: PurePath, content: bytes | None = None) -> RunConfig:
    """Read a file that `dump_yaml` wrote, or the `content` of a remote one. Raises `CorruptError` for an invalid one."""
    with refusing(
        f"{path} is not as the run wrote it",
        CorruptError,
        want="the configuration that began the run",
        do="restore the file, or give the run another name",
    ):
        if content is None and not Path(path).is_file():
            raise OSError("it is no regular file")
        content = Path(path).read_bytes() if content is None else content
        return RunConfig.model_validate(_moved(yaml.load(content, CoreLoader)))


def _moved(settings: Any) -> Any:
    """Return settings that an earlier version of Burnish recorded, with their names of today."""
    for before, now in _MOVED.items():
        section, _, last = before.partition(".")
        if last not in settings.get(section, {}):
            continue
        value = settings[section].pop(last)
        above, _, key = now.rpartition(".")
        place = settings
        for part in above.split("."):
            place[part] = (
                {"name": place[part]} if isinstance(place.get(part), str) else place.get(part, {})
            )
            place = place[part]
        # A recorded configuration has the settings of all formulas, and only one is in use.
        if above not in FORMULAS or place.get("name") in FORMULAS[above].formulas_with(key):
            place[key] = value
    return settings

"""From a YAML file and overrides to a `RunConfig`, with the origin of each value.

All mistakes are reported together, with file and line or "command line". Relative paths count from the working directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from burnish.config.document import Document, parse_document, write_yaml
from burnish.config.draft import Draft
from burnish.config.identity import difference, digest
from burnish.config.keys import known_keys
from burnish.config.problems import refusal
from burnish.config.schema import RunConfig
from burnish.config.section import Section
from burnish.errors import MissingError, UsageError

__all__ = [
    "Resolved",
    "difference",
    "digest",
    "dump_yaml",
    "load_config",
    "load_settings",
    "read_document",
]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A whole configuration."""

    config: RunConfig
    """Every setting."""
    origin: Mapping[str, str]
    """For the dotted key of every setting: "default", "FILE:LINE" or "command line"."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Resolved:
    """Read `path` (None: only defaults), then apply overrides `a.b=c` in order.

    A value is YAML (`optim.lr=1e-6`, `data.train=[a.jsonl]`, `steps=null`). An override of a section (`rollout={n: 4}`) changes the keys
    it names; a list is replaced. Keys inside a mapping `model.fresh` can be set one by one. Raises `MissingError` for an absent file and
    `UsageError` for everything else: broken YAML, unknown keys with the nearest known one, wrong types, values out of bounds.
    """
    draft = Draft(known=known_keys())
    subject = "the command line"
    if path is not None:
        subject = f"{path} and the command line" if overrides else str(path)
        draft.take_document(read_document(path), str(path))
    for override in overrides:
        draft.take_override(override)
    return _resolved(draft, subject)


def load_settings(
    source: str | os.PathLike[str] | Mapping[str, Any] | RunConfig, settings: Mapping[str, Any]
) -> RunConfig:
    """Return the configuration of a file, of nested mappings or of another one, with `settings` applied.

    `settings` are sections as mappings (`optim={"lr": 1e-5}`) or dotted keys. Raises as `load_config` does.
    """
    draft = Draft(known=known_keys())
    if isinstance(source, str | os.PathLike):
        draft.take_document(read_document(source), str(source))
    elif isinstance(source, RunConfig):
        draft.take_document(Document(source.model_dump(exclude_unset=True), {}), "")
    else:
        draft.take_document(Document(_plain(source), {}), "")
    for name, value in _plain(settings).items():
        draft.set(name, value)
    return _resolved(draft, "the settings").config


def _plain(value: Any) -> Any:
    """Mappings as dictionaries and paths as texts, at every depth."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _resolved(draft: Draft, subject: str) -> Resolved:
    try:
        config = RunConfig.model_validate(draft.values)
    except ValidationError as error:
        draft.note_invalid(error)
        raise refusal(draft.problems, subject) from None
    if draft.problems:
        raise refusal(draft.problems, subject)
    settings = [name for name, key in draft.known.items() if not key.section and "[" not in name]
    return Resolved(config, {name: draft.origin_of(name) for name in settings})


def read_document(path: str | os.PathLike[str]) -> Document:
    """Read the YAML mapping in a file, with the line of every key.

    Raises `MissingError` for an absent file and `UsageError` for anything but YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingError(
            f"there is no configuration file {path}",
            have=f"nothing at {Path(path).absolute()}",
            want="a YAML file",
            do="give the file first, then key=value overrides",
        ) from None
    except IsADirectoryError:
        raise UsageError(
            f"{path} is a directory",
            have="a directory",
            want="a YAML file",
            do=f"give a file in it, as {Path(path) / 'config.yaml'}",
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not a text file",
            have=f"byte {error.object[error.start]:#04x} at offset {error.start}",
            want="YAML in UTF-8",
            do="give the configuration file",
        ) from None
    return parse_document(text, str(path))


def dump_yaml(config: RunConfig, comments: Mapping[str, str] | None = None) -> str:
    """Return the whole configuration as YAML that `load_config` reads back equal.

    `comments` maps dotted keys to a remark behind each setting, aligned.
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
    """Lines of YAML, each with the dotted key of the setting that starts on it, or ""."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield f"{indent}{name}:", ""
            yield from _rows(value, f"{prefix}{name}.", indent + "  ")
            continue
        plain = section.model_dump(include={name})
        for number, line in enumerate(write_yaml(plain).rstrip("\n").split("\n")):
            yield indent + line, "" if number else prefix + name

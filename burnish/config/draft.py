"""Values and their origins on the way to a `RunConfig`, with all problems so far.

Unknown keys are noted and left out, so one pass finds everything that is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, get_origin

from pydantic import ValidationError

from burnish.config.document import Document, parse_value
from burnish.config.keys import Key, alternatives, item_section_of, plain_name, section_of
from burnish.config.problems import Problem, refusal
from burnish.config.schema import RunConfig
from burnish.config.section import Section
from burnish.config.unknown import answer_unknown, foreign_names
from burnish.errors import UsageError

COMMAND_LINE = "command line"
"""The origin of a value set by an override."""
DEFAULT = "default"
"""The origin of a value that nothing set."""


@dataclass(slots=True)
class Draft:
    """What has been taken in so far."""

    known: Mapping[str, Key]
    """The schema's keys."""
    values: dict[str, Any] = field(default_factory=dict)
    """Nested as in the file, known keys only."""
    origins: dict[str, str] = field(default_factory=dict)
    """By path (`reward.functions[0].weight`): "FILE:LINE" or "command line"."""
    problems: list[Problem] = field(default_factory=list)
    """What is wrong, in the order found."""

    def take_document(self, document: Document, source: str) -> None:
        """Take the file's values; keys that do not exist become problems."""
        self.origins = {name: f"{source}:{line}" for name, line in document.lines.items()}
        self.values = self._known_part(document.values, RunConfig, "")

    def take_override(self, text: str) -> None:
        """Apply one `a.b=c`."""
        name, equals, written = text.partition("=")
        name = name.strip()
        if not equals or not name:
            self.problems.append(
                Problem(
                    f"{text!r} is not an override",
                    have=text,
                    want="key=value",
                    do="write as in optim.lr=1e-6",
                )
            )
            return
        try:
            value = parse_value(written, name)
        except UsageError as error:
            self.problems.append(
                Problem(
                    f"the value of {name} on the command line is not YAML",
                    have=written,
                    want="a YAML value",
                    do="quote it: once for YAML and once for the shell",
                )
            )
            raise refusal(self.problems, "the command line") from error
        self.set(name, value)

    def set(self, name: str, value: Any) -> None:
        """Set one key, or the keys of a section."""
        key = self.known.get(name)
        if key and key.section:
            if not isinstance(value, Mapping):
                self._note(name, value, COMMAND_LINE, f"set its keys: {name}.KEY=value")
                return
            for part, inner in value.items():
                self.set(f"{name}.{part}", inner)
        elif key and "[" not in name:
            self._place(name, value)
        elif (owner := self._mapping_above(name)) is not None:
            self._place_inside(owner, name, value)
        else:
            self._note_unknown(name, value, COMMAND_LINE)

    def _place(self, name: str, value: Any) -> None:
        *sections, last = name.split(".")
        target = self.values
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                return  # the file has no section there, which the schema will say
        key = self.known[name]
        item = item_section_of(key.annotation)
        self._forget_origins(name)
        self.origins[name] = COMMAND_LINE
        target[last] = self._known_items(value, item, name) if item else value

    def _forget_origins(self, name: str) -> None:
        """Drop the lines of what was inside a value that is being replaced."""
        inside = [each for each in self.origins if each.startswith((f"{name}.", f"{name}["))]
        for each in inside:
            del self.origins[each]

    def _mapping_above(self, name: str) -> str | None:
        """The setting above `name` that may hold a mapping of the user's own, or None."""
        parts = name.split(".")
        above = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        return next(
            (each for each in above if each in self.known and self.known[each].takes_mapping), None
        )

    def _place_inside(self, owner: str, name: str, value: Any) -> None:
        """Set one key of a mapping of the user's own (`model.fresh.hidden_size=64`)."""
        current = self._value_at(owner)
        current = None if current is _ABSENT else current
        if not isinstance(current, Mapping | None):
            self._note(owner, current, COMMAND_LINE, f"give {owner} as a mapping to set {name}")
            return
        changed = _with(current or {}, name[len(owner) + 1 :].split("."), value)
        origin = self.origins.get(owner)
        self._place(owner, changed)
        if origin and COMMAND_LINE not in origin:
            origin = f"{origin}, {COMMAND_LINE}"
        self.origins[owner] = origin or COMMAND_LINE

    def _known_part(
        self, values: Mapping[Any, Any], section: type[Section], prefix: str
    ) -> dict[str, Any]:
        """A copy without the keys that the section does not have, which become problems."""
        kept: dict[str, Any] = {}
        for key, value in values.items():
            name = f"{prefix}{key}"
            known = section.model_fields.get(str(key))
            if known is None:
                self._note_unknown(name, value, self.origins.get(name, COMMAND_LINE))
            elif inner := section_of(known.annotation):
                given = {} if value is None else value
                nested = isinstance(given, Mapping)
                kept[key] = self._known_part(given, inner, f"{name}.") if nested else given
            elif item := item_section_of(known.annotation):
                kept[key] = self._known_items(value, item, name)
            else:
                kept[key] = value
        return kept

    def _known_items(self, value: Any, item: type[Section], name: str) -> Any:
        if not isinstance(value, list):
            return value
        return [
            self._known_part(each, item, f"{name}[{index}].") if isinstance(each, Mapping) else each
            for index, each in enumerate(value)
        ]

    def note_invalid(self, error: ValidationError) -> None:
        """Turn pydantic's findings into problems, one per setting."""
        noted = set()
        for finding in error.errors(include_url=False, include_context=False):
            name = _name_of(finding["loc"])
            if name not in noted:
                noted.add(name)
                self._note(name, self._value_at(name), self.origin_of(name))

    def _note(self, name: str, value: Any, origin: str, do: str | None = None) -> None:
        key = self.known.get(plain_name(name))
        owner = self.known[plain_name(name).removesuffix("[]")]
        fault = "is not set" if value is _ABSENT else "has a value that does not fit"
        self.problems.append(
            Problem(
                f"{name} {fault} ({origin})",
                have="nothing" if value is _ABSENT else _shown(value),
                want=key.values if key else f"each item in {owner.values}",
                do=do or _advice(name, key or owner, value, origin),
            )
        )

    def _note_unknown(self, name: str, value: Any, origin: str) -> None:
        section = name.partition(".")[0]
        if isinstance(value, Mapping) and value and section in foreign_names().sections:
            for part, inner in value.items():
                self._note_unknown(
                    f"{name}.{part}", inner, self.origins.get(f"{name}.{part}", origin)
                )
            return
        answer = answer_unknown(name, self.known)
        self.problems.append(
            Problem(
                f"there is no setting {name} ({origin})",
                have=f"{name}: {_shown(value)}",
                want=answer.want,
                do=answer.do,
            )
        )

    def origin_of(self, name: str) -> str:
        """Where a value came from; for part of a value, where the whole came from."""
        while name not in self.origins:
            head = max(name.rfind("."), name.rfind("["))
            if head < 0:
                return DEFAULT
            name = name[:head]
            key = self.known.get(plain_name(name))
            if key and key.section and name in self.known:
                return DEFAULT
        return self.origins[name]

    def _value_at(self, name: str) -> Any:
        value: Any = self.values
        for part in name.replace("[", ".[").split("."):
            if part.startswith("["):
                value = value[int(part[1:-1])]
            elif isinstance(value, Mapping) and part in value:
                value = value[part]
            else:
                return _ABSENT
        return value


class _Absent:
    """Marks a value that nothing gave, where None is a value."""


_ABSENT = _Absent()


def _with(mapping: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of `mapping` in which the value at `path` is `value`."""
    head, *rest = path
    if not rest:
        return {**mapping, head: value}
    inner = mapping.get(head)
    return {**mapping, head: _with(inner if isinstance(inner, Mapping) else {}, rest, value)}


def _name_of(location: tuple[int | str, ...]) -> str:
    """Pydantic's location as a dotted key; what lies inside a setting's own value is left away."""
    name = ""
    section: type[Section] = RunConfig
    parts = iter(location)
    for part in parts:
        field_info = section.model_fields[str(part)]
        name = f"{name}.{part}" if name else str(part)
        if inner := section_of(field_info.annotation):
            section = inner
            continue
        item = item_section_of(field_info.annotation)
        index = next(parts, None)
        if item is None or index is None:
            return name
        name, section = f"{name}[{index}]", item
    return name


def _shown(value: Any, limit: int = 80) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _advice(name: str, key: Key, value: Any, origin: str) -> str:
    """The exact thing to write where it can be guessed from the value."""
    colon = "=" if origin == COMMAND_LINE else ": "
    item = item_section_of(key.annotation)
    if item is not None and isinstance(value, str):
        required = next(key for key, field in item.model_fields.items() if field.is_required())
        if name.endswith("]"):
            return f"write it as a mapping: {{{required}: {value}}}"
        quote = "'" if origin == COMMAND_LINE else ""
        return (
            f"write it as a list of mappings: {name}{colon}{quote}[{{{required}: {value}}}]{quote}"
        )
    if get_origin(key.annotation) is list and key.name == name and isinstance(value, str):
        return f"write it as a list: {name}{colon}[{value}]"
    wants_text = set(alternatives(key.annotation)) <= {str, NoneType}
    if wants_text and isinstance(value, int | float):
        quoted = f"'\"{value}\"'" if origin == COMMAND_LINE else f'"{value}"'
        return f"quote it, so that YAML reads a text: {name}{colon}{quoted}"
    return f"see `burnish config explain {key.name}`"

"""The schema as a flat table of dotted keys, with words for each one's values.

Error messages, `config explain` and the search for a misspelt key read this table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from burnish.config.schema import RunConfig
from burnish.config.section import Section


@dataclass(frozen=True, slots=True)
class Key:
    """A setting, or a section of settings."""

    name: str
    """Dotted (`rollout.n`); fields of a list's items are written `reward.functions[].weight`."""
    doc: str
    """What it means: the string under the field, or the section's docstring."""
    annotation: Any
    """Its Python type."""
    values: str
    """Its type and bounds in words."""
    default: Any
    """Value when nothing is set; None for a section."""
    required: bool
    """Whether there is no default."""
    section: type[Section] | None
    """The section's class; None for a setting."""

    @property
    def takes_mapping(self) -> bool:
        """Whether a value may be a mapping with keys of the user's own."""
        return any(get_origin(each) is dict for each in alternatives(self.annotation))


def known_keys(section: type[Section] = RunConfig, prefix: str = "") -> dict[str, Key]:
    """Every key below `section`, sections included, in the schema's order."""
    return {key.name: key for key in _keys(section, prefix)}


def plain_name(name: str) -> str:
    """`reward.functions[3].weight` as the table knows it: `reward.functions[].weight`."""
    return re.sub(r"\[\d+\]", "[]", name)


def section_of(annotation: Any) -> type[Section] | None:
    """The section class an annotation is, or None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return None


def item_section_of(annotation: Any) -> type[Section] | None:
    """The section class that an annotation is a list of, or None."""
    return section_of(get_args(annotation)[0]) if get_origin(annotation) is list else None


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; the annotation itself where it is none."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _keys(section: type[Section], prefix: str) -> Iterator[Key]:
    for field_name, field in section.model_fields.items():
        key = _key(prefix + field_name, field)
        yield key
        if key.section:
            yield from _keys(key.section, f"{key.name}.")
        elif item := item_section_of(field.annotation):
            yield from _keys(item, f"{key.name}[].")


def _key(name: str, field: FieldInfo) -> Key:
    section = section_of(field.annotation)
    default = None if section else field.get_default(call_default_factory=True, validated_data={})
    return Key(
        name=name,
        doc=((section.__doc__ if section else field.description) or "").strip(),
        annotation=field.annotation,
        values=_words(field.annotation, field.metadata),
        default=None if default is PydanticUndefined else default,
        required=field.is_required(),
        section=section,
    )


_PLAIN = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    NoneType: "null",
}
_PLURAL = {int: "whole numbers", float: "numbers", str: "texts"}


def _words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    if section_of(annotation):
        return "a section of settings"
    parts = [_words_of_one(each, metadata) for each in alternatives(annotation)]
    return ", or ".join(parts)


def _words_of_one(annotation: Any, metadata: Iterable[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words_of_one(arguments[0], [*metadata, *_constraints(arguments[1:])])
    if origin is Literal:
        return "one of " + ", ".join(str(each) for each in arguments)
    if origin is dict:
        return "a mapping"
    if origin is list:
        return f"a list of {_plural(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)} {_plural(arguments[0])}"
    if _is_name(metadata):
        return "file.py:name or module:name"
    bounds = "" if annotation is NoneType else _bounds(metadata)
    return _PLAIN[annotation] + (f", {bounds}" if bounds else "")


def _plural(annotation: Any) -> str:
    if item := section_of(annotation):
        return f"mappings with the keys {', '.join(item.model_fields)}"
    plain, *extras = get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
    if _is_name(_constraints(extras)):
        return "names, each file.py:name or module:name"
    bounds = _bounds(_constraints(extras))
    return _PLURAL[plain] + (f", each {bounds}" if bounds else "")


def _is_name(metadata: Iterable[Any]) -> bool:
    """Return whether the constraints are those of `FunctionName`, the one setting with a pattern."""
    return any(getattr(each, "pattern", None) for each in metadata)


def _constraints(extras: Iterable[Any]) -> list[Any]:
    return [each for extra in extras for each in getattr(extra, "metadata", [extra])]


def _bounds(metadata: Iterable[Any]) -> str:
    """Words for annotated-types' constraints: "0 or more, at most 1"."""
    words = {
        "ge": "{} or more",
        "gt": "more than {}",
        "le": "at most {}",
        "lt": "less than {}",
        "min_length": "not empty",
    }
    found = [
        words[name].format(getattr(each, name))
        for each in metadata
        for name in words
        if hasattr(each, name)
    ]
    return ", ".join(found)

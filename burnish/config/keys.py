"""The schema as a flat table of dotted keys, with their values in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from burnish.config.algorithm import FORMULAS
from burnish.config.schema import RunConfig
from burnish.config.section import MAY_CHANGE, Section

_Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Key:
    """A setting or a section."""

    name: str
    """Dotted (`rollout.n`). Fields of a list's items are written `reward.functions[].weight`."""
    doc: str
    """Its meaning: the string under the field, or the section's docstring."""
    values: str
    """Its type and bounds in words."""
    default: Any
    """Value if nothing is set, as plain YAML values; of a formula its name, of another section None."""
    required: bool
    """Whether there is no default."""
    may_change: bool
    """Whether it may change when a run is resumed."""
    section: tuple[str, ...] = ()
    """Names of the settings in a section; empty for a setting."""
    item: tuple[str, ...] = ()
    """Names of the settings in each item of a list, the required one first; empty for anything else."""
    is_list: bool = False
    """Whether it is a list of any length."""
    is_text: bool = False
    """Whether it, or each item of the list, is a text."""


@cache
def known_keys() -> Mapping[str, Key]:
    """Return every key, sections included, in the schema's order."""
    schema = RunConfig.model_json_schema()
    return {key.name: key for key in _keys(schema, schema["$defs"], "", may_change=False)}


def keys_of(section: type[Section], prefix: str) -> Iterator[Key]:
    """Yield the settings of a method's own section."""
    schema = section.model_json_schema()
    yield from _keys(schema, schema.get("$defs", {}), prefix, may_change=False)


def is_default(name: str, value: Any) -> bool:
    """Return whether a setting has this value by default."""
    key = known_keys().get(name)
    return key is not None and key.default == value


def plain_name(name: str) -> str:
    """Return `reward.functions[3].weight` as the table has it: `reward.functions[].weight`."""
    return re.sub(r"\[\d+\]", "[]", name)


def _keys(schema: _Schema, sections: _Schema, prefix: str, *, may_change: bool) -> Iterator[Key]:
    for field, shape in schema["properties"].items():
        section = _referred(shape, sections)
        kinds = [kind for kind in shape.get("anyOf", [shape]) if kind.get("type") != "null"]
        is_list = kinds[0].get("type") == "array" and "prefixItems" not in kinds[0]
        texts = [kinds[0]["items"]] if is_list else kinds
        item = _referred(shape.get("items", {}), sections)
        inner = section.get("properties", {})
        name = prefix + field
        default = inner["name"]["default"] if name in FORMULAS else shape.get("default")
        key = Key(
            name=name,
            doc=(section or shape)["description"],
            values=_words(shape, sections),
            default=None if section and name not in FORMULAS else default,
            required=field in schema.get("required", ()),
            may_change=may_change or MAY_CHANGE.items() <= shape.items(),
            section=tuple(inner),
            item=tuple(item.get("properties", ())),
            is_list=is_list,
            is_text=all(kind.get("type") == "string" for kind in texts),
        )
        yield key
        if section:
            yield from _keys(section, sections, f"{key.name}.", may_change=key.may_change)
        elif item:
            yield from _keys(item, sections, f"{key.name}[].", may_change=key.may_change)


def _referred(schema: _Schema, sections: _Schema) -> _Schema:
    """Return the section that a schema refers to, or an empty one."""
    name = schema.get("$ref", "").rpartition("/")[2]
    return sections[name] if name else {}


_KINDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "null": "null",
    "object": "a mapping",
}
_PLURALS = {"integer": "whole numbers", "number": "numbers", "string": "texts"}
_PATTERNS = {
    r"^[\w.-]+/": "OWNER/NAME",
    "^auto(": "auto, or auto:TOKENS as a run records it",
    "^.+:": "file.py:name or module:name",
    "^([A-Za-z]": "an entry point's name, file.py:Class or module:Class",
    "^https?:": "a URL, http:// or https://",
    "^(env|https?:": "env, or a URL, http:// or https://",
    r"^(\d{1,2}": "a share such as 10%",
    r"^(\d+(": "a part of an epoch such as 1/4 epoch",
}
_BOUNDS = {
    "minimum": "{:.15g} or more",
    "exclusiveMinimum": "more than {:.15g}",
    "maximum": "at most {:.15g}",
    "exclusiveMaximum": "less than {:.15g}",
    "minLength": "not empty",
}


def _words(schema: _Schema, sections: _Schema) -> str:
    """Return a schema in words, such as "a whole number, 1 or more, or null"."""
    if "anyOf" in _referred(schema, sections):
        return "a name, or a mapping with the name and its settings"
    if "anyOf" in schema:
        return ", or ".join(_words(kind, sections) for kind in schema["anyOf"])
    if "$ref" in schema:
        return "a section of settings"
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if pattern := schema.get("pattern"):
        return next(text for start, text in _PATTERNS.items() if pattern.startswith(start))
    bounds = [text.format(schema[name]) for name, text in _BOUNDS.items() if name in schema]
    if schema["type"] != "array":
        return ", ".join([_KINDS[schema["type"]], *bounds])
    items = schema.get("items") or schema["prefixItems"][0]
    if item := _referred(items, sections):
        return f"a list of mappings with the keys {', '.join(item['properties'])}"
    if "anyOf" in items or "pattern" in items:
        return f"a list of names, each {_words(items, sections)}"
    item_bounds = [text.format(items[name]) for name, text in _BOUNDS.items() if name in items]
    count = f"{len(schema['prefixItems'])} " if "prefixItems" in schema else ""
    return f"a list of {count}{_PLURALS[items['type']]}" + (
        f", each {', '.join(item_bounds)}" if item_bounds else ""
    )

"""Hypothesis strategies that make any valid `RunConfig`, read off the schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st

from burnish.config.algorithm import FormulaConfig
from burnish.config.schema import RunConfig
from burnish.config.section import Section

TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12
) | st.sampled_from(
    ["1e5", "no", "null", "~", "<<", "1_000", "0x1f", "# x", "a: b", "- a", "'", "a\nb", "\x85", ""]
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def sections(section: type[Section] = RunConfig) -> st.SearchStrategy[Any]:
    fields = {
        name: values(field.annotation, field.metadata)
        for name, field in section.model_fields.items()
    }
    required = {n: s for n, s in fields.items() if section.model_fields[n].is_required()}
    optional = {n: s for n, s in fields.items() if n not in required}
    return st.fixed_dictionaries(required, optional=optional).map(section.model_validate)


def _with_own_settings(formulas: type[FormulaConfig]) -> Iterator[st.SearchStrategy[Any]]:
    """Yield each built-in formula that has settings of its own, with such settings."""
    for name, own in formulas.own_settings.items():
        given = sections(own).map(
            lambda settings, name=name: {"name": name, **settings.model_dump()}
        )
        yield given.map(formulas.model_validate)


def values(annotation: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    is_union = get_origin(annotation) in (Union, UnionType)
    alternatives = get_args(annotation) if is_union else (annotation,)
    return st.one_of([_one(each, metadata) for each in alternatives])


def _one(annotation: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, FormulaConfig):
        return st.one_of(sections(annotation), *_with_own_settings(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return sections(annotation)
    if origin is Annotated:
        return _one(arguments[0], [*metadata, *arguments[1].metadata])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values(arguments[0], []), max_size=3)
    if origin is tuple:
        return st.tuples(*(_one(each, []) for each in arguments))
    if origin is dict:
        return st.dictionaries(TEXT, JSON, max_size=3)
    bounds = {
        name: getattr(each, name)
        for each in metadata
        for name in ("ge", "gt", "le", "lt", "min_length")
        if hasattr(each, name)
    }
    if annotation is int:
        return st.integers(bounds.get("ge"), bounds.get("le", 2**40))
    if annotation is float:
        low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
        return st.floats(
            low,
            high,
            exclude_min="gt" in bounds,
            exclude_max="lt" in bounds,
            allow_nan=False,
            allow_infinity=False,
        )
    patterns = [each.pattern for each in metadata if getattr(each, "pattern", None)]
    if patterns:
        texts = [
            "my.py:function",
            "package.module:function",
            "env",
            "http://collector:4318",
            "me/sums",
        ]
        texts += ["10%", "1/4 epoch", "auto", "auto:32768"]
        return st.sampled_from([t for t in texts if all(re.search(p, t) for p in patterns)])
    if annotation is str:
        return TEXT.filter(lambda text: len(text) >= bounds.get("min_length", 0))
    return {bool: st.booleans(), NoneType: st.none()}[annotation]

"""Read the tests of a program as published data sets write them.

- PRIME, TACO, APPS, verl: `{"inputs": [...], "outputs": [...], "fn_name": ...}`
- LiveCodeBench, DeepCoder: `[{"input": ..., "output": ..., "testtype": "stdin"}, ...]`, with the function's name in a column `metadata`
- open-r1: `{"language": "python", "test_cases": [{"input": ..., "output": ..., "type": "stdin_stdout"}, ...]}`
- CodeContests: `{"input": [...], "output": [...]}`

Each may be JSON in a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A test: what a program gets, and what it has to answer."""

    given: Any
    """The text of stdin, or the arguments of the function."""
    wanted: Any
    """The text of stdout, or what the function returns."""
    function: str | None
    """None: the program reads stdin."""


def read_cases(ground_truth: Any, columns: Mapping[str, Any]) -> list[Case]:
    """Return the tests that a row has; `columns` are its others. Raises `ValueError` for a row without any."""
    value = _plain(ground_truth)
    language = value.get("language", "python") if isinstance(value, Mapping) else "python"
    if language not in ("python", "python3"):
        raise ValueError(f"the tests are for programs in {language}, and only Python can be run")
    name = _function_of(columns) or (_function_of(value) if isinstance(value, Mapping) else None)
    if isinstance(value, Mapping) and "test_cases" in value:
        value = _plain(value["test_cases"])
    cases = [*_cases(value, name)]
    if not cases:
        raise ValueError(
            "the ground truth has no tests: wanted inputs and outputs, or a list of input and output"
        )
    return cases


def _cases(value: Any, name: str | None) -> Iterator[Case]:
    if isinstance(value, Mapping):
        for ours, theirs in (("inputs", "outputs"), ("input", "output")):
            if ours in value and theirs in value:
                inputs = _plain(value[ours])
                outputs = _plain(value[theirs])
                if not isinstance(inputs, list) or not isinstance(outputs, list):
                    raise ValueError(f"{ours} and {theirs} of the ground truth are no lists")
                if len(inputs) != len(outputs):
                    raise ValueError(
                        f"the ground truth has {len(inputs)} {ours} and {len(outputs)} {theirs}"
                    )
                for given, wanted in zip(inputs, outputs, strict=True):
                    yield _case(given, wanted, name)
                return
    elif isinstance(value, list):
        for entry in map(_plain, value):
            if not isinstance(entry, Mapping) or not {"input", "output"} <= entry.keys():
                raise ValueError("a test without input and output")
            kind = entry.get("type") or entry.get("testtype")
            reads = kind in ("stdin", "stdin_stdout", "stdin-stdout")
            own = _function_of(entry) or name
            if kind in ("functional", "function_call", "call_based") and own is None:
                raise ValueError("a test of a function whose name is nowhere: fn_name is missing")
            yield _case(entry["input"], entry["output"], None if reads else own)


def _case(given: Any, wanted: Any, function: str | None) -> Case:
    if function is None:
        return Case(_text(given), _text(wanted), None)
    if isinstance(given, str):  # one argument a line
        given = [_decoded(line) for line in given.split("\n")]
    if isinstance(wanted, str):
        wanted = _decoded(wanted)
    return Case(given if isinstance(given, list) else [given], wanted, function)


def _function_of(entry: Mapping[str, Any]) -> str | None:
    if entry.get("fn_name"):
        return str(entry["fn_name"])
    metadata = _decoded(entry["metadata"]) if isinstance(entry.get("metadata"), str) else None
    metadata = metadata or entry.get("metadata")
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    return str(name) if name else None


def _plain(value: Any) -> Any:
    """Return a value of a column, which may be JSON in a text, as lists and mappings. Raises `ValueError` for other texts."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"the ground truth is no JSON of tests ({error})") from error
    value = value.tolist() if hasattr(value, "tolist") else value
    return [*value] if isinstance(value, tuple) else value


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)

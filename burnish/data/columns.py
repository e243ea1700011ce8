"""Find the columns to read by name, and check their values. Imports neither `datasets` nor torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from burnish.config.schema import DataConfig
from burnish.errors import UsageError

if TYPE_CHECKING:
    from burnish.data.sources import Rows

_ExampleKind = Literal["chat", "pair", "text"]
Row = dict[str, Any]
"""One row: a value for every column, None where the row has none."""
Message = dict[str, Any]
"""One turn: `role`, `content`, and whatever else the chat template reads."""
Tools = list[dict[str, Any]]
"""JSON schemas of the functions that a conversation may call."""

READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
}
"""File suffix to kind. In a directory, files with other suffixes are ignored."""
_INSTRUCTION = "instruction"
"""Alpaca's prompt, to which `input` is added; `output` is the answer."""
_PROMPT_COLUMNS = ("prompt", "question", "problem", _INSTRUCTION)
"""Usual names of the prompt (verl and TRL; GSM8K; MATH; Alpaca)."""
ANSWER_COLUMNS = ("answer", "ground_truth", "reward_model.ground_truth", "solution", "output")
"""Usual names of the ground truth; a dot goes into a nested column."""
TOOLS_COLUMN = "tools"
"""The functions that a row's conversation may call (TRL)."""
_MESSAGES_COLUMNS = ("messages", "conversations")
"""Usual names of a chat (OpenAI and TRL; ShareGPT)."""
_ROLES: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""ShareGPT's `from` to `role`."""


def is_data(name: str) -> bool:
    """Return whether a file of this name holds data."""
    return PurePosixPath(name).suffix in READERS


def example_format(data: DataConfig, rows: Rows) -> tuple[_ExampleKind, tuple[str, ...]]:
    """Choose the kind of examples and their columns: by settings, else the first usual ones present. Raises `MissingError`."""
    prompt = data.prompt_column or _first(_PROMPT_COLUMNS, rows) or _PROMPT_COLUMNS[0]
    completion = "output" if prompt == _INSTRUCTION else "completion"
    messages = data.messages_column or _first(_MESSAGES_COLUMNS, rows) or _MESSAGES_COLUMNS[0]
    formats: dict[_ExampleKind, dict[str, str]] = {
        "chat": {"messages": messages},
        "pair": {"prompt": prompt, "completion": data.completion_column or completion},
        "text": {"text": data.text_column or "text"},
    }
    named: dict[_ExampleKind, str | None] = {
        "pair": data.prompt_column or data.completion_column,
        "chat": data.messages_column,
        "text": data.text_column,
    }
    chosen = [kind for kind, name in named.items() if name is not None]
    for each in chosen or formats:
        if all(map(rows.has, formats[each].values())):
            return each, tuple(formats[each].values())
    if not chosen and not rows.has(prompt):
        settings = "data.messages_column, data.prompt_column or data.text_column"
        raise rows.missing((*_MESSAGES_COLUMNS, *_PROMPT_COLUMNS, "text"), settings)
    wanted = formats[chosen[0] if chosen else "pair"]
    setting, missing = next((key, name) for key, name in wanted.items() if not rows.has(name))
    raise rows.missing((missing,), f"data.{setting}_column")


def prompt_column(data: DataConfig, rows: Rows) -> str:
    """Return the prompt column for RL, chosen in the same way. Raises `MissingError`."""
    chosen = data.prompt_column or data.messages_column
    names = (chosen,) if chosen else (_PROMPT_COLUMNS[0], *_MESSAGES_COLUMNS, *_PROMPT_COLUMNS[1:])
    found = _first(names, rows)
    if found is None:
        is_chat = data.messages_column and not data.prompt_column
        raise rows.missing(names, f"data.{'messages' if is_chat else 'prompt'}_column")
    return found


def holds_chats(data: DataConfig, column: str) -> bool:
    """Return whether a column holds whole chats, whose last turn is not part of the prompt."""
    return column in ((data.messages_column,) if data.messages_column else _MESSAGES_COLUMNS)


def answer_column(data: DataConfig, rows: Rows) -> str | None:
    """Return the ground truth column, or None. Without a setting, the first usual one with a value in any row."""
    if data.answer_column is None:
        return next((name for name in ANSWER_COLUMNS if rows.has_values(name)), None)
    if not rows.has(data.answer_column):
        raise rows.missing((data.answer_column,), "data.answer_column")
    return data.answer_column


def _first(names: tuple[str, ...], rows: Rows) -> str | None:
    return next((name for name in names if rows.has(name)), None)


def value_at(row: Row, name: str) -> Any:
    """Return a row's value; dots go into nested columns."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def prompt_at(row: Row, name: str) -> Any:
    """Return a row's prompt. Alpaca's instruction and input become a message."""
    value, input_ = value_at(row, name), row.get("input")
    if name != _INSTRUCTION or not isinstance(value, str):
        return value
    return [{"role": "user", "content": f"{value}\n\n{input_}" if input_ else value}]


def messages_of(
    value: Any, name: str, role: str | None = None, exact: bool = False
) -> list[Message]:
    """Check messages and remove nulls, except from arguments if `exact`. With a `role`, a string is a message of this role."""
    if role is not None and isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise _not_messages(name, value, "" if role is None else "a string, or ")
    return [_message(turn, f"message {i} of {name}", exact) for i, turn in enumerate(value)]


def tools_of(row: Row, name: str, exact: bool = False) -> Tools | None:
    """Read a row's tools: a list of JSON schemas, or its text. Raises `UsageError`."""
    value = row.get(TOOLS_COLUMN)
    if isinstance(value, str) and value.strip():
        try:
            value, exact = json.loads(value), True
        except ValueError as error:
            raise _not_tools(name, value) from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise _not_tools(name, value)
    return value if exact else [_cleaned(tool) for tool in value]


def _not_tools(name: str, value: Any) -> UsageError:
    return UsageError(
        f"the column {TOOLS_COLUMN!r} of {name} does not describe tools",
        have=f"{value!r:.60}",
        want="a list of JSON schemas, or such a list as JSON text",
        do="correct the row, or rename the column if it holds something else",
    )


def _message(turn: Any, name: str, exact: bool) -> Message:
    if isinstance(turn, dict) and isinstance(turn.get("from"), str) and turn.get("role") is None:
        if turn["from"] not in _ROLES:
            raise _not_messages(name, turn, want=f"from: {', '.join(_ROLES)}")
        others = {key: turn[key] for key in turn.keys() - {"from", "value"}}
        turn = {**others, "role": _ROLES[turn["from"]], "content": turn.get("value")}
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise _not_messages(name, turn)
    meant = _ROLES.get(turn["role"].strip().lower())
    if meant and turn["role"] not in (*_ROLES.values(), "observation"):
        raise _not_messages(name, turn, want=f"the role {meant}")
    message: Message = _cleaned(turn, "arguments" if exact else "")
    if message.keys() == {"role"} or not isinstance(message.setdefault("content", ""), str | list):
        raise _not_messages(name, turn)
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise UsageError(
            f"the tool calls of {name} cannot be read",
            have=f"{calls!r:.200}",
            want='tool_calls: a list of {"function": {"name": ..., "arguments": {...}}}',
            do="correct the row",
        )
    return message


def _is_call(call: Any) -> bool:
    function = called(call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return False
    return isinstance(function.get("name"), str) and isinstance(arguments, dict)


def called(call: Any) -> Mapping[str, Any]:
    """Return name and arguments of a tool call, in OpenAI's form or without its envelope."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


def _cleaned(value: Any, kept: str = "") -> Any:
    if isinstance(value, dict):
        return {k: v if k == kept else _cleaned(v, kept) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_cleaned(item, kept) for item in value]
    return value


def _not_messages(name: str, value: Any, or_: str = "", *, want: str = "") -> UsageError:
    return UsageError(
        f"{name} is not in chat form",
        have=f"{type(value).__name__} {value!r:.100}",
        want=want or or_ + 'a list of {"role": ..., "content": ...}',
        do="convert the data to that form",
    )


def text_of(value: Any, column: str, name: str) -> str:
    """Return a text. Raises `UsageError` for another type."""
    if isinstance(value, str):
        return value
    raise UsageError(
        f"{name} has no text",
        have=f"{value!r:.60} in column {column!r}",
        want="a string",
        do="correct the row, or name another column in data.messages_column, data.prompt_column or data.text_column",
    )

"""What the columns of a row mean: prompts, answers and messages under the names in common use.

Left out: reading files (`burnish.data.sources`) and tokens (`burnish.data.chat`).
"""

from __future__ import annotations

import json
from typing import Any

from burnish.data.chat import Message, Tools
from burnish.data.kinds import TOOLS_COLUMN
from burnish.data.sources import Row, Rows
from burnish.errors import MissingError, UsageError


def has_column(rows: Rows, name: str) -> bool:
    """Whether there is such a column, dots going into nested ones as the schema or the first row has them."""
    if name in rows.columns:
        return True
    head, _, rest = name.partition(".")
    if not rest or head not in rows.columns:
        return False
    return _has(rows.table.features[head], rest) or _has(rows[0][head], rest)


def _has(value: Any, path: str) -> bool:
    head, _, rest = path.partition(".")
    found = isinstance(value, dict) and head in value
    return found and (not rest or _has(value[head], rest))


def value_at(row: Row, name: str) -> Any:
    """The row's value in a column, dots going into nested ones; None where it has none."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def nothing_found(rows: Rows, want: str, do: str) -> MissingError:
    """The error for a table without any of the columns looked for."""
    return MissingError(
        f"no usable columns in {', '.join(rows.files[:2])}",
        have="columns " + ", ".join(rows.columns),
        want=want,
        do=do,
    )


def messages_of(value: Any, name: str) -> list[Message]:
    """Chat messages as the data holds them, without the nulls that Arrow adds to make rows alike.

    Raises `UsageError` naming the row for anything but a list of messages with `role` and `content`.
    """
    if not isinstance(value, list) or not value:
        raise _not_messages(name, f"{type(value).__name__} {str(value)[:60]!r}")
    return [_message(turn, f"message {i} of {name}") for i, turn in enumerate(value)]


def tools_of(row: Row, name: str) -> Tools | None:
    """What may be called in the row's conversation, from TRL's column: a list of JSON schemas, or that list as JSON text.

    None where there is nothing. Raises `UsageError` naming the row for anything else.
    """
    value = row.get(TOOLS_COLUMN)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _not_tools(name, value) from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise _not_tools(name, value)
    return [_without_nulls(tool) for tool in value]


def _not_tools(name: str, value: Any) -> UsageError:
    return UsageError(
        f"the column {TOOLS_COLUMN!r} of {name} does not describe tools",
        have=f"{value!r:.60}",
        want="a list of JSON schemas, or such a list as JSON text",
        do="correct the row, or give the column another name, and it is not read",
    )


def _message(turn: Any, name: str) -> Message:
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise _not_messages(name, f"keys {sorted(turn)}" if isinstance(turn, dict) else repr(turn))
    message: Message = _without_nulls(turn)
    if "content" not in message:
        if message.keys() == {"role"}:
            raise _not_messages(name, "no content")
        message["content"] = ""
    return message


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _not_messages(name: str, have: str) -> UsageError:
    return UsageError(
        f"{name} is not in chat form",
        have=have,
        want='a list of {"role": ..., "content": ...}',
        do="convert the data to that form",
    )


def text_of(value: Any, column: str, name: str) -> str:
    """The value of a column if it is a string; otherwise `UsageError` naming row and column."""
    if isinstance(value, str):
        return value
    raise UsageError(
        f"{name} has no text",
        have=f"{value!r:.60} in column {column!r}",
        want="a string",
        do="correct the row, or name another column in data.messages_column, data.prompt_column or data.text_column",
    )

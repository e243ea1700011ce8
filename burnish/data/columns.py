"""Find the columns to read by name, and check their values. Imports neither `datasets` nor torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from burnish.config.schema import DataConfig
from burnish.data.messages import REQUEST_COLUMN
from burnish.errors import UsageError

if TYPE_CHECKING:
    from burnish.data.sources import Rows

_ExampleKind = Literal["chat", "pair", "text"]
Row = dict[str, Any]
"""One row: a value for every column, None where the row has none."""

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
PROMPT_COLUMNS = ("prompt", "question", "problem", _INSTRUCTION)
"""Usual names of the prompt (verl and TRL; GSM8K; MATH; Alpaca)."""
ANSWER_COLUMNS = ("answer", "ground_truth", "reward_model.ground_truth", "solution", "output")
"""Usual names of the ground truth; a dot goes into a nested column."""
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
"""Columns of a row's own system message (LLaMA-Factory, OpenOrca)."""
SOURCE_COLUMN = "data_source"
"""The name of the data set that a row is from (verl)."""
HISTORY_COLUMN = "history"
"""Earlier questions and answers of an Alpaca row (LLaMA-Factory)."""
_CONTEXT_COLUMNS = (
    *SYSTEM_COLUMNS, HISTORY_COLUMN, "audio", "audios", "context", "developer", "documents", "functions", "image", "images", "input",
    "instruction", "tools", "video", "videos",
)  # fmt: skip
"""Columns that by convention hold what the model reads."""
_TARGET_COLUMNS = (
    "chosen", "completion", "conversations", "messages", "output", "prompt", "reasoning", "reasoning_content", "rejected", "response",
    "text", "thinking", "thoughts",
)  # fmt: skip
"""Columns that by convention hold what the model learns to write, or a whole row. Reward functions read them too."""
_OTHER_COMPLETIONS = ("response", "answer", "output")
"""Columns that often hold a completion, and are named where there is no other."""
_MESSAGES_COLUMNS = ("messages", "conversations")
"""Usual names of a chat (OpenAI and TRL; ShareGPT)."""


def is_data(name: str) -> bool:
    """Return whether a file of this name holds data."""
    return PurePosixPath(name).suffix in READERS


def example_format(data: DataConfig, rows: Rows) -> tuple[_ExampleKind, tuple[str, ...]]:
    """Choose the kind of examples and their columns: by settings, else the first usual ones present. Raises `MissingError`."""
    prompt = data.prompt_column or first_present(PROMPT_COLUMNS, rows) or PROMPT_COLUMNS[0]
    completion = "output" if prompt == _INSTRUCTION else "completion"
    messages = (
        data.messages_column or first_present(_MESSAGES_COLUMNS, rows) or _MESSAGES_COLUMNS[0]
    )
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
    for kind in chosen or formats:
        if all(map(rows.has, formats[kind].values())):
            if kind == "pair" and not chosen:
                _require_no_undesirable(rows, *formats[kind].values())
            return kind, tuple(formats[kind].values())
    if not chosen and rows.has("chosen") and rows.has("rejected"):
        raise UsageError(
            "data.train holds preferences",
            have="columns " + ", ".join(rows.columns),
            want="messages, a prompt and its completion, or a text",
            do="start burnish dpo; or set data.completion_column=chosen to fine-tune on the chosen answers, or data.messages_column=chosen if those are whole chats",
        )
    if not chosen and not rows.has(prompt):
        settings = "data.messages_column, data.prompt_column or data.text_column"
        raise rows.missing((*_MESSAGES_COLUMNS, *PROMPT_COLUMNS, "text"), settings)
    wanted = formats[chosen[0] if chosen else "pair"]
    setting, missing = next((key, name) for key, name in wanted.items() if not rows.has(name))
    others = _OTHER_COMPLETIONS if setting == "completion" else ()
    raise rows.missing((missing,), f"data.{setting}_column", others)


def _require_no_undesirable(rows: Rows, prompt: str, completion: str) -> None:
    """Raise `UsageError` for rows of KTO, which say of answers that nobody wants them."""
    if any(row.get("label") is False for row in rows.beginning):
        raise UsageError(
            "data.train holds answers that are not desirable",
            have=f"{prompt}, {completion}, and false in the column label",
            want="answers to learn",
            do="start burnish dpo with method.loss={kto: 1.0}; "
            f"or set data.completion_column={completion} to fine-tune on all of them",
        )


def prompt_column(data: DataConfig, rows: Rows) -> str:
    """Return the prompt column for RL, chosen in the same way. Raises `MissingError`."""
    chosen = data.prompt_column or data.messages_column
    usual = (REQUEST_COLUMN, PROMPT_COLUMNS[0], *_MESSAGES_COLUMNS, *PROMPT_COLUMNS[1:])
    names = (chosen,) if chosen else usual
    column = first_present(names, rows)
    if column is None:
        is_chat = data.messages_column and not data.prompt_column
        raise rows.missing(names, f"data.{'messages' if is_chat else 'prompt'}_column")
    return column


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


def first_present(names: tuple[str, ...], rows: Rows) -> str | None:
    """Return the first of these columns that the rows have."""
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
    """Return a row's prompt. Alpaca's instruction and input become a message, after those of its history."""
    value = value_at(row, name)
    if name != _INSTRUCTION or not isinstance(value, str):
        return value
    from burnish.data.prompt_forms import messages_of_instruction

    return messages_of_instruction(value, row.get("input"), row.get(HISTORY_COLUMN))


def beside(row: Row, used: Collection[str], *, targets: bool) -> Row:
    """Return what a row has in columns that are usually for the model, without the `used` ones.

    `targets` adds those that are usually trained on.
    """
    names = (*_CONTEXT_COLUMNS, *_TARGET_COLUMNS) if targets else _CONTEXT_COLUMNS
    return {name: row[name] for name in names if row.get(name) and name not in used}


def system_of(row: Row) -> str | None:
    """Return a row's own system message in a column, or None."""
    texts = (row.get(name) for name in SYSTEM_COLUMNS)
    return next((text for text in texts if isinstance(text, str) and text.strip()), None)


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

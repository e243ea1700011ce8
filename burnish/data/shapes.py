"""Which columns a row is read from, decided by their names alone.

A run asks with the rows at hand, a dry run with nothing but a schema (`burnish.data.peek`), and both get the same answer.
Left out: what the columns hold (`burnish.data.columns`) and errors for it (`burnish.data.tasks`, `burnish.cli.contents`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from burnish.config.schema import DataConfig
from burnish.data.kinds import ANSWER_COLUMNS, PROMPT_COLUMNS

Has = Callable[[str], bool]
"""Whether there is a column of that name; dots go into nested ones."""

_MESSAGES, _COMPLETION, _TEXT = "messages", "completion", "text"


@dataclass(frozen=True, slots=True)
class Shape:
    """How an example is read: a chat, a prompt with its completion, or plain text."""

    kind: Literal["chat", "pair", "text"]
    columns: tuple[str, ...]
    """The column of the messages; of prompt and completion; of the text."""


@dataclass(frozen=True, slots=True)
class Lack:
    """A column that would be needed."""

    names: tuple[str, ...]
    """One of these is missing."""
    want: str
    """What would do, in words."""
    setting: str
    """What names another column."""


def example_shape(data: DataConfig, has: Has) -> Shape | Lack:
    """How examples are read: as the settings say that name a column, else by the usual names.

    A column that is named is never passed over for another. Of several kinds that are named, as for files of two kinds, the first that
    is there counts.
    """
    pair = Shape(
        "pair",
        (
            data.prompt_column or _first(PROMPT_COLUMNS, has) or PROMPT_COLUMNS[0],
            data.completion_column or _COMPLETION,
        ),
    )
    chat = Shape("chat", (data.messages_column or _MESSAGES,))
    text = Shape("text", (data.text_column or _TEXT,))
    named = [
        (pair, data.prompt_column or data.completion_column),
        (chat, data.messages_column),
        (text, data.text_column),
    ]
    chosen = [shape for shape, name in named if name is not None]
    for shape in chosen or (chat, pair, text):
        if all(map(has, shape.columns)):
            return shape
    if chosen:
        return _lack_of(chosen[0], data, has)
    if has(pair.columns[0]):
        return _lack_of(pair, data, has)
    return Lack(
        (_MESSAGES, *PROMPT_COLUMNS, _TEXT),
        f"{_MESSAGES}, or a prompt and {_COMPLETION}, or {_TEXT}",
        "data.messages_column, data.prompt_column or data.text_column",
    )


def _lack_of(shape: Shape, data: DataConfig, has: Has) -> Lack:
    """The first column of the shape that is not there."""
    missing = next(name for name in shape.columns if not has(name))
    if shape.kind == "chat":
        return Lack((missing,), f"a conversation in {missing}", "data.messages_column")
    if shape.kind == "text":
        return Lack((missing,), f"a text in {missing}", "data.text_column")
    if missing == shape.columns[1]:
        want = f"a completion in {missing} beside the prompt"
        return Lack((missing,), want, "data.completion_column")
    names = (missing,) if data.prompt_column else PROMPT_COLUMNS
    return Lack(names, f"a prompt in {' or '.join(names)}", "data.prompt_column")


def prompt_column(data: DataConfig, has: Has) -> str | Lack:
    """The column of the prompts of reinforcement learning: the one that is named, else the first of the usual ones."""
    chosen = data.prompt_column or data.messages_column
    setting = "data.prompt_column" if data.prompt_column or not chosen else "data.messages_column"
    names = (chosen,) if chosen else (PROMPT_COLUMNS[0], _MESSAGES, *PROMPT_COLUMNS[1:])
    return _first(names, has) or Lack(names, f"a prompt in {' or '.join(names)}", setting)


def holds_chats(data: DataConfig, column: str) -> bool:
    """Whether the prompts in a column are whole chats, of which the assistant's last turn is not asked."""
    return column == (data.messages_column or _MESSAGES)


def answer_column(data: DataConfig, has: Has) -> str | Lack | None:
    """The column of the ground truth: the one that is named, else the first of the usual ones; None where there is none."""
    chosen = data.answer_column
    if chosen is None or has(chosen):
        return chosen or _first(ANSWER_COLUMNS, has)
    return Lack((chosen,), f"the answer in {chosen}", "data.answer_column")


def _first(names: tuple[str, ...], has: Has) -> str | None:
    return next((name for name in names if has(name)), None)

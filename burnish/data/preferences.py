"""Data sets of preferences: a prompt with an answer that was chosen and one that was rejected."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, takewhile
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from burnish.config.schema import DataConfig
from burnish.data.chat import Conversation
from burnish.data.columns import Row, preference_prompt_column, prompt_at, value_at
from burnish.data.example_encoder import Encoded, Text
from burnish.data.examples import AnswerRows
from burnish.data.sources import Rows
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.records import Example
from burnish.tracking.progress import Progress

Sides = tuple[str, str]
"""The columns of the chosen and of the rejected answers."""


class PreferenceDataset(AnswerRows[tuple[Example, Example]]):
    """Pairs of answers: a `Sequence[tuple[Example, Example]]`, the chosen one first.

    A row has a prompt and two answers, each text or messages, or two whole conversations whose common beginning is the prompt. Only what
    the answers have of their own is trained on. Rows whose answers are equal are dropped. A row's length is that of its longer answer,
    with the prompt.
    """

    def __init__(  # noqa: PLR0913
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        sides: Sides,
        max_length: int,
        progress: Progress | None = None,
        layout: Layout | None = None,
        eos_token_ids: Sequence[int] = (),
        *,
        limit_name: str = "data.max_length",
        is_judged: bool = False,
    ) -> None:
        """See `ExampleDataset`. Collective. Raises `MissingError` without the columns `sides`.

        With `is_judged` an example is what a reward model reads: the whole text, and one more token, the only one in the loss mask. Its
        value is that of the state after the text.
        """
        self._is_judged = is_judged
        super().__init__(
            rows, tokenizer, data, max_length, limit_name, layout, eos_token_ids, strict=True
        )
        self._sides = sides
        self._prompt = preference_prompt_column(data, rows, sides)
        self._used = (*sides, *([self._prompt] if self._prompt else ()))
        if all(isinstance(value_at(rows[0], name), str) for name in self._used):
            self._notice_raw(self._used[-1])
        self._scan(progress)

    def _measure(self, indices: range, rows: list[Row]) -> list[tuple[int, bytes]]:
        measured = []
        for chosen, rejected in self._encode(indices, rows):
            length = max(len(chosen[0]), len(rejected[0]))
            content = b"".join(array.tobytes() for array in (*chosen, *rejected))
            is_usable = self._differ(chosen, rejected) or length > self._most
            measured.append((length if is_usable else 0, content))
        return measured

    @staticmethod
    def _differ(chosen: Encoded, rejected: Encoded) -> bool:
        """Whether both sides have tokens to train on, and other ones."""
        trained = chosen[1].any() and rejected[1].any()
        return bool(trained) and chosen[0].tobytes() != rejected[0].tobytes()

    def make(self, indices: Sequence[int]) -> list[tuple[Example, Example]]:
        """Return rows' pairs."""
        pairs = self._encode(indices, [self.rows[index] for index in indices])
        self._warn_streamed()
        return [
            (Example(token_ids=c[0], loss_mask=c[1]), Example(token_ids=r[0], loss_mask=r[1]))
            for c, r in pairs
        ]

    def _encode(self, indices: Sequence[int], rows: list[Row]) -> list[tuple[Encoded, Encoded]]:
        shaped = [self._read(index, row) for index, row in zip(indices, rows, strict=True)]
        sides = [*chain.from_iterable(shaped)]
        encoded = iter(self._whole(sides) if self._is_judged else self._encoded(sides))
        return list(zip(encoded, encoded, strict=True))

    def _whole(self, shaped: Sequence[Conversation | Text]) -> list[Encoded]:
        """Encode whole texts as `reward.models` read them. A plain text has no end-of-sequence token there."""
        whole = []
        for side, (ids, mask) in zip(shaped, self._encoded(shaped), strict=True):
            if isinstance(side, Text):
                (tokens,) = self._encoder.ids([side.prompt + side.text], special=True)
                ids = np.array(tokens, np.int64)
            last = np.arange(len(ids) + 1) == len(ids)
            whole.append((np.append(ids, ids[-1:]), last & mask.any()))
        return whole

    def _read(self, index: int, row: Row) -> list[Conversation | Text]:
        name = self.rows.where(index)
        answers = [value_at(row, column) for column in self._sides]
        for column, answer in zip(self._sides, answers, strict=True):
            if not answer:
                raise UsageError(
                    f"{name} has no answer in the column {column}",
                    have=repr(answer),
                    want="a text, or messages",
                    do="correct the row",
                )
        if answers[0] == answers[1]:
            text = f"dropped rows whose chosen and rejected answers are equal, such as {name}"
            self._encoder.unread.note("equal answers", text)
        prompt = None if self._prompt is None else prompt_at(row, self._prompt)
        if all(_is_whole(answer) for answer in answers):
            prompt, answers = self._divided(answers, name)
        if not prompt:
            raise UsageError(
                f"{name} has no prompt",
                have=f"columns {', '.join(row)}",
                want=f"a prompt, or whole conversations in {' and '.join(self._sides)}",
                do="correct the row, or set data.prompt_column",
            )
        column = self._prompt or ""
        return [self._completed(row, name, prompt, answer, column) for answer in answers]

    def _divided(self, answers: Sequence[Any], name: str) -> tuple[list[Any], list[list[Any]]]:
        """Return what two conversations begin with, and what each goes on with."""
        chosen, rejected = answers
        same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
        shared = min(len([*same]), len(chosen) - 1, len(rejected) - 1)
        if not shared:
            raise UsageError(
                f"the conversations of {name} have no message in common",
                have=f"{chosen[0]!s:.60} and {rejected[0]!s:.60}",
                want="the same prompt before two answers",
                do="correct the row",
            )
        return chosen[:shared], [chosen[shared:], rejected[shared:]]


def _is_whole(answer: Any) -> bool:
    """Whether an answer is a conversation that begins with its prompt."""
    first = answer[0] if isinstance(answer, list) and answer else None
    role = first.get("role", first.get("from")) if isinstance(first, dict) else None
    return role is not None and role not in ("assistant", "gpt")

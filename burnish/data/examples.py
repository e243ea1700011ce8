"""Data sets of examples for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from burnish.config.schema import DataConfig
from burnish.data.chat import Conversation
from burnish.data.columns import (
    SOURCE_COLUMN,
    Row,
    example_format,
    prompt_at,
    text_of,
    value_at,
)
from burnish.data.example_encoder import Encoded, ExampleEncoder, Text
from burnish.data.messages import THOUGHTS
from burnish.data.sources import Rows
from burnish.data.tasks import Item, RowDataset
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.records import Example, Floats, Mask, TokenIds
from burnish.tracking.progress import Progress


def by_weight(row: Conversation) -> dict[float, Conversation]:
    """Return, by each weight of trained turns other than 1, the conversation with only those turns trained."""
    weights = {turn: row.messages[turn].get("weight", 1.0) for turn in row.turns}
    return {
        weight: replace(
            row,
            messages=[
                message | {"weight": 0} if weights.get(turn, weight) != weight else message
                for turn, message in enumerate(row.messages)
            ],
        )
        for weight in {*weights.values()} - {1.0}
    }


def _is_empty(row: Conversation | Text) -> bool:
    """Return whether an answer to train on has no words, no thoughts and no calls."""
    if isinstance(row, Text):
        return bool(row.prompt) and not row.text.strip()
    keys = ("content", "tool_calls", *THOUGHTS)
    said = ([row.messages[turn].get(key) for key in keys] for turn in row.turns)
    return any(not any(map(_has_words, values)) for values in said)


def _has_words(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


class AnswerRows(RowDataset[Item]):
    """Rows with answers to train on."""

    encoder = ExampleEncoder
    untrained = "nothing to train on, such as a message of the role assistant"
    _encoder: ExampleEncoder

    def _completed(
        self, row: Row, name: str, prompt: Any, completion: Any, column: str
    ) -> Conversation | Text:
        """Return a prompt, of the column `column`, and its completion, each text or messages."""
        others = self._beside(row, targets=True)
        strings = isinstance(prompt, str) and isinstance(completion, str)
        if strings and self._data.string_prompts == "raw":
            self._require_no_chat_settings(name)
            return Text(completion, prompt, name, others)
        before = self._messages(prompt, f"the prompt of {name}", "user")
        after = self._messages(completion, f"the completion of {name}", "assistant")
        before = self._opened(before, row)
        # As in LLaMA-Factory, the answers in an Alpaca row's history are trained on.
        is_alpaca = isinstance(prompt, list) and isinstance(row.get(column), str)
        context = 0 if is_alpaca else len(before)
        return Conversation(before + after, name, context, self._tools(row, name), others)

    def _encoded(self, shaped: Sequence[Conversation | Text]) -> list[Encoded]:
        if empty := next((each.name for each in shaped if _is_empty(each)), None):
            text = f"an answer of {empty} is empty, and perhaps others are: the model learns to say nothing there; remove such rows, or set loss: false for such messages"
            self._encoder.unread.note("empty answers", text)
        chats = iter(
            self._encoder.conversations([x for x in shaped if isinstance(x, Conversation)])
        )
        texts = iter(self._encoder.texts([x for x in shaped if isinstance(x, Text)]))
        return [next(chats) if isinstance(x, Conversation) else next(texts) for x in shaped]


class ExampleDataset(AnswerRows[Example]):
    """Examples for supervised fine-tuning: a `Sequence[Example]`. One whose row or turns have weights has `weights`.

    A row is a chat, trained on all assistant turns; a prompt and completion, each text or messages, trained on the completion;
    Alpaca's instruction and output, which become a chat; or plain text, trained on whole. Two strings are joined unchanged. A
    string beside messages becomes a message. Text and string completions end with the end-of-sequence token.

    `data.overlong` decides on examples over `max_length` tokens. Those without trained tokens are dropped (`dropped_untrained`).
    """

    def __init__(  # noqa: PLR0913
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        max_length: int | None = None,
        progress: Progress | None = None,
        layout: Layout | None = None,
        eos_token_ids: Sequence[int] = (),
        *,
        strict: bool = False,
        limit_name: str = "data.max_length",
        weight_column: str | None = None,
    ) -> None:
        """See `PromptDataset`; `eos_token_ids` end the model's completions. `strict`: see `ChatEncoder`. Collective.

        `limit_name` names `max_length` in messages. `weight_column` has a factor of each row's loss.
        """
        super().__init__(
            rows, tokenizer, data, max_length, limit_name, layout, eos_token_ids, strict=strict
        )
        self._kind, self._columns = example_format(data, rows)
        self._weight = weight_column
        if self._weight is not None and not rows.has(self._weight):
            raise rows.missing((self._weight,), "method.weight_column")
        self._used = (*self._columns, *([weight_column] if weight_column else ()))
        self._settings = weight_column
        if self._kind == "pair" and all(
            isinstance(prompt_at(rows[0], n), str) for n in self._columns
        ):
            self._notice_raw(self._columns[0])
        self._scan(progress)

    def _read(self, index: int, row: Row) -> Conversation | Text:
        name = self.rows.where(index)
        others = self._beside(row, targets=True)
        if self._kind == "text":
            self._require_no_chat_settings(name)
            text = text_of(value_at(row, self._columns[0]), self._columns[0], name)
            return Text(text, name=name, beside=others)
        if self._kind == "chat":
            messages = self._messages(value_at(row, self._columns[0]), name)
            messages = self._opened(messages, row)
            return Conversation(messages, name, tools=self._tools(row, name), beside=others)
        prompt, completion = (prompt_at(row, column) for column in self._columns)
        return self._completed(row, name, prompt, completion, self._columns[0])

    def _measure(self, indices: range, rows: list[Row]) -> list[tuple[int, bytes]]:
        measured = []
        for ids, mask, weights in self._encode(indices, rows):
            content = ids.tobytes() + mask.tobytes()
            content += b"" if weights is None else weights.tobytes()
            measured.append((len(ids) if mask.any() or len(ids) > self._most else 0, content))
        return measured

    def make(self, indices: Sequence[int]) -> list[Example]:
        """Return rows' examples."""
        rows = [self.rows[index] for index in indices]
        encoded = self._encode(indices, rows)
        self._warn_streamed()
        sources = [str(row.get(SOURCE_COLUMN) or "") for row in rows]
        return [
            Example(token_ids=ids, loss_mask=mask, weights=weights, source=source)
            for source, (ids, mask, weights) in zip(sources, encoded, strict=True)
        ]

    def _encode(
        self, indices: Sequence[int], rows: list[Row]
    ) -> list[tuple[TokenIds, Mask, Floats | None]]:
        shaped = [self._read(i, row) for i, row in zip(indices, rows, strict=True)]
        encoded = []
        for text, row, (ids, mask) in zip(shaped, rows, self._encoded(shaped), strict=True):
            factor = 1.0 if self._weight is None else self._factor(row, text.name)
            weights = np.full(len(ids), factor, np.float32)
            is_weighted = self._weight is not None
            if isinstance(text, Conversation):
                for weight, only in by_weight(text).items():
                    ((_, own),) = self._encoder.conversations([only])
                    weights[own] *= weight
                    is_weighted = True
            encoded.append((ids, mask & (factor > 0), weights if is_weighted else None))
        return encoded

    def _factor(self, row: Row, name: str) -> float:
        """Return the factor of a row's loss."""
        value = value_at(row, str(self._weight))
        with suppress(TypeError, ValueError):  # a CSV file has texts
            if 0 <= float(value) < np.inf:
                return float(value)
        raise UsageError(
            f"{name} has no weight",
            have=f"{value!r:.60} in the column {self._weight}",
            want="a number, at least 0",
            do="correct the row, or remove method.weight_column",
        )

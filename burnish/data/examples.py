"""Data sets of examples for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config.schema import DataConfig
from burnish.data.chat import Conversation
from burnish.data.columns import (
    Row,
    example_format,
    prompt_at,
    text_of,
    value_at,
)
from burnish.data.example_encoder import Encoded, ExampleEncoder, Text
from burnish.data.sources import Rows
from burnish.data.tasks import Item, RowDataset
from burnish.distributed.layout import Layout
from burnish.records import Example
from burnish.tracking.progress import Progress


class AnswerRows(RowDataset[Item]):
    """Rows with answers to train on."""

    encoder = ExampleEncoder
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
        chats = iter(
            self._encoder.conversations([x for x in shaped if isinstance(x, Conversation)])
        )
        texts = iter(self._encoder.texts([x for x in shaped if isinstance(x, Text)]))
        return [next(chats) if isinstance(x, Conversation) else next(texts) for x in shaped]


class ExampleDataset(AnswerRows[Example]):
    """Examples for supervised fine-tuning: a `Sequence[Example]`.

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
    ) -> None:
        """See `PromptDataset`; `eos_token_ids` end the model's completions. `strict`: see `ChatEncoder`. Collective.

        `limit_name` names `max_length` in messages.
        """
        super().__init__(
            rows, tokenizer, data, max_length, limit_name, layout, eos_token_ids, strict=strict
        )
        self._kind, self._columns = example_format(data, rows)
        self._used = self._columns
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
        return [
            (len(ids) if mask.any() or len(ids) > self._most else 0, ids.tobytes() + mask.tobytes())
            for ids, mask in self._encode(indices, rows)
        ]

    def make(self, indices: Sequence[int]) -> list[Example]:
        """Return rows' examples."""
        encoded = self._encode(indices, [self.rows[index] for index in indices])
        self._warn_streamed()
        return [Example(token_ids=ids, loss_mask=mask) for ids, mask in encoded]

    def _encode(self, indices: Sequence[int], rows: list[Row]) -> list[Encoded]:
        return self._encoded([self._read(i, row) for i, row in zip(indices, rows, strict=True)])

"""Data sets of preferences: a prompt with an answer that was chosen and one that was rejected, or with one answer and its label."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from transformers import PreTrainedTokenizerBase

from burnish.config.preferences import PairSettings
from burnish.config.schema import DataConfig
from burnish.data.chat import Conversation
from burnish.data.columns import Row, prompt_at, value_at
from burnish.data.example_encoder import Encoded, Text
from burnish.data.examples import AnswerRows, by_weight
from burnish.data.preference_columns import (
    answer_columns,
    label_of,
    margin_columns,
    preference_prompt_column,
)
from burnish.data.sources import Rows
from burnish.distributed.layout import Layout
from burnish.errors import UsageError, count_text, few
from burnish.records import Example, TokenIds
from burnish.tracking.progress import Progress

_SUBSET = "subset"
_SPAN = 1024
"""Rows that are read together."""


class PreferenceDataset(AnswerRows[tuple[Example, ...]]):
    """Rows with answers that were judged: a `Sequence[tuple[Example, ...]]`. An item has the row's answers.

    A row has a prompt and two answers, each text or messages, or two whole conversations whose common beginning is the prompt. The
    chosen answer comes first. Only what the answers have of their own is trained on. Rows whose answers are equal are dropped. A row's
    length is that of its longer answer, with the prompt.

    A row may have a margin, or scores of both answers that make one.

    If the loss is of single answers, a row may have one answer with a label. Each answer is followed by a mismatched one then, for
    KTO's reference point: the row's prompt with the answer to another one, of the row before or, if that has the same prompt, of one
    farther up. The first row takes the last one's.
    """

    untrained = "equal answers, or nothing to train on"

    def __init__(  # noqa: PLR0913
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        settings: PairSettings,
        max_length: int,
        progress: Progress | None = None,
        layout: Layout | None = None,
        eos_token_ids: Sequence[int] = (),
        *,
        limit_name: str = "data.max_length",
        is_judged: bool = False,
    ) -> None:
        """See `ExampleDataset`. Collective. Raises `MissingError` without the columns that `settings` name.

        With `is_judged` an example is what a reward model reads: the whole text, and one more token, the only one in the loss mask. Its
        value is that of the state after the text.
        """
        self._is_judged = is_judged
        self._answers = answer_columns(data, rows, settings)
        self._label = settings.label_column
        if len(self._answers) == 1 and not settings.is_of_answers:
            raise UsageError(
                f"the rows of {rows.files[0]} have one answer each, with a label",
                have="columns " + ", ".join(rows.columns),
                want=f"the columns {' and '.join(settings.sides)}, or a loss of single answers",
                do="set method.loss={kto: 1.0} in burnish dpo",
            )
        self._is_of_answers = settings.is_of_answers
        self._per_score = settings.margin_per_score
        self.margins = margin_columns(rows, settings)
        """The columns of margins, or of the scores that make them."""
        super().__init__(
            rows, tokenizer, data, max_length, limit_name, layout, eos_token_ids, strict=True
        )
        self._settings = settings, is_judged
        self._prompt = preference_prompt_column(data, rows, self._answers)
        self._used = (*self._answers, *([self._prompt] if self._prompt else ()))
        if self._prompt and all(isinstance(value_at(rows[0], name), str) for name in self._used):
            self._notice_raw(self._prompt)
        self._scan(progress)
        # A batch of streamed rows joins its own prompts and answers.
        self._is_joined = self._is_of_answers and not rows.is_streamed
        self._others = self._with_another_prompt() if self._is_joined else self._usable

    def _measure(self, indices: range, rows: list[Row]) -> list[tuple[int, bytes]]:
        measured = []
        labels = [self._labels(index, row) for index, row in zip(indices, rows, strict=True)]
        for own, answers in zip(labels, self._encode(indices, rows), strict=True):
            length = max(len(ids) for ids, _ in answers)
            content = b"".join(array.tobytes() for array in chain.from_iterable(answers))
            if len(answers) == 1 or (self.margins and any(own)):
                content += np.array(own).tobytes()
            is_usable = self._are_trained(answers) or length > self._most
            measured.append((length if is_usable else 0, content))
        return measured

    @staticmethod
    def _are_trained(answers: Sequence[Encoded]) -> bool:
        """Whether all answers have tokens to train on, and other ones."""
        is_trained = all(mask.any() for _, mask in answers)
        return is_trained and len({ids.tobytes() for ids, _ in answers}) == len(answers)

    def make(self, indices: Sequence[int]) -> list[tuple[Example, ...]]:
        """Return rows' answers."""
        read = [*indices]
        if self._is_joined:
            read += self._others[np.searchsorted(self._usable, indices)].tolist()
        rows = [self.rows[index] for index in read]
        encoded = self._encode(read, rows)
        self._warn_streamed()
        items = []
        for index, row, answers in zip(indices, rows, encoded, strict=False):
            labels = self._labels(index, row)
            items.append([_example(*each) for each in zip(answers, labels, strict=True)])
        if not self._is_joined:
            return [tuple(item) for item in items]
        others = ([_example(each, 0.0) for each in other] for other in encoded[len(items) :])
        return [joined(item, other, self.limit) for item, other in zip(items, others, strict=True)]

    def joined_within(self, items: Sequence[Sequence[Example]]) -> list[tuple[Example, ...]]:
        """Return streamed items, each joined with the nearest one before it, or from the end, that has another prompt.

        If all have one prompt, each is joined with another answer to it, and that is said once.
        """
        prompts = [_prompt(item[0]).tobytes() for item in items]
        if len({*prompts}) == 1:
            text = (
                "a step has rows of one prompt only, so that kto's reference point is of answers to it; "
                "set data.shuffle=true, raise batch.examples or remove data.streaming"
            )
            self._encoder.unread.note("one prompt", text)
            self._warn_streamed()

        def other(place: int) -> int:
            backward = range(place - 1, place - len(items), -1)
            differing = (near for near in backward if prompts[near] != prompts[place])
            return next(differing, place - 1)

        return [joined(item, items[other(place)], self.limit) for place, item in enumerate(items)]

    def subsets(self, indices: Sequence[int]) -> list[str]:
        """Return what items' rows have in the column `subset`; "" for nothing."""
        rows = (self.rows[index] for index in self._usable[list(indices)].tolist())
        return [str(row.get(_SUBSET) or "") for row in rows]

    def _with_another_prompt(self) -> npt.NDArray[np.int64]:
        """Return, for each item, the nearest row before its own that has another prompt. Raises `UsageError` if there is none."""
        starts = range(0, len(self.rows), _SPAN)
        rows = chain.from_iterable(self.rows.span(at, at + _SPAN) for at in starts)
        asked = (xxhash.xxh3_64_intdigest(repr(self._asked(row)).encode()) for row in rows)
        prompts = np.fromiter(asked, np.uint64, len(self.rows))[self._usable]
        begins = np.flatnonzero(prompts != np.roll(prompts, 1))
        if not len(begins):
            raise UsageError(
                "kto reads each prompt with the answer to another one too, for its reference point",
                have=f"{count_text(len(self), 'row')} of {few(self.rows.files)}, all with one prompt",
                want="rows with at least two prompts, also to validate with",
                do="add rows with other prompts, or choose another method.loss",
            )
        # The rows of one prompt that follow each other share what comes before the first of them.
        first = begins[np.searchsorted(begins, np.arange(len(self)), side="right") - 1]
        return self._usable[first - 1]

    def _asked(self, row: Row) -> Any:
        """Return what tells rows of different prompts apart."""
        if self._prompt is not None:
            return prompt_at(row, self._prompt)
        return value_at(row, self._answers[0])[:1]

    def _labels(self, index: int, row: Row) -> tuple[float, ...]:
        """Return the label of each answer; of a pair, unless its answers are single ones, twice its margin."""
        if len(self._answers) > 1:
            return (1.0, -1.0) if self._is_of_answers else (self._margin(index, row),) * 2
        value = value_at(row, self._label)
        name = self.rows.where(index)
        what = "its answer is desirable"
        label = label_of(value, name, self._label, "method.label_column", what)
        return (label,)

    def _margin(self, index: int, row: Row) -> float:
        values = [value_at(row, column) for column in self.margins]
        if not values or values == [None]:
            return 0.0
        with suppress(TypeError, ValueError):  # a CSV file has texts
            numbers = [float(value) for value in values]
            if len(numbers) == 2:
                numbers = [self._per_score * (numbers[0] - numbers[1])]
            if np.isfinite(numbers[0]):
                return numbers[0]
        raise UsageError(
            f"{self.rows.where(index)} has no margin",
            have=f"{', '.join(map(repr, values)):.60} in {' and '.join(self.margins)}",
            want="a number, or two scores",
            do="correct the row, or name another column in method.margin_column",
        )

    def _encode(self, indices: Sequence[int], rows: list[Row]) -> list[tuple[Encoded, ...]]:
        shaped = [self._read(index, row) for index, row in zip(indices, rows, strict=True)]
        answers = [*chain.from_iterable(shaped)]
        for answer in answers:
            if isinstance(answer, Conversation) and by_weight(answer):
                text = f"preferences do not use weights of turns other than 0, such as in {answer.name}"
                self._encoder.unread.note("weights of turns", text)
        encoded = iter(self._whole(answers) if self._is_judged else self._encoded(answers))
        return list(zip(*[encoded] * len(self._answers), strict=True))

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
        answers = [value_at(row, column) for column in self._answers]
        for column, answer in zip(self._answers, answers, strict=True):
            if not answer:
                raise UsageError(
                    f"{name} has no answer in the column {column}",
                    have=repr(answer),
                    want="a text, or messages",
                    do="correct the row",
                )
        if len(answers) == 2 and answers[0] == answers[1]:
            text = f"dropped rows whose chosen and rejected answers are equal, such as {name}"
            self._encoder.unread.note("equal answers", text)
        prompt = None if self._prompt is None else prompt_at(row, self._prompt)
        whole = [_is_whole(answer) for answer in answers]
        if len(answers) == 2 and any(whole) and not all(whole):
            raise UsageError(
                f"{name} has one answer with its prompt, and one without",
                have=f"a whole conversation in {self._answers[whole.index(True)]} alone",
                want="whole conversations in both columns, or answers in both",
                do="correct the row",
            )
        if not all(isinstance(answer, str) for answer in answers):  # both have one form
            answers = [_as_messages(answer) for answer in answers]
        if all(whole) and len(answers) == 2:
            if self._prompt is not None:
                said = "\n".join(map(_words, chain.from_iterable(answers)))
                words = prompt if isinstance(prompt, str) else [*map(_words, prompt or ())]
                self._encoder.unread.check_beside({self._prompt: words}, None, name, said)
            prompt, answers = self._divided(answers, name)
        if not prompt:
            raise UsageError(
                f"{name} has no prompt",
                have=f"columns {', '.join(row)}",
                want=f"a prompt, or whole conversations in {' and '.join(self._answers)}",
                do="correct the row, or set data.prompt_column",
            )
        column = self._prompt or ""
        return [self._completed(row, name, prompt, answer, column) for answer in answers]

    def _divided(self, answers: Sequence[Any], name: str) -> tuple[list[Any], list[list[Any]]]:
        """Return what two conversations begin with, and what each goes on with."""
        chosen, rejected = answers
        same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
        shared = min(len([*same]), len(chosen) - 1, len(rejected) - 1)
        if not shared and chosen[0] == rejected[0]:
            raise UsageError(
                f"a conversation of {name} ends with its prompt",
                have=f"{chosen[-1]!s:.60} and {rejected[-1]!s:.60} at the ends",
                want="an answer after the prompt in both",
                do="correct the row",
            )
        if not shared:
            raise UsageError(
                f"the conversations of {name} have no message in common",
                have=f"{chosen[0]!s:.60} and {rejected[0]!s:.60}",
                want="the same prompt before two answers",
                do="correct the row",
            )
        return chosen[:shared], [chosen[shared:], rejected[shared:]]


def joined(
    item: Sequence[Example], other: Sequence[Example], limit: int | None
) -> tuple[Example, ...]:
    """Return an item's answers, after each one its prompt with the answer to another one, up to the limit."""
    pairs = ((own, _mismatched(own, each, limit)) for own, each in zip(item, other, strict=True))
    return tuple(chain.from_iterable(pairs))


def _prompt(answer: Example) -> TokenIds:
    return answer.token_ids[: int(answer.loss_mask.argmax())]


def _mismatched(own: Example, other: Example, limit: int | None) -> Example:
    before = _prompt(own)
    start = len(_prompt(other))
    ids = np.concatenate([before, other.token_ids[start:]])[:limit]
    trained = np.concatenate([np.zeros(len(before), np.bool_), other.loss_mask[start:]])[:limit]
    return _example((ids, trained), 0.0)


def _example(answer: Encoded, label: float) -> Example:
    ids, mask = answer
    return Example(token_ids=ids, loss_mask=mask, labels=np.full(len(ids), label, np.float32))


def _words(message: Any) -> str:
    if not isinstance(message, dict):
        return ""
    return str(message.get("content") or message.get("value") or "")


def _as_messages(answer: Any) -> Any:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _is_whole(answer: Any) -> bool:
    """Whether an answer is a conversation that begins with its prompt."""
    first = answer[0] if isinstance(answer, list) and answer else None
    role = first.get("role", first.get("from")) if isinstance(first, dict) else None
    return role is not None and role not in ("assistant", "gpt")

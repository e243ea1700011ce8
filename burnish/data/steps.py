"""Data sets of answers in steps, of which each has a label: for process rewards (arXiv 2305.20050)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from burnish.config.preferences import RewardSettings
from burnish.config.schema import DataConfig
from burnish.data.columns import Row, prompt_at, value_at
from burnish.data.examples import AnswerRows
from burnish.data.preference_columns import label_of, preference_prompt_column
from burnish.data.sources import Rows
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.records import Example
from burnish.tracking.progress import Progress


class StepDataset(AnswerRows[Example]):
    """Answers in steps: a `Sequence[Example]`.

    A row has a prompt, a list of steps and a list of as many labels. The separator follows each step. The loss mask has the token after
    each separator, whose value is that of the state there; `labels` has 1 or -1 at it. One more token follows the last step.
    """

    def __init__(  # noqa: PLR0913
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        settings: RewardSettings,
        max_length: int,
        progress: Progress | None = None,
        layout: Layout | None = None,
        eos_token_ids: Sequence[int] = (),
        *,
        limit_name: str = "data.max_length",
    ) -> None:
        """See `ExampleDataset`. Collective. Raises `MissingError` without the columns that `settings` name."""
        super().__init__(
            rows, tokenizer, data, max_length, limit_name, layout, eos_token_ids, strict=True
        )
        self._settings = settings
        self._separator = settings.step_separator or ""
        self._steps = (settings.completions_column, settings.step_labels_column)
        self._prompt = preference_prompt_column(data, rows, self._steps) or "prompt"
        if not rows.has(self._prompt):
            raise rows.missing((self._prompt,), "data.prompt_column")
        self._used = (self._prompt, *self._steps)
        if isinstance(prompt_at(rows[0], self._prompt), str):
            self._notice_raw(self._prompt)
        self._scan(progress)

    def _measure(self, indices: range, rows: list[Row]) -> list[tuple[int, bytes]]:
        return [
            (len(each.token_ids), each.token_ids.tobytes() + np.asarray(each.labels).tobytes())
            for each in self._encode(indices, rows)
        ]

    def make(self, indices: Sequence[int]) -> list[Example]:
        """Return rows' examples."""
        examples = self._encode(indices, [self.rows[index] for index in indices])
        self._warn_streamed()
        return examples

    def _encode(self, indices: Sequence[int], rows: list[Row]) -> list[Example]:
        return [self._example(*each) for each in zip(indices, rows, strict=True)]

    def _example(self, index: int, row: Row) -> Example:
        name = self.rows.where(index)
        steps, labels = (value_at(row, column) for column in self._steps)
        is_list = isinstance(steps, list) and isinstance(labels, list) and len(steps) == len(labels)
        if not (is_list and steps and all(isinstance(step, str) and step for step in steps)):
            raise UsageError(
                f"{name} has no steps with labels",
                have=f"{steps!s:.60} and {labels!s:.60}",
                want=f"a list of texts in {self._steps[0]}, and a label for each in {self._steps[1]}",
                do="correct the row, or name other columns in method.completions_column and method.step_labels_column",
            )
        prompt = prompt_at(row, self._prompt)
        others = self._beside(row, targets=True)
        if isinstance(prompt, str) and self._data.string_prompts == "raw":
            self._require_no_chat_settings(name)
            (before,) = self._encoder.ids([prompt], special=True)
        else:
            messages = self._messages(prompt, f"the prompt of {name}", "user")
            messages = self._opened(messages, row)
            text = self._encoder.prompt(messages, name, self._tools(row, name), others)
            (before,) = self._encoder.ids([text], special=False)
        parts = self._encoder.ids([step + self._separator for step in steps], special=False)
        ends = len(before) + np.cumsum([len(part) for part in parts])
        tokens = [*before, *(token for part in parts for token in part)]
        ids = np.array([*tokens, tokens[-1]], np.int64)
        mask = np.zeros(len(ids), np.bool_)
        mask[ends] = True
        said = np.zeros(len(ids), np.float32)
        said[ends] = [self._said(label, name) for label in labels]
        return Example(token_ids=ids, loss_mask=mask, labels=said)

    def _said(self, label: Any, name: str) -> float:
        return label_of(label, name, self._steps[1], "method.step_labels_column", "a step is right")

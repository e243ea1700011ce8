"""Make data sets of prompts (RL, evaluation) from a table of rows; `burnish.data.examples` makes those of examples.

Ranks tokenize all rows once, to find bad ones before expensive work. They keep only the lengths.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import xxhash
from transformers import PreTrainedTokenizerBase

from burnish.config.schema import DataConfig
from burnish.data.chat import ChatEncoder
from burnish.data.columns import (
    ANSWER_COLUMNS,
    READERS,
    SOURCE_COLUMN,
    Row,
    answer_column,
    beside,
    holds_chats,
    prompt_at,
    prompt_column,
    system_of,
    value_at,
)
from burnish.data.loader import MEASURED, Difficulty
from burnish.data.messages import REQUEST_COLUMN, Message, Tools, messages_of, tool_column, tools_of
from burnish.data.sources import Rows
from burnish.distributed.collectives import agree, any_rank, gather_objects
from burnish.distributed.layout import Layout
from burnish.errors import UsageError, few
from burnish.records import Prompt, TokenIds
from burnish.tracking.progress import Bar, Progress

if TYPE_CHECKING:
    from burnish.data.length_cache import Lengths

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

_SPAN = 512
"""Number of rows that are tokenized together."""
WORTH_KEEPING = 1 << 20
"""The lengths of fewer tokens are not kept for the next start, but counted again."""
_SYSTEM_ROLES = ("system", "developer")


class ItemSequence(Sequence[Item], ABC):
    """Items that are made on access."""

    digest: str
    """Digest of everything that is trained on: equal for the same items in the same order."""

    def difficulty(self) -> Difficulty | None:
        """Return the numbers by which an epoch goes through the items; None for a plain shuffle."""
        return None

    @abstractmethod
    def items(self, indices: Sequence[int]) -> list[Item]:
        """Return items, tokenized together."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return self.items(range(len(self))[index])
        return self.items([index])[0]


class RowDataset(ItemSequence[Item]):
    """Make items from rows on access."""

    encoder: type[ChatEncoder] = ChatEncoder
    """Encodes the rows."""
    lengths: npt.NDArray[np.int64]
    """Tokens of each item, shape [len(self)]."""
    untrained = "nothing to train on"
    """What dropped rows have that are not too long."""
    first_index: int
    """Number of rows in a mixture that come before these."""

    def __init__(  # noqa: PLR0913
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        limit: int | None,
        setting: str,
        layout: Layout | None,
        eos_token_ids: Sequence[int] = (),
        *,
        strict: bool = False,
    ) -> None:
        """`setting` names the setting of `limit`, in tokens. `strict`: see `ChatEncoder`."""
        self.rows = rows
        self.first_index = 0
        self._data = data
        self._layout = layout or Layout()
        self._tokenizer = tokenizer
        self.limit = limit
        self._setting = setting
        self._most = np.inf if limit is None else limit
        # Arrow fills the keys that a row lacks with nulls.
        self._exact = READERS[PurePath(rows.files[0]).suffix] not in ("parquet", "arrow")
        self._encoder = self.encoder(tokenizer, data, limit, eos_token_ids, strict=strict)
        self._strict = strict
        self._eos = tuple(eos_token_ids)
        self._warned: set[str] = set()
        self._used: tuple[str, ...] = ()
        """The columns that are read."""
        self._settings: object = None
        """What the lengths depend on besides `data`."""

    @abstractmethod
    def _measure(self, indices: range, rows: list[Row]) -> list[tuple[int, bytes]]:
        """Return each row's length in tokens (0: untrained) and bytes that identify it."""

    @abstractmethod
    def make(self, indices: Sequence[int]) -> list[Item]:
        """Return the items of these rows."""

    def _scan(self, progress: Progress | None) -> None:
        """Measure all rows, unless streamed. Keep those neither empty nor too long."""
        if self.rows.is_streamed:
            self._usable = self.lengths = np.zeros(0, np.int64)
            self.digest = self.rows.digest
            return
        total = len(self.rows)
        limit = self.limit
        setting = self._setting
        # A limit of the model is named in words, and nobody can raise it.
        do = "shorten the rows" if setting.startswith("the ") else f"raise {setting}"
        lengths, self.digest, warnings = self._lengths(progress or Progress(enabled=False))
        for warning in warnings:
            logger.warning("%s", warning)
        over = lengths > self._most
        if over.any() and self._data.overlong == "error":
            index = int(np.flatnonzero(over)[0])
            raise UsageError(
                f"{self.rows.where(index)} is too long",
                have=f"at least {lengths[index]} tokens; {over.sum()} of {total} rows are over the limit",
                want=f"at most {limit} ({setting})",
                do=f"{do}, or set data.overlong=drop",
            )
        self.dropped_overlong = int(over.sum())
        self.dropped_untrained = int((lengths == 0).sum())
        self._usable = np.flatnonzero(~over & (lengths > 0))
        self.lengths = lengths[self._usable]
        if not len(self):
            raise UsageError(
                f"no row of {', '.join(self.rows.files[:2])} can be used",
                have=f"{total} rows: {self.dropped_overlong} over {setting}={limit}, {self.dropped_untrained} with {self.untrained}",
                want="at least one row to use",
                do=f"{do}, or correct the data",
            )
        if self.dropped_overlong:
            numbers = self.dropped_overlong, total, setting, limit
            logger.warning("dropped %d of %d rows: longer than %s=%d tokens", *numbers)
        if self.dropped_untrained:
            dropped = self.dropped_untrained
            logger.warning("dropped %d of %d rows: %s", dropped, total, self.untrained)

    def _lengths(self, progress: Progress) -> Lengths:
        """Tokenize all rows, unless an earlier start did. Collective."""
        rows = self.rows
        data = self._data.model_dump(exclude={"train", "validation", "max_rows"})
        kind = type(self).__name__
        ends = self._eos
        others = ends, self._strict, self._settings
        named = (rows.digest, len(rows), rows.keys, kind, self.limit, data, *others)
        from burnish.data import length_cache

        key = length_cache.key_of(self._tokenizer, named)
        lengths: Lengths | None = length_cache.read_lengths(key) if key else None
        contents = gather_objects(rows.digest.partition(" ")[0], self._layout)
        sharing = self._layout if len(set(contents)) == 1 else Layout()
        if any_rank(lengths is None, sharing) or lengths is None:
            with progress.phase("tokenizing", len(rows)) as bar:
                lengths = self._tokenized(bar, sharing)
            if key and lengths[0].sum() >= WORTH_KEEPING and self._layout.local_rank == 0:
                length_cache.write_lengths(key, lengths)
        return lengths

    def _tokenized(self, bar: Bar, sharing: Layout) -> Lengths:
        """Tokenize this rank's spans of rows; return all ranks'. Collective."""
        total = len(self.rows)
        starts = range(0, len(self.rows), _SPAN)
        lengths = np.zeros(total, dtype=np.int64)
        digests = np.zeros((len(starts), 2), dtype=np.int64)
        firsts: list[tuple[int, str, str]] = []
        with agree(sharing):
            for number in range(sharing.rank, len(starts), sharing.world):
                span = range(starts[number], min(starts[number] + _SPAN, total))
                digest = xxhash.xxh3_128()
                for index, (length, content) in zip(
                    span, self._measure(span, self.rows.span(span.start, span.stop)), strict=True
                ):
                    lengths[index] = length
                    if 0 < length <= self._most:
                        digest.update(b"%d " % len(content) + content)
                digests[number] = np.frombuffer(digest.digest(), np.int64)
                known = {key for _, key, _ in firsts}
                for key, sentence in self._encoder.warnings.items():
                    if key not in known:
                        firsts.append((number, key, sentence))
                bar.advance(len(span) * sharing.world)
        if sharing.world > 1:  # each number is 0 on all ranks but one
            for numbers in (lengths, digests):
                dist.all_reduce(torch.from_numpy(numbers))
        warnings: dict[str, str] = {}
        for _, key, sentence in sorted(chain.from_iterable(gather_objects(firsts, sharing))):
            warnings.setdefault(key, sentence)
        return lengths, xxhash.xxh3_128_hexdigest(digests.tobytes()), [*warnings.values()]

    def _warn_streamed(self) -> None:
        """Log the warnings of streamed rows, which no scan has collected."""
        if not self.rows.is_streamed:
            return
        new = {key: text for key, text in self._encoder.warnings.items() if key not in self._warned}
        self._warned |= new.keys()
        for warning in new.values():
            logger.warning("%s", warning)

    def _notice_raw(self, column: str) -> None:
        is_raw = self._data.string_prompts == "raw" and self._tokenizer.chat_template
        if is_raw and not self.rows.has_share:
            logger.warning(
                "prompts in %r of %s are strings and are used as they are, although the tokenizer has a chat template; "
                "data.string_prompts=user makes each a user's message",
                column,
                few(self.rows.files),
            )

    def _tools(self, row: Row, name: str) -> Tools | None:
        return tools_of(row, name, self._exact) if self._encoder.reads_tools else None

    def _messages(self, value: Any, name: str, role: str | None = None) -> list[Message]:
        return messages_of(value, name, role, self._exact)

    def _beside(self, row: Row, *, targets: bool) -> Row:
        """See `beside`."""
        used = (*self._used, *([tool_column(row)] if self._encoder.reads_tools else ()))
        return beside(row, used, targets=targets)

    def _opened(self, messages: list[Message], row: Row) -> list[Message]:
        """Put the row's own system message, or else `data.system_prompt`, before messages without one."""
        system = system_of(row) or self._data.system_prompt
        if system is None or messages[0]["role"] in _SYSTEM_ROLES:
            return messages
        return [{"role": "system", "content": system}, *messages]

    def _require_no_chat_settings(self, name: str) -> None:
        data = self._data
        extra = [key for key in ("system_prompt", "chat_template_kwargs") if getattr(data, key)]
        if extra:
            raise UsageError(
                f"{name} is plain text, without the chat template",
                have=" and ".join(f"data.{key}" for key in extra) + ", which are for conversations",
                want="messages, or prompts that become a user's message",
                do=f"set data.string_prompts=user, or remove {' and '.join(f'data.{key}' for key in extra)}",
            )

    def __len__(self) -> int:
        return len(self._usable)

    @property
    def kept_rows(self) -> npt.NDArray[np.int64]:
        """Numbers of the rows that the items are made of, [len(self)]."""
        return self._usable

    @property
    def first_row(self) -> str:
        """The first item's row, for an error message."""
        return self.rows.where(0 if self.rows.is_streamed else int(self._usable[0]))

    def difficulty(self) -> Difficulty | None:
        """Return the column of `data.curriculum`. Raises `UsageError` for other values than numbers."""
        if self._data.curriculum in (None, MEASURED):
            return None
        from burnish.data.curriculum import difficulties

        return difficulties(self.rows, str(self._data.curriculum))[self._usable]

    def items(self, indices: Sequence[int]) -> list[Item]:
        """See `ItemSequence.items`."""
        return self.make(self._usable[list(indices)].tolist())


class PromptDataset(RowDataset[Prompt]):
    """Prompts for RL and evaluation: a `Sequence[Prompt]`.

    The chat template renders messages, with the row's `tools`; a whole chat loses its last assistant turn.
    `data.string_prompts` keeps a plain string or makes it a user's message.

    A prompt over `data.max_prompt_length` or one of `limits` (setting to tokens) is dropped and counted (`dropped_overlong`), or
    raises `UsageError`, depending on `data.overlong`. Raises `MissingError` for a missing column.
    """

    def __init__(  # noqa: PLR0913
        self,
        rows: Rows,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        *,
        limits: Mapping[str, int] | None = None,
        scored: Collection[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        progress: Progress | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Tokenize all rows, a part on each rank of `layout`. Reward functions read the columns `scored`. Collective.

        `tools` are an environment's, for rows without their own.
        """
        self._environment_tools = [dict(tool) for tool in tools]
        most = dict(limits or {})
        if data.max_prompt_length is not None:
            most["data.max_prompt_length"] = data.max_prompt_length
        setting = min(most, key=most.__getitem__, default="data.max_prompt_length")
        super().__init__(rows, tokenizer, data, most.get(setting), setting, layout)
        self._column = prompt_column(data, rows)
        self._used = (self._column, *scored)
        self._answer = answer_column(data, rows)
        if isinstance(prompt_at(rows[0], self._column), str):
            self._notice_raw(self._column)
        self._scan(progress)

    def _measure(self, indices: range, rows: list[Row]) -> list[tuple[int, bytes]]:
        encoded = self._encode(indices, rows)
        return [
            (len(ids), ids.tobytes() + repr(self._answer_of(row, index)).encode())
            for index, (_, _, ids), row in zip(indices, encoded, rows, strict=True)
        ]

    def make(self, indices: Sequence[int]) -> list[Prompt]:
        """Return rows' prompts."""
        rows = [self.rows[index] for index in indices]
        encoded = zip(indices, rows, self._encode(indices, rows), strict=True)
        return [
            Prompt(
                index=self.first_index + self.rows.number(index),
                token_ids=ids,
                text=text,
                messages=messages,
                answer=self._answer_of(row, index),
                source=str(row.get(SOURCE_COLUMN) or ""),
                columns=row,
            )
            for index, row, (text, messages, ids) in encoded
        ]

    def _encode(
        self, indices: Sequence[int], rows: list[Row]
    ) -> list[tuple[str, list[Message] | None, TokenIds]]:
        pairs = [self._prompt(index, row) for index, row in zip(indices, rows, strict=True)]
        plain = iter(
            self._encoder.ids([t for t, messages in pairs if messages is None], special=True)
        )
        chats = iter(self._encoder.ids([t for t, messages in pairs if messages], special=False))
        encoded = []
        for index, (text, messages) in zip(indices, pairs, strict=True):
            ids = next(plain) if messages is None else next(chats)
            if not ids:
                raise UsageError(
                    f"the prompt of {self.rows.where(index)} is empty", do="correct the row"
                )
            encoded.append((text, messages, np.array(ids, dtype=np.int64)))
        self._warn_streamed()
        return encoded

    def _answer_of(self, row: Row, index: int) -> Any:
        answer = None if self._answer is None else value_at(row, self._answer)
        if answer is None and self._data.answer_column is None:
            others = [name for name in ANSWER_COLUMNS if value_at(row, name) is not None]
            if others:
                self._encoder.unread.note(
                    "answers",
                    f"answers are read from the column {self._answer}, which {self.rows.where(index)} and perhaps others lack; they have {others[0]}. Set data.answer_column to choose the column",
                )
        return answer

    def _prompt(self, index: int, row: Row) -> tuple[str, list[Message] | None]:
        if self._column == REQUEST_COLUMN:
            from burnish.data.prompt_forms import chat_of_request

            row = chat_of_request(row, self._data.system_prompt)
        value = prompt_at(row, self._column)
        name = self.rows.where(index)
        others = self._beside(row, targets=False)
        if isinstance(value, str) and self._data.string_prompts == "raw":
            self._require_no_chat_settings(name)
            self._encoder.unread.check_beside(others, None, name, value)
            return value, None
        messages = self._messages(value, f"the prompt of {name}", "user")
        if holds_chats(self._data, self._column) and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise UsageError(f"{name} has no messages before the assistant's", do="correct the row")
        messages = self._opened(messages, row)
        tools = self._tools(row, name) or self._environment_tools or None
        return self._encoder.prompt(messages, name, tools, others), messages


class Mixture(ItemSequence[Item]):
    """The entries of `data.train` end to end, drawn by weight."""

    def __init__(self, parts: Sequence[RowDataset[Item]]) -> None:
        self.parts: tuple[RowDataset[Item], ...] = tuple(parts)
        self.digest = xxhash.xxh3_128_hexdigest("".join(part.digest for part in parts).encode())
        self.first_row = parts[0].first_row
        self.lengths = np.concatenate([part.lengths for part in parts])
        self._ends = np.cumsum([len(part) for part in parts])
        for before, part in pairwise(parts):
            part.first_index = before.first_index + before.rows.end

    def __len__(self) -> int:
        return int(self._ends[-1])

    def items(self, indices: Sequence[int]) -> list[Item]:
        """See `ItemSequence.items`."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        by_place = dict[int, Item]()
        for number in set(numbers.tolist()):
            places = np.flatnonzero(numbers == number)
            own = (np.asarray(indices, np.int64)[places] - self._ends[number]).tolist()
            by_place.update(zip(places.tolist(), self.parts[number].items(own), strict=True))
        return [by_place[place] for place in range(len(indices))]

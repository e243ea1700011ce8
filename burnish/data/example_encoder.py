"""Encode conversations and texts as token ids and loss masks.

A chat template with `{% generation %}` marks the trained tokens. Without it, prefix differencing renders the messages up to each
turn and compares ids. The model trains on the assistant's tokens and its end of turn, except a sequence's first token.

GLM's templates end a turn only by the next role's first token, which also ends completions. So it is trained on and, as in TRL,
added after a last turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

import numpy as np

from burnish.data.chat import ANCHOR, ChatEncoder, Conversation, shared_beginning
from burnish.data.messages import Message
from burnish.errors import UsageError
from burnish.records import Mask, TokenIds

Encoded = tuple[TokenIds, Mask]
"""Token ids [T] and, for each, whether its prediction is trained on."""


# Characters that an error message shows on each side of a difference.
_CONTEXT = 30
_CONTENTS = ("0", "x")
"""Two contents of a message without a common beginning."""
_MARKING = {
    "tokenize": True,
    "return_assistant_tokens_mask": True,
    "tokenizer_kwargs": {"return_offsets_mapping": True},
}


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text to train on."""

    text: str
    """The trained text; an end-of-sequence token is added."""
    prompt: str = ""
    """The text before it, which is context only."""
    name: str = "a row"
    """The row's name in warnings."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """See `Conversation.beside`."""


class ExampleEncoder(ChatEncoder):
    """Encode rows to train on: token ids, and which of them are trained on."""

    def texts(self, rows: Sequence[Text]) -> list[Encoded]:
        """Encode prompt, text and end of sequence. Text and end are trained on, but never the first token.

        No token spans the prompt's end, because a generator reads the prompt alone.
        """
        heads = self.ids([row.prompt for row in rows], special=True)
        joined = self.ids([row.prompt + row.text for row in rows], special=True)
        encoded = []
        for row, head, tokens in zip(rows, heads, joined, strict=True):
            if tokens[: len(head)] != head:
                tokens = head + self._continued(row.text)
            if self._eos is not None and (len(tokens) == len(head) or tokens[-1] != self._eos):
                tokens = [*tokens, self._eos]
            mask = np.arange(len(tokens)) >= max(len(head), 1)
            encoded.append((np.array(tokens, dtype=np.int64), mask))
            self.unread.check_beside(row.beside, None, row.name, row.prompt + row.text)
        return encoded

    def _continued(self, text: str) -> list[int]:
        """Tokenize a continuation, without the space that some tokenizers prepend."""
        before, both = self.ids([ANCHOR, ANCHOR + text], special=False)
        if self._prepends and both[: len(before)] == before:
            return both[len(before) :]
        return self.ids([text], special=False)[0]

    def conversations(self, rows: Sequence[Conversation]) -> list[Encoded]:
        """Encode each conversation.

        Raises `UsageError` naming the row if the template refuses it or, without generation marks, rewrites earlier text other
        than thoughts.
        """
        if self._for_tools is not None and any(row.tools for row in rows):
            with_tools = iter(self._for_tools.conversations([row for row in rows if row.tools]))
            others = iter(self.conversations([row for row in rows if not row.tools]))
            return [next(with_tools) if row.tools else next(others) for row in rows]
        encoded = self._by_marks(rows) if self._marked else self._by_prefixes(rows)
        for _, mask in encoded:
            mask[:1] = False
        if self._openers:
            encoded = [self._ended(row, *each) for row, each in zip(rows, encoded, strict=True)]
        for row, (ids, mask) in zip(rows, encoded, strict=True):
            is_cut = self._limit is not None and len(ids) > self._limit
            if mask.any() and not is_cut and not np.isin(ids[mask], self._stops).any():
                self.unread.note("the end of turns", self._without_end(row))
        return encoded

    def _without_end(self, row: Conversation) -> str:
        end = "the token that ends a turn" if self._eos is None else self._tokenizer.eos_token
        do = f"set model.chat_template to one that writes {end} after the assistant's content"
        for token in set(self._past_ends) - {*self._ends}:
            opener = self._tokenizer.convert_ids_to_tokens(token)
            do += f", or add {opener} to eos_token_id in generation_config.json"
        return f"the chat template ends no turn of the assistant in {row.name}, and perhaps in others: the model does not learn to stop; {do}"

    def _ended(self, row: Conversation, ids: TokenIds, mask: Mask) -> Encoded:
        """Train on the next role's token after each trained turn; add one after the last."""
        last = row.messages[-1]
        ends = [*self._past_ends, *self._openers.values()]
        if len(row.messages) - 1 in row.turns and mask[-1:].any() and ids[-1] not in ends:
            token = self._openers.get("tool" if last.get("tool_calls") else "user", self._eos)
            if token is not None:
                ids = np.append(ids, token)
                mask = np.append(mask, False)
        mask[1:] |= mask[:-1] & ~np.isin(ids[:-1], ends) & np.isin(ids[1:], ends)
        return ids, mask

    def _by_marks(self, rows: Sequence[Conversation]) -> list[Encoded]:
        """Take masks from `{% generation %}`; add an end-of-turn token that follows it."""
        encoded = []
        for row in rows:
            if any(message.get("weight") == 0 for message in row.messages):
                encoded += self._by_prefixes([row])
                continue
            text = self._checked(row)
            if self._beginning(text) != text:
                ids = np.array(self.ids([text], special=False)[0], dtype=np.int64)
                encoded.append((ids, np.ones(len(ids), dtype=np.bool_)))
                continue
            out = self._render(row.messages, row, **_MARKING)
            ids = np.array(out["input_ids"], dtype=np.int64)
            self._note_unknown([text], [out["input_ids"]])
            mask = np.array(out["assistant_masks"], dtype=np.bool_)
            begins, ends = np.array(out["offset_mapping"]).reshape(-1, 2).T
            for i in np.flatnonzero(begins[1:] < ends[:-1]) + 1:  # further bytes of one character
                mask[i] |= mask[i - 1]
            mask[1:] |= mask[:-1] & np.isin(ids[1:], self._ends)
            if row.trained_from:
                before = self._before(row.messages[: row.trained_from], row)
                both = self._with_contents(row, row.trained_from - 1)
                rest = _common(*(each[::-1] for each in both))[::-1]
                start, end = self.ids([before, rest], special=False)
                mask[: shared_beginning(start, ids)] = False
                if text.endswith(rest):  # `before` may have thoughts that the text drops
                    mask[: len(ids) - shared_beginning(end[::-1], ids[::-1])] = False
            encoded.append((ids, mask))
        return encoded

    def _by_prefixes(self, rows: Sequence[Conversation]) -> list[Encoded]:
        texts: list[str] = []
        for row in rows:
            texts.append(self._checked(row))
            for turn in row.turns:
                texts.append(self._before(row.messages[:turn], row))
                texts.append(str(self._render(row.messages[: turn + 1], row)))
        tokenized = iter(zip(texts, self.ids(texts, special=False), strict=True))
        encoded = []
        for row in rows:
            text, tokens = next(tokenized)
            ids = np.array(tokens, dtype=np.int64)
            mask = np.zeros(len(ids), dtype=np.bool_)
            for turn in row.turns:
                start = self._turn_start(next(tokenized), (text, ids), row, turn)
                end = self._turn_end(next(tokenized), (text, ids), start, row, turn)
                mask[start:end] = True
            encoded.append((ids, mask))
        return encoded

    def _turn_start(
        self,
        before: tuple[str, list[int]],
        whole: tuple[str, TokenIds],
        row: Conversation,
        turn: int,
    ) -> int:
        """Return the index of a turn's first token; `before` is its prompt.

        If a template drops the prompt's thoughts, the turn begins with its content.
        """
        if turn + 1 < len(row.messages) and not whole[0].startswith(before[0]):
            header = self._up_to_content(row, turn)
            if before[0].startswith(header) and whole[0].startswith(header):
                before = header, self.ids([header], special=False)[0]
        return self._boundary(before, whole, row, turn)

    def _up_to_content(self, row: Conversation, turn: int) -> str:
        return _common(*self._with_contents(row, turn))

    def _with_contents(self, row: Conversation, turn: int) -> list[str]:
        before = row.messages[:turn]
        after = row.messages[turn + 1 :]
        changed = ([*before, row.messages[turn] | {"content": c}, *after] for c in _CONTENTS)
        return [str(self._render(messages, row)) for messages in changed]

    def _turn_end(
        self,
        after: tuple[str, list[int]],
        whole: tuple[str, TokenIds],
        start: int,
        row: Conversation,
        turn: int,
    ) -> int:
        """Return the index after a turn's end-of-turn token.

        If a template rewrites past turns, this is the last such token before the next content.
        """
        if turn + 1 < len(row.messages) and not whole[0].startswith(after[0]):
            header = self._up_to_content(row, turn + 1)
            if whole[0].startswith(header):
                stop = shared_beginning(self.ids([header], special=False)[0], whole[1])
                closing = np.isin(whole[1][start:stop], self._past_ends)
                if closing.any():
                    return start + int(np.flatnonzero(closing)[-1]) + 1
        end = self._boundary(after, whole, row, turn)
        inside = np.flatnonzero(np.isin(whole[1][start:end], self._ends))
        return start + int(inside[-1]) + 1 if len(inside) else end

    def _boundary(
        self,
        prefix: tuple[str, list[int]],
        whole: tuple[str, TokenIds],
        row: Conversation,
        turn: int,
    ) -> int:
        """Return the index in `whole` where the prefix ends, before a token that spans its end."""
        shared = shared_beginning(prefix[1], whole[1])
        if shared == len(prefix[1]) or whole[0].startswith(prefix[0]):
            return shared
        at = len(_common(prefix[0], whole[0]))
        begin = max(0, at - _CONTEXT)
        raise UsageError(
            f"the chat template renders the text before message {turn} of {row.name} differently when more messages follow: token {shared} (character {at}) is the first to differ",
            have=repr(whole[0][begin : at + _CONTEXT]),
            want=repr(prefix[0][begin : at + _CONTEXT]),
            do=self._remedy,
        )

    def _before(self, messages: list[Message], row: Conversation) -> str:
        if not messages:
            raise UsageError(
                f"{row.name} begins with the assistant",
                want="a user or system message before the assistant's first",
                do="correct the row, or use a chat template with {% generation %}",
            )
        return str(self._render(messages, row, add_generation_prompt=True))


def _common(*texts: str) -> str:
    return commonprefix(texts)  # noqa: RUF071 - of texts that are no paths

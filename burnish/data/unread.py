"""Find words of a row that do not reach the text that a chat template writes.

What is to be trained is refused. Everything else is named once per key, with the first row.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.data.messages import THOUGHTS, Message, Tools, called
from burnish.data.template import ChatTemplate
from burnish.errors import UsageError

_READ = frozenset({"role", "content", "tool_calls", "weight"})
_METADATA = frozenset({
    "annotations", "author", "created", "created_at", "date", "extra", "extra_info", "finish_reason", "id", "index", "label", "labels",
    "lang", "language", "logprobs", "message_id", "meta", "metadata", "model", "parent_id", "rating", "score", "source", "status",
    "stop_reason", "time", "timestamp", "token_count", "tokens", "tool_call_id", "turn", "type", "updated_at", "url", "usage", "uuid",
})  # fmt: skip
"""Keys of a message that by convention are about it, or link a result to its call."""
_SHORT = 16
"""A shorter value may be in a text by chance, so it is looked for in another way."""
_MARKER = "qzjxmarker"
_CLOSING = "</think>"
_TOOL_WORDS = ("name", "description")
"""Keys of a tool's schema whose values are words; templates write types and the like in their own way."""

Again = Callable[[Sequence[Message]], str | None]
"""Renders changed messages like the first ones, or returns None."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """One value of a message."""

    key: str
    """Its key, or `thoughts` for those in the content."""
    value: Any
    marked: Message
    """The message with another text in its place."""


class UnreadWords:
    """Checks rendered rows. `warnings` has a sentence for each key, of the first row that has it."""

    def __init__(
        self, template: ChatTemplate, system_prompt: str | None = None, *, strict: bool = True
    ) -> None:
        """A system message that is `system_prompt` comes from `data.system_prompt`. `strict`: see `ChatEncoder`."""
        self._strict = strict
        self.warnings: dict[str, str] = {}
        self._template = template
        self._system_prompt = system_prompt
        self._written: dict[tuple[str, ...], bool] = {}

    def check(
        self,
        messages: Sequence[Message],
        name: str,
        text: str,
        again: Again,
        turns: Collection[int] = (),
    ) -> None:
        """Raise `UsageError` for words of the trained `turns`, tool calls or `data.system_prompt` that are not in `text`."""
        later = frozenset(_later_users(messages))
        for number, message in enumerate(messages):
            where = f"message {number} of {name}"
            self._check_calls(message, where, text)
            for piece in _pieces(message):
                is_past = number in later
                if missing(piece.value, text) is not None or not self._is_written(
                    messages, number, piece, again, is_past
                ):
                    self._report(message, piece, where, number in turns, is_past)

    def _report(
        self, message: Message, piece: _Piece, where: str, is_trained: bool, is_past: bool
    ) -> None:
        """Refuse or note a value that does not reach the text."""
        role = message["role"]
        key = piece.key
        if role == "system" and message["content"] == self._system_prompt:
            raise UsageError(
                "the chat template leaves out data.system_prompt",
                have=f"a template that writes no system message in {where}",
                want="a template with a place for system messages",
                do="remove data.system_prompt, or set model.chat_template to such a template",
            )
        is_thought = key in (*THOUGHTS, "thoughts")
        # Templates of thinking models drop the thoughts of answers before the last question.
        if is_trained and (key == "content" or (is_thought and not is_past)):
            problem = f"the chat template leaves out {key} of {where}, which is to be trained on"
            if not self._strict:
                return self.note(f"trained {key}", problem)
            raise UsageError(
                problem,
                have=f"{piece.value!r:.80}",
                want="a template that writes it",
                do="set model.chat_template to one, write the words into content in the template's form, "
                "or set weight: 0 in that message",
            )
        past = " before the last question" if is_thought and is_past else ""
        advice = "; to train on it, give a row that ends there" if past and is_trained else ""
        return self.note(
            f"{role}.{key}{past}",
            f"the chat template leaves out {key!r} of the {role}{past} in {where}, and perhaps in others{advice}",
        )

    def _is_written(
        self,
        messages: Sequence[Message],
        number: int,
        piece: _Piece,
        again: Again,
        is_past: bool,
    ) -> bool:
        """Return whether the template writes this kind of value, which may be in the text by chance."""
        key = piece.key
        message = messages[number]
        named = self._template.thoughts_key(key) if key in THOUGHTS else key
        is_named = key in (*_READ, "thoughts") or self._template.reads(named)
        is_long = is_named and min(map(len, _leaves(piece.value)), default=_SHORT) >= _SHORT
        # A tool's result repeats the name that stands in the call.
        is_result = key == "name" and message["role"] == "tool"
        if is_long or is_result or not (key == "content" or isinstance(piece.value, str)):
            return True
        is_last = number == len(messages) - 1
        place = f"{number == 0} {is_last} {is_past}"
        kind = (message["role"], key, place, *sorted(message))
        if kind not in self._written:
            text = again([*messages[:number], piece.marked, *messages[number + 1 :]])
            self._written[kind] = text is None or missing(_MARKER, text) is None
        return self._written[kind]

    def _check_calls(self, message: Message, where: str, text: str) -> None:
        calls = [called(call) for call in message.get("tool_calls", ())]
        lost: str | None = None
        for call in calls:
            arguments = call.get("arguments") or {}
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            lost = (
                lost or missing(str(call.get("name")), text) or missing(arguments, text, keys=True)
            )
        if lost is not None or (calls and not self._template.reads("tool_calls")):
            raise UsageError(
                f"the chat template does not write the tool calls of {where}",
                have=f"calls of {', '.join(str(call.get('name')) for call in calls)}",
                want="a template that writes tool_calls",
                do="set model.chat_template to one, or write the calls into content",
            )

    def check_beside(
        self, beside: Mapping[str, Any], tools: Tools | None, name: str, text: str
    ) -> None:
        """Note columns, and words of tools, that are not in `text`."""
        for column, value in beside.items():
            if column not in self.warnings and missing(value, text) is not None:
                self.note(
                    column,
                    f"the column {column!r} is not read: its words in {name}, and perhaps in others, do not reach the model; "
                    "write them into the messages, or rename the column",
                )
        lost = None if "tools" in self.warnings else missing([*_tool_words(tools or [])], text)
        if lost is not None:
            what = f"the chat template leaves out words of 'tools' or 'functions' in {name}, and perhaps in others: {lost!r:.80}"
            self.note("tools", what)

    def note(self, key: str, sentence: str) -> None:
        """Keep the first sentence of a key."""
        self.warnings.setdefault(key, sentence)


def missing(value: Any, text: str, *, keys: bool = False) -> str | None:
    """Return the first string in a value whose words are not in the text, or None. With `keys`, numbers and keys count too.

    Templates trim texts, and write them as JSON or HTML.
    """
    for leaf in _leaves(value, keys=keys):
        if not _is_in(leaf, text):
            lines = leaf.splitlines() if "\n" in leaf.strip() else [leaf]
            lost = next((line for line in lines if not _is_in(line, text)), None)
            if lost is not None:
                return lost
    return None


def _is_in(words: str, text: str) -> bool:
    words = words.strip()
    if words in text:
        return True
    plain, ascii_ = (json.dumps(words, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    forms = (plain, ascii_, json.dumps(plain)[1:-1], html.escape(words), repr(words)[1:-1])
    return any(form in text for form in forms)


def _leaves(value: Any, *, keys: bool = False) -> Iterator[str]:
    if isinstance(value, str):
        if value.strip():
            yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if keys:
                yield str(key)
            yield from _leaves(inner, keys=keys)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner, keys=keys)
    elif isinstance(value, bytes):  # of an image
        yield repr(value)
    elif keys and isinstance(value, int) and not isinstance(value, bool):
        yield str(value)


def _tool_words(value: Any, *, named: bool = False) -> Iterator[str]:
    """Yield names and descriptions of tools and their parameters."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if named:
                yield key
            if key in _TOOL_WORDS and isinstance(inner, str):
                yield inner
            else:
                yield from _tool_words(inner, named=key == "properties")
    elif isinstance(value, list):
        for inner in value:
            yield from _tool_words(inner)


def _pieces(message: Message) -> Iterator[_Piece]:
    """Yield a message's values that are words for the model, without calls."""
    content = message.get("content")
    if isinstance(content, list):
        content = [part.get("text", "") for part in content]
        yield _Piece("content", content, message | {"content": _MARKER})
    elif isinstance(content, str):
        thoughts, closing, answer = content.rpartition(_CLOSING)
        if message["role"] != "assistant" or not closing:
            answer = content
        elif thoughts.replace("<think>", "").strip():
            marked = message | {"content": f"<think>\n{_MARKER}\n{_CLOSING}{answer}"}
            yield _Piece("thoughts", thoughts.replace("<think>", "\n"), marked)
        if answer.strip():
            marked = message | {"content": content[: len(content) - len(answer)] + _MARKER}
            yield _Piece("content", answer, marked)
    for key in message.keys() - _READ - _METADATA:
        if any(True for _ in _leaves(message[key])):
            yield _Piece(key, message[key], message | {key: _MARKER})


def _later_users(messages: Sequence[Message]) -> Iterator[int]:
    """Yield the indices of messages that a user's message follows."""
    last = max((i for i, each in enumerate(messages) if each["role"] == "user"), default=0)
    return iter(range(last))

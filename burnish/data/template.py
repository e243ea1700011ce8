"""What one chat template reads, found by rendering probes, and messages in the form that it reads.

Published rows and templates use two forms of several things: content as text or parts, arguments as an object or JSON text, thoughts
under several keys. Rows may have either form. Each template gets the one that it writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from burnish.data.messages import THOUGHTS, Message, Tools, called
from burnish.data.tokenizer import render
from burnish.errors import UsageError

_ONE = "qzjxone"
_TWO = "qzjxtwo"
"""Words that no template has."""
_ASKED: Message = {"role": "user", "content": "hello"}
_JOIN = "\n"
"""Stands between text parts, as vLLM puts it, if the template takes only text."""


class ChatTemplate:
    """One chat template of a tokenizer, with the variables of `data.chat_template_kwargs`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self._forms: dict[str, tuple[bool, bool]] = {}

    def reads(self, name: str) -> bool:
        """Return whether the name occurs in the template."""
        template = str(self._tokenizer.chat_template or "")
        return re.search(rf"\b{re.escape(name)}\b", template) is not None

    def render(
        self,
        messages: Sequence[Message],
        name: str,
        tools: Tools | None = None,
        documents: Tools | None = None,
        **options: Any,
    ) -> Any:
        """Render messages in the template's form. Raises `UsageError` naming the row if the template refuses it."""
        if not self._tokenizer.chat_template:
            raise UsageError(
                f"{name} is a conversation, and the tokenizer has no chat template",
                do="set model.chat_template to a Jinja file, or use plain prompts and completions",
            )
        extras = {"tools": tools, "documents": documents}
        variables = self._variables | {key: value for key, value in extras.items() if value}
        try:
            fitted = self.fitted(messages)
            return render(self._tokenizer, fitted, **{"tokenize": False} | variables | options)
        except jinja2.TemplateError as error:
            raise UsageError(
                f"the chat template refuses {name}: {error}",
                have=f"roles {', '.join(str(message.get('role')) for message in messages)}",
                do="correct the row, or set model.chat_template to a template that takes it",
            ) from error

    def rendered(self, messages: Sequence[Message], **options: Any) -> str | None:
        """Render messages as they are, or return None if the template refuses them."""
        try:
            how = {"tokenize": False} | self._variables | options
            return str(render(self._tokenizer, messages, **how))
        except (jinja2.TemplateError, UsageError):
            return None

    def fitted(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in the form that the template takes."""
        return [self._fitted(message) for message in messages]

    def _fitted(self, message: Message) -> Message:
        """Return the message in the form that the template takes."""
        role = message["role"]
        content = message.get("content")
        changed = dict[str, Any]()
        takes_text, takes_parts = self._content_forms(role)
        if isinstance(content, list) and not takes_parts:
            content = _JOIN.join(str(part.get("text", "")) for part in content)
        if isinstance(content, str):
            changed["content"] = content if takes_text else _parts(content)
        if message.get("tool_calls"):
            changed["tool_calls"] = [self._fitted_call(call) for call in message["tool_calls"]]
        message = message | changed
        for key in [each for each in THOUGHTS if each in message and role == "assistant"]:
            message.setdefault(self.thoughts_key(key), message.pop(key))
        return message

    def thoughts_key(self, key: str) -> str:
        """Return the key under which the template reads the thoughts that a row has under `key`."""
        return key if key in self._thoughts or not self._thoughts else self._thoughts[0]

    def _fitted_call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = called(call).get("arguments") or {}
        if self._takes_json_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str) and not self._takes_json_text:
            arguments = json.loads(arguments)
        return call | {"function": {**called(call), "arguments": arguments}}

    def _content_forms(self, role: str) -> tuple[bool, bool]:
        """Return whether the template writes a role's content given as text, and given as text parts."""
        if role not in self._forms:
            text_form = [*_before(role), {"role": role, "content": _ONE}]
            text_form += [_ASKED] if role in ("system", "developer") else []
            parts_form = [each | {"content": _parts(each["content"])} for each in text_form]
            as_text, as_parts = (self.rendered(each) or "" for each in (text_form, parts_form))
            written = re.search(f"{_ONE}(.*?){_TWO}", as_parts, re.DOTALL)
            # Otherwise the template writes Python's form of the list, or JSON.
            takes_parts = written is not None and "type" not in written[1]
            self._forms[role] = _ONE in as_text or _ONE not in as_parts, takes_parts
        return self._forms[role]

    @cached_property
    def _takes_json_text(self) -> bool:
        """Whether the template joins arguments to a text, so that they have to be one."""
        arguments = {_ONE: _TWO}

        def written(value: Any) -> str:
            function = {"name": "look", "arguments": value}
            call = {"id": "qzjx00001", "type": "function", "function": function}
            asks = {"role": "assistant", "content": "", "tool_calls": [call]}
            return self.rendered([_ASKED, asks]) or ""

        as_object = written(arguments)
        as_text = written(json.dumps(arguments))
        is_plain = f'"{_ONE}"' in as_text and f'\\"{_ONE}' not in as_text
        return (
            is_plain and f'"{_ONE}"' not in as_object and f"'{_ONE}'" in (as_object or f"'{_ONE}'")
        )

    @cached_property
    def _thoughts(self) -> list[str]:
        """The keys under which the template writes thoughts, or else those that it names."""
        named = [key for key in THOUGHTS if self.reads(key)]

        def is_written(key: str) -> bool:
            turn = {"role": "assistant", "content": _ONE, key: _TWO}
            return _TWO in (self.rendered([_ASKED, turn]) or "")

        return [key for key in named if is_written(key)] or named


def _parts(text: str) -> list[dict[str, str]]:
    texts = (_ONE, _TWO) if text == _ONE else (text,)
    return [{"type": "text", "text": each} for each in texts]


def _before(role: str) -> list[Message]:
    """Return the messages before one of a role, in a usual conversation."""
    if role != "tool":
        return [] if role in ("system", "developer", "user") else [_ASKED]
    function = {"name": "look", "arguments": {}}
    call = {"id": "qzjx00001", "type": "function", "function": function}
    return [_ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]

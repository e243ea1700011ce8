"""Render conversations with a tokenizer's chat template, and tokenize texts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from burnish.config.schema import DataConfig
from burnish.data.messages import Message, Tools
from burnish.data.template import ChatTemplate
from burnish.data.tokenizer import end_of_turn_id, has_generation_marks, single_template
from burnish.data.unread import UnreadWords
from burnish.errors import UsageError
from burnish.records import TokenIds

logger = logging.getLogger(__name__)

ANCHOR = "\n"
"""A text that tokenizers do not merge with the text after it."""
_CHARACTERS_PER_TOKEN = 32
"""Characters of a long text that are tokenized first, per token of the limit."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a row."""

    messages: list[Message]
    name: str
    """The row's name in error messages."""
    trained_from: int = 0
    """Assistant turns before this index are context only."""
    tools: Tools | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)
    """What the row has in other columns that are usually for the model."""

    @property
    def documents(self) -> Tools | None:
        """The documents beside the messages, which some templates write."""
        return self.beside.get("documents")

    @property
    def turns(self) -> list[int]:
        """Indices of trained assistant messages, without those of `weight: 0`."""
        own = [i for i, m in enumerate(self.messages) if m.get("role") == "assistant"]
        return [i for i in own if i >= self.trained_from and self.messages[i].get("weight") != 0]


class ChatEncoder:
    """Encode many rows at a time, in the tokenizer's threads."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig | None = None,
        limit: int | None = None,
        eos_token_ids: Collection[int] = (),
        *,
        strict: bool = True,
    ) -> None:
        """`eos_token_ids` end the model's completions. `data` says how to render.

        `strict` refuses words to train on that the template leaves out; otherwise they are only noted. Raises `UsageError` if the
        template does not read one of `data.chat_template_kwargs`; only warns if it is a boolean.
        """
        data = data or DataConfig()
        self._for_tools: Self | None = None
        """The encoder of rows with tools, if the tokenizer has another template for them."""
        name = data.chat_template_name
        several = tokenizer.chat_template
        if name is None and isinstance(several, dict) and {"tool_use", "default"} <= several.keys():
            used = single_template(tokenizer, tools=True)
            other = type(self)(used, data, limit, eos_token_ids, strict=strict)
            self._for_tools = cast(Self, other)
        tokenizer = single_template(tokenizer, name)
        self._tokenizer = tokenizer
        self._limit = limit
        self._longest = 0 if limit is None else max(map(len, tokenizer.get_vocab()))
        self._template = ChatTemplate(tokenizer, data.chat_template_kwargs)
        self.unread = UnreadWords(self._template, data.system_prompt, strict=strict)
        """Collects warnings of words that do not reach the model."""
        _require_read(self._template, tokenizer, data.chat_template_kwargs)
        self._remedy = "set model.chat_template to a template with {% generation %} around the assistant's part"
        if self._template.reads("enable_thinking"):
            self._remedy += (
                ", or enable_thinking in data.chat_template_kwargs as rows have thoughts or none"
            )
        self._marked = has_generation_marks(tokenizer)
        self._eos = tokenizer.eos_token_id
        # gpt-oss ends a turn that others follow with another token than the last turn.
        last = end_of_turn_id(tokenizer)
        past = end_of_turn_id(tokenizer, "user")
        self._ends = [token for token in (last, self._eos) if token is not None]
        self._past_ends = [*self._ends, *([] if past is None else [past])]
        self._openers: dict[str, int] = {}
        """Next message's role → its first token, if that token is what ends the assistant's turn."""
        if last is None:
            openers = {"user": past, "tool": end_of_turn_id(tokenizer, "tool")}
            ending = {role: token for role, token in openers.items() if token in eos_token_ids}
            self._openers = {r: t for r, t in ending.items() if t is not None and t != self._eos}
        self._stops = [*self._past_ends, *eos_token_ids]
        unknown = tokenizer.unk_token_id
        others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        self._unknown = None if unknown in others else unknown
        # Compare with `plain`: the tokens for a sequence's beginning and end may have the same id.
        plain, closed = (
            tokenizer("0", add_special_tokens=each)["input_ids"] for each in (False, True)
        )
        before, both = self.ids([ANCHOR, f"{ANCHOR}0"], special=False)
        self._prepends = both[len(before) :] != plain
        self._closes_itself = plain[-1:] != closed[-1:] == [self._eos]
        bos = tokenizer.bos_token_id
        self._doubled = [bos, bos] if plain[:1] != closed[:1] == [bos] else None
        """How a text begins that has the beginning-of-sequence token already."""

    @property
    def reads_tools(self) -> bool:
        """Whether a chat template has a place for descriptions of tools."""
        return self._for_tools is not None or self._template.reads("tools")

    @property
    def warnings(self) -> dict[str, str]:
        """One sentence for each kind of words that do not reach the model, and for turns without an end."""
        others = {} if self._for_tools is None else self._for_tools.warnings
        return others | self.unread.warnings

    def ids(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """Tokenize each text. `special` adds leading tokens, never trailing ones, and no second beginning of sequence.

        A text over the limit may lose its end, but stays over the limit.
        """
        if not texts:
            return []
        lists: list[list[int]] = self._tokenizer(
            list(map(self._beginning, texts)),
            add_special_tokens=special,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        if self._unknown is not None:
            self._note_unknown(texts, lists)
        if special and self._closes_itself:
            lists = [tokens[:-1] for tokens in lists]
        if special and self._doubled:
            for number, tokens in enumerate(lists):
                if tokens[:2] == self._doubled:
                    lists[number] = tokens[1:]
                    begun = f"texts begin with {self._tokenizer.bos_token}, such as {texts[number]!r:.60}; the tokenizer does not add it again"
                    self.unread.note("the beginning", begun)
        return lists

    def _note_unknown(self, texts: Sequence[str], lists: Sequence[Sequence[int]]) -> None:
        token = self._tokenizer.unk_token
        lost = (text for text, ids in zip(texts, lists, strict=True) if self._unknown in ids)
        if text := next((each for each in lost if token not in each), None):
            said = f"the tokenizer does not know some characters of {text!r:.60}, and perhaps of other texts: the model reads {token} in their place"
            self.unread.note("unknown characters", said)

    def _beginning(self, text: str) -> str:
        """Return the text, or a beginning of it that is already over the limit."""
        if self._limit is None:
            return text
        # The cut may split a token into one token per character.
        most = self._limit + self._longest
        size = most * _CHARACTERS_PER_TOKEN
        while size < len(text):
            if len(self._tokenizer(text[:size], verbose=False)["input_ids"]) > most:
                return text[:size]
            size *= 4
        return text

    def prompt(
        self,
        messages: list[Message],
        name: str,
        tools: Tools | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> str:
        """Render up to the assistant's next turn; leave a last assistant turn open. `beside`: see `Conversation`."""
        if tools and self._for_tools:
            return self._for_tools.prompt(messages, name, tools, beside)
        row = Conversation(messages, name, len(messages), tools, beside or {})
        is_open = messages[-1].get("role") == "assistant"
        how = {"continue_final_message" if is_open else "add_generation_prompt": True}
        return self._checked(row, **how)

    def answered(self, messages: list[Message], answer: str, name: str) -> str:
        """Render with the assistant's answer, or the rest of its open turn."""
        *before, last = messages
        if last.get("role") == "assistant":
            last = last | {"content": f"{text_in(last['content'])}{answer}"}
            return str(self._template.render([*before, last], name))
        turn = {"role": "assistant", "content": answer}
        return str(self._template.render([*messages, turn], name))

    def _checked(self, row: Conversation, **options: Any) -> str:
        """Render the row, and look for its words in the text."""
        text = str(self._render(row.messages, row, **options))

        def again(messages: Sequence[Message]) -> str | None:
            try:
                return str(self._render(messages, row, **options))
            except UsageError:
                return None

        self.unread.check(row.messages, row.name, text, again, row.turns)
        self.unread.check_beside(row.beside, row.tools, row.name, text)
        return text

    def _render(self, messages: Sequence[Message], row: Conversation, **options: Any) -> Any:
        documents = row.documents if self._template.reads("documents") else None
        return self._template.render(messages, row.name, row.tools, documents, **options)


def shared_beginning(start: Sequence[int] | TokenIds, ids: TokenIds) -> int:
    """Return how many leading ids agree."""
    length = min(len(start), len(ids))
    differs = np.flatnonzero(np.array(start[:length], dtype=np.int64) != ids[:length])
    return int(differs[0]) if len(differs) else length


def text_in(content: str | list[dict[str, Any]]) -> str:
    """Return the text of a message's content."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def _require_read(
    template: ChatTemplate, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]
) -> None:
    unread = [name for name in variables if not template.reads(name)]
    if unread and all(isinstance(variables[name], bool) for name in unread):
        logger.warning(
            "data.chat_template_kwargs: the chat template does not read %s", ", ".join(unread)
        )
        return
    if unread:
        raise UsageError(
            f"the chat template does not read {', '.join(unread)}",
            have="data.chat_template_kwargs, and "
            + ("a template without" if tokenizer.chat_template else "no chat template"),
            want="names that occur in the template",
            do="correct data.chat_template_kwargs, or set model.chat_template to a template that reads them",
        )

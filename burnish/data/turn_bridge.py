"""Continue a conversation in token ids. What the model said is never tokenized again.

An environment's messages become the text that the chat template writes between the end of an assistant's turn and the beginning of the
next one. `burnish.data.bridge_proof` compares ids that grow so with the ids of the whole conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from burnish.config.schema import DataConfig
from burnish.data.messages import Message, Tools
from burnish.data.template import ChatTemplate
from burnish.data.tokenizer import single_template
from burnish.data.tool_calls import ParsedTurn, form_of, parse_by_schema, parse_turn
from burnish.data.tool_forms import FORMS, Called
from burnish.errors import UsageError
from burnish.records import Prompt, TokenIds

_SAID = "qzjxsaid"
_HEARD = "qzjxheard"
"""Words that no template has. They stand for what was said and heard."""
_ASKED: Message = {"role": "user", "content": "hello"}
OPENS = "<think>"
CLOSES = "</think>"


Thoughts = Literal["none", "apart", "inside"]
"""What a turn has before its answer: no thoughts, thoughts under a key of their own, or thoughts within the content."""


class TurnBridge:
    """Turns messages into token ids, and ids into messages, for one chat template and one list of tools."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        tools: Tools,
        stop_token_ids: Collection[int],
    ) -> None:
        """`stop_token_ids` end a turn. Raises `UsageError` for a template without a place for tools, or whose calls cannot be read."""
        tokenizer = single_template(tokenizer, data.chat_template_name, tools=bool(tools))
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, data.chat_template_kwargs)
        self.tools = list(tools)
        special = tokenizer.added_tokens_decoder
        # Other ids that end a completion, such as those of `rollout.stop_token_ids`, are text and do not end a turn of the template.
        self._stops = [t for t in map(int, stop_token_ids) if t in special and special[t].special]
        self._stop_texts = [str(tokenizer.convert_ids_to_tokens(token)) for token in self._stops]
        self._control = [
            str(token) for token in tokenizer.added_tokens_decoder.values() if len(str(token)) > 1
        ]
        if not tokenizer.chat_template:
            raise UsageError(
                "rollout.environment needs a chat template, and the tokenizer has none",
                do="set model.chat_template to a Jinja file",
            )
        self._form = form_of(self._template) if tools else None
        self._has_schema = getattr(tokenizer, "response_template", None) is not None
        if tools and not self._template.reads("tools"):
            raise UsageError(
                "the chat template has no place for tools",
                have=f"{len(tools)} tools of the environment",
                want="a template that reads `tools`",
                do="set model.chat_template to one that does, or describe the calls in the prompt and read them in the environment's step",
            )
        if tools and self._form is None and not self._has_schema:
            raise UsageError(
                "the form in which the chat template writes tool calls is not known",
                have="a probe call that no form reads back",
                want=f"one of {', '.join(form.name for form in FORMS)}, or a response_template in tokenizer_config.json",
                do="set model.chat_template to a template of one of them",
            )
        if self._has_schema:
            self._require_schema()

    def _require_schema(self) -> None:
        """Raise `UsageError` unless the tokenizer's `response_template` reads the turn that the chat template writes."""
        asked: list[Called] = [(tool_name(tool), {}) for tool in self.tools[:1]]
        _, calls, whole = self.turn_of([_ASKED], asked, _SAID, "", "none", 0)
        if not whole.startswith(self._opening):
            return  # no model could say it
        spoken = whole[len(self._opening) :]
        marks = _places(spoken, self._stop_texts)
        spoken = spoken[: min(marks)[1]] if marks else spoken
        turn = parse_by_schema(self._tokenizer, spoken, self._opening, self.tools)
        if turn.problem or turn.calls != [*calls] or turn.content not in (_SAID, ""):
            raise UsageError(
                "the tokenizer's response_template does not read what the chat template writes",
                have=turn.problem or f"{turn.content!r:.100} and the calls {turn.calls}",
                want=f"{_SAID!r} and the calls {[*calls]} of {spoken!r:.300}",
                do="correct response_template in tokenizer_config.json, or remove it",
            )

    @cached_property
    def thoughts(self) -> Sequence[Thoughts]:
        """The ways in which turns of this template may have thoughts."""
        key = self._template.thoughts_key("reasoning_content")
        turn: Message = {"role": "assistant", "content": _SAID, key: _HEARD}
        if _HEARD in self.whole([_ASKED, turn], "a conversation", opens=False):
            return "none", "apart"
        return ("none", "inside") if CLOSES in str(self._tokenizer.chat_template) else ("none",)

    def text_of(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return ids as text, with or without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def read(self, ids: Sequence[int]) -> ParsedTurn:
        """Read what the model said in a turn."""
        spoken = list(ids)
        if self._has_schema:
            text = self.text_of(spoken, special=True)
            return parse_by_schema(self._tokenizer, text, self._opening, self.tools)
        turn = self._parsed(spoken[: -1 if self.end_of(spoken) is not None else None])
        # The mark that ends a call may end the turn as well.
        return self._parsed(spoken) if turn.problem else turn

    def _parsed(self, ids: Sequence[int]) -> ParsedTurn:
        # Forms may be written with special tokens, so these stay in the text that is searched.
        text = self.text_of(ids, special=self._form is not None)
        return parse_turn(text, self._form, self.tools)

    def loses(self, ids: Sequence[int]) -> bool:
        """Return whether ids have a token that stands for text which the tokenizer does not know."""
        return self._tokenizer.unk_token_id in ids

    def end_of(self, ids: Sequence[int] | TokenIds) -> int | None:
        """Return the token that ended a turn; None for a turn that was cut."""
        last = int(ids[-1]) if len(ids) else None
        return last if last in self._stops else None

    def first(
        self, messages: Sequence[Message], name: str, *, foreign: Sequence[Message] = ()
    ) -> list[int]:
        """Return the ids of a whole conversation up to the assistant's turn. No text of `foreign` messages, which follow, becomes a control token."""
        stood_in, texts = self._with_stand_ins(foreign)
        return self.ids_of(self.whole([*messages, *stood_in], name), texts)

    def length_of(self, messages: Sequence[Message]) -> int:
        """Return how many tokens the texts of messages have."""
        texts = [str(message["content"]) for message in messages]
        return sum(len(self.ids_of(_HEARD, {_HEARD: text})) for text in texts)

    def message_of(self, turn: ParsedTurn, text: str, earlier: int = 0) -> Message:
        """Return a turn of the model as a message for the template; `text` is the whole turn, `earlier` the number of calls before it."""
        said: Message = {"role": "assistant", "content": turn.content}
        is_apart = "apart" in self.thoughts
        if turn.problem:
            said["content"] = text
        elif turn.thoughts and is_apart:
            said[self._template.thoughts_key("reasoning_content")] = turn.thoughts
        elif turn.thoughts and turn.calls:
            said["content"] = f"{OPENS}\n{turn.thoughts}\n{CLOSES}\n\n{turn.content}"
        elif turn.thoughts:  # the prompt may have opened them
            said["content"] = text if OPENS in text else OPENS + text
        if turn.calls and not turn.problem:
            said["tool_calls"] = _enveloped(turn.calls, earlier)
        return said

    def told(self, new: Sequence[Mapping[str, Any]], *, rendered: bool) -> list[Mapping[str, Any]]:
        """Return what a tool answers to a call that cannot be read, from a user if the template leaves out results without a call."""
        shows = self._shows_results[rendered]
        return [
            {"role": "user", "content": message["content"]}
            if message.get("role") == "tool" and not shows
            else message
            for message in new
        ]

    @cached_property
    def _shows_results(self) -> tuple[bool, bool]:
        """Whether results without a call are shown: in `following`, and in a rendering of the whole."""
        result: Message = {"role": "tool", "content": _HEARD}
        said: Message = {"role": "assistant", "content": _SAID}

        def shows(text: Callable[[], str]) -> bool:
            try:
                return _HEARD in text()
            except UsageError:
                return False

        return (
            shows(lambda: self.text_of(self.following([], [result], ended_by=None))),
            shows(lambda: self.whole([_ASKED, said, result], "a conversation")),
        )

    def following(
        self,
        calls: Sequence[Called],
        new: Sequence[Message],
        *,
        ended_by: int | None,
        earlier: int = 0,
    ) -> list[int]:
        """Return the ids between a turn of the model, with these calls, and its next turn.

        `ended_by`: what `end_of` returns for the turn. `earlier`: how many calls there were before it, which some templates number.
        Raises `UsageError` if the template refuses the messages.
        """
        stood, texts = self._with_stand_ins([*({"name": name} for name, _ in calls), *new])
        called: list[Called] = [(each["name"], {}) for each in stood[: len(calls)]]
        text = self._answered(called, stood[len(calls) :], earlier)
        start, end = self._end_of_turn(text)
        is_ended = ended_by is not None and (
            # The token that ends a turn may open the next role's. Then it must be the right one.
            self._ends_turns or text[start:end] == self._tokenizer.convert_ids_to_tokens(ended_by)
        )
        return self.ids_of(text[end if is_ended else start :], texts)

    def whole(self, messages: Sequence[Message], name: str, *, opens: bool = True) -> str:
        """Return the text of a conversation, up to the assistant's turn if that `opens`. `name` is for errors."""
        tools = self.tools or None
        return str(self._template.render(messages, name, tools, add_generation_prompt=opens))

    def _answered(self, calls: Sequence[Called], heard: Sequence[Message], earlier: int = 0) -> str:
        """Render a stand-in for a turn with these calls, and the answer, in the first way that the template takes."""
        results = [each for each in heard if each["role"] == "tool"]
        names = [name for name, _ in calls]
        if results and not names and self.tools:  # an answer to a call that could not be read
            names = [tool_name(self.tools[0])]
        named = [
            {"name": name, "tool_call_id": call_id(earlier + i)} for i, name in enumerate(names)
        ]
        for result, more in zip(results, named, strict=False):
            result |= more | result
        # Arguments could hold the text of what ends a turn, and the text after the turn does not depend on them.
        written = _enveloped([(name, {_SAID: _SAID}) for name in names], earlier)
        refused: UsageError | None = None
        for content, some in (
            (_SAID, written if calls else []),
            ("", written),
            ("", written[:1]),
        ):
            said: Message = {"role": "assistant", "content": content}
            before = [_ASKED, *(_called_before(names, earlier) if self._numbers_calls else ())]
            try:
                asked = [*before, said | ({"tool_calls": some} if some else {}), *heard]
                text = self.whole(asked, "the environment's answer")
            except UsageError as error:
                refused = refused or error
                continue
            if _SAID in text:
                return text
        raise refused or UsageError(
            "the chat template drops what was said",
            do="set model.chat_template to a template that keeps earlier turns",
        )

    def _end_of_turn(self, text: str) -> tuple[int, int]:
        """Return where the mark that ends the assistant's turn begins and ends in a rendered text."""
        said = text.rfind(_SAID) + len(_SAID)
        marks = _places(text, self._stop_texts, said) or _places(text, self._control, said)
        if not marks:
            raise self._unended(text[said:])
        return min(marks)

    @cached_property
    def _ends_turns(self) -> bool:
        """Whether the template ends a turn itself. Otherwise the token that opens the next role's turn does (GLM)."""
        said: Message = {"role": "assistant", "content": _SAID}
        text = self.whole([_ASKED, said], "a conversation", opens=False)
        return bool(_places(text, self._stop_texts, text.rfind(_SAID)))

    @cached_property
    def _numbers_calls(self) -> bool:
        """Whether results are numbered over the whole conversation (Command R)."""
        if not self.tools:
            return False
        name = tool_name(self.tools[0])

        def result(earlier: int) -> str:
            said: Message = {"role": "assistant", "content": ""}
            said["tool_calls"] = _enveloped([(name, {})], earlier)
            heard = result_of(earlier, name, _HEARD)
            turns = [_ASKED, *_called_before([name], earlier), said, heard]
            text = self.whole(turns, "a conversation").replace(call_id(earlier), "")
            before = max(
                (text.rfind(mark, 0, text.rfind(_HEARD)) for mark in self._control), default=0
            )
            return text[before:]

        try:
            return result(0) != result(1)
        except UsageError:
            return False

    @cached_property
    def _opening(self) -> str:
        """What a turn follows."""
        return self.whole([_ASKED], "a conversation")

    def _unended(self, text: str) -> UsageError:
        return UsageError(
            "the chat template does not end the assistant's turn with a token that ends a completion",
            have=f"{text[:200]!r} after what was said",
            want=f"one of {', '.join(self._stop_texts)} there",
            do="add the token that ends a turn to rollout.stop_token_ids, or set model.chat_template",
        )

    def _with_stand_ins(self, new: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """Put words in the place of texts that have a control token's text; return these texts by word."""
        texts: dict[str, str] = {}
        marks = [*self._control, _SAID, _HEARD]
        # Templates look for thoughts in what an assistant said.
        of_assistant = [mark for mark in marks if mark not in (OPENS, CLOSES)]

        def stood_in(value: Any, unwanted: Sequence[str]) -> Any:
            if isinstance(value, dict):
                return {key: stood_in(each, unwanted) for key, each in value.items()}
            if isinstance(value, list):
                return [stood_in(each, unwanted) for each in value]
            if not isinstance(value, str) or not any(mark in value for mark in unwanted):
                return value
            word = f"{_HEARD}{len(texts)}e"
            texts[word] = value
            return word

        said = [message.get("role") == "assistant" for message in new]
        return [
            stood_in(message, of_assistant if is_said else marks)
            for message, is_said in zip(new, said, strict=True)
        ], texts

    def _harmless(self, text: str) -> Iterator[str]:
        """Divide a text within each control token's, for the tokenizer would find those that are not marked as special."""
        start = 0
        marks = "|".join(map(re.escape, self._control))
        for mark in re.finditer(f"(?={marks})", text) if marks else ():
            yield text[start : mark.start() + 1]
            start = mark.start() + 1
        yield text[start:]

    def ids_of(self, text: str, texts: Mapping[str, str] | None = None) -> list[int]:
        """Return the ids of a rendered text; words that are keys of `texts` stand for others' texts."""
        ids: list[int] = []
        # A template may leave a text out, write it twice, or in another order.
        while words := {text.find(word): word for word in texts or {} if word in text}:
            word = words[min(words)]
            content = (texts or {})[word]
            before, _, text = text.partition(word)
            ids += self._tokenizer(before, add_special_tokens=False)["input_ids"]
            for piece in self._harmless(content):
                # Somebody else's text must not end a turn or begin one in another role.
                how = {"add_special_tokens": False, "split_special_tokens": True}
                ids += self._tokenizer(piece, **how)["input_ids"]
        return [*ids, *self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def turn_of(
        self,
        before: Sequence[Message],
        calls: Sequence[Called],
        content: str,
        thought: str,
        thoughts: Thoughts,
        earlier: int,
    ) -> tuple[Message, Sequence[Called], str]:
        """Return a turn that the template takes, its calls, and the text of the conversation that it ends.

        Some templates have no parallel calls, or no content beside a call.
        """
        refused: UsageError | None = None
        for some, words in ((calls, content), (calls, ""), (calls[:1], content), (calls[:1], "")):
            said: Message = {"role": "assistant", "content": words}
            if thoughts == "apart":
                said[self._template.thoughts_key("reasoning_content")] = thought
            elif thoughts == "inside":
                said["content"] = f"{OPENS}\n{thought}\n{CLOSES}\n\n{words}"
            if some:
                said["tool_calls"] = _enveloped(some, earlier)
            try:
                return said, some, self.whole([*before, said], "a conversation", opens=False)
            except UsageError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def up_to_stop(
        self, spoken: str, calls: Sequence[Called], new: Sequence[Message], earlier: int
    ) -> str:
        """Return a turn up to the token that ends it, which the next role's turn may open with."""
        marks = _places(spoken, self._stop_texts)
        if marks:
            return spoken[: min(marks)[1]]
        text = self._answered(calls, new, earlier)
        marks = _places(text, self._stop_texts, text.rfind(_SAID))
        if not marks:
            raise self._unended(text[text.rfind(_SAID) + len(_SAID) :])
        return spoken + text[slice(*min(marks))]


def require_messages(prompt: Prompt) -> None:
    """Raise `UsageError` for a prompt that is a plain text: the template cannot continue it as a conversation."""
    if prompt.messages is None:
        raise UsageError(
            "rollout.environment needs prompts that are messages",
            have=f"a text: {prompt.text[:80]!r}",
            want="messages, or texts that become a user's message",
            do="set data.string_prompts=user",
        )


def _places(text: str, marks: Sequence[str], start: int = 0) -> list[tuple[int, int]]:
    """Return where the first of each mark begins and ends after `start`."""
    found = [(text.find(mark, max(start, 0)), len(mark)) for mark in marks]
    return [(place, place + length) for place, length in found if place >= 0]


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name in a tool's schema."""
    return str(tool.get("function", tool)["name"])


def call_id(number: int) -> str:
    """Return the id of a call, by its number in the conversation. Mistral's templates want nine characters."""
    return f"{number:09d}"


def _enveloped(calls: Sequence[Called], earlier: int) -> list[dict[str, Any]]:
    return [
        {
            "id": call_id(earlier + number),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(calls)
    ]


def result_of(number: int, name: str, content: str) -> Message:
    """Return what a tool answers to the call of this number."""
    return {"role": "tool", "name": name, "tool_call_id": call_id(number), "content": content}


def _called_before(names: Sequence[str], count: int) -> Iterator[Message]:
    for number in range(count if names else 0):
        call = _enveloped([(names[0], {})], number)
        yield {"role": "assistant", "content": "", "tool_calls": call}
        yield result_of(number, names[0], "")

"""Continue a conversation in token ids. What the model said is never tokenized again.

An environment's messages become the text that the chat template writes between the end of an assistant's turn and the beginning of the
next one. `prove_bridge` compares ids that grow so with the ids of the whole conversation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from burnish.config.schema import DataConfig, RolloutConfig
from burnish.data.chat import shared_beginning
from burnish.data.messages import Message, Tools
from burnish.data.template import ChatTemplate
from burnish.data.tokenizer import single_template
from burnish.data.tool_calls import Called, ParsedTurn, form_of, parse_turn
from burnish.errors import UsageError
from burnish.records import Prompt, TokenIds

_SAID = "qzjxsaid"
_HEARD = "qzjxheard"
"""Words that no template has. They stand for what was said and heard."""
_CONVERSATIONS = 20
_WORDS = ("seven", "17", "the blue box", "x = 3", "Ωmega", "\nnext line", '{"a": 1}', "end.")


class FirstDifference(NamedTuple):
    """The first token at which a conversation in parts differs from the whole one."""

    place: int
    whole: str
    in_parts: str


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
        self._tools = list(tools)
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
        if tools and not self._template.reads("tools"):
            raise UsageError(
                "the chat template has no place for tools",
                have=f"{len(tools)} tools of the environment",
                want="a template that reads `tools`",
                do="set model.chat_template to one that does, or describe the calls in the prompt and read them in the environment's step",
            )
        if tools and self._form is None:
            raise UsageError(
                "the form in which the chat template writes tool calls is not known",
                have="a probe call that no form reads back",
                want="one of Hermes, Qwen XML, Llama, Mistral, DeepSeek, Kimi, GLM and harmony",
                do="set model.chat_template to a template of one of them",
            )

    @property
    def thinks(self) -> bool:
        """Whether the template writes thoughts."""
        return self._template.writes_thoughts

    def text_of(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return ids as text, with or without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def read(self, ids: Sequence[int]) -> ParsedTurn:
        """Read what the model said in a turn."""
        spoken = list(ids)
        if self.ends(spoken):
            spoken.pop()
        # Forms may be written with special tokens, so these stay in the text that is searched.
        return parse_turn(self.text_of(spoken, special=self._form is not None), self._form)

    def ends(self, ids: Sequence[int] | TokenIds) -> bool:
        """Return whether the ids of a turn end with a token that ends a turn."""
        return len(ids) > 0 and int(ids[-1]) in self._stops

    def first(self, messages: Sequence[Message], name: str, *, foreign: bool = False) -> list[int]:
        """Return the ids of a conversation up to the assistant's turn. No text of `foreign` messages becomes a control token."""
        stood_in, texts = self._with_stand_ins(messages) if foreign else (messages, {})
        return self._ids(self._whole(stood_in, name), texts)

    def following(
        self, calls: Sequence[Called], new: Sequence[Message], *, is_ended: bool = True
    ) -> list[int]:
        """Return the ids between a turn of the model, with these calls, and its next turn.

        `is_ended`: whether the turn's own ids end with what ends a turn. Raises `UsageError` if the template refuses the messages.
        """
        heard, texts = self._with_stand_ins(new)
        said: Message = {"role": "assistant", "content": _SAID}
        if calls:
            # Arguments could hold the text of what ends a turn, and the text after the turn does not depend on them.
            said["tool_calls"] = _enveloped([(name, {}) for name, _ in calls])
        asked: Message = {"role": "user", "content": "hello"}
        text = self._whole([asked, said, *heard], "the environment's answer")
        start, end = self._end_of_turn(text)
        return self._ids(text[end if is_ended else start :], texts)

    def _whole(self, messages: Sequence[Message], name: str) -> str:
        tools = self._tools or None
        return str(self._template.render(messages, name, tools, add_generation_prompt=True))

    def _end_of_turn(self, text: str) -> tuple[int, int]:
        """Return where the mark that ends the assistant's turn begins and ends in a rendered text."""
        said = text.rfind(_SAID)
        marks = [
            (place, place + len(mark))
            for mark in self._stop_texts
            if said >= 0 and (place := text.find(mark, said + len(_SAID))) >= 0
        ]
        if not marks:
            raise UsageError(
                "the chat template does not end the assistant's turn with a token that ends a completion",
                have=f"{text[said:][:200]!r}"
                if said >= 0
                else "a template that drops what was said",
                want=f"one of {', '.join(self._stop_texts)} after it",
                do="add the token that ends a turn to rollout.stop_token_ids, or set model.chat_template",
            )
        return min(marks)

    def _with_stand_ins(self, new: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
        """Put words in the place of texts that have a control token's text; return these texts by word."""
        texts: dict[str, str] = {}

        def stood_in(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: stood_in(each) for key, each in value.items()}
            if isinstance(value, list):
                return [stood_in(each) for each in value]
            if not isinstance(value, str) or not any(mark in value for mark in self._control):
                return value
            word = f"{_HEARD}{len(texts)}e"
            texts[word] = value
            return word

        return [stood_in(message) for message in new], texts

    def _ids(self, text: str, texts: Mapping[str, str] | None = None) -> list[int]:
        ids: list[int] = []
        # A template may leave a text out, write it twice, or in another order.
        while words := {text.find(word): word for word in texts or {} if word in text}:
            word = words[min(words)]
            content = (texts or {})[word]
            before, _, text = text.partition(word)
            ids += self._tokenizer(before, add_special_tokens=False)["input_ids"]
            # Somebody else's text must not end a turn or begin one in another role.
            plain = self._tokenizer(content, add_special_tokens=False, split_special_tokens=True)
            ids += plain["input_ids"]
        return [*ids, *self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    # The proof.

    def difference(
        self, role: str, *, thoughts: bool = False, seed: int = 0
    ) -> FirstDifference | None:
        """Compare random conversations in parts with whole ones; return the first difference.

        `role` answers the model: tool or user. With `thoughts`, the model thinks before it answers. Turns that do not tokenize to the
        same ids alone and within the whole say nothing. Raises `UsageError` if none can be compared.
        """
        rng = random.Random(seed)
        compared = 0
        for _ in range(_CONVERSATIONS):
            turns, difference = self._compared(rng, role, thoughts=thoughts)
            if difference is not None:
                return difference
            compared += turns
        if compared == 0:
            raise UsageError(
                "it cannot be proven how the chat template writes earlier turns",
                have="no turn of the model that begins where the prompt ends and has the same token ids alone",
                want="a template that opens the assistant's turn with add_generation_prompt",
                do="set rollout.environment.history=appended if you know that it keeps earlier turns, or set model.chat_template",
            )
        return None

    def _compared(
        self, rng: random.Random, role: str, *, thoughts: bool
    ) -> tuple[int, FirstDifference | None]:
        """Compare a random conversation; return how many turns could be compared, and the first difference."""
        messages: list[Message] = [{"role": "user", "content": _some(rng)}]
        ids = self.first(messages, "a conversation")
        text = self._whole(messages, "a conversation")
        for turn in range(rng.randint(1, 4)):
            calls = self._some_calls(rng) if role == "tool" else []
            said: Message = {"role": "assistant", "content": _some(rng).strip()}
            if thoughts:
                said[self._template.thoughts_key("reasoning_content")] = _some(rng).strip()
            if calls:
                said["tool_calls"] = _enveloped(calls)
            new = [*_results(rng, calls)] or [{"role": "user", "content": _some(rng)}]
            spoken = self._spoken(messages, said)
            if spoken is None:
                return turn, None
            whole_text = self._whole([*messages, said, *new], "a conversation")
            # The part of a text that a model could have said: it may not lean on what stands before it.
            in_one = self._ids(text + spoken)
            apart = [*self._ids(text), *self._ids(spoken)]
            if in_one != apart:
                return turn, None
            ids = [*ids, *self._ids(spoken), *self.following(calls, new)]
            messages += [said, *new]
            whole = self._ids(whole_text)
            if ids != whole:
                return turn, self._first_of(whole, ids)
            text = whole_text
        return turn + 1, None

    def _spoken(self, before: Sequence[Message], said: Message) -> str | None:
        """Return what the template writes for a turn after its opening, up to its end."""
        opened = self._whole(before, "a conversation")
        tools = self._tools or None
        text = str(self._template.render([*before, said], "a conversation", tools))
        if not text.startswith(opened):
            return None
        rest = text[len(opened) :]
        ends = [place + len(mark) for mark in self._stop_texts if (place := rest.rfind(mark)) >= 0]
        return rest[: max(ends)] if ends else None

    def _some_calls(self, rng: random.Random) -> list[Called]:
        names = [tool.get("function", tool)["name"] for tool in self._tools]
        return [
            (rng.choice(names), {"a": _some(rng), "b": rng.randint(0, 99)})
            for _ in range(rng.randint(1, 2))
        ]

    def _first_of(self, whole: list[int], ids: list[int]) -> FirstDifference:
        place = shared_beginning(whole, np.array(ids, np.int64))
        names = [
            self.text_of(part[place : place + 1], special=True) if place < len(part) else "nothing"
            for part in (whole, ids)
        ]
        return FirstDifference(place, *names)


def require_messages(prompt: Prompt) -> None:
    """Raise `UsageError` for a prompt that is a plain text: the template cannot continue it as a conversation."""
    if prompt.messages is None:
        raise UsageError(
            "rollout.environment needs prompts that are messages",
            have=f"a text: {prompt.text[:80]!r}",
            want="messages, or texts that become a user's message",
            do="set data.string_prompts=user",
        )


def proven_bridge(
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    rollout: RolloutConfig,
    eos_token_ids: Collection[int],
    environments: Any,
) -> TurnBridge:
    """Return the bridge for an `EnvironmentPool`, proven as `rollout.environment.history` says."""
    stops = (*eos_token_ids, *rollout.stop_token_ids)
    tools = [dict(tool) for tool in environments.described.tools]
    bridge = TurnBridge(tokenizer, data, tools, stops)
    if rollout.environment.history == "exact" and rollout.environment.verifiers is None:
        prove_bridge(bridge, "tool" if tools else "user")
    return bridge


def prove_bridge(bridge: TurnBridge, role: str) -> None:
    """Raise `UsageError` unless conversations in parts have the ids of whole ones.

    `role` answers the model: tool or user. Turns with thoughts are compared too if the template writes them: many templates drop those
    of earlier turns.
    """
    for thoughts in (False, True) if bridge.thinks else (False,):
        difference = bridge.difference(role, thoughts=thoughts)
        if difference is not None:
            what = " with thoughts" if thoughts else ""
            raise UsageError(
                f"the chat template writes earlier turns{what} otherwise than the model said them, once a {role} answers",
                have=f"token {difference.place} of a conversation: {difference.whole!r} in the whole, {difference.in_parts!r} in parts",
                want="the same token ids",
                do="set rollout.environment.history=appended to train on conversations as they were said, or set model.chat_template to a template that keeps earlier turns",
            )


def _enveloped(calls: Sequence[Called]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{number:09d}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(calls)
    ]


def _results(rng: random.Random, calls: Sequence[Called]) -> Iterator[Message]:
    for number, (name, _) in enumerate(calls):
        content = json.dumps({"value": _some(rng)})
        yield {"role": "tool", "name": name, "tool_call_id": f"{number:09d}", "content": content}


def _some(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(1, 4)))

"""Read what a model said in a turn: thoughts, content and tool calls, in the form of its family.

A form is chosen by what the chat template writes for a probe call, never by the model's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from burnish.data.messages import THOUGHTS
from burnish.data.template import ChatTemplate
from burnish.data.tool_forms import FORMS, Called, ToolForm, Unquoted, from_json, meant

_PROBE: Called = ("qzjxlook", {"qzjxone": "qzjx two", "qzjxcount": 3})
_UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    SyntaxError,
    RecursionError,
    MemoryError,
)
"""What a text raises that is no call of a form."""
_DEEPEST = 64
"""How deep the arguments of a call may be nested."""
_ASKED = {"role": "user", "content": "hello"}


class ParsedTurn(NamedTuple):
    """What a turn says beside its calls."""

    content: str
    thoughts: str
    calls: list[Called]
    problem: str | None
    """Why a call cannot be read."""


def parse_turn(
    text: str, form: ToolForm | None, tools: Sequence[Mapping[str, Any]] = ()
) -> ParsedTurn:
    """Divide a turn's text, with special tokens, into thoughts, content and calls.

    Forms without quotes write 17 and "17" alike. Then the schemas of `tools` say which of them is meant.
    """
    thoughts, _, rest = text.rpartition("</think>")
    before, opened, after = thoughts.partition("<think>")
    thoughts = after if opened else before
    if form is None:
        return ParsedTurn(rest.strip(), thoughts.strip(), [], None)
    first = re.search(form.begin, rest)
    if first is None:
        return ParsedTurn(rest.strip(), thoughts.strip(), [], None)
    calls = list[Called]()
    problem = None
    try:
        for name, arguments in form.read(rest[first.start() :]):
            if not isinstance(arguments, dict):
                raise ValueError("name and arguments are expected")
            calls.append(_sound(name, _typed(arguments, _types_of(name, tools))))
    except _UNREADABLE as error:
        problem = f"the call cannot be read: {error}"
    if not calls and problem is None:
        problem = "the call cannot be read: it does not end"
    return ParsedTurn(rest[: first.start()].strip(), thoughts.strip(), calls, problem)


def parse_by_schema(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    opening: str,
    tools: Sequence[Mapping[str, Any]],
) -> ParsedTurn:
    """Divide a turn's text by the `response_template` of the tokenizer. `opening` is the text of the prompt."""
    try:
        message = tokenizer.parse_response(text, prefix=opening, tools=[*map(dict, tools)])
        found = message.get("tool_calls") or []
        calls = [_sound(*from_json(each.get("function", each))) for each in found]
    except _UNREADABLE as error:
        return ParsedTurn(text.strip(), "", [], f"the call cannot be read: {error}")
    thoughts = next((str(message[key]) for key in THOUGHTS if message.get(key)), "")
    content = message.get("content") or ""
    return ParsedTurn(str(content).strip(), thoughts.strip(), calls, None)


def form_of(template: ChatTemplate) -> ToolForm | None:
    """Return the form in which a chat template writes calls; None if it writes none that is known."""
    name, arguments = _PROBE
    call = {
        "id": "qzjx00001",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    schema = {
        "type": "function",
        "function": {
            "name": name,
            "description": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "qzjxone": {"type": "string", "description": "one"},
                    "qzjxcount": {"type": "integer", "description": "two"},
                },
                "required": ["qzjxone"],
            },
        },
    }
    asks = template.fitted([_ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}])
    before = template.rendered(asks[:1], tools=[schema], add_generation_prompt=True)
    whole = template.rendered(asks, tools=[schema])
    if whole is None or before is None or name not in whole:
        return None
    turn = whole[len(before) :] if whole.startswith(before) else whole[whole.rfind("hello") :]
    for form in FORMS:
        first = re.search(form.begin, turn)
        if first is None:
            continue
        try:
            read = [*form.read(turn[first.start() :])]
            if [(called, _typed(each, {})) for called, each in read] == [_PROBE]:
                return form
        except _UNREADABLE:
            continue
    return None


def _sound(name: Any, arguments: Any) -> Called:
    """Return a call with arguments that JSON can write. Raises `ValueError` for others."""
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("name and arguments are expected")
    return _written(name, 0), _written(arguments, 0)


def _written(value: Any, depth: int) -> Any:
    if depth > _DEEPEST:
        raise ValueError(f"arguments are nested deeper than {_DEEPEST}")
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # half of a surrogate pair is no text
    if isinstance(value, dict):
        return {_written(str(key), depth): _written(each, depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_written(each, depth + 1) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"{type(value).__name__} is no type of JSON")


def _types_of(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, set[str]]:
    """Return the types that a tool's schema allows each argument."""
    functions = [tool.get("function", tool) for tool in tools]
    schema: Mapping[str, Any] = next((each for each in functions if each.get("name") == name), {})
    fields = (schema.get("parameters") or {}).get("properties") or {}
    types = dict[str, set[str]]()
    for key, field in fields.items():
        found = [each.get("type", []) for each in (field, *field.get("anyOf", ()))]
        types[key] = {
            each for some in found for each in ([some] if isinstance(some, str) else some)
        }
    return types


def _typed(arguments: Mapping[str, Any], types: Mapping[str, set[str]]) -> dict[str, Any]:
    return {
        key: meant(value, types.get(key, set())) if isinstance(value, Unquoted) else value
        for key, value in arguments.items()
    }

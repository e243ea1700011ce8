"""Read the tool calls that a model wrote, in the form of its family.

A form is chosen by what the chat template writes for a probe call, never by the model's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from burnish.data.template import ChatTemplate

Called = tuple[str, dict[str, Any]]
"""Name and arguments of a call."""
_PROBE: Called = ("qzjxlook", {"qzjxone": "qzjx two", "qzjxcount": 3})
_ASKED = {"role": "user", "content": "hello"}


class ParsedTurn(NamedTuple):
    """What a turn says beside its calls."""

    content: str
    thoughts: str
    calls: list[Called]
    problem: str | None
    """Why a call cannot be read."""


class ToolForm(NamedTuple):
    """How a family of models writes calls."""

    name: str
    begin: str
    """A regular expression of where calls begin. What stands before is content."""
    read: Callable[[str], Iterator[Called]]
    """Yields the calls of a text from there on. Raises `ValueError` for one that cannot be read."""


def parse_turn(text: str, form: ToolForm | None) -> ParsedTurn:
    """Divide a turn's text, with special tokens, into thoughts, content and calls."""
    thoughts, _, rest = text.rpartition("</think>")
    thoughts = thoughts.partition("<think>")[2] or thoughts
    if form is None:
        return ParsedTurn(rest.strip(), thoughts.strip(), [], None)
    first = re.search(form.begin, rest)
    if first is None:
        return ParsedTurn(rest.strip(), thoughts.strip(), [], None)
    calls = list[Called]()
    problem = None
    try:
        calls += form.read(rest[first.start() :])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"the call cannot be read: {error}"
    if not calls and problem is None:
        problem = "the call cannot be read: it does not end"
    return ParsedTurn(rest[: first.start()].strip(), thoughts.strip(), calls, problem)


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
            if [*form.read(turn[first.start() :])] == [_PROBE]:
                return form
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def _objects(text: str) -> Iterator[Any]:
    """Yield the JSON values that follow each other in a text, up to something else."""
    decoder = json.JSONDecoder()
    place = 0
    while place < len(text):
        while place < len(text) and text[place] in " \t\r\n;,":
            place += 1
        if place >= len(text) or text[place] not in "[{":
            return
        value, place = decoder.raw_decode(text, place)
        yield value


def _from_json(value: Any) -> Called:
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    name = value["name"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("name and arguments are expected")
    return name, arguments


def _hermes(text: str) -> Iterator[Called]:
    for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        yield _from_json(json.loads(body))
    _require_closed(text, "<tool_call>", "</tool_call>")


def _require_closed(text: str, opens: str, closes: str) -> None:
    if text.count(opens) != text.count(closes):
        raise ValueError(f"{closes} is missing")


def _value(text: str) -> Any:
    """Read an argument: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _qwen_xml(text: str) -> Iterator[Called]:
    for name, body in re.findall(r"<function=([^>\n]+)>(.*?)</function>", text, re.DOTALL):
        pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
        _require_closed(body, "<parameter=", "</parameter>")
        yield name.strip(), {key.strip(): _value(value) for key, value in pairs}
    _require_closed(text, "<function=", "</function>")


def _glm(text: str) -> Iterator[Called]:
    for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        name = re.match(r"\s*([^\s<]+)", body)
        if name is None:
            raise ValueError("a name is expected after <tool_call>")
        keys = re.findall(r"<arg_key>(.*?)</arg_key>", body, re.DOTALL)
        values = re.findall(r"<arg_value>(.*?)</arg_value>", body, re.DOTALL)
        if len(keys) != len(values):
            raise ValueError("each <arg_key> needs an <arg_value>")
        pairs = zip(keys, values, strict=True)
        yield name[1], {key.strip(): _value(value.strip()) for key, value in pairs}
    _require_closed(text, "<tool_call>", "</tool_call>")


def _mistral(text: str) -> Iterator[Called]:
    """`[TOOL_CALLS][{...}]`, or since version 11 `[TOOL_CALLS]name[ARGS]{...}`."""
    for body in text.split("[TOOL_CALLS]")[1:]:
        name = re.match(r"\s*([\w.-]+?)\s*(?:\[CALL_ID\][^\[{]*)?\[ARGS\]", body)
        if name is not None:
            yield name[1], next(_objects(body[name.end() :]))
            continue
        name = re.match(r"\s*([\w.-]+)\s*(?=\{)", body)
        if name is not None:
            yield name[1], next(_objects(body[name.end() :]))
            continue
        for value in _objects(body):
            for each in value if isinstance(value, list) else [value]:
                yield _from_json(each)


def _llama(text: str) -> Iterator[Called]:
    """A turn that is JSON as a whole, perhaps after `<|python_tag|>`; several are divided by `;`."""
    for value in _objects(text.removeprefix("<|python_tag|>")):
        yield _from_json(value)


def _deepseek(text: str) -> Iterator[Called]:
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a line, and JSON; since V3.1 `NAME<｜tool▁sep｜>{...}`."""
    pattern = "<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>"
    for first, rest in re.findall(pattern, text, re.DOTALL):
        if first.strip() == "function":
            name, _, body = rest.partition("\n")
            body = re.sub(r"^\s*```(?:json)?|```\s*$", "", body.strip()).strip()
            yield name.strip(), json.loads(body)
        else:
            yield first.strip(), json.loads(rest)
    _require_closed(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")


def _kimi(text: str) -> Iterator[Called]:
    pattern = r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"
    for identity, body in re.findall(pattern, text, re.DOTALL):
        name = identity.strip().removeprefix("functions.")
        yield re.sub(r":\d+$", "", name), json.loads(body)
    _require_closed(text, "<|tool_call_begin|>", "<|tool_call_end|>")


def _harmony(text: str) -> Iterator[Called]:
    pattern = r"to=functions\.([\w.-]+)[^{]*?<\|message\|>(.*?)(?:<\|call\|>|<\|end\|>|$)"
    for name, body in re.findall(pattern, text, re.DOTALL):
        yield name, json.loads(body)


FORMS = (
    ToolForm("Kimi", re.escape("<|tool_calls_section_begin|>"), _kimi),
    ToolForm("DeepSeek", "<｜tool▁calls▁begin｜>", _deepseek),
    ToolForm("Mistral", re.escape("[TOOL_CALLS]"), _mistral),
    ToolForm(
        "harmony",
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? ?to=functions\.",
        _harmony,
    ),
    ToolForm("Qwen XML", "(?:<tool_call>\\s*)?<function=", _qwen_xml),
    ToolForm("GLM", r"<tool_call>\s*[^\s<{]", _glm),
    ToolForm("Hermes", "<tool_call>", _hermes),
    ToolForm(
        "Llama", r"(?:<\|python_tag\|>)|^\s*\{\s*\"name\"|(?<=\n)\{\s*\"name\"|\{\"name\"", _llama
    ),
)
"""From the most particular form to the most general."""

"""Read the messages and tools of a row in the forms that are published, and give them one form.

A message has `role` and `content`, which is a text or a list of text parts. Calls have OpenAI's form. A mark of a turn that is not
trained on becomes OpenAI's `weight: 0`. Other weights are factors of a turn's loss.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from typing import Any

from burnish.errors import UsageError

Message = dict[str, Any]
"""One turn: `role`, `content`, and whatever else the chat template reads."""
Tools = list[dict[str, Any]]
"""JSON schemas of the functions that a conversation may call."""

_TOOL_COLUMNS = ("tools", "functions")
"""The functions that a row's conversation may call (TRL; OpenAI's first form)."""
REQUEST_COLUMN = "responses_create_params"
"""A request of OpenAI's Responses API, which has all that the model reads (NeMo Gym)."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought", "thoughts")
"""Keys of an assistant's thoughts (Qwen and DeepSeek; gpt-oss; OpenRouter and vLLM; others)."""
_ROLES: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""ShareGPT's `from` to `role`."""
_RESULTS = ("function", "tool_response")
"""Other roles of a tool's result (OpenAI's first form; ms-swift)."""
_CALLS = ("function_call", "tool_call")
"""Roles whose content is calls as JSON text (LLaMA-Factory; ms-swift)."""
_KNOWN_ROLES = (*_ROLES.values(), "observation", "developer", *_RESULTS, *_CALLS)
_TRAINED = {
    "weight": False,
    "loss": False,
    "loss_mask": False,
    "step_loss_mask": False,
    "train": True,
    "training": True,
    "trainable": True,
}
"""Marks of a turn: false or 0 means not trained on (OpenAI; ms-swift; slime; axolotl). Whether true also trains other roles than the assistant."""
_MASKED = ("masked",)
"""Marks with the opposite meaning."""
_UNREADABLE_MARKS = ("mask", "loss_scale", "loss_weight", "train_detail", "training_detail")
"""Marks that weigh parts of a turn, or whose meaning differs between projects."""
_MEDIA = ("audio", "audios", "file", "files", "image", "images", "video", "videos")
_PART_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Types of text parts, and the key of their text (OpenAI's two APIs)."""
_PART_THOUGHTS = {"thinking": "thinking", "reasoning": "text"}
"""Types of parts that are thoughts (Anthropic and Mistral)."""


def messages_of(
    value: Any, name: str, role: str | None = None, exact: bool = False
) -> list[Message]:
    """Check messages and remove nulls, except from arguments if `exact`. With a `role`, a string is a message of this role."""
    if role is not None and isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise _not_messages(name, value, "" if role is None else "a string, or ")
    return [_message(turn, f"message {i} of {name}", exact) for i, turn in enumerate(value)]


def tool_column(row: Mapping[str, Any]) -> str:
    """Return the column of a row's tools."""
    return next((name for name in _TOOL_COLUMNS if row.get(name)), _TOOL_COLUMNS[0])


def tools_of(row: Mapping[str, Any], name: str, exact: bool = False) -> Tools | None:
    """Read a row's tools: a list of JSON schemas, or its text. Raises `UsageError`."""
    column = tool_column(row)
    value = row.get(column)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
            exact = True
        except ValueError as error:
            raise _not_tools(column, name, value) from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise _not_tools(column, name, value)
    tools = value if exact else [_cleaned(tool) for tool in value]
    if column == _TOOL_COLUMNS[0]:
        return tools
    return [
        each if "function" in each else {"type": "function", "function": each} for each in tools
    ]


def called(call: Any) -> Mapping[str, Any]:
    """Return name and arguments of a tool call, in OpenAI's form or without its envelope."""
    function = call.get("function", call) if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


def _not_tools(column: str, name: str, value: Any) -> UsageError:
    return UsageError(
        f"the column {column!r} of {name} does not describe tools",
        have=f"{value!r:.60}",
        want="a list of JSON schemas, or such a list as JSON text",
        do="correct the row, or rename the column if it holds something else",
    )


def _message(turn: Any, name: str, exact: bool) -> Message:
    if isinstance(turn, dict) and isinstance(turn.get("from"), str) and turn.get("role") is None:
        if turn["from"] not in (*_ROLES, *_RESULTS, *_CALLS):
            raise _not_messages(
                name, turn, want=f"from: {', '.join((*_ROLES, *_RESULTS, *_CALLS))}"
            )
        others = {key: turn[key] for key in turn.keys() - {"from", "value"}}
        role = _ROLES.get(turn["from"], turn["from"])
        turn = {**others, "role": role, "content": turn.get("value")}
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise _not_messages(name, turn)
    meant = _ROLES.get(turn["role"].strip().lower())
    if meant and turn["role"] not in (*_ROLES.values(), "observation"):
        raise _not_messages(name, turn, want=f"the role {meant}")
    near = difflib.get_close_matches(turn["role"], _KNOWN_ROLES, n=1, cutoff=0.8)
    # A mistyped turn would be rendered, and never trained on.
    if near and turn["role"] not in _KNOWN_ROLES:
        raise _not_messages(name, turn, want=f"the role {near[0]}")
    message: Message = _cleaned(turn, "arguments" if exact else "")
    if message["role"] in _RESULTS:
        message["role"] = "tool"
    _read_calls(message, name)
    _read_content(message, name)
    _read_marks(message, name)
    return message


def _read_calls(message: Message, name: str) -> None:
    """Give calls OpenAI's form. Raises `UsageError`."""
    if message["role"] in _CALLS:
        message |= {"role": "assistant", "tool_calls": _decoded(message.pop("content", None))}
    if "function_call" in message and "tool_calls" not in message:
        message["tool_calls"] = [message.pop("function_call")]
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise UsageError(
            f"the tool calls of {name} cannot be read",
            have=f"{calls!r:.200}",
            want='tool_calls: a list of {"function": {"name": ..., "arguments": {...}}}',
            do="correct the row",
        )
    if calls:
        enveloped = (
            each if "function" in each else {"type": "function", "function": each} for each in calls
        )
        message["tool_calls"] = list(enveloped)


def _decoded(text: Any) -> Any:
    """Return the calls in a JSON text, or the text if there are none."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, list) else [value]


def _is_call(call: Any) -> bool:
    function = called(call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return False
    return isinstance(function.get("name"), str) and isinstance(arguments, dict)


def _read_content(message: Message, name: str) -> None:
    """Leave a text or a list of text parts. Raises `UsageError` for anything else, such as images."""
    for key in _MEDIA:
        if message.get(key):
            raise _not_text(name, f"{key}: {message[key]!r:.60}")
    content = message.get("content")
    refusal = message.get("refusal")
    if isinstance(refusal, str) and not content:
        content = message.pop("refusal")
    if isinstance(content, str):
        message["content"] = content
        return
    is_called = message["role"] == "assistant" and "tool_calls" in message
    if content in (None, []) and (is_called or any(message.get(key) for key in THOUGHTS)):
        message["content"] = ""
        return
    is_parts = isinstance(content, list) and content and not any(map(_is_object, content))
    if message["role"] == "tool" and isinstance(content, dict | list) and not is_parts:
        # Clients of serving engines send a tool's result as JSON text.
        message["content"] = json.dumps(content, ensure_ascii=False)
    elif isinstance(content, list) and is_parts:
        message["content"] = [_part(each, message, name) for each in content]
        message["content"] = [each for each in message["content"] if each] or ""
    else:
        raise _not_messages(name, message)


def _is_object(part: Any) -> bool:
    """Return whether a list's item is no part of a message, but an object of its own."""
    return not isinstance(part, str) and not (isinstance(part, dict) and "type" in part)


def _part(part: Any, message: Message, name: str) -> dict[str, Any]:
    """Return a text part, or {} for one whose text becomes the message's thoughts."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = str(part["type"])
    if kind in _PART_THOUGHTS and message["role"] == "assistant":
        thought = part.get(_PART_THOUGHTS[kind])
        if isinstance(thought, list):
            thought = "".join(
                str(each.get("text", "")) for each in thought if isinstance(each, dict)
            )
        if isinstance(thought, str):
            message[THOUGHTS[0]] = message.get(THOUGHTS[0], "") + thought
            return {}
    text = part.get(_PART_TEXTS.get(kind, ""))
    if not isinstance(text, str):
        raise _not_text(name, f"a part of type {kind}: {part!r:.100}")
    others = {key: part[key] for key in part.keys() - {"type", _PART_TEXTS[kind]}}
    return {"type": "text", "text": text, **others}


def _not_text(name: str, have: str) -> UsageError:
    return UsageError(
        f"{name} is not text alone",
        have=have,
        want="text, or a list of text parts: the model reads no images, audio or video here",
        do="remove such rows, or write what they show as text",
    )


def _read_marks(message: Message, name: str) -> None:
    """Write `weight: 0` into a turn that is not trained on; keep a weight other than 1, and remove other marks. Raises `UsageError`."""
    marks = {key: message.pop(key) for key in (*_TRAINED, *_MASKED) if key in message}
    weight = marks.get("weight")
    factor = 1.0
    is_answer = message["role"] == "assistant"
    if is_answer and isinstance(weight, int | float) and 0 < weight < math.inf:
        factor = float(weight)
        marks["weight"] = True
    unread = [key for key in _UNREADABLE_MARKS if key in message]
    if unread or any(value not in (0, 1) for value in marks.values()):
        key = next((k for k, value in marks.items() if value not in (0, 1)), *unread[:1])
        raise UsageError(
            f"{name} does not say clearly whether to train on it",
            have=f"{key}: {message.get(key, marks.get(key))!r:.60}",
            want="weight, loss or train: true, false, 1 or 0; or a positive weight of the assistant's turn",
            do="correct or remove it",
        )
    trained = {key: bool(value) != (key in _MASKED) for key, value in marks.items()}
    if len(set(trained.values())) > 1:
        raise UsageError(
            f"{name} says twice whether to train on it, and differently",
            have=", ".join(f"{key}: {marks[key]!r}" for key in marks),
            do="remove all but one of them",
        )
    others = [key for key, value in trained.items() if value and _TRAINED.get(key)]
    if others and message["role"] != "assistant":
        raise UsageError(
            f"{name} is marked as trained on, and only the assistant's turns are",
            have=f"{others[0]}: {marks[others[0]]!r} on role {message['role']}",
            do=f"remove {others[0]} there, or write the row as plain text, which is trained on whole",
        )
    if not all(trained.values()):
        message["weight"] = 0
    elif factor != 1:
        message["weight"] = factor


def _cleaned(value: Any, raw: str = "") -> Any:
    if isinstance(value, dict):
        return {k: v if k == raw else _cleaned(v, raw) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_cleaned(item, raw) for item in value]
    return value


def _not_messages(name: str, value: Any, or_: str = "", *, want: str = "") -> UsageError:
    return UsageError(
        f"{name} is not in chat form",
        have=f"{type(value).__name__} {value!r:.100}",
        want=want or or_ + 'a list of {"role": ..., "content": ...}',
        do="convert the data to that form",
    )

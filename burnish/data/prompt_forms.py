"""Read prompts that are no messages: Alpaca's instructions, and requests of OpenAI's Responses API, as NeMo Gym's rows have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.data.messages import REQUEST_COLUMN, Message
from burnish.errors import UsageError

_KEPT = ("name", "description", "parameters")
"""What a chat template sees of a tool, in the order in which NeMo Gym's model server sends it."""


def messages_of_instruction(asked: str, given: Any, history: Any) -> list[Any]:
    """Return the messages of an instruction and its input, after a history of [question, answer]; anything else is no history."""
    pairs = history if isinstance(history, list) else []
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        pairs = []
    roles = ("user", "assistant")
    return [
        *(
            {"role": role, "content": text}
            for pair in pairs
            for role, text in zip(roles, pair, strict=True)
        ),
        {"role": "user", "content": f"{asked}\n\n{given}" if given else asked},
    ]


def chat_of_request(row: Mapping[str, Any], system_prompt: str | None = None) -> dict[str, Any]:
    """Return what the model reads of a row with a request: the messages in its place, and tools. Other columns are for verifiers.

    Raises `UsageError` for a system prompt, which nobody would send.
    """
    if system_prompt is not None:
        raise UsageError(
            f"rows with {REQUEST_COLUMN} have their own system messages",
            have=f"data.system_prompt: {system_prompt:.60}",
            do="remove it, or write it into the rows",
        )
    request = row.get(REQUEST_COLUMN)
    if not isinstance(request, dict):
        return {REQUEST_COLUMN: request}
    return {REQUEST_COLUMN: messages_of_params(request), "tools": chat_tools(request)}


def messages_of_params(params: Mapping[str, Any]) -> list[Any]:
    """Return the messages of a request: its `instructions` and `input`. Items of other types stay as they are."""
    given = params.get("input")
    items: Any = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages: list[Any] = []
    if params.get("instructions"):
        messages.append({"role": "system", "content": params["instructions"]})
    for item in items if isinstance(items, list) else [items]:
        kind = (item.get("type") or "message") if isinstance(item, dict) else ""
        if kind == "message":
            said = {key: value for key, value in item.items() if key in ("role", "content")}
            _add(messages, said)
        elif kind == "reasoning" and (thoughts := _thoughts(item.get("summary"))) is not None:
            _add(messages, {"role": "assistant", "reasoning_content": thoughts})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _add(messages, {"role": "assistant", "tool_calls": [call]})
        elif kind == "function_call_output":
            answer = {"content": item.get("output"), "tool_call_id": item.get("call_id")}
            messages.append({"role": "tool", **answer})
        else:
            messages.append(item)
    return messages


def _thoughts(summary: Any) -> str | None:
    """Return the text of a summary's parts; None for anything else."""
    parts = summary or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return None
    texts = [part.get("text") or "" for part in parts]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None


def _add(messages: list[Any], said: Message) -> None:
    """Append a message. Items of one turn of the assistant become one message."""
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    if said.get("role") != "assistant" or last.get("role") != "assistant":
        messages.append(said)
    elif "tool_calls" in said:
        last["tool_calls"] = [*last.get("tool_calls", ()), *said["tool_calls"]]
    elif last.keys() & said.keys() - {"role"}:
        messages.append(said)
    else:
        last.update(said)


def chat_tools(params: Mapping[str, Any]) -> list[Any]:
    """Return the tools of a request in the form of chats. What is no tool stays, for `tools_of` to refuse."""
    given = params.get("tools") or []
    return [
        {
            "function": {name: tool[name] for name in _KEPT if tool.get(name) is not None},
            "type": "function",
        }
        if isinstance(tool, dict)
        else tool
        for tool in (given if isinstance(given, list) else [str(given)])
    ]

"""Read the requests of OpenAI's and vLLM's APIs, and write their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import xxhash

from burnish.environments.calls import AgentReply, Ask

MODEL = "policy"
"""The name under which agents know the model."""
_UNREADABLE = "features", "content_parts"
_NUMBERS = ("temperature", "top_p", "top_k", "min_p")
_SAMPLING = (
    *_NUMBERS,
    *("stop", "stop_token_ids", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("response_format", "tool_choice", "structured_outputs", "min_tokens", "ignore_eos"),
)
"""Parameters that the trainer compares with its own. Others do not concern what is drawn."""


def ask_of(body: Any, *, is_chat: bool) -> Ask:
    """Read a request. Raises `ValueError` for what the gateway cannot do."""
    if not isinstance(body, dict):
        raise ValueError("the body is no JSON object")
    json.dumps(body, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    settings = body if is_chat else body.get("sampling_params") or {}
    if settings.get("n") not in (None, 1):
        raise ValueError("n: a request gets one answer")
    limits = [settings.get(name) for name in ("max_completion_tokens", "max_tokens")]
    most = next((limit for limit in limits if limit is not None), None)
    if most is not None and (type(most) is not int or most < 1):
        raise ValueError(f"max_tokens: {most!r} is no number above 0")
    sampling = _sampling_of(settings)
    if is_chat:
        messages = body.get("messages")
        tools = body.get("tools") or []
        if not messages or not all(_is(each, dict) for each in (messages, tools)):
            raise ValueError("messages and tools have to be lists of objects")
        if not all(map(_is_message, messages)):
            raise ValueError("a message has a role, and a content that is text")
        if not all(isinstance(tool.get("function", tool).get("name"), str) for tool in tools):
            raise ValueError("a tool has a function with a name")
        return Ask(0, None, messages, tools, most, sampling)
    unread = [name for name in _UNREADABLE if body.get(name)]
    ids = body.get("token_ids")
    if unread:
        raise ValueError(f"{unread[0]}: only text is read")
    if not ids or not _is(ids, int):
        raise ValueError("token_ids has to be a list of integers, and not empty")
    return Ask(0, tuple(ids), (), (), most, sampling)


def _sampling_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
    wrong = [name for name in _NUMBERS if not isinstance(sampling.get(name, 0), int | float)]
    stop = sampling.get("stop", "")
    if not (isinstance(stop, str) or _is(stop, str)):
        wrong.append("stop")
    if not _is(sampling.get("stop_token_ids", []), int):
        wrong.append("stop_token_ids")
    if wrong:
        raise ValueError(f"{wrong[0]}: {sampling[wrong[0]]!r:.80} has another type")
    return sampling


def _is(value: Any, kind: type) -> bool:
    """Return whether a value is a list of a kind."""
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _is_message(message: Mapping[str, Any]) -> bool:
    calls = message.get("tool_calls") or []
    return (
        isinstance(message.get("role"), str)
        and isinstance(message.get("content") or "", str | list)
        and _is(calls, dict)
    )


def generated(reply: AgentReply) -> dict[str, Any]:
    """Return an answer as vLLM's `/inference/v1/generate` has it."""
    choice = {
        "index": 0,
        "token_ids": list(reply.token_ids),
        "logprobs": _logprobs(reply),
        "finish_reason": reply.stop_reason,
    }
    return {"request_id": _name(reply), "choices": [choice], "usage": _usage(reply)}


def chat_completion(reply: AgentReply, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as OpenAI's API has it; with `return_token_ids`, ids beside it, as vLLM does."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", **_message(reply)},
        "finish_reason": _finish_reason(reply),
        "logprobs": _logprobs(reply) if body.get("logprobs") else None,
    }
    answer = _head(reply, body) | {"object": "chat.completion", "choices": [choice]}
    if body.get("return_token_ids"):
        answer["prompt_token_ids"] = list(reply.prompt_token_ids)
        choice["token_ids"] = list(reply.token_ids)
    return answer | {"usage": _usage(reply)}


def chat_chunks(reply: AgentReply, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an answer as the events of a stream. It is whole when it begins, because the model's turns come in waves."""
    head = _head(reply, body) | {"object": "chat.completion.chunk"}
    message = _message(reply)
    for number, call in enumerate(message.get("tool_calls", ())):
        call["index"] = number
    deltas: tuple[dict[str, Any], ...] = ({"role": "assistant", "content": ""}, message, {})
    for number, delta in enumerate(deltas):
        reason = _finish_reason(reply) if number == len(deltas) - 1 else None
        yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield head | {"choices": [], "usage": _usage(reply)}


def _head(reply: AgentReply, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": _name(reply), "created": 0, "model": body.get("model") or MODEL}


def _name(reply: AgentReply) -> str:
    return f"chatcmpl-{xxhash.xxh3_64_hexdigest(repr(reply).encode())}"


def _message(reply: AgentReply) -> dict[str, Any]:
    message: dict[str, Any] = {"content": reply.content or None}
    if reply.thoughts:
        message["reasoning_content"] = reply.thoughts
    if reply.calls:
        message["tool_calls"] = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
            for key, name, arguments in reply.calls
        ]
    return message


def _finish_reason(reply: AgentReply) -> str | None:
    return "tool_calls" if reply.calls and reply.stop_reason == "stop" else reply.stop_reason


def _logprobs(reply: AgentReply) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True)
    ]
    return {"content": content}


def _usage(reply: AgentReply) -> dict[str, int]:
    asked = len(reply.prompt_token_ids)
    said = len(reply.token_ids)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}

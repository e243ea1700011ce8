"""Servers of OpenEnv, over its WebSocket."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from burnish.environments.background_loop import started
from burnish.environments.base import Action, EnvironmentFailure, Message, Observation
from burnish.environments.tool_environment import ToolEnvironment
from burnish.errors import MissingError, UsageError
from burnish.functions import did_you_mean, failure

_START_SECONDS = 100.0
_SEED = "episode_seed"
"""The column of rows that the class brings: each is an episode, the same for all samples."""
_STEP = "step"
"""The tool that sends an action to a server whose actions are no calls of tools."""


class OpenEnv(ToolEnvironment):
    """An episode of a server. Its tools are the model's; otherwise an action is a call of the tool `step`, or the model's text."""

    def __init__(
        self,
        openenv: str,
        action: str | None = None,
        observation: str | None = None,
        reset: Sequence[str] = (),
        size: int = 500,
        prompt: str = "",
    ) -> None:
        """Take a URL, and open nothing.

        `action` is the field of an action that gets the model's text. `observation` is the field that the model sees; by default all
        of them. `reset` names the row's columns that the server's `reset` gets beside the seed.
        """
        self._url = openenv
        self._action = action
        self._field = observation
        self._columns = reset
        self._connection: Any = None
        self._rewards: dict[str, float] = {}
        self._done = False

    @classmethod
    def rows(cls, size: int = 500, prompt: str = "") -> Iterator[Mapping[str, Any]]:
        """Yield episodes. Their prompt is `prompt`, and what the server says after it."""
        for number in range(size):
            yield {"prompt": [{"role": "user", "content": prompt}], _SEED: number}

    @classmethod
    def schemas(cls, openenv: str = "", action: str | None = None) -> Iterator[Mapping[str, Any]]:
        """Ask the server for its tools, or for the form of its actions. Raises `UsageError` if it cannot be reached."""
        schema = _action_schema(openenv)
        fields = {name: value for name, value in schema["properties"].items() if name != "metadata"}
        if action is not None and action not in fields:
            raise UsageError(
                f"an action of {openenv} has no field {action}",
                have=f"rollout.environment.kwargs.action: {action}",
                want=", ".join(fields),
                do=did_you_mean(action, fields) or "correct it",
            )
        if action is None and _calls_tools(openenv):
            for tool in started(_tools_of(openenv)).result(_START_SECONDS):
                described = tool["name"], tool.get("description") or "", tool["input_schema"]
                yield _described(*described)
        elif action is None:
            required = [name for name in schema.get("required", ()) if name in fields]
            parameters = {**schema, "properties": fields, "required": required}
            text = schema.get("description") or "Act in the environment."
            yield _described(_STEP, text, parameters)

    async def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Message] | Observation:  # type: ignore[override]
        """See `Environment.begin`."""
        self._connection = await self._asked(_connected(self._url))
        data = {name: row[name] for name in self._columns}
        text = await self._send("reset", {"seed": row.get(_SEED, seed) % 2**31, **data})
        *before, last = row["prompt"]
        if not text or last["role"] != "user" or not isinstance(last["content"], str):
            return [{"role": "user", "content": text}] if text else ()
        told = "\n\n".join(filter(None, [last["content"], text]))
        return Observation([*before, {**last, "content": told}], replaces_prompt=True)

    async def step(self, action: Action) -> Observation:  # type: ignore[override]
        """Send what the model said, or its calls."""
        self._rewards = {}
        if self._action is None:
            observation = await super().step(action)
            done = observation.done or self._done
            return Observation(observation.messages, self._rewards, done)
        text = await self._send("step", {self._action: action.content})
        return Observation([{"role": "user", "content": text}], self._rewards, self._done)

    async def use(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See `ToolEnvironment.use`."""
        if self._done:
            raise RuntimeError("the episode has ended")
        if name == _STEP and not _calls_tools(self._url):
            return await self._send("step", dict(arguments))
        call = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        return await self._send("step", call)

    async def close(self) -> None:  # type: ignore[override]
        """See `Environment.close`."""
        if self._connection is not None:
            await self._asked(self._connection.close())

    async def _send(self, kind: str, data: Mapping[str, Any]) -> str:
        """Send a message, and return the observation as text. Raises what the server says of the data."""
        answer = await self._asked(_answer(self._connection, kind, data))
        reward = answer.get("reward")
        if reward is not None:
            self._rewards = {"reward": self._rewards.get("reward", 0.0) + float(reward)}
        self._done = bool(answer.get("done"))
        return _text_of(answer.get("observation") or {}, self._field)

    async def _asked(self, coroutine: Any) -> Any:
        from websockets.exceptions import WebSocketException

        try:
            return await asyncio.wrap_future(started(coroutine))
        except (OSError, WebSocketException) as error:
            raise EnvironmentFailure(f"{self._url}: {failure(error)}") from error


async def _connected(url: str) -> Any:
    from websockets.asyncio.client import connect

    address = url.rstrip("/").replace("http", "ws", 1) + "/ws"
    return await connect(address, max_size=100 << 20, open_timeout=_START_SECONDS)


async def _answer(connection: Any, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    await connection.send(json.dumps({"type": kind, "data": data}))
    answer = json.loads(await connection.recv())
    if answer["type"] == "error":
        error = answer["data"]
        raise ValueError(f"{error.get('message')} {error.get('errors') or ''}".strip())
    value: Mapping[str, Any] = answer["data"]
    return value


async def _tools_of(url: str) -> Any:
    connection = await _connected(url)
    try:
        answer = await _answer(connection, "step", {"type": "list_tools"})
    finally:
        await connection.close()
    return answer["observation"]["tools"]


@lru_cache
def _action_schema(url: str) -> Mapping[str, Any]:
    """Return the JSON schema of a server's actions. Raises `UsageError`."""
    if find_spec("websockets") is None:
        raise MissingError(
            "the package websockets is not installed",
            have="rollout.environment.openenv",
            do="pip install 'burnish[openenv]'",
        )
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=_START_SECONDS) as answer:
            schema: Mapping[str, Any] = json.load(answer)["action"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{url} does not answer as a server of OpenEnv",
            have=failure(error),
            want="the schema of its actions at /schema",
            do="start the server, or correct rollout.environment.openenv",
        ) from error
    return schema


def _calls_tools(url: str) -> bool:
    return "tool_name" in _action_schema(url)["properties"]


def _described(name: str, description: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _text_of(observation: Mapping[str, Any], field: str | None) -> str:
    """Return what the model sees: a field, a tool's result, or all fields as JSON."""
    value: Any = observation
    if field is not None:
        for name in field.split("."):
            value = value[int(name)] if isinstance(value, list) else value[name]
    elif "tool_name" in observation:
        if observation.get("error"):
            raise RuntimeError(json.dumps(observation["error"], ensure_ascii=False))
        value = observation.get("result")
        if isinstance(value, dict) and "data" in value:
            value = value["data"]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

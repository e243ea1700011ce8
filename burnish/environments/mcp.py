"""Tools of MCP servers: programs that speak over stdin and stdout, or URLs that speak streamable HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from burnish.environments.background_loop import background_loop, started
from burnish.environments.base import EnvironmentFailure, Message
from burnish.environments.tool_environment import ToolEnvironment
from burnish.errors import MissingError, UsageError
from burnish.functions import did_you_mean, failure

_START_SECONDS = 100.0
"""How long a server may take to start and to describe its tools."""


class McpTools(ToolEnvironment):
    """Tools of MCP servers. Each conversation has a session of its own, and with stdio a process."""

    def __init__(
        self,
        mcp: str | Sequence[str],
        only: Sequence[str] | None = None,
        shared: bool = False,
        call_seconds: float = 20.0,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        mode: str = "legacy",
    ) -> None:
        """Take commands and URLs, and open nothing.

        `only` names the tools to show. With `shared`, all conversations of a worker have one session. A call is told to have
        failed after `call_seconds`. `env` of programs and `headers` of URLs may name the environment's variables, as $NAME.
        `mode` is the client's: legacy opens a session, which servers of 2026 can do without.
        """
        self._servers = _servers(mcp, env, headers, mode)
        self._shared = shared
        self._seconds = call_seconds
        self._sessions: list[_Session] = []
        self._owners: dict[str, _Session] = {}
        self._only = only

    @classmethod
    def schemas(
        cls,
        mcp: str | Sequence[str] = (),
        only: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        mode: str = "legacy",
    ) -> Iterator[Mapping[str, Any]]:
        """Ask the servers for their tools. Raises `UsageError` for one that does not start, and for two tools of one name."""
        described: dict[str, Mapping[str, Any]] = {}
        for server in _servers(mcp, env, headers, mode):
            session = _Session(server)
            try:
                tools = session.opened.result(_START_SECONDS)
            except Exception as error:
                raise UsageError(
                    f"the MCP server {server.name} cannot be used",
                    have=f"no answer within {_START_SECONDS:g} s"
                    if isinstance(error, TimeoutError)
                    else failure(error),
                    want="a program that speaks MCP over stdin and stdout, or a URL that speaks streamable HTTP",
                    do="start it by hand, or set rollout.environment.kwargs.mode=auto for a server without sessions",
                ) from error
            finally:
                session.close()
            twice = [tool.name for tool in tools if tool.name in described]
            if twice:
                raise UsageError(
                    "two MCP servers have tools of one name",
                    have=", ".join(twice),
                    do="name the tools that you want in rollout.environment.kwargs.only of one server",
                )
            described |= {tool.name: _schema(tool) for tool in tools}
        for name in only if only is not None else described:
            if name not in described:
                raise UsageError(
                    f"there is no tool {name}",
                    have=f"rollout.environment.kwargs.only: {', '.join(only or ())}",
                    want=", ".join(described),
                    do=did_you_mean(name, described) or "correct it",
                )
            yield described[name]

    async def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:  # type: ignore[override]
        """Open the sessions."""
        make = _shared_session if self._shared else _Session
        self._sessions = [make(server) for server in self._servers]
        for session in self._sessions:
            try:
                tools = await asyncio.wait_for(asyncio.wrap_future(session.opened), _START_SECONDS)
            except Exception as error:
                raise EnvironmentFailure(f"{session.name}: {failure(error)}") from error
            shown = [tool.name for tool in tools if self._only is None or tool.name in self._only]
            self._owners |= dict.fromkeys(shown, session)
        return ()

    async def use(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See `ToolEnvironment.use`."""
        if name not in self._owners:
            raise LookupError(f"there is no tool {name}; there are {', '.join(self._owners)}")
        return await self._owners[name].call(name, arguments, self._seconds)

    def told(self, error: Exception) -> str:
        """See `ToolEnvironment.told`."""
        text = str(error)
        return text if text.startswith("Error") else f"Error: {text}"

    def close(self) -> None:
        """Close the sessions that are the conversation's own."""
        for session in self._sessions:
            if not self._shared:
                session.close()


class _Server(NamedTuple):
    """How a server is reached. Equal ones can share a session."""

    name: str
    env: tuple[tuple[str, str], ...]
    headers: tuple[tuple[str, str], ...]
    mode: str


class _Session:
    """A connection to a server, which lives in one task of the background loop."""

    def __init__(self, server: _Server) -> None:
        """Begin to connect."""
        self.name = server.name
        self.opened: Future[list[Any]] = Future()
        """The server's tools, once it has told them."""
        self._client: Any = None
        self._closing = asyncio.Event()
        started(self._live(server))

    async def call(self, name: str, arguments: Mapping[str, Any], seconds: float) -> str:
        """Call a tool and return its result as text. Raises what the server says, and `EnvironmentFailure` if it is gone."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        asked = self._client.call_tool(name, dict(arguments), read_timeout_seconds=seconds)
        try:
            result = await asyncio.wrap_future(started(asked))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise EnvironmentFailure(f"{self.name} has closed the connection") from error
            if error.code == REQUEST_TIMEOUT:
                raise TimeoutError(f"{name}: no answer within {seconds:g} s") from error
            raise RuntimeError(error.message) from error
        texts = [_text(block) for block in result.content]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content, ensure_ascii=False)]
        text = "\n".join(texts)
        if result.is_error:
            raise RuntimeError(text)
        return text

    def close(self) -> None:
        """End the connection. What a program does then is not waited for."""
        background_loop().call_soon_threadsafe(self._closing.set)

    async def _live(self, server: _Server) -> None:
        try:
            from mcp import Client

            async with AsyncExitStack() as stack:
                transport = await _transport(server, stack)
                self._client = await stack.enter_async_context(Client(transport, mode=server.mode))
                self.opened.set_result(await self._tools())
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - whatever the transport raises is the reason
            if not self.opened.done():
                self.opened.set_exception(_innermost(error))

    async def _tools(self) -> list[Any]:
        page = await self._client.list_tools()
        tools = list(page.tools)
        while page.next_cursor:
            page = await self._client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return tools


@lru_cache
def _shared_session(server: _Server) -> _Session:
    return _Session(server)


async def _transport(server: _Server, stack: AsyncExitStack) -> Any:
    """Return what the package's client takes."""
    if server.name.startswith(("http://", "https://")):
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(30, read=300)
        client = httpx2.AsyncClient(headers=_expanded(server.headers), timeout=timeout)
        return streamable_http_client(
            server.name, http_client=await stack.enter_async_context(client)
        )
    from mcp import StdioServerParameters

    command, *arguments = shlex.split(server.name)
    return StdioServerParameters(command=command, args=arguments, env=_expanded(server.env))


def _servers(
    mcp: str | Sequence[str],
    env: Mapping[str, str] | None,
    headers: Mapping[str, str] | None,
    mode: str,
) -> list[_Server]:
    if find_spec("mcp") is None:
        raise MissingError(
            "the package mcp is not installed",
            have="rollout.environment.mcp",
            do="pip install 'burnish[mcp]'",
        )
    names = [mcp] if isinstance(mcp, str) else mcp
    variables = tuple((env or {}).items())
    fields = tuple((headers or {}).items())
    return [_Server(name, variables, fields, mode) for name in names]


def _expanded(values: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {name: os.path.expandvars(value) for name, value in values}


def _schema(tool: Any) -> Mapping[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def _text(block: Any) -> str:
    """Return a block of a result as text. The model reads no images or sound, and is told so."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    if block.type == "resource_link":
        return f"[{block.name}: {block.uri}]"
    kind = getattr(getattr(block, "resource", block), "mime_type", None) or block.type
    return f"[{kind}, left out]"


def _innermost(error: BaseException) -> BaseException:
    """Return the first error of groups, which tasks wrap around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

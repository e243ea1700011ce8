"""An MCP server with tools of every temper: `mcp_server.py` over stdin and stdout, `mcp_server.py PORT` over HTTP."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("temper")
counts: Counter[str] = Counter()


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@server.tool()
def count(context: Context) -> int:
    """Count the calls of this session."""
    name = (context.headers or {}).get("mcp-session-id", "stdio")
    counts[name] += 1
    return counts[name]


@server.tool()
def draw() -> Image:
    """Draw a picture."""
    return Image(data=b"no picture", format="png")


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


@server.tool()
def wait(seconds: float) -> str:
    """Take time."""
    time.sleep(seconds)
    return "rested"


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


@server.tool()
def variable(name: str) -> str:
    """Tell a variable of the process's environment."""
    return os.environ.get(name, "nothing")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")

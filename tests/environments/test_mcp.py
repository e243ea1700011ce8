"""Tools of real MCP servers, over stdin and stdout and over HTTP."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from environments.played import play, play_all, pool_of, wait_for
from support.ranks.ports import free_port

from burnish.environments.base import Action, ToolCall
from burnish.environments.mcp import McpTools
from burnish.errors import MissingError, UsageError

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]
STDIO = shlex.join(SERVER)
INSTALLED = find_spec("mcp") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="make nightly-environments installs mcp")
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def url():
    port = free_port()
    process = subprocess.Popen([*SERVER, str(port)])
    try:
        wait_for(port)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["stdio", "http"])
def server(request):
    return STDIO if request.param == "stdio" else request.getfixturevalue("url")


@needs_package
def test_calls_are_answered_and_each_conversation_has_its_session(server):
    with pool_of(mcp=server) as pool:
        schemas = {tool["function"]["name"]: tool["function"] for tool in pool.described.tools}
        assert schemas["multiply"]["description"] == "Multiply two numbers."
        assert schemas["multiply"]["parameters"]["required"] == ["a", "b"]
        script = [
            [("multiply", {"a": 3, "b": 4}), ("count", {})],
            [("count", {})],
            [("draw", {}), ("fail", {"why": "no luck"})],
            [("fly", {}), ("multiply", {"a": "x"})],
            "Done.",
        ]
        one, two = play_all(pool, [{}, {}], [script, script])
        assert one == two
        assert one.texts[:4] == ["12", "1", "2", "[image/png, left out]"]
        assert "no luck" in one.texts[4]
        assert "fly" in one.texts[5]
        assert all("Error" in text for text in one.texts[4:])
        assert one.turns[-1].done


@needs_package
def test_a_shared_session_and_chosen_tools(server):
    kwargs = {"shared": True, "only": ["count"]}
    with pool_of(mcp=[server], kwargs=kwargs) as pool:
        assert [tool["function"]["name"] for tool in pool.described.tools] == ["count"]
        script = [[("count", {})], [("multiply", {"a": 1, "b": 1})]]
        one, two = play_all(pool, [{}, {}], [script, script])
        assert sorted(one.texts[:1] + two.texts[:1]) == ["1", "2"]
        assert "there is no tool" in one.texts[1]


@needs_package
def test_a_late_call_is_told_and_a_lost_server_drops_the_conversation():
    with pool_of(mcp=STDIO, kwargs={"call_seconds": 0.5}) as pool:
        (played,) = play_all(pool, [{}], [[[("wait", {"seconds": 30})], "Done."]])
        assert "0.5 s" in played.texts[0]
    with pool_of(mcp=STDIO, kwargs={"call_seconds": 300.0}) as pool:
        pool.begin({(0, 0): ({}, 0), (1, 0): ({}, 0)})
        answers = pool.step(
            {
                (0, 0): Action("", "", (ToolCall("die", {}),)),
                (1, 0): Action("", "", (ToolCall("count", {}),)),
            }
        )
        assert answers[0, 0].observation is None
        assert answers[1, 0].observation.messages[0]["content"] == "1"


@needs_package
def test_variables_reach_a_program_by_name(monkeypatch):
    monkeypatch.setenv("A_SECRET", "hidden")
    kwargs = {"env": {"TOKEN": "$A_SECRET"}}
    asked = [[("variable", {"name": "TOKEN"}), ("variable", {"name": "A_SECRET"})]]
    assert play({}, asked, mcp=STDIO, kwargs=kwargs).texts == ["hidden", "nothing"]


@needs_package
@pytest.mark.parametrize(
    "settings",
    [
        {"mcp": "no-such-program"},
        {"mcp": f"{sys.executable} -c 1"},
        {"mcp": "http://127.0.0.1:9/mcp"},
        {"mcp": [STDIO, STDIO]},
        {"mcp": STDIO, "kwargs": {"only": ["multiplie"]}},
    ],
)
def test_what_cannot_be_used_is_refused(settings):
    with pytest.raises(UsageError):
        pool_of(**settings)


@pytest.mark.skipif(INSTALLED, reason="it is installed")
def test_without_the_package_the_extra_is_named():
    with pytest.raises(MissingError, match="mcp"):
        list(McpTools.schemas("a server"))

"""The tool `python` in a session and without, as a class and in an environment's process."""

from __future__ import annotations

import pytest

from burnish.config.environment import EnvironmentConfig
from burnish.environments.base import Action, ToolCall
from burnish.environments.pool import EnvironmentPool
from burnish.errors import UsageError
from burnish.sandbox.python_tool import PythonTool
from burnish.sandbox.sandbox import Sandbox, SandboxError

TARGET = "burnish.sandbox.python_tool:PythonTool"
LIMITS = {"seconds": 20.0, "memory_mb": 256}


@pytest.fixture(scope="module", autouse=True)
def _isolated() -> None:
    try:
        Sandbox().close()
    except SandboxError as error:
        pytest.skip(str(error))


def call(tool: PythonTool, *codes: str) -> list[str]:
    calls = tuple(ToolCall("python", {"code": code}) for code in codes)
    return [message["content"] for message in tool.step(Action("", "", calls)).messages]


def test_a_session_keeps_its_variables():
    tool = PythonTool(limits=LIMITS)
    assert call(tool, "x = 3\nx", "print(x + 1, end='')", "def f():\n    return x\nf()") == [
        "3\n",
        "4",
        "3\n",
    ]
    (error,) = call(tool, "print('before')\n1 / 0")
    assert error.splitlines()[0] == "before"
    assert error.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert call(tool, "import subprocess\nsubprocess.run(['echo', 'x']).returncode") == ["x\n0\n"]
    tool.close()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "end",
    [
        "import os; os._exit(1)",
        "import os; os.close(0); os.close(3); os.kill(os.getpid(), 9)",
        "x = bytearray(b'x') * 10**9",
        "while True: pass",
    ],
)
def test_a_session_that_ends_starts_again(end):
    limits = LIMITS | ({"seconds": 0.5} if end.startswith("while") else {})
    tool = PythonTool(limits=limits)
    assert call(tool, "x = 1", end, "x")[2].endswith("1\n") == end.startswith("x =")
    assert call(tool, "1 + 1") == ["2\n"]
    tool.close()


def test_without_a_session_each_call_stands_alone():
    tool = PythonTool(session=False, limits=LIMITS, most_characters=300)
    first, second, long = call(tool, "x = 3\nx", "x", "'a' * 1000")
    assert first == "3\n"
    assert second.splitlines()[-1] == "NameError: name 'x' is not defined"
    assert long.startswith("'" + "a" * 299)
    assert len(long) < 400


@pytest.mark.nightly
def test_the_model_sees_its_schema_and_answers_come_from_a_process():
    config = EnvironmentConfig(function=TARGET, workers=1, kwargs={"limits": LIMITS})
    with EnvironmentPool(config) as pool:
        (schema,) = pool.described.tools
        assert schema["function"]["name"] == "python"
        assert list(schema["function"]["parameters"]["properties"]) == ["code"]
        keys = [(0, 0), (0, 1)]
        pool.begin({key: ({}, 7) for key in keys})
        for code, wanted in (("x = 0", [""] * 2), ("x += 1; print(x)", ["1\n"] * 2)):
            calls = (ToolCall("python", {"code": code}),)
            answers = pool.step({key: Action("", "", calls) for key in keys})
            said = [answers[key].observation.messages[0]["content"] for key in keys]
            assert said == wanted


@pytest.mark.nightly
@pytest.mark.parametrize("limits", [{"second": 1}, {"seconds": -1}, {"preload": ["no_such"]}])
def test_limits_that_cannot_be_used_are_refused_before_the_run(limits):
    with pytest.raises(UsageError):
        EnvironmentPool(EnvironmentConfig(function=TARGET, kwargs={"limits": limits}))


def test_a_machine_that_forbids_sandboxes_is_refused_before_the_run(monkeypatch):
    def forbid(*arguments):
        raise SandboxError("user namespaces are forbidden")

    monkeypatch.setattr("burnish.sandbox.python_tool.Sandbox", forbid)
    with pytest.raises(UsageError):
        PythonTool.schemas()

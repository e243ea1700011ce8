"""The tool `python`: the model runs programs, in a session that keeps its variables or each by itself."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any

from burnish.environments.base import Environment, EnvironmentFailure
from burnish.errors import UsageError
from burnish.sandbox.sandbox import Limits, Sandbox, SandboxError, run_shared

_CELLS = """
import ast, json, os, sys, traceback
os.dup2(1, 2)
sys.stdout.reconfigure(line_buffering=True)

def run(source, names):
    try:
        tree = ast.parse(source, "<cell>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        pass
    except BaseException as error:
        own = error.__traceback__.tb_next
        traceback.print_exception(type(error), error, own)
    sys.stdout.flush()

names = vars(sys.modules["__main__"])
for line in os.fdopen(os.dup(0)):
    run(json.loads(line), names)
    os.write(3, b"x")
"""
"""A program that runs texts from stdin, one a line, as a notebook runs cells."""
_MOST_CODE = 60_000
"""Most characters of a call: a pipe takes so many at once."""
_FOR_EVER = 1_000_000
_CHECK_SECONDS = 0.05


def python(code: str) -> str:
    """Run Python code, and return what it prints and the value of its last line.

    Args:
        code: The code.
    """
    raise NotImplementedError(code)


class PythonTool(Environment):
    """A conversation in which the model may run Python in a sandbox."""

    tools = (python,)

    def __init__(
        self,
        session: bool = True,
        most_characters: int = 2000,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep variables between calls if `session`. Cut what a call prints to `most_characters`. `limits` are those of `Limits`."""
        self._limits = Limits(**(limits or {}))
        self._most = most_characters
        self._session: PythonSession | None = PythonSession(self._limits) if session else None
        run: Callable[[str], str] = self._run
        self.tools = (wraps(python)(lambda code: run(code)),)  # type: ignore[misc]

    @classmethod
    def schemas(cls, limits: Mapping[str, Any] | None = None) -> Iterable[Mapping[str, Any]] | None:
        """Raise `UsageError`, before the run, where programs cannot be isolated or the limits cannot be used."""
        try:
            Sandbox(Limits(**(limits or {}))).close()
        except (SandboxError, TypeError, ValueError) as error:
            raise UsageError(
                "the tool python cannot be used",
                have=str(error),
                want="a sandbox for programs",
                do="correct rollout.environment.kwargs.limits, or the machine",
            ) from error
        return None

    def _run(self, code: str) -> str:
        try:
            if self._session is not None:
                text = self._session.run(code)
            else:
                done = run_shared(self._limits, _CELLS, json.dumps(code))
                text = done.stdout + _note(done.stopped, self._limits)
        except SandboxError as error:
            raise EnvironmentFailure(str(error)) from error
        if len(text) <= self._most:
            return text
        return f"{text[: self._most]}\n[{len(text) - self._most} characters are left out]"

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()


class PythonSession:
    """Cells that share their variables. It starts with the first cell, and again after one that is stopped."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sandbox: Sandbox | None = None
        self._files: list[int] = []
        self._read = 0

    def run(self, code: str) -> str:
        """Run a cell, and return what it prints. Raises `SandboxError` if the sandbox cannot be built."""
        if len(code) > _MOST_CODE:
            return f"Error: {len(code)} characters of code; at most {_MOST_CODE} can be run at once"
        sandbox = self._sandbox or self._started()
        _, cells, output, result = self._files
        stopped = "ended"
        with suppress(OSError):
            os.write(cells, f"{json.dumps(code)}\n".encode())
            stopped = self._wait(sandbox, result)
        most = self._limits.output_kb << 10
        data = os.pread(output, most, self._read)
        self._read = os.fstat(output).st_size
        text = data.decode("utf-8", "replace")
        if stopped:
            self.close()
            text += _note(stopped, self._limits)
            text += "\nThe session starts again, without its variables."
        return text

    def _wait(self, sandbox: Sandbox, result: int) -> str:
        """Wait for the end of a cell; return why it did not come, or an empty text."""
        deadline = time.monotonic() + self._limits.seconds
        while True:
            ready, _, _ = select.select([result, sandbox.fileno()], [], [], _CHECK_SECONDS)
            if result in ready:
                return "" if os.read(result, 1) else "ended"
            if ready:
                return "ended"
            if time.monotonic() > deadline:
                return "time"
            if sandbox.uses_too_much():
                return "memory"

    def _started(self) -> Sandbox:
        sandbox = Sandbox(self._limits)
        source = os.memfd_create("cells")
        os.write(source, _CELLS.encode())
        os.lseek(source, 0, os.SEEK_SET)
        given, cells = os.pipe()
        output = os.memfd_create("output")
        result, done = os.pipe()
        sandbox.start([source, given, output, output, done], _FOR_EVER, cpu_seconds=_FOR_EVER)
        os.close(given)
        os.close(done)
        self._files = [source, cells, output, result]
        self._read = 0
        self._sandbox = sandbox
        return sandbox

    def close(self) -> None:
        """End the session's program."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []


def _note(stopped: str | None, limits: Limits) -> str:
    if stopped is None:
        return ""
    return {
        "time": f"\nError: stopped, because it ran longer than {limits.seconds:g} s",
        "memory": f"\nError: stopped, because it needed more than {limits.memory_mb} MB of memory",
    }.get(stopped, "\nError: the program has ended")

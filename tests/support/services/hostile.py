"""Environments that do what they should not, by what the model says to them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress

import burnish

HUGE = 100 << 20


class Stubborn:
    """A number that is none."""

    def __float__(self):
        raise RuntimeError("not today")


def nested(depth):
    """A list in a list in a list."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


def scribble():
    """Write to every descriptor."""
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.write(descriptor, b"this is no answer of a worker\n")


def spin():
    """Leave a thread that works on."""
    threading.Thread(target=threading.Event().wait).start()


def flood():
    """Print more than a pipe holds."""
    for stream in (sys.stdout, sys.stderr):
        stream.write("y" * (1 << 20))
        stream.flush()


def change_process():
    """Change what a process has once."""
    os.chdir("/")
    os.environ.clear()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    sys.path.clear()
    sys.setrecursionlimit(200)


def leave_a_child():
    """Start a process that outlives the call, in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        threading.Event().wait()


def raises(error):
    """Raise it."""
    raise error


def nested_call():
    """Call itself."""
    return nested_call()


DEADLY = {
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(0),
    "leave": sys.exit,
    "abort": os.abort,
    "odd signal": lambda: os.kill(os.getpid(), 40),
    "memory": lambda: raises(MemoryError()),
    "close": lambda: os.closerange(3, 64),
    "scribble": scribble,
    "interrupt": lambda: raises(KeyboardInterrupt()),
}
"""What ends the process, or its connection."""
HARMLESS = {
    "fork": os.fork,
    "child": leave_a_child,
    "thread": spin,
    "flood": flood,
    "process": change_process,
}
"""What the conversation survives."""
ANSWERS = {
    "loud error": lambda: raises(ValueError("z" * HUGE)),
    "recursion": nested_call,
    "huge name": lambda: [{"role": "tool", "name": "n" * HUGE, "content": "x" * HUGE}] * 9,
    "huge parts": lambda: [{"role": "tool", "content": [{"type": "text", "text": "x" * HUGE}] * 9}],
    "many messages": lambda: ({"role": "tool", "content": "x" * 100} for _ in iter(int, 1)),
    "deep": lambda: [{"role": "tool", "content": nested(100000)}],
    "no content": lambda: [{"role": "tool", "content": None}],
    "nan": lambda: burnish.Observation(rewards=float("nan")),
    "infinite": lambda: burnish.Observation(rewards={"a": float("inf")}),
    "too large": lambda: burnish.Observation(rewards=10**400),
    "stubborn": lambda: burnish.Observation(rewards=Stubborn()),
    "many rewards": lambda: burnish.Observation(rewards={str(i): 1.0 for i in range(100000)}),
    "many metrics": lambda: burnish.Observation(metrics={str(i): 1.0 for i in range(100000)}),
    "no observation": lambda: burnish.Observation(messages=7),
}
"""What is no answer."""


class Hostile(burnish.Environment):
    """Does what it is told."""

    def begin(self, row, seed):
        """Count turns."""
        self.count = 0
        return ()

    def step(self, action):
        """Attack, or answer how often it was asked."""
        self.count += 1
        attack = {**DEADLY, **HARMLESS}.get(action.text)
        if attack is not None:
            attack()
        if action.text in ANSWERS:
            made = ANSWERS[action.text]()
            return made if isinstance(made, burnish.Observation) else burnish.Observation(made)
        if action.text == "half":
            return burnish.Observation([{"role": "user", "content": "a\ud800b", "name": "\udfff"}])
        return burnish.Observation([{"role": "user", "content": str(self.count)}], rewards=1.0)


class Endless(burnish.Environment):
    """Its coroutine ends for some."""

    async def step(self, action):
        """Wait for ever, or answer."""
        if action.text == "wait":
            await asyncio.Event().wait()
        if action.text == "cancel":
            raise asyncio.CancelledError
        return burnish.Observation([{"role": "user", "content": "here"}])

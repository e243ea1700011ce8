"""Environments of every temper, by their classes' names."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time

import burnish


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def hangs() -> str:
    """Never return."""
    time.sleep(1000)
    return ""


def explode(why: str) -> str:
    """Raise an error.

    Args:
        why: Its text.
    """
    raise ValueError(why)


class Calculator(burnish.Environment):
    """Only tools."""

    tools = (multiply, explode)


class Quick(Calculator):
    """The same tools with schemas of their own, for which its process does not import transformers."""

    @classmethod
    def schemas(cls):
        """Describe the tools."""
        parameters = {"type": "object", "properties": {}}
        described = [(tool.__name__, tool.__doc__) for tool in cls.tools]
        return [
            {
                "type": "function",
                "function": {"name": name, "description": text, "parameters": parameters},
            }
            for name, text in described
        ]


class Rewarding(Calculator):
    """Rewards each turn, and the end."""

    def step(self, action):
        """Pay for calls, and more for the right answer."""
        observation = super().step(action)
        if observation.done:
            return burnish.Observation(rewards={"right": float("12" in action.text)}, done=True)
        return burnish.Observation(
            observation.messages, rewards={"called": 0.25}, metrics={"calls made": 1}
        )


class Counting(burnish.Environment):
    """Has state: says how often it was asked, beginning with a number of its own."""

    def __init__(self, first: int = 0) -> None:
        self.count = first

    def begin(self, row, seed):
        """Ask the first question."""
        self.seed = seed
        return [{"role": "user", "content": f"Count from {self.count}."}]

    def step(self, action):
        """Count on, up to three."""
        self.count += 1
        if action.text == "die":
            os._exit(3)
        if action.text == "hang":
            time.sleep(1000)
        if action.text == "fail":
            raise burnish.EnvironmentFailure("no connection")
        if action.text == "leave":
            left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            return burnish.Observation([{"role": "user", "content": str(left.pid)}])
        if action.text == "flood":
            return burnish.Observation([{"role": "user", "content": "x" * (50 << 20)}])
        if action.text == "nonsense":
            return burnish.Observation([{"role": "user"}])
        if action.text == "nothing":
            return None
        if action.text == "nan":
            return burnish.Observation(rewards=float("nan"), done=True)
        return burnish.Observation(
            [{"role": "user", "content": str(self.count)}], rewards=1.0, done=self.count >= 3
        )


class Clinging(Counting):
    """Does not close after a wrong word."""

    def step(self, action):
        """Note the word."""
        self.word = action.text
        return super().step(action)

    def close(self):
        """Hang or die."""
        if self.word == "cling":
            time.sleep(1000)
        if self.word == "drop":
            os._exit(3)


class Forgetful(Counting):
    """Does not repeat: its answers hold the process's id."""

    def step(self, action):
        """Say who it is."""
        observation = super().step(action)
        return burnish.Observation(
            [{"role": "user", "content": str(os.getpid())}], done=observation.done
        )


class Waiting(burnish.Environment):
    """Its methods are coroutines, which wait for each other in a wave."""

    together = 0

    async def begin(self, row, seed):
        """Say nothing."""
        return ()

    async def step(self, action):
        """Answer how many waited at the same time."""
        type(self).together += 1
        await asyncio.sleep(0.2)
        count = type(self).together
        await asyncio.sleep(0.2)
        type(self).together -= 1
        return burnish.Observation(rewards=float(count), done=True)


class Untyped(burnish.Environment):
    """Its tool has no types."""

    @staticmethod
    def look(where):
        """Look."""

    tools = (look,)


class NoEnvironment:
    """Lacks all methods."""


class Compared(Counting):
    """Pays each conversation for the others of its group that said less."""

    def score_group(self, conversations):
        """Compare what was said in the last turn; "mute" breaks it."""
        said = [
            [m["content"] for m in each.messages if m["role"] == "assistant"][-1]
            for each in conversations
        ]
        if "mute" in said:
            return [0.0]
        if "break" in said:
            raise ValueError("a tie")
        return [{"longer": sum(len(own) > len(other) for other in said)} for own in said]


class Capitals(burnish.Environment):
    """Three turns; each is rewarded for its share of capital letters."""

    def begin(self, row, seed):
        """Count turns."""
        self.turns = 0
        self.row = row["answer"]
        return ()

    def step(self, action):
        """Ask again."""
        self.turns += 1
        share = sum(letter.isupper() for letter in action.text) / max(len(action.text), 1)
        again = [{"role": "user", "content": f"{self.row}!"}]
        return burnish.Observation(again, rewards={"capitals": share}, done=self.turns == 3)


class Bringing(Capitals):
    """Brings its rows."""

    @classmethod
    def rows(cls, size: int = 5):
        """Make rows."""
        return [{"prompt": f"Say {number}", "answer": str(number)} for number in range(size)]

    def __init__(self, size: int = 5) -> None:
        self.size = size


class Described(burnish.Environment):
    """An environment whose tools depend on its arguments."""

    def __init__(self, tool: str) -> None:
        self.tool = tool

    @classmethod
    def schemas(cls, tool: str):
        return [{"type": "function", "function": {"name": tool, "parameters": {}}}]


class Scored(burnish.Environment):
    """Asks in its own words, and rewards each conversation when it has ended."""

    def begin(self, row, seed):
        """Put other words in place of the row's."""
        self.length = 0
        asked = row["prompt"][-1]["content"].upper()
        return burnish.Observation([{"role": "user", "content": asked}], replaces_prompt=True)

    def step(self, action):
        """Listen on."""
        self.length += len(action.text)
        return burnish.Observation([{"role": "user", "content": "Go on."}], rewards={"turn": 1.0})

    async def score(self):
        """Pay by the letter."""
        return {"length": float(self.length)}


def capitals(completions, **columns):
    """A reward in a process of its own: how many capital letters a conversation has."""
    return [float(sum(map(str.isupper, str(completion)))) for completion in completions]

"""A task set of verifiers, with a harness that plays two turns in its own process."""

from __future__ import annotations

import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumData(vf.TaskData):
    """A sum."""

    answer: str = ""


class SumTask(vf.Task[SumData]):
    """Rewards the answer, and capital letters."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last answer has the sum."""
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def capitals(self, trace: vf.Trace) -> float:
        """The share of capital letters."""
        text = "".join(message.content or "" for message in trace.assistant_messages)
        return sum(letter.isupper() for letter in text) / max(len(text), 1)


class SumConfig(vf.TasksetConfig):
    """How many sums."""

    size: int = 8


class Sums(vf.Taskset[SumTask, SumConfig]):
    """Sums of two digits."""

    def load(self):
        """Yield them."""
        for number in range(self.config.size):
            asked = f"{number} + {number} = "
            data = SumData(prompt=asked, system_prompt="Add.", answer=str(2 * number))
            yield SumTask(data, self.config.task)


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    """Asks, says "Sure?", and asks again."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        """Talk to the interception server, as each harness does."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = answer.choices[0].message.content or ""
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": "Sure?"},
                ]
        return vf.ProgramResult(0, "", "")


__all__ = ["Sums", "TwoTurns"]

"""An environment whose tools come from elsewhere, and may wait."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from burnish.environments.base import (
    Action,
    Environment,
    EnvironmentFailure,
    Message,
    Observation,
    ToolCall,
    without_calls,
)


class ToolEnvironment(Environment, ABC):
    """Calls tools until a turn has no call. A subclass says how a tool is called; the calls of a turn wait together."""

    @abstractmethod
    async def use(self, name: str, arguments: Mapping[str, Any]) -> str | Sequence[Any]:
        """Call a tool, and return the content of its message. What it raises is told to the model."""

    def told(self, error: Exception) -> str:
        """Return what the model hears of a tool's error."""
        return f"Error: {type(error).__name__}: {error}"

    async def step(self, action: Action) -> Observation:  # type: ignore[override]  # as any method may
        """See `Environment.step`."""
        if not action.calls or action.problem:
            return without_calls(action)
        return Observation(await asyncio.gather(*map(self._message, action.calls)))

    async def _message(self, call: ToolCall) -> Message:
        message = {"role": "tool", "name": call.name, "tool_call_id": call.id, "began": time.time()}
        start = time.monotonic()
        try:
            message["content"] = await self.use(call.name, call.arguments)
        except EnvironmentFailure:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is told to the model
            message |= {"content": self.told(error), "is_error": True}
        return message | {"seconds": time.monotonic() - start}

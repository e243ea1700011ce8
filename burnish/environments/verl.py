"""Tools that are written for verl: classes with `create`, `execute`, `calc_reward` and `release`, and its function tools."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from burnish.environments.base import Action, Message, Observation
from burnish.environments.tool_environment import ToolEnvironment
from burnish.errors import MissingError, UsageError
from burnish.functions import failure

_SETTING = "rollout.environment.verl"


class VerlTools(ToolEnvironment):
    """Tools of verl. A conversation has one instance of each tool that it calls, from the first call to its end."""

    def __init__(self, verl: str | Sequence[str]) -> None:
        """Take files of `tool_config_path` (YAML) and `function_tool_path` (Python)."""
        self._tools = _tools(verl)
        self._instances: dict[str, str] = {}
        self._creating = asyncio.Lock()
        self._created: Mapping[str, Any] = {}
        self._rewards: dict[str, float] = {}
        self._metrics: dict[str, float] = {}

    @classmethod
    def schemas(cls, verl: str | Sequence[str] = ()) -> Iterator[Mapping[str, Any]]:
        """Return the tools' own schemas."""
        for tool in _tools(verl).values():
            yield tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """Take the row's `tools_kwargs`, which verl keeps in its `extra_info`."""
        extra = row.get("extra_info") or {}
        self._created = row.get("tools_kwargs") or extra.get("tools_kwargs") or {}
        return ()

    async def step(self, action: Action) -> Observation:  # type: ignore[override]  # as any method may
        """Call the tools. Their rewards and metrics are those of the turn."""
        self._rewards = {}
        self._metrics = {}
        observation = await super().step(action)
        return Observation(observation.messages, self._rewards, observation.done, self._metrics)

    async def use(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See `ToolEnvironment.use`."""
        tool = self._tools.get(name)
        if tool is None:
            raise LookupError(f"Unknown function '{name}'. Available tools: {list(self._tools)}")
        if hasattr(tool, "execute"):
            async with self._creating:
                if name not in self._instances:
                    created = await tool.create(create_kwargs=self._of(name, "create"))
                    self._instances[name] = created[0]
            response, reward, metrics = await tool.execute(
                self._instances[name], dict(arguments), agent_data=None
            )
        else:
            response, reward, metrics = _triple(await tool.call(dict(arguments)))
        self._rewards[name] = self._rewards.get(name, 0.0) + float(reward or 0.0)
        for key, value in (metrics or {}).items():
            if isinstance(value, int | float):
                self._metrics[key] = self._metrics.get(key, 0.0) + value
        return _text_of(response)

    def told(self, error: Exception) -> str:
        """See `ToolEnvironment.told`."""
        return f"Error executing tool: {error}"

    async def score(self) -> Mapping[str, float]:  # type: ignore[override]
        """Return what `calc_reward` says of each tool that was called."""
        return {
            f"{name}/final": float(await self._tools[name].calc_reward(instance))
            for name, instance in self._instances.items()
        }

    async def close(self) -> None:  # type: ignore[override]
        """Release the instances."""
        for name, instance in self._instances.items():
            await self._tools[name].release(instance, **self._of(name, "release"))

    def _of(self, name: str, what: str) -> Mapping[str, Any]:
        return (self._created.get(name) or {}).get(f"{what}_kwargs") or {}


def _tools(verl: str | Sequence[str]) -> dict[str, Any]:
    files = (verl,) if isinstance(verl, str) else tuple(verl)
    return {tool.name: tool for file in files for tool in _tools_of_file(file)}


@lru_cache
def _tools_of_file(file: str) -> list[Any]:
    """Make the tools of a file, once a process. Raises `UsageError` if it cannot."""
    if not Path(file).is_file():
        raise UsageError(
            f"{_SETTING}: there is no file {file}",
            want="verl's tool_config_path (YAML) or function_tool_path (Python)",
            do=f"correct {_SETTING}",
        )
    try:
        from verl.tools.function_tool import load_function_tools_from_path
        from verl.tools.tool_registry import initialize_tools_from_config
    except ImportError as error:
        raise MissingError(
            "verl's tools cannot be imported",
            have=failure(error),
            want="the modules verl.tools and verl.utils.rollout_trace",
            do="pip install --no-deps verl, and what the import names",
        ) from error
    make = load_function_tools_from_path if file.endswith(".py") else initialize_tools_from_config
    try:
        tools = make(file)
    except Exception as error:
        raise UsageError(
            f"{_SETTING}: the tools of {file} cannot be made",
            have=failure(error),
            do="correct the file",
        ) from error
    if not tools:
        raise UsageError(
            f"{_SETTING}: {file} has no tools",
            want="functions with @function_tool, or a list `tools`",
            do="correct the file",
        )
    return list(tools)


def _triple(result: Any) -> Any:
    from verl.tools.function_tool import normalize_function_tool_return

    return normalize_function_tool_return(result)


def _text_of(response: Any) -> str:
    """Return a `ToolResponse` as text. The model reads no images, and is told so."""
    left_out = [f"[{kind}, left out]" for kind in ("image", "video") if getattr(response, kind)]
    return "\n".join([*filter(None, [response.text]), *left_out])

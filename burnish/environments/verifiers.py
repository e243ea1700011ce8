"""Task sets and environments of the package verifiers, whose training client asks for token ids through the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from burnish.environments.agent_api import MODEL
from burnish.environments.base import EnvironmentFailure
from burnish.environments.gateway import Agent, gateway
from burnish.errors import BurnishError, MissingError, UsageError
from burnish.functions import failure

_NO_KEY = "BURNISH_GATEWAY_NEEDS_NO_KEY"
"""The environment variable of a key that the gateway does not ask for."""


class Verifiers(Agent):
    """One episode."""

    def __init__(
        self,
        verifiers: str,
        timeout_seconds: float,
        tokenizer: str = "",
        renderer: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`renderer` is a configuration of the package renderers, and `settings` one of the environment, of `select` too."""
        super().__init__(verifiers, timeout_seconds)
        self._played = _played(verifiers, _text(settings))
        self._renderer = dict(renderer) if renderer else None
        self._tokenizer = tokenizer

    @classmethod
    def schemas(  # type: ignore[override]
        cls, verifiers: str = "", timeout_seconds: float = 0.0, **settings: Any
    ) -> Sequence[Mapping[str, Any]]:
        """Load the environment, and read the renderer's settings. Its tools are its own, so there are no schemas."""
        renderer = settings.pop("renderer", None)
        tokenizer = settings.pop("tokenizer", "")
        _played(verifiers, _text(settings))
        _client("http://127.0.0.1", renderer, tokenizer)
        return ()

    @classmethod
    def rows(cls, verifiers: str = "", **settings: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the tasks. A row has the number of its task."""
        own = ("timeout_seconds", "tokenizer", "renderer")
        settings = {name: value for name, value in settings.items() if name not in own}
        from verifiers.v1.dialects.chat import message_to_wire

        for index, task in enumerate(_played(verifiers, _text(settings)).tasks):
            data = task.data
            prompt = (
                [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
            )
            if isinstance(data.prompt, str):
                prompt.append({"role": "user", "content": data.prompt})
            else:
                prompt += [message_to_wire(message) for message in data.prompt or ()]
            if not prompt:  # a user who speaks first
                prompt = [{"role": "user", "content": data.name or f"task {index}"}]
            yield {"prompt": prompt, "data_source": verifiers, "index": index}

    async def act(self, row: Mapping[str, Any], url: str, seed: int) -> Mapping[str, float]:
        """Play the episode; return its rewards. Raises `EnvironmentFailure` for one that did not end well."""
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.types import SamplingConfig

        environment = await self._played.serving()
        server = gateway()
        client = _client(f"{server.url}/v1", self._renderer, self._tokenizer)
        context = ModelContext(client=client, model=MODEL, sampling=SamplingConfig())
        (slot,) = environment.slots(self._played.tasks[int(row["index"])])
        # Its client names the trace in each request. So all sessions share one client.
        episode = await environment.run_slot(
            slot, context, on_trace=lambda trace: server.open(self._session, trace.id)
        )
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            why = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise EnvironmentFailure(why or "the episode did not end well")
        return {
            name: reward.value for trace in episode.traces for name, reward in trace.rewards.items()
        }


class _Played:
    """An environment of verifiers, and its tasks."""

    def __init__(self, environment: Any, tasks: Sequence[Any]) -> None:
        self.tasks = tasks
        self._environment = environment
        self._server: asyncio.Task[None] | None = None
        self._is_up: asyncio.Future[None]

    async def serving(self) -> Any:
        """Return the environment, once its servers are up."""
        if self._server is None:
            self._is_up = asyncio.get_running_loop().create_future()
            self._server = asyncio.create_task(self._serve())
        await asyncio.shield(self._is_up)
        return self._environment

    async def _serve(self) -> None:
        try:
            async with self._environment.serving():
                self._is_up.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - those who wait raise it
            if not self._is_up.done():
                self._is_up.set_exception(error)


@lru_cache(maxsize=4)
def _played(name: str, settings: str) -> _Played:
    """Load an environment. Raises `UsageError` for one that is unknown, refuses its settings, has no end or several agents."""
    try:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.configs.select import SelectConfig
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        raise MissingError(
            "verifiers 0.4 or newer is not installed",
            have=f"rollout.environment.verifiers: {name} ({error})",
            do="pip install 'burnish[verifiers]'",
        ) from error
    fields = json.loads(settings)
    if not {"", os.getcwd()}.intersection(sys.path):
        sys.path.append(os.getcwd())  # for a task set of one's own
    try:
        select = SelectConfig(**fields.pop("select", {}))
        fields["taskset"] = {**fields.get("taskset", {}), "id": name}
        environment = load_environment(resolve_env_config(fields))
        taskset = environment.taskset.select(select)
        tasks = [*taskset] if taskset.bounded else []
    except BurnishError:
        raise
    except Exception as error:
        raise UsageError(
            f"verifiers cannot load the task set {name}",
            have=failure(error),
            want="an installed package with a task set, and settings of its environment",
            do="correct rollout.environment.verifiers or rollout.environment.kwargs",
        ) from error
    agents = agent_config_fields(environment.config)
    if len(agents) > 1 or not tasks:
        raise UsageError(
            f"the task set {name} cannot be trained on",
            have=f"{len(agents)} agents: {', '.join(agents)}" if tasks else "no tasks, or no end",
            want="one agent, and a number of tasks",
            do="choose another" if tasks else "set rollout.environment.kwargs.select.limit",
        )
    return _Played(environment, tasks)


def _client(url: str, renderer: Mapping[str, Any] | None, tokenizer: str) -> Any:
    """Return the configuration of the training client. Raises `UsageError` for a renderer that is none."""
    from verifiers.v1.configs.client import TrainClientConfig

    try:
        return TrainClientConfig(
            base_url=url,
            api_key_var=_NO_KEY,
            renderer=None if renderer is None else dict(renderer),
            renderer_model_name=tokenizer or None,
        )
    except ValueError as error:
        raise UsageError(
            "the package renderers refuses rollout.environment.kwargs.renderer",
            have=failure(error),
            want="a configuration of one of its renderers, such as {name: qwen3}",
            do="correct it, or remove it to have one chosen for the model",
        ) from error


def _text(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)

"""Agents and resources servers of NeMo Gym, over HTTP: they run as they are, and their model server asks the gateway.

A row goes to `/run` of its agent's server, which answers with the reward. Meanwhile the agent asks Gym's model server, which has one
address for the model, its `base_url`. There a relay listens, which one of the workers runs. A request's metadata names its session's URL.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

import yaml

from burnish.distributed.listening import HttpServer, listen
from burnish.environments.base import EnvironmentFailure, Observation
from burnish.environments.gateway import Agent, GatewayHandler, in_thread
from burnish.errors import UsageError, few
from burnish.functions import did_you_mean, failure

_SECONDS = 30.0
"""How long a server may take to say what it is."""
_REQUEST = "responses_create_params"
"""The column of a row's request."""
_SESSION = "burnish_session"
"""The key in a request's metadata of its session's URL."""
_AGENTS = "responses_api_agents"
"""A kind of servers in Gym's configuration."""
_MODELS = "responses_api_models"
"""Another."""
_ENVIRONMENTS = "environment_servers"
"""What stands before agents, since NeMo Gym 0.7."""


class NemoGym(Agent):
    """One rollout of an agent of NeMo Gym."""

    def __init__(self, agent: str, timeout_seconds: float, name: str = "") -> None:
        """Take the URL of the head server. `name` is the agent of rows without an `agent_ref`."""
        super().__init__(agent, timeout_seconds)
        self._head = agent
        self._name = name

    @classmethod
    def schemas(cls, agent: str = "", name: str = "") -> Sequence[Mapping[str, Any]]:  # type: ignore[override]
        """Read Gym's configuration, and listen at its model's address. An agent's tools are in its rows, so there are no schemas.

        Raises `UsageError`.
        """
        gym = _gym(agent)
        if name and name not in gym.agents:
            raise UsageError(
                f"NeMo Gym has no agent {name}",
                have=f"rollout.environment.kwargs.name: {name}",
                want=", ".join(gym.agents) or "an agent",
                do=did_you_mean(name, gym.agents) or "correct it, or start Gym with the agent",
            )
        for agent_name in [name] if name else gym.agents:
            _require_relay(*gym.address_of(agent_name))
        return ()

    async def act(self, row: Mapping[str, Any], url: str, seed: int) -> Observation:
        """Let the agent play a row; return its reward. Raises `EnvironmentFailure` for one that did not end well."""
        gym = _gym(self._head)
        name = (row.get("agent_ref") or {}).get("name") or self._name
        if not name and len(gym.agents) == 1:
            (name,) = gym.agents
        params = row.get(_REQUEST)
        if name not in gym.agents or not isinstance(params, dict):
            raise EnvironmentFailure(
                f"a row needs {_REQUEST}, and an agent_ref with a name of {few([*gym.agents])}; this one has {few([*row])}, and the agent {name!r}"
            )
        _require_relay(*gym.address_of(name))
        params = {**params, "metadata": {**(params.get("metadata") or {}), _SESSION: url}}
        # By the numbers Gym tells rollouts from each other.
        numbers = {"_ng_task_index": seed, "_ng_rollout_index": 0}
        asked = {**row, _REQUEST: params, **numbers}
        server = gym.server_of(name)
        try:
            answer = await in_thread(partial(_answered, f"{server}/run", asked))
        except (OSError, HTTPException, ValueError) as error:
            raise EnvironmentFailure(f"{server}/run: {failure(error)}") from error
        return _observation_of(answer)


def _observation_of(answer: Any) -> Observation:
    """Return the reward of a rollout, and its other numbers as metrics. Raises `EnvironmentFailure` where Gym says that it counts for nothing."""
    if not isinstance(answer, dict):
        raise EnvironmentFailure(f"NeMo Gym answered {answer!r:.200}")
    reward = answer.get("reward")
    if answer.get("mask_sample") or not isinstance(reward, int | float):
        why = answer.get("failure_reason") or answer.get("failure_kind")
        raise EnvironmentFailure(f"NeMo Gym gave no reward: {why or few([*answer])}")
    numbers = {**answer, **(answer.get("reward_components") or {})}
    metrics = {
        name: float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and name not in ("reward", "mask_sample")
    }
    return Observation(rewards={"reward": float(reward)}, metrics=metrics)


def _answered(url: str, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> Any:
    """Get JSON, or post it, and return the answer. Raises `OSError`, `HTTPException` and `ValueError`."""
    place = urlsplit(url)
    connection = HTTPConnection(place.hostname or "", place.port or 80, timeout=seconds)
    try:
        if body is None:
            connection.request("GET", place.path)
        else:
            content = json.dumps(body, default=str)
            connection.request("POST", place.path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != HTTPStatus.OK:
        raise ValueError(f"status {response.status}: {text.decode(errors='replace')[-500:]}")
    return json.loads(text)


@dataclass(frozen=True)
class _Gym:
    """The configuration of Gym's servers."""

    config: Mapping[str, Any]

    @property
    def agents(self) -> Mapping[str, Mapping[str, Any]]:
        """The settings of agents, by name."""
        return dict(self._servers(_AGENTS))

    def server_of(self, agent: str) -> str:
        """Return the URL of an agent's environment server, or of the agent where Gym has none."""
        for _, server in self._servers(_ENVIRONMENTS):
            if (server.get("agent_server") or {}).get("name") == agent:
                return _url_of(server)
        return _url_of(self.agents[agent])

    def address_of(self, agent: str) -> tuple[str, int]:
        """Return where an agent's model server looks for the model. Raises `UsageError` for one that asks for what the gateway lacks."""
        name = (self.agents[agent].get("model_server") or {}).get("name")
        model = dict(self._servers(_MODELS)).get(str(name), {})
        url = self._resolved(model.get("base_url"))
        place = urlsplit(url if isinstance(url, str) else "")
        problem = None
        if place.scheme != "http" or not place.hostname or not place.port:
            problem = f"{name or 'no model server'}, with base_url {url!r}"
        elif model.get("return_token_id_information") and not model.get(
            "request_prompt_and_generation_token_ids"
        ):
            problem = f"{name}, which asks the model's server to tokenize"
        if problem is not None:
            raise UsageError(
                f"the agent {agent} of NeMo Gym cannot ask the model that is trained",
                have=problem,
                want="the model server vllm_model, with an address and a port of this machine for Burnish to listen at",
                do="start Gym with --model-type vllm_model --model-url http://127.0.0.1:PORT/v1",
            )
        return str(place.hostname), int(place.port or 0)

    def _servers(self, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, block in self.config.items():
            if isinstance(block, dict) and isinstance(block.get(kind), dict):
                yield name, next(iter(block[kind].values()))

    def _resolved(self, value: Any) -> Any:
        """Return a value, or that to which it refers as ${key.key}."""
        match = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        if match is None:
            return value
        target: Any = self.config
        for key in match[1].split("."):
            target = target.get(key) if isinstance(target, dict) else None
        return self._resolved(target)


def _url_of(server: Mapping[str, Any]) -> str:
    return f"http://{server['host']}:{server['port']}"


@lru_cache
def _gym(head: str) -> _Gym:
    """Ask the head server for the configuration. Raises `UsageError`."""
    url = f"{head.rstrip('/')}/global_config_dict_yaml"
    try:
        config = yaml.safe_load(_answered(url, seconds=_SECONDS))
        if not isinstance(config, dict):
            raise TypeError(f"a {type(config).__name__}")
    except (OSError, HTTPException, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UsageError(
            f"{head} does not answer as a head server of NeMo Gym",
            have=failure(error),
            want="the configuration of Gym's servers at /global_config_dict_yaml",
            do="start Gym with `gym env start`, or correct rollout.environment.agent",
        ) from error
    return _Gym(config)


# The relay.


class _Relay(GatewayHandler):
    """Sends requests on to the gateways of their sessions."""

    def do_POST(self) -> None:
        """Have the session's gateway answer."""
        content = self.content()
        if content is None:
            return
        try:
            url = str(json.loads(content)["metadata"][_SESSION])
        except (ValueError, TypeError, KeyError, RecursionError):
            self.refuse(
                HTTPStatus.BAD_REQUEST,
                f"the request has lost the metadata of its row's {_REQUEST}, which name its session",
            )
            return
        session = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/s/[\w-]+/v1/)", f"{url}/")
        if session is None:
            self.refuse(HTTPStatus.GONE, "this session has ended")
            return
        connection = HTTPConnection("127.0.0.1", int(session[1]))
        try:
            connection.request("POST", session[2] + self.path.rpartition("/v1/")[2], content)
            answer = connection.getresponse()
            kind = answer.headers.get("Content-Type", "")
            self.send(answer.read(), answer.status, kind)
        except (OSError, HTTPException):
            self.refuse(HTTPStatus.GONE, "this session has ended")
        finally:
            connection.close()


@lru_cache
def _relay(host: str, port: int) -> HttpServer:
    """Relay from an address, for as long as this process lives. Raises `UsageError` if it cannot listen there."""
    server = HttpServer(listen(host, port), partial(_Relay, lambda _: None))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _require_relay(host: str, port: int) -> None:
    """Listen at Gym's address of the model, unless another worker does. Raises `UsageError`."""
    try:
        _relay(host, port)
    except UsageError as error:
        if _relays(host, port):
            return
        raise UsageError(
            f"Burnish cannot stand in for the model of NeMo Gym at {host}:{port}",
            have=error.__cause__,
            want="an address of this machine at which nothing else listens: on several machines, each has a Gym of its own",
            do="start Gym with --model-url http://127.0.0.1:PORT/v1 and a free port",
        ) from error


def _relays(host: str, port: int) -> bool:
    """Return whether a process of Burnish listens at an address."""
    try:
        models = _answered(f"http://{host}:{port}/v1/models", seconds=_SECONDS)
        return bool(models["data"][0]["owned_by"] == "burnish")
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return False

"""Environments of the package skyrl-gym, and classes that are written for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from burnish.environments.base import Action, Environment, Message, Observation
from burnish.environments.process_random import ProcessRandom
from burnish.errors import MissingError, UsageError
from burnish.functions import did_you_mean, failure, load_function


class SkyRLGym(Environment):
    """An environment of skyrl-gym. Rows are those of SkyRL: it reads `reward_spec` and what else it needs from their columns."""

    def __init__(self, skyrl_gym: str, max_turns: int = 8, **settings: Any) -> None:
        """Take a registered name, or file.py:Class. `max_turns` is for environments that end by themselves; `settings` are its `env_config`."""
        self._name = skyrl_gym
        self._max_turns = max_turns
        self._settings = settings
        self._environment: Any = None
        self._random = ProcessRandom(0)

    @classmethod
    def schemas(cls, skyrl_gym: str = "", **arguments: Any) -> Sequence[Mapping[str, Any]]:
        """Return no tools: the environments read calls from the text. Raises `UsageError` for an unknown one."""
        _maker(skyrl_gym)
        return ()

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Message] | Observation:
        """See `Environment.begin`."""
        name = row.get("env_class") or self._name
        extras = {"max_turns": self._max_turns, **row}
        prompt = list(row["prompt"])
        self._random = ProcessRandom(seed)
        with self._random:
            self._environment = _maker(name)(
                env_config=_config(name, self._settings), extras=extras
            )
            messages, _ = self._environment.init([*prompt])
        if messages[: len(prompt)] == prompt:
            return list(messages[len(prompt) :])
        return Observation(messages, replaces_prompt=True)

    def step(self, action: Action) -> Observation:
        """Tell the environment what the model said. Its `postprocessed_action` is left out: tokens stay as they were drawn."""
        with self._random:
            output = self._environment.step(action.text)
        metrics = _numbers_of(self._environment.get_metrics()) if output["done"] else {}
        return Observation(output["observations"], output["reward"], output["done"], metrics)

    def close(self) -> None:
        """See `Environment.close`."""
        if self._environment is not None:
            self._environment.close()


def _maker(name: str) -> Any:
    """Return what makes an environment. Raises `UsageError` for an unknown one."""
    if ":" in name:
        return load_function(name, "rollout.environment.skyrl_gym")
    try:
        import skyrl_gym
    except ImportError as error:
        raise MissingError(
            "skyrl-gym cannot be imported",
            have=failure(error),
            do="pip install skyrl-gym",
        ) from error
    if name not in skyrl_gym.registry:
        raise UsageError(
            f"skyrl-gym has no environment {name}",
            want=f"{', '.join(skyrl_gym.registry)}, or file.py:Class",
            do=did_you_mean(name, skyrl_gym.registry) or "correct it",
        )

    def make(**arguments: Any) -> Any:
        return skyrl_gym.make(name, **arguments)

    return make


def _config(name: str, settings: Mapping[str, Any]) -> Any:
    """Return an `env_config` as SkyRL makes it: the settings over the package's defaults, if it has some."""
    from omegaconf import OmegaConf

    defaults: Any = {}
    if name == "search":
        from skyrl_gym.envs.search.env import SearchEnvConfig

        defaults = SearchEnvConfig()
    if name == "text2sql":
        from skyrl_gym.envs.sql.env import Text2SQLEnvConfig

        defaults = Text2SQLEnvConfig()
    return OmegaConf.merge(defaults, dict(settings))


def _numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}

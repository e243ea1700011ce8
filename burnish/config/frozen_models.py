"""The frozen models that a method reads beside the one that it trains: what the parts of a run need to know of each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from burnish.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A model that is read and not trained (`Method.frozen`)."""

    path: str
    """A directory, a hub's id or a URL; while it is loaded, a directory of this machine."""
    setting: str
    """The setting of `path`: method.judge, or reward.models[0].path."""
    role: str
    """What it is called in summaries and plans. Several models may share it."""
    gives: Literal["log-probs", "scores", "weights"]
    """log-probs: those of the policy's tokens, whose vocabulary it has. scores: a number after each of its own tokens. weights: what another model starts from."""
    phase: Literal["rollout", "log-probs", "start"]
    """When it computes: rollout, where completions are judged; log-probs, before each update; start: before training alone, so that none of it stays in memory."""

    def holder(self, values: Mapping[str, Any]) -> tuple[Any, str]:
        """Return what holds its path in a configuration's values, and the key there."""
        *names, key = re.findall(r"[^.\[\]]+", self.setting)
        place: Any = values
        for name in names:
            place = place[int(name) if isinstance(place, list) else name]
        return place, key


def of_sections(config: RunConfig) -> Iterator[FrozenModel]:
    """Yield those that sections of the configuration name, whatever a method reads of them."""
    yield from critic_start(config)
    yield from reward_models(config)
    yield from teachers(config)


def critic_start(config: RunConfig) -> Iterator[FrozenModel]:
    """Yield the model that PPO's critic starts from, if it is not the policy."""
    if config.critic.path is not None:
        yield FrozenModel(config.critic.path, "critic.path", "critic", "weights", "start")


def reward_models(config: RunConfig) -> Iterator[FrozenModel]:
    """Yield the models of `reward.models`."""
    for number, judge in enumerate(config.reward.models):
        setting = f"reward.models[{number}].path"
        yield FrozenModel(judge.path, setting, "reward models", "scores", "rollout")


def teachers(config: RunConfig) -> Iterator[FrozenModel]:
    """Yield the models of `distill.teachers` whose weights are read here and are not the start's."""
    for number, teacher in enumerate(config.distill.teachers):
        if teacher.url is None and not teacher.is_start:
            setting = f"distill.teachers[{number}].path"
            yield FrozenModel(teacher.path, setting, "teachers", "log-probs", "log-probs")


def frozen_rows(
    models: Iterable[FrozenModel], rows: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield a row of a summary for the models of each role that no other row names."""
    words = {word.strip(",") for _, text in rows for word in text.split()}
    by_role = defaultdict(list)
    for model in models:
        if model.path not in words:
            by_role[model.role].append(model.path)
    for role, paths in by_role.items():
        yield role, ", ".join(paths)

"""Choose which committed steps stay, and remove the others. No torch here.

Only the disk's files decide. The newest healthy step and all after it stay.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Self

from burnish.checkpoint.steps import TRASH, open_step, read_commit, step_paths
from burnish.config.schema import CheckpointConfig, KeepBestConfig
from burnish.errors import BurnishError, CorruptError, IncompatibleError, UsageError
from burnish.files.durable import Removals, move_aside, read_whole, write_durably
from burnish.files.lease import locked
from burnish.files.storage import LocalStorage, Source
from burnish.files.strict_json import encode_json, parse_json, shortened

PINS = "pins.json"
"""The file of pinned steps below `checkpoints/`."""
PINS_LIMIT = 1 << 20
"""Most bytes of that file, and of `MIRRORED`."""
MIRRORED = "mirrored.json"
"""The file below `checkpoints/` that lists the steps which need not wait for the mirror."""

_FORMAT = 1
_LOCK = ".pins.lock"
_STEP = re.compile(r"0|[1-9][0-9]{0,17}")


def read_pins(root: PurePath, storage: Source) -> dict[int, str]:
    """Return the reason of each pinned step.

    Raises `CorruptError` for a broken file: then every step counts as pinned.
    """
    path = root / PINS
    try:
        value = parse_json(read_whole(storage, path, PINS_LIMIT), str(path))
    except FileNotFoundError:
        return {}
    except (ValueError, EOFError, OSError, CorruptError) as error:
        raise _damaged(path, getattr(error, "have", error)) from error
    match value:
        case {"format": 1, "pins": dict(pins)} if len(value) == 2:
            if all(_STEP.fullmatch(step) and isinstance(pins[step], str) for step in pins):
                return dict(sorted((int(step), reason) for step, reason in pins.items()))
    raise _damaged(path, shortened(value))


@contextmanager
def holding_pins(root: Path, storage: LocalStorage) -> Iterator[dict[int, str]]:
    """Hold the pins exclusively; write changes to the dictionary at the end. Raises as `read_pins` does."""
    with locked(root / _LOCK):
        pins = read_pins(root, storage)
        before = dict(pins)
        yield pins
        if pins != before:
            by_step = {str(step): reason for step, reason in pins.items()}
            write_durably(storage, root / PINS, encode_json({"format": _FORMAT, "pins": by_step}))


def _damaged(path: PurePath, have: object) -> CorruptError:
    return CorruptError(
        f"{path} is damaged, so every step counts as pinned",
        have=have,
        want=f'{{"format": {_FORMAT}, "pins": {{"STEP": "REASON"}}}}',
        do="repair it, or remove it and pin again the steps that must stay",
    )


MEASURED = "measured"
MEASURED_LATER = "measured_later"
"""Keys of state.json: the validation's numbers, by name; and those of earlier steps, which were saved before their validation."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts about a step that retention uses."""

    step: int
    healthy: bool = True
    """Whether losses and weights were finite."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """The validation's numbers at this step, by name. Only finite numbers count."""
    later: Mapping[str, Any] = field(default_factory=dict)
    """The same for earlier steps that were saved before their validation, by step."""
    uuid: str = ""
    """Identifies the save of the step."""


def completed(steps: Collection[StepFacts]) -> list[StepFacts]:
    """Add to each step the validation results that later steps record."""
    later = {step: results for facts in steps for step, results in facts.later.items()}
    return [
        replace(facts, measured={**_mapping(later.get(str(facts.step))), **facts.measured})
        for facts in steps
    ]


def best(steps: Collection[StepFacts], which: KeepBestConfig) -> set[int]:
    """Return the healthy steps with a metric's best values, the newer of equals."""
    sign = 1 if which.mode == "max" else -1
    values = [
        (sign * value, facts.step)
        for facts in steps
        if facts.healthy and (value := _number(facts.measured.get(which.metric or ""))) is not None
    ]
    return {step for _, step in sorted(values, reverse=True)[: which.count]}


def _number(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


@dataclass(frozen=True, slots=True)
class Retention:
    """A run's rules for which steps stay."""

    keep_last: int = 2
    """Newest healthy steps to keep; 1 or more."""
    keep_every: int = 0
    """Keep the healthy steps that are multiples of this; 0: none."""
    keep_best: KeepBestConfig = field(default_factory=KeepBestConfig)
    mirror: str | None = None
    """URL of the mirror. A step may be removed here only when the mirror has it or does not want it."""

    @classmethod
    def of(cls, config: CheckpointConfig, mirror: str | None = None) -> Self:
        """Return a run's retention; `mirror` is its URL."""
        return cls(config.keep_last, config.keep_every, config.keep_best, mirror)

    @classmethod
    def of_mirror(cls, config: CheckpointConfig) -> Self | None:
        """Return the retention of the mirror's steps; None if all stay."""
        count = config.mirror_keep_last
        return replace(cls.of(config), keep_last=count) if count else None

    def outlived(self, steps: Collection[StepFacts], pins: Iterable[int] = ()) -> list[int]:
        """Return the removable steps, oldest first. Pure.

        An unhealthy step displaces no other. It goes when older than the steps that `keep_last` keeps.
        """
        healthy = sorted(facts.step for facts in steps if facts.healthy)
        oldest = healthy[-self.keep_last] if len(healthy) >= self.keep_last else 0
        kept_steps = {*pins, *best(steps, self.keep_best)}
        if self.keep_every:
            kept_steps |= {step for step in healthy if step % self.keep_every == 0}
        old = sorted(facts.step for facts in steps if facts.step < oldest)
        return [step for step in old if step not in kept_steps]

    def removable(self, root: Path, storage: LocalStorage, pins: Iterable[int]) -> list[int]:
        """Return the outlived steps that do not wait for a mirror."""
        outlived, awaited = self._outlived_and_awaited(root, storage, pins)
        return [step for step in outlived if step not in awaited]

    def waiting(self, root: Path, storage: LocalStorage) -> list[int]:
        """Return the steps that wait only for the mirror."""
        if self.mirror is None:
            return []
        outlived, awaited = self._outlived_and_awaited(root, storage)
        return sorted(awaited.intersection(outlived))

    def _outlived_and_awaited(
        self, root: Path, storage: LocalStorage, pins: Iterable[int] = ()
    ) -> tuple[list[int], set[int]]:
        facts = completed(self.facts(step_paths(root, storage).values(), storage))
        outlived = self.outlived(facts, pins)
        if self.mirror is None:
            return outlived, set()
        settled = read_mirrored(root, self.mirror, storage)
        return outlived, {each.step for each in facts if settled.get(each.step) != each.uuid}

    def apply(self, root: Path, storage: LocalStorage) -> BurnishError | None:
        """Remove outlived steps, through the trash; return an error if not all could be removed.

        Unreadable steps stay; if `pins.json` is unreadable, all stay.
        """
        removals = Removals(root)
        aside: list[Path] = []
        try:
            with removals.trying(), holding_pins(root, storage) as pins:
                paths = step_paths(root, storage)
                for step in self.removable(root, storage, pins):
                    with removals.trying():
                        aside.append(move_aside(storage, paths[step], root / TRASH))
        except CorruptError as error:
            _log.warning("no step was removed: %s", error)
        for path in aside:
            with removals.trying():
                storage.remove(path)
        return removals.error()

    def facts(self, paths: Iterable[PurePath], storage: Source) -> list[StepFacts]:
        """Return the facts of the readable steps; log the others."""
        facts = []
        for path in paths:
            try:
                commit = read_commit(path, storage)
            except (CorruptError, IncompatibleError) as error:
                _log.warning("a step stays, because it cannot be read: %s", error)
                continue
            state: Mapping[str, Any] = {}
            if self.keep_best.metric:
                try:
                    state = open_step(path, storage).state
                except (CorruptError, IncompatibleError) as error:
                    _log.warning("a step counts as not measured: %s", error)
            measured = _mapping(state.get(MEASURED))
            later = _mapping(state.get(MEASURED_LATER))
            facts.append(StepFacts(commit.step, commit.healthy, measured, later, commit.uuid))
        return facts


def read_mirrored(root: Path, url: str, storage: LocalStorage) -> dict[int, str]:
    """Return, by step, the uuids of local steps that the mirror has or does not want; {} for a damaged file."""
    path = root / MIRRORED
    try:
        value = parse_json(read_whole(storage, path, PINS_LIMIT), str(path))
        if value["format"] != _FORMAT or value["url"] != url:
            return {}
        return {int(step): str(uuid) for step, uuid in value["steps"].items()}
    except FileNotFoundError:
        return {}
    except (CorruptError, OSError, ValueError, EOFError, KeyError, TypeError, AttributeError) as e:
        _log.warning("%s is damaged, so every step counts as not mirrored: %s", path, e)
        return {}


def write_mirrored(root: Path, url: str, steps: Mapping[int, str], storage: LocalStorage) -> None:
    """Write `MIRRORED` if it changes."""
    if steps != read_mirrored(root, url, storage):
        by_step = {str(step): uuid for step, uuid in sorted(steps.items())}
        content = encode_json({"format": _FORMAT, "url": url, "steps": by_step})
        write_durably(storage, root / MIRRORED, content)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def require_measured(metric: str | None, measured: Mapping[str, float]) -> None:
    """Raise `UsageError` if the validation does not measure the metric."""
    if metric is not None and metric not in measured:
        raise UsageError(
            f"the validation does not measure {metric}",
            have=", ".join(measured),
            want="one of them",
            do="set checkpoint.keep_best.metric to one of them",
        )

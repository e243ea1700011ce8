"""Which committed steps stay: predicates over what is on disk, and the removal of the others.

Nothing is remembered between saves, so a resumed run, a prolonged one and a person with a tool decide alike.
A predicate is a pure function from the steps to those that it keeps; a step goes when none keeps it.
The newest healthy step and everything after it stay whatever the settings say. No torch here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Literal, Self

from burnish.checkpoint.destinations.mirrored import read_mirrored
from burnish.checkpoint.destinations.partial_checkpoints import portion_paths
from burnish.checkpoint.pins import holding_pins
from burnish.checkpoint.room import Waiting
from burnish.checkpoint.steps import TRASH, open_step, read_commit, step_paths
from burnish.config.keeping import CheckpointConfig
from burnish.errors import CorruptError, IncompatibleError, UsageError
from burnish.files.durable import move_aside
from burnish.files.removals import Removals
from burnish.files.storage import Source, Storage

MEASURED, MEASURED_LATER = "measured", "measured_later"
"""The keys of state.json under which a trainer puts the validation's numbers, by name, and those of earlier steps
whose validation came after their save, by step."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """What retention knows of a committed step."""

    step: int
    """Which one."""
    healthy: bool = True
    """Whether losses and weights were finite."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """The validation's numbers at this step, by name; anything but finite numbers is overlooked."""
    later: Mapping[str, Any] = field(default_factory=dict)
    """The same of earlier steps that were saved before they were validated, by step."""


@dataclass(frozen=True, slots=True)
class Best:
    """Which steps count as best."""

    metric: str
    """A number of the validation."""
    mode: Literal["min", "max"]
    """Whether less or more is better."""
    count: int = 1
    """How many to keep."""


def completed(steps: Collection[Facts]) -> list[Facts]:
    """The steps with what later ones know of their validations."""
    told = {step: found for each in steps for step, found in each.later.items()}
    return [
        replace(each, measured={**_mapping(told.get(str(each.step))), **each.measured})
        for each in steps
    ]


def latest(steps: Collection[Facts], count: int) -> set[int]:
    """The `count` newest healthy steps, and the unhealthy ones among and after them."""
    healthy = sorted(each.step for each in steps if each.healthy)
    oldest = healthy[-count] if len(healthy) >= count else 0
    return {each.step for each in steps if each.step >= oldest}


def every(steps: Collection[Facts], interval: int) -> set[int]:
    """The healthy steps that `interval` divides; none for 0."""
    return {each.step for each in steps if interval and each.healthy and each.step % interval == 0}


def best(steps: Collection[Facts], which: Best) -> set[int]:
    """The healthy steps with the best values of a metric; of equals, the newer. Those without a value do not count."""
    sign = 1 if which.mode == "max" else -1
    values = [
        (sign * each.measured[which.metric], each.step)
        for each in steps
        if each.healthy and _is_number(each.measured.get(which.metric))
    ]
    return {step for _, step in sorted(values, reverse=True)[: which.count]}


@dataclass(frozen=True, slots=True)
class Retention:
    """The predicates of a run, put together."""

    keep_last: int = 2
    """Newest healthy steps to keep; 1 or more."""
    keep_every: int = 0
    """Keep the steps that this divides; 0: none."""
    keep_best: Best | None = None
    """Keep the best by a metric."""
    mirror: str | None = None
    """URL of the mirror that has to have a step before it may go from here."""

    @classmethod
    def of(cls, config: CheckpointConfig, mirror: str | None = None) -> Self:
        """What a run's configuration says; `mirror` is the URL of its copy."""
        which = config.keep_best
        kept = Best(which.metric, which.mode, which.count) if which.metric and which.mode else None
        return cls(config.keep_last, config.keep_every, kept, mirror)

    @classmethod
    def of_mirror(cls, config: CheckpointConfig) -> Self | None:
        """What the configuration says of the mirror's own steps; None: all of them stay."""
        count = config.mirror_keep_last
        return replace(cls.of(config), keep_last=count) if count else None

    def outlived(self, steps: Collection[Facts], pins: Iterable[int] = ()) -> list[int]:
        """The steps that may go, oldest first. Pure.

        An unhealthy step displaces no other, and goes when it is older than all that `keep_last`
        keeps. With fewer healthy steps than that nothing goes.
        """
        kept = latest(steps, self.keep_last) | every(steps, self.keep_every) | set(pins)
        if self.keep_best:
            kept |= best(steps, self.keep_best)
        newest = max((each.step for each in steps if each.healthy), default=-1)
        return sorted(each.step for each in steps if each.step not in kept and each.step < newest)

    def removable(self, root: Path, storage: Storage, pins: Iterable[int]) -> list[int]:
        """The steps below `root` that may go: outlived, and on the mirror where there is one."""
        awaited = self._awaited(root, storage)
        gone = self.outlived(self.facts(root, storage), pins)
        return [step for step in gone if step not in awaited]

    def waiting(self, root: Path, storage: Storage) -> Waiting | None:
        """The steps below `root` that have outlived their use and stay for the mirror's sake, and those of portions; None without a mirror.

        Nobody's pins are asked for: it is for a message.
        """
        if self.mirror is None:
            return None
        awaited = self._awaited(root, storage)
        outlived = self.outlived(self.facts(root, storage))
        portions = portion_paths(root, storage).values()
        return Waiting(self.mirror, sorted({*portions, *awaited.intersection(outlived)}))

    def apply(self, root: Path, storage: Storage) -> list[int]:
        """Remove what has outlived its use below `root`; returns those steps.

        Each goes into the trash by one rename before it is removed. Steps that cannot be read are
        left alone; while `pins.json` cannot be read nothing goes. Where the disk does not let go of
        one the others go all the same, and then `NotRemovedError` is raised.
        """
        removals = Removals(root)
        gone: list[int] = []
        aside: list[Path] = []
        try:
            with removals.trying(), holding_pins(root, storage) as pins:
                gone = self.removable(root, storage, pins)
                paths = step_paths(root, storage)
                for step in gone:
                    with removals.trying():
                        aside.append(move_aside(storage, paths[step], root / TRASH))
        except CorruptError as error:
            _log.warning("no step was removed: %s", error)
        for path in aside:
            with removals.trying():
                storage.remove(path)
        removals.check()
        return gone

    def _awaited(self, root: Path, storage: Storage) -> set[int]:
        """The steps that the mirror still wants."""
        if self.mirror is None:
            return set()
        settled = read_mirrored(root, self.mirror, storage)
        found = set()
        for step, path in step_paths(root, storage).items():
            with suppress(CorruptError, IncompatibleError):  # which `facts` has told of
                if settled.get(step) != read_commit(path, storage).uuid:
                    found.add(step)
        return found

    def facts(self, root: PurePath, storage: Source) -> list[Facts]:
        """What the predicates ask of the steps below `root`; those that cannot be read are named in the log."""
        found = [self.fact(path, storage) for path in step_paths(root, storage).values()]
        return completed([each for each in found if each is not None])

    def fact(self, path: PurePath, storage: Source) -> Facts | None:
        """What one step says of itself and earlier ones; None where it cannot be read, which is said in the log."""
        try:
            commit = read_commit(path, storage)
        except (CorruptError, IncompatibleError) as error:
            _log.warning("left alone, for it cannot be read: %s", error)
            return None
        state = _state(path, storage) if self.keep_best else {}
        both = (_mapping(state.get(name)) for name in (MEASURED, MEASURED_LATER))
        return Facts(commit.step, commit.healthy, *both)


def _state(path: PurePath, storage: Source) -> Mapping[str, Any]:
    """What state.json of the step at `path` holds; nothing where it is damaged."""
    try:
        return open_step(path, storage).state
    except (CorruptError, IncompatibleError) as error:
        _log.warning("counts as not measured: %s", error)
        return {}


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def require_measured(metric: str | None, measured: Mapping[str, float]) -> None:
    """Refuse a metric to keep steps by that the validation does not give. Raises `UsageError`."""
    if metric is not None and metric not in measured:
        raise UsageError(
            f"the validation does not measure {metric}",
            have=", ".join(measured),
            want="one of them",
            do="set checkpoint.keep_best.metric to one of them",
        )

"""How far a run is: what state.json holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePath
from typing import Any

from burnish.checkpoint.layout import MAIN
from burnish.checkpoint.manifest import ADAPTER_STATE, IMPORTED, STATE
from burnish.checkpoint.steps import Committed
from burnish.engines.base import Engine
from burnish.errors import IncompatibleError
from burnish.files.strict_json import clipped, shortened
from burnish.train.fingerprints import INPUTS

CONFIG_DIGEST, WEIGHTS_VERSION = "config_digest", "weights_version"
"""Keys of state.json: the digest of the settings that decide the outcome (`burnish.config.resume`), and `weights_version`. Steps may lack them."""

_ABSENT = object()
_COUNTS = ("optimizer_steps", "skipped_in_a_row")
_BESIDE = {CONFIG_DIGEST: "str", WEIGHTS_VERSION: "int"}
_ROLES = "Mapping[str, Mapping[str, int]]"
_LATER = "Mapping[str, Mapping[str, float | str]]"


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is; all that resuming needs beside the tensors."""

    step: int = 0
    """Steps finished."""
    cursor: int = 0
    """Samples taken from the data, over all epochs."""
    tokens: int = 0
    """Tokens trained on."""
    optimizer_steps: int = 0
    """Updates made; skipped ones not counted."""
    skipped_in_a_row: int = 0
    """Updates skipped, for a gradient that was not finite, since the last one made."""
    measured: Mapping[str, float | str] | None = None
    """What the validation after this step measured, by which the best steps are kept; None where none was due or done."""
    unlogged: Mapping[str, float | str] | None = None
    """The last step's line of metrics as far as it is known; None once it is logged, which is after its save."""
    unvalidated: bool = False
    """Whether the last step's validation was interrupted and is still to be done."""
    measured_later: Mapping[str, Mapping[str, float | str]] = field(default_factory=dict)
    """What the validation of earlier steps measured, by step, where a signal came before it and so the save did."""
    roles: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """`optimizer_steps` and `skipped_in_a_row` of each further model that is trained, by its role."""

    kl_coef: float | None = None
    """The weight of KL in the reward for the next step, where it adapts."""

    def counts(self, role: str) -> tuple[int, int]:
        """Return `optimizer_steps` and `skipped_in_a_row` of a role's model. Raises `IncompatibleError` for an unknown role."""
        if role == MAIN:
            return self.optimizer_steps, self.skipped_in_a_row
        if role not in self.roles:
            raise IncompatibleError(
                f"{STATE} says nothing of the {role}",
                have=", ".join(self.roles) or "no further model",
                want=f"how many updates of the {role} were made",
                do="resume with the version of Burnish that wrote it",
            )
        first, second = (self.roles[role][name] for name in _COUNTS)
        return first, second


def weights_version(steps: int, warmup_steps: int) -> int:
    """Return the version of the policy's weights after so many steps: the last step in which it learned, or 0.

    In the critic's `warmup_steps` it does not.
    """
    return steps if steps > warmup_steps else 0


def counts(engine: Engine) -> dict[str, int]:
    """What `Position.roles` holds of a model."""
    return dict(zip(_COUNTS, (engine.steps, engine.skipped_in_a_row), strict=True))


def position_of(step: Committed) -> Position:
    """Return the position in a step's state.json. Raises `IncompatibleError` for anything that no trainer writes there."""
    if IMPORTED in step.state:
        raise IncompatibleError(
            f"{step.path} was imported and has no training state to continue",
            have="weights alone",
            want="a step that training wrote",
            do=f"begin a run from it: model.path={step.path / 'model'}, and another name=NAME",
        )
    kinds = {field.name: str(field.type) for field in fields(Position)}
    values: dict[str, Any] = {"roles": {}, "measured_later": {}, "kl_coef": None}
    values |= {name: each for name, each in step.state.items() if name in kinds}
    unknown = step.state.keys() - {*kinds, *_BESIDE, INPUTS, ADAPTER_STATE}
    wrong = [name for name, kind in kinds.items() if not _is(kind, values.get(name, _ABSENT))]
    beside = {name: step.state[name] for name in _BESIDE if name in step.state}
    wrong += [name for name, value in beside.items() if not _is(_BESIDE[name], value)]
    if unknown or wrong or values["step"] != step.step:
        shown = [f"{name} {shortened(step.state.get(name), 60)}" for name in wrong]
        raise IncompatibleError(
            f"{step.path / STATE} was not written by this trainer",
            have=clipped(", ".join([*sorted(unknown), *shown]) or f"step {values['step']}"),
            want=", ".join(kinds),
            do="resume with the version of Burnish that wrote it",
        )
    return Position(**values)


def _is(kind: str, value: Any) -> bool:
    """Return whether a JSON value is of this kind of field."""
    if kind == "int":
        return _is_count(value)
    if kind == "float | None":
        return value is None or (type(value) is float and math.isfinite(value) and value >= 0)
    if kind == "str":
        return type(value) is str
    if kind == "bool":
        return type(value) is bool
    if kind == _ROLES:
        return isinstance(value, dict) and all(map(_are_counts, value.values()))
    if kind == _LATER:
        return isinstance(value, dict) and all(map(_are_numbers, value.values()))
    return value is None or _are_numbers(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(
        type(each) in (int, float, str) for each in value.values()
    )


def _are_counts(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == set(_COUNTS)
        and all(map(_is_count, value.values()))
    )


def require_same_adapter(
    recorded: Mapping[str, Any] | None, wanted: Mapping[str, Any] | None, where: PurePath
) -> None:
    """Refuse a checkpoint with another adapter than the run's, or with one if the run has none.

    Raises `IncompatibleError` with a table. The base model may have moved.
    """
    have, want = dict(recorded or {}), dict(wanted or {})
    keys = [key for key in {**want, **have} if key != "base" and have.get(key) != want.get(key)]
    if not keys:
        return
    shown = ["base", *keys] if "base_digest" in keys else keys
    rows = [
        ("", "have", "want"),
        *((k, str(have.get(k, "-")), str(want.get(k, "-"))) for k in shown),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    table = "\n".join(f"  {k:<{widths[0]}}  {h:<{widths[1]}}  {w}" for k, h, w in rows)
    kinds = ["an adapter" if each else "a whole model" for each in (have, want)]
    raise IncompatibleError(
        f"{where} holds {'another adapter than' if have and want else 'not what'} this run trains\n{table}",
        have=f"{kinds[0]} that differs in {', '.join(keys)}" if have and want else kinds[0],
        want=kinds[1],
        do="restore model.path and model.lora, or begin another run with name=NAME",
    )

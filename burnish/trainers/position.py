"""How far a run is: what state.json holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from burnish.checkpoint.committed import Committed
from burnish.checkpoint.manifest import STATE
from burnish.errors import IncompatibleError
from burnish.models.lora_names import ADAPTER_STATE
from burnish.models.lora_record import AdapterRecord


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


def adapter_state(adapter: AdapterRecord | None) -> dict[str, Any]:
    """What state.json holds of the adapter, beside the position."""
    return {} if adapter is None else {ADAPTER_STATE: adapter.as_state()}


def position_of(step: Committed) -> Position:
    """The position in a step's state.json. Raises `IncompatibleError` where that says something unknown."""
    known = [field.name for field in fields(Position)]
    unknown = step.state.keys() - {*known, ADAPTER_STATE}
    if unknown:
        raise IncompatibleError(
            f"{step.path / STATE} was not written by this trainer",
            have=", ".join(sorted(unknown)),
            want=", ".join(known),
            do="resume with the version of Burnish that wrote it",
        )
    return Position(**{name: value for name, value in step.state.items() if name in known})

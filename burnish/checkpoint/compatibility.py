"""Whether a committed step holds the very model and optimizer that are to go on from it.

Found out from headers, before anything of either is touched, and told as a table of what the step
has and what is wanted. Left out: what is no tensor (`burnish.train.trainer_state`, `inputs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from burnish.checkpoint.streams import Described
from burnish.checkpoint.tensor_sets import MODEL
from burnish.errors import IncompatibleError, MissingError

_SHOWN = 12
_NOTHING = "-"


def require_slots(where: PurePath, stored: set[str], wanted: set[str]) -> None:
    """Raise `MissingError` unless every set of optimizer slots that is wanted is there."""
    absent = sorted(wanted - stored)
    if absent:
        raise MissingError(
            f"{where} has no optimizer state {', '.join(absent)}",
            have=", ".join(sorted(stored)) or "no tensors",
            want=", ".join(sorted(wanted)),
            do="resume with the optimizer that wrote it; checkpoint.fresh_optimizer=true begins with a fresh one where there is none",
        )


def require_fit(
    where: PurePath, have: Mapping[str, Described], want: Mapping[str, Described]
) -> None:
    """Raise with a table unless both describe the same tensors, by key, with the same dtypes and shapes.

    `IncompatibleError`, or `MissingError` where all that is wrong is that the step lacks some.
    Slots follow their weights, so they are shown only where the weights agree.
    """
    keys = sorted(key for key in {**want, **have} if have.get(key) != want.get(key))
    if not keys:
        return
    keys = [key for key in keys if key.startswith(f"{MODEL}/")] or keys
    text = f"{where} does not hold what is trained\n{_table(keys, have, want)}"
    do = "resume with the model that wrote it, or begin another run with name=NAME"
    if all(key not in have for key in keys):
        raise MissingError(text, do=do)
    raise IncompatibleError(text, do=do)


def _table(keys: list[str], have: Mapping[str, Described], want: Mapping[str, Described]) -> str:
    rows = [("tensor", "have", "want")]
    rows += [
        (key.removeprefix(f"{MODEL}/"), _words(have.get(key)), _words(want.get(key)))
        for key in keys[:_SHOWN]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {name:<{widths[0]}}  {a:<{widths[1]}}  {b}" for name, a, b in rows]
    more = [f"  and {len(keys) - _SHOWN} more"] if len(keys) > _SHOWN else []
    return "\n".join(lines + more)


def _words(tensor: Described | None) -> str:
    if tensor is None:
        return _NOTHING
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

"""Names of a step's tensors and files.

A step holds one or more trained models, told apart by role. A model's tensors come in sets: weights ("model"), what bf16 lacks
("residual"), and one per optimizer slot ("exp_avg"). The role `MAIN` has no prefix; other sets begin with their role
("critic/model"). A tensor's key is set/weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAIN = ""
"""The role of the run's own model, whose directories are `model/` and `training/`."""
MODEL, RESIDUAL, TRAINING = "model", "residual", "training"
"""The set of the weights and the directory it lies in; the set beside it; the directory of all sets but the weights."""

_FILE = re.compile(
    r"((?:[a-z][a-z0-9_]*/)?)(?:(model)|training)/(.+?)(?:-[0-9]{5}-of-[0-9]{5})?\.safetensors"
)
_ROLE = re.compile(r"[a-z][a-z0-9_]*")


def prefix_of(role: str) -> str:
    """Return the prefix of a role's sets and directories. Raises `ValueError` for an impossible name."""
    if role == MAIN:
        return ""
    if not _ROLE.fullmatch(role) or role in (MODEL, RESIDUAL, TRAINING):
        raise ValueError(f"{role!r} cannot be the name of a role")
    return f"{role}/"


def key_parts(key: str, roles: Iterable[str]) -> tuple[str, str]:
    """The set and the weight's name of a key, given the roles that there are."""
    prefix = next((f"{role}/" for role in roles if role and key.startswith(f"{role}/")), "")
    kind, _, name = key.removeprefix(prefix).partition("/")
    return prefix + kind, name


def path_of(tensor_set: str) -> str:
    """Where a set's files lie below a step, without number and suffix: "critic/training/exp_avg"."""
    role, slash, kind = tensor_set.rpartition("/")
    return f"{role}{slash}{MODEL if kind == MODEL else TRAINING}/{kind}"


def set_of(path: str) -> str | None:
    """Return the set of a file of a step; None for a file without tensors."""
    match = _FILE.fullmatch(path)
    return None if match is None else match[1] + (match[2] or match[3])


def roles_in(paths: Iterable[str]) -> list[str]:
    """The roles whose weights lie in these files of a step, the run's own first."""
    sets = {tensor_set for path in paths if (tensor_set := set_of(path)) is not None}
    return sorted(
        s.removesuffix(MODEL).removesuffix("/") for s in sets if s.split("/")[-1] == MODEL
    )

"""How the tensors of a step are named, and which files they lie in.

A step holds one or more trained models, told apart by role. The tensors of a model come in sets: the
weights ("model"), what the bf16 weights lack ("residual"), and each of the optimizer's slots
("exp_avg"). The run's own model has the role `MAIN` and its sets no prefix; those of any other
model begin with its role ("critic/model"). A tensor's key is its set, a slash and its weight's name.
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
    """What the sets and the directories of a role begin with. Raises `ValueError` for what cannot name one."""
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
    """The set that a file of a step belongs to; None for a file that holds no tensors."""
    match = _FILE.fullmatch(path)
    return None if match is None else match[1] + (match[2] or match[3])


def roles_in(paths: Iterable[str]) -> list[str]:
    """The roles whose weights lie in these files of a step, the run's own first."""
    sets = {tensor_set for path in paths if (tensor_set := set_of(path)) is not None}
    return sorted(
        s.removesuffix(MODEL).removesuffix("/") for s in sets if s.split("/")[-1] == MODEL
    )

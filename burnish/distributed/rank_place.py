"""A process's place in its run, and the variables of launchers that say it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from burnish.distributed.layout import Layout
from burnish.errors import UsageError


@dataclass(frozen=True, slots=True)
class RankPlace:
    """This process's rank, and where the run's processes meet."""

    layout: Layout
    """Rank and sizes."""
    host: str = ""
    """Name or address (IPv6 without brackets) of the machine of rank 0; "" for a lone process."""
    port: int = 0
    """TCP port on `host`; 0 for a lone process."""
    agent_store: bool = False
    """Whether the launcher's agent serves the store, instead of rank 0."""
    own_device: bool = False
    """Whether the launcher shows each process only its own accelerator."""
    attempt: int = 0
    """How often the launcher has restarted the run."""
    same_attempt: bool = True
    """Whether all ranks have the same `attempt`. Each torchrun agent counts its own restarts, so the agent of a new machine differs."""


def layout_of(
    environ: Mapping[str, str], rank_name: str, world_name: str, local_name: str, local_world: int
) -> Layout:
    """Read rank, world and local rank from these variables. Raises `UsageError`."""
    world = number_of(environ, world_name)
    rank = number_of(environ, rank_name)
    local_rank = number_of(environ, local_name, default=0 if world == 1 else None)
    do = "start the processes with torchrun or srun, or unset both for one process"
    if world < 1 or not 0 <= rank < world:
        raise UsageError(
            f"{rank_name}={rank} and {world_name}={world} contradict each other",
            want=f"0 <= {rank_name} < {world_name}",
            do=do,
        )
    if local_rank < 0 or local_world < 1:
        raise UsageError(
            f"{local_name}={local_rank} does not fit {local_world} processes on this machine",
            want=f"{local_name} from 0 on, and at least one process",
            do=do,
        )
    return Layout(rank, world, local_rank, local_world)


def number_of(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a whole number, or `default` if the variable is not set. Raises `UsageError`."""
    if default is not None and name not in environ:
        return default
    value = variable(environ, name)
    if not re.fullmatch(r"-?\d+", value):
        raise UsageError(
            f"the environment variable {name} is not a whole number",
            have=repr(value),
            want="0, 1, 2, ...",
            do="start with torchrun or srun, which set it, or unset RANK and WORLD_SIZE for one process",
        )
    return int(value)


def variable(environ: Mapping[str, str], name: str) -> str:
    """Return a variable that a distributed run needs. Raises `UsageError` without it."""
    if environ.get(name, "") == "":
        present = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        have = [f"{key}={environ[key]}" for key in present if key in environ]
        have += [f"{key}={value}" for key, value in environ.items() if key.startswith("SLURM_STEP")]
        raise UsageError(
            f"the environment of a distributed run is half set: {name} is missing",
            have=" ".join(have),
            want=f"{name} as well",
            do="start with torchrun or srun, which set all of them, or unset RANK and WORLD_SIZE for one process",
        )
    return environ[name]

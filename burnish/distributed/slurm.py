"""Read this process's place from the variables of Slurm's srun."""

from __future__ import annotations

import re
from collections.abc import Mapping

from burnish.distributed.rank_place import RankPlace, layout_of, number_of
from burnish.errors import UsageError

# Below Linux's ephemeral ports, which begin at 32768.
_PORTS = range(15000, 30000)


def place_of_step(environ: Mapping[str, str]) -> RankPlace:
    """Read this process's place. Raises `UsageError`."""
    step_tasks = "SLURM_STEP_NUM_TASKS" in environ
    world_name = "SLURM_STEP_NUM_TASKS" if step_tasks else "SLURM_NTASKS"
    node = number_of(environ, "SLURM_NODEID", default=0)
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    local_world = tasks[node] if node < len(tasks) else 1
    layout = layout_of(environ, "SLURM_PROCID", world_name, "SLURM_LOCALID", local_world)
    if layout.world == 1:
        return RankPlace(layout)
    host = environ.get("MASTER_ADDR", _first_host(environ["SLURM_STEP_NODELIST"])).strip("[]")
    return RankPlace(
        layout,
        host,
        number_of(environ, "MASTER_PORT", default=_port(environ)),
        own_device="SLURM_GPUS_PER_TASK" in environ,
        attempt=number_of(environ, "SLURM_RESTART_COUNT", default=0),
    )


def _port(environ: Mapping[str, str]) -> int:
    job = number_of(environ, "SLURM_JOB_ID", default=0)
    step = number_of(environ, "SLURM_STEP_ID", default=0)
    return _PORTS[(job * 7 + step) % len(_PORTS)]


def _first_host(nodelist: str) -> str:
    """Return a Slurm node list's first machine: `rack[1-2]node[03-05,9],other` gives `rack1node03`."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist.strip())
    if first is None:
        raise UsageError(
            "SLURM_STEP_NODELIST names no machine",
            have=repr(nodelist),
            want="a list such as node[01-04]",
            do="set MASTER_ADDR to the machine of rank 0",
        )
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


def _tasks_per_node(counts: str) -> list[int]:
    """Expand Slurm's counts, one entry per machine: `2(x3),1` gives [2, 2, 2, 1]."""
    expanded: list[int] = []
    for entry in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            raise UsageError(
                "SLURM_STEP_TASKS_PER_NODE cannot be read",
                have=repr(counts),
                want="2(x3),1",
                do="start the processes with srun, which sets it",
            )
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded

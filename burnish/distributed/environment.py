"""Read this process's rank from the environment of torchrun or Slurm's srun, if any.

torchrun's variables win, because srun may start torchrun. A Slurm batch script without `srun` is one process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from burnish.distributed.layout import Layout
from burnish.distributed.rank_place import RankPlace, layout_of, number_of, variable
from burnish.errors import UsageError

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""The signals that ask a run to save and end. The run's helper processes ignore them."""

MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGINT)
"""Signals that stay ignored if they are at the start: nohup ignores SIGHUP, and a shell's script SIGINT for jobs in the background."""

AFTER_SAVE = signal.SIGUSR2
"""The signal that asks a run to end once its next regular save is committed."""

PARENT = "BURNISH_PARENT"
"""The variable by which `burnish.launch` tells a rank the launcher's process id. The rank dies with that process."""

_PR_SET_PDEATHSIG = 1


def place_of(environ: Mapping[str, str]) -> RankPlace:
    """Read this process's place. Raises `UsageError` for partial, contradictory or non-numeric variables."""
    place = RankPlace(Layout())
    if "RANK" in environ or "WORLD_SIZE" in environ:
        place = _torchrun(environ)
    elif "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" in environ:
        from burnish.distributed.slurm import place_of_step

        place = place_of_step(environ)
    if place.layout.world > 1 and not 0 < place.port < 1 << 16:
        raise UsageError(
            "the environment variable MASTER_PORT is not a TCP port",
            have=f"MASTER_PORT={place.port}",
            want="1 to 65535",
            do="set MASTER_PORT to a free port of the machine of rank 0",
        )
    return place


def ignored() -> list[signal.Signals]:
    """Return the signals of `MAY_BE_IGNORED` that this process was started to ignore."""
    return [each for each in MAY_BE_IGNORED if signal.getsignal(each) is signal.SIG_IGN]


@contextmanager
def handling(
    numbers: Iterable[int], handle: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals inside the block, except `ignored` ones."""
    unheard = ignored()
    former = {number: signal.signal(number, handle) for number in numbers if number not in unheard}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def environ_of_child() -> dict[str, str]:
    """Return an environment in which a child Python finds the same modules."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return os.environ | {"PYTHONPATH": path}


def descendants(pid: int) -> list[int]:
    """Return a process's descendants, in any session."""
    pids = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, file.read_text().split()):
                pids += [child, *descendants(child)]
    return pids


def kill_descendants(pid: int) -> None:
    """Kill all that a process has started, before it ends and orphans them."""
    for child in descendants(pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def die_with_agent(environ: MutableMapping[str, str]) -> None:
    """End this rank when torchrun or the launcher dies, since nobody else would."""
    if PARENT in environ:
        die_with(int(environ.pop(PARENT)))  # children must not see it: their parent differs
    elif "TORCHELASTIC_RUN_ID" in environ:
        die_with(os.getppid())


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _torchrun(environ: Mapping[str, str]) -> RankPlace:
    local_world = number_of(environ, "LOCAL_WORLD_SIZE", default=1)
    layout = layout_of(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", local_world)
    attempt = number_of(environ, "TORCHELASTIC_RESTART_COUNT", default=0)
    if layout.world == 1:
        return RankPlace(layout, attempt=attempt)
    agent_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankPlace(
        layout,
        variable(environ, "MASTER_ADDR").strip("[]"),
        number_of(environ, "MASTER_PORT"),
        agent_store=agent_store,
        attempt=attempt,
        same_attempt=agent_store or "TORCHELASTIC_RUN_ID" not in environ,
    )

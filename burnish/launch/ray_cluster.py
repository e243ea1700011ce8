"""Place the ranks of a run on a Ray cluster: a placement group with a bundle and an actor per process.

Each actor starts the command as its child, which has a main thread and signals of its own. The child ends with the actor, and the
actors with the process that started them.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from burnish.errors import UsageError
from burnish.launch.local import LAST_LINES, RankProcess, free_port
from burnish.launch.supervisor import REFUSALS

# Ray's names of accelerators for training.
_DEVICES = ("GPU", "NPU")
_VISIBLE = {"GPU": "CUDA_VISIBLE_DEVICES", "NPU": "ASCEND_RT_VISIBLE_DEVICES"}
# Prefixes of the driver's variables that ranks get. Others come from the nodes or from Ray's runtime environment.
_PASSED = ("BURNISH_", "GLOO_", "HF_", "NCCL_", "OMP_", "PYTORCH_", "TOKENIZERS_", "TORCH_NCCL_")
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# The status of a rank whose actor is gone, as if the system had killed it.
_LOST = -signal.SIGKILL
_ANSWER_SECONDS = 1.0
_ALL_LINES = 1 << 14
_PAUSE_SECONDS = 0.05
_SERVERS_SECONDS = 1.0
_MOST_STARTS = 10

log = logging.getLogger("burnish")


class _RankActor:
    """An actor in one bundle, with one rank as its child."""

    def where(self) -> Mapping[str, Any]:
        """Return the node, its address, a free port, and the accelerators of this process."""
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        ids = context.get_accelerator_ids()
        devices: list[str] = next((ids[kind] for kind in _DEVICES if ids.get(kind)), [])
        node = context.get_node_id()
        port = str(free_port())
        return {"node": node, "address": address, "port": port, "devices": devices}

    def start(self, argv: Sequence[str], environ: Mapping[str, str], cwd: str, keeps: int) -> None:
        """Start the command in the driver's directory, or if it is missing, in the Ray job's."""
        signal.signal(signal.SIGTERM, lambda number, _: self.send(number))
        inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", *_OURS)}
        here = cwd if os.path.isdir(cwd) else os.getcwd()
        self._process = RankProcess(argv, {**inherited, **environ}, cwd=here, keeps=keeps)

    def serve(self, argv: Sequence[str], environ: Mapping[str, str], cwd: str) -> None:
        """Start `burnish serve` at this node's address."""
        address = ray.util.get_node_ip_address()
        self.start([*argv, "--host", address, "--port", "0"], environ, cwd, LAST_LINES)

    def poll(self, seconds: float, take: bool) -> tuple[int | None, list[str]]:
        """Wait at most `seconds` for its end. Return its status, and new lines if it ended or with `take`."""
        until = time.monotonic() + seconds
        while (status := self._process.poll()) is None and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
        return status, self._process.take_lines() if take or status is not None else []

    def send(self, number: int) -> None:
        """Send it a signal."""
        self._process.send(number)


@dataclass
class _Placed:
    """An actor and the known state of its process."""

    actor: Any
    polled: Any = None
    status: int | None = None
    lines: list[str] = field(default_factory=list)
    starts: int = 1

    def take(self) -> list[str]:
        """Take the answer, which has arrived; return its lines."""
        answer = self.polled
        self.polled = None
        try:
            self.status, lines = ray.get(answer) or (None, [])
        except RayError as error:
            self.status = _LOST
            lines = [f"its actor is gone: {str(error).partition(chr(10))[0]}"]
        return lines


class _RayAttempt:
    """An `Attempt` on bundles. This process prints rank 0's lines."""

    def __init__(
        self, group: PlacementGroup, actors: Sequence[Any], keep_servers: Callable[[], None]
    ) -> None:
        self._group = group
        self._keep_servers = keep_servers
        self._ranks = [_Placed(actor) for actor in actors]
        self._ended: dict[int, int] = {}

    def poll(self, seconds: float) -> Mapping[int, int]:
        self._keep_servers()
        until = time.monotonic() + seconds
        before = len(self._ended)
        while len(self._ended) == before and (left := until - time.monotonic()) > 0:
            asked = {}
            for rank, placed in enumerate(self._ranks):
                if placed.status is None:
                    if placed.polled is None:
                        placed.polled = placed.actor.poll.remote(_ANSWER_SECONDS, rank == 0)
                    asked[placed.polled] = rank
            if not asked:
                break
            ready, _ = ray.wait(list(asked), timeout=left)
            for answer in ready:
                self._take(asked[answer])
        return self._ended

    def _take(self, rank: int) -> None:
        placed = self._ranks[rank]
        lines = placed.take()
        if rank == 0:
            for line in lines:
                print(line, flush=True)
        else:
            placed.lines += lines
        if placed.status is not None:
            self._ended[rank] = placed.status

    def last_lines(self, rank: int) -> Sequence[str]:
        return self._ranks[rank].lines

    def send(self, number: int) -> None:
        for placed in self._ranks:
            if placed.status is None:
                placed.actor.send.remote(number)

    def close(self) -> None:
        """End actors and ranks; give their bundles back."""
        for placed in self._ranks:
            ray.kill(placed.actor)
        remove_placement_group(self._group)


class RayLauncher:
    """A `Launcher` on the bundles of a placement group, neighbours on one node."""

    def __init__(
        self, address: str, argv: Sequence[str], servers: int = 0, devices: int = 1
    ) -> None:
        """Connect, and start `servers` with `devices` each. Raises `UsageError` without a cluster."""
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(
                "there is no Ray cluster to start on",
                have=f"--ray {address}: {str(error).partition(chr(10))[0]}",
                want="auto, with a node of Ray on this machine, or HOST:PORT",
                do="start one with: ray start --head",
            ) from error
        self._argv = argv
        self._kind = next((kind for kind in _DEVICES if self._total(kind)), None)
        self._per_process = {"CPU": 1.0} | ({self._kind: 1.0} if self._kind else {})
        self._devices = devices
        self._servers = [self._server() for _ in range(servers)]
        """The generators of a run with `rollout.place: servers`, which outlive single starts."""

    def _server(self, starts: int = 1) -> _Placed:
        actor = ray.remote(_RankActor).options(**self._amounts(self._devices)).remote()
        polled = actor.serve.remote(["serve", *self._argv[1:]], _passed(), os.getcwd())
        return _Placed(actor, polled, starts=starts)

    def _keep_servers(self) -> None:
        """Restart dead servers, at most ten times each and not after `REFUSALS`."""
        for number, placed in enumerate(self._servers):
            if placed.status is not None or not ray.wait([placed.polled], timeout=0)[0]:
                continue
            lines = placed.take()
            if placed.status is None:
                placed.polled = placed.actor.poll.remote(_SERVERS_SECONDS, False)
                continue
            for line in lines:
                log.error("a server: %s", line)
            if placed.status in REFUSALS or placed.starts > _MOST_STARTS:
                log.error("a server ended with status %d and is not started again", placed.status)
                continue
            log.warning("a server ended with status %d; starting another", placed.status)
            self._servers[number] = self._server(placed.starts + 1)

    def _amounts(self, devices: int) -> dict[str, Any]:
        amounts: dict[str, Any] = {"num_cpus": 1, "num_gpus": devices * (self._kind == "GPU")}
        if self._kind not in (None, "GPU"):
            amounts["resources"] = {self._kind: devices}
        return amounts

    def processes(self) -> int:
        """Return the number of accelerators that servers leave. Raises `UsageError` if it is 0."""
        for_servers = len(self._servers) * self._devices
        free = self._total(self._kind) - for_servers if self._kind else 0
        if free < 1:
            raise UsageError(
                "the Ray cluster has no accelerators left for training",
                have=f"{self._total(self._kind or 'CPU')} × {self._kind or 'CPU'}, {for_servers} for servers",
                do="give --processes N",
            )
        return free

    def _total(self, kind: str) -> int:
        return int(ray.cluster_resources().get(kind, 0))

    def room(self) -> int:
        """See `Launcher.room`."""
        free = ray.available_resources()
        return int(min(free.get(kind, 0) // amount for kind, amount in self._per_process.items()))

    def close(self) -> None:
        """End the servers by a signal, so that they remove their address files."""
        for placed in self._servers:
            placed.actor.send.remote(signal.SIGTERM)
        waited = [each.actor.poll.remote(_SERVERS_SECONDS, False) for each in self._servers]
        ray.wait(waited, num_returns=len(waited), timeout=10 * _SERVERS_SECONDS)
        for placed in self._servers:
            ray.kill(placed.actor)

    def start(
        self, world: int, attempt: int, seconds: float, stopped: Callable[[], bool]
    ) -> _RayAttempt | None:
        """See `Launcher.start`."""
        group = placement_group([self._per_process] * world, strategy="PACK")
        until = time.monotonic() + seconds
        ready = group.ready()
        while not ray.wait([ready], timeout=_ANSWER_SECONDS)[0]:
            if stopped() or time.monotonic() > until:
                remove_placement_group(group)
                return None
        return self._started(group, world, attempt)

    def _started(self, group: PlacementGroup, world: int, attempt: int) -> _RayAttempt | None:
        remote = ray.remote(_RankActor)
        amounts = self._amounts(1)
        actors = [
            remote.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index), **amounts
            ).remote()
            for index in range(world)
        ]
        try:
            places = ray.get([actor.where.remote() for actor in actors])
            order = sorted(range(world), key=lambda at: (places[at]["address"], places[at]["node"]))
            actors = [actors[at] for at in order]
            places = [places[at] for at in order]
            master = {"MASTER_ADDR": places[0]["address"], "MASTER_PORT": places[0]["port"]}
            environs = [
                {**environ, **master, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
                for environ in _ranks(places, self._kind)
            ]
            started = [
                actor.start.remote(
                    self._argv, environ, os.getcwd(), LAST_LINES if rank else _ALL_LINES
                )
                for rank, (actor, environ) in enumerate(zip(actors, environs, strict=True))
            ]
            ray.get(started)
        except RayError as error:  # a node was lost meanwhile
            log.warning("an actor is gone: %s", str(error).partition("\n")[0])
            remove_placement_group(group)
            return None
        return _RayAttempt(group, actors, self._keep_servers)


def _passed() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith(_PASSED)}


def _ranks(places: Sequence[Mapping[str, Any]], kind: str | None) -> list[dict[str, str]]:
    """Return the variables of each rank. A rank sees all the run's accelerators on its node, since these communicate."""
    nodes = [place["node"] for place in places]
    environs = []
    for rank, place in enumerate(places):
        here = [at for at, node in enumerate(nodes) if node == place["node"]]
        environ = {
            **_passed(),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(places)),
            "LOCAL_RANK": str(here.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(here)),
        }
        if kind is not None:
            devices = [device for at in here for device in places[at]["devices"]]
            environ[_VISIBLE[kind]] = ",".join(devices)
        environs.append(environ)
    return environs

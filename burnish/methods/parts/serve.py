"""Run generators in their own processes: start one beside each rank, find those that serve a run, and serve.

`burnish serve` writes its address and token to `servers/` of the run's directory, where the trainer finds them.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import xxhash

from burnish.boxes.shards import TensorSpec
from burnish.distributed.child_process import Companion, accompany
from burnish.distributed.collectives import agree, from_main, gather_objects
from burnish.distributed.device import empty_cache, pick_device, share_cores
from burnish.distributed.layout import Layout
from burnish.distributed.processes import tuned
from burnish.engines.base import compute_dtype
from burnish.errors import BurnishError, UsageError
from burnish.files.storage import open_regular
from burnish.methods.parts.generators import local_generator
from burnish.models.meta_init import build_on_meta
from burnish.models.names import Region, regions
from burnish.rollout.client import ServedGenerator, Server, ServerLost
from burnish.rollout.server import GeneratorServer
from burnish.rollout.weight_group import OwnProcess
from burnish.runs.setup import Foundation, lay_foundation
from burnish.runs.signals import StopRequested, catch_signals
from burnish.tracking.rundir import RunDirectory

# Seconds for generators to start, less than the default time-out of other ranks, and for a server to describe itself.
_START_SECONDS = 500.0
_PROBE_SECONDS = 5.0
# Most bytes of a note with a server's address and token.
_NOTE_BYTES = 1 << 16
# Prefixes of launchers' environment variables, which a generator's own process removes.
_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC",
    "SLURM_",
)

log = logging.getLogger("burnish")


def served_generator(foundation: Foundation) -> ServedGenerator:
    """Return the generator that `rollout.place` names. Collective.

    Raises `UsageError` for too few servers, and `BurnishError` if a process does not start.
    """
    config = foundation.config
    layout = foundation.layout
    (specs, fixed), timeout = _specs(foundation), config.rollout.timeout_seconds
    in_flight = config.rollout.in_flight
    vocabulary = foundation.hf_config.get_text_config().vocab_size
    make = partial(ServedGenerator, specs=specs, layout=layout, fixed=fixed, in_flight=in_flight)
    if config.rollout.place == "servers":
        addresses: list[tuple[str, str]] = []
        model = _digest_of([*specs, *fixed])
        notes = RunDirectory(config.directory).servers
        look = partial(_answering_servers, notes, model, set[str]())
        with agree(layout):
            if layout.is_main:
                addresses = _servers(look, config.rollout.servers)
        servers = [Server(*each, timeout, vocabulary) for each in from_main(addresses, layout)]
        others = partial(_replacements, look, layout)
        return make(servers, revive=others)
    own: list[_Child] = []
    with ExitStack() as stack:
        with agree(layout):
            if _starts_generator(layout, config.rollout.tensor_parallel):
                seen = visible_devices(foundation.device, config.rollout.tensor_parallel)
                own = [_Child(foundation, seen)]
                stack.callback(own[0].close)
                own[0].wait()
        addresses_by_rank = gather_objects([(child.url, child.token) for child in own], layout)
        end = stack.pop_all().close

    def revive(lost: Sequence[str], others: Sequence[str]) -> dict[str, tuple[str, str]]:
        return own[0].revive(lost) if own else {}

    servers = [
        Server(*each, timeout, vocabulary) for theirs in addresses_by_rank for each in theirs
    ]
    return make(servers, make_room=empty_cache, revive=revive, end=end)


def _starts_generator(layout: Layout, devices: int) -> bool:
    """Return whether this rank starts a generator: the first of every `devices` does."""
    if layout.local_world % devices:
        raise UsageError(
            "the processes of this machine cannot be divided into groups that share a generator",
            have=f"rollout.tensor_parallel: {devices}, {layout.local_world} processes on this machine",
            want="a number that divides them",
            do="set rollout.tensor_parallel to such a number, or start other processes on each machine",
        )
    return layout.local_rank % devices == 0


def visible_devices(device: torch.device, count: int) -> str | None:
    """Return a CUDA_VISIBLE_DEVICES that shows `count` devices from this one on; None without CUDA."""
    if device.type != "cuda":
        return None
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",") if named else [str(each) for each in range(torch.cuda.device_count())]
    first = device.index or 0
    shown = names[first : first + count]
    if len(shown) < count:
        raise UsageError(
            f"rollout.tensor_parallel needs {count} devices; this process sees {len(shown)} from its own on",
            have=f"{len(names)} visible, of which this rank's device is number {first}",
            want=f"{count} from there on",
            do="have the launcher show each process all devices of its machine",
        )
    return ",".join(shown)


class _Child:
    """A generator in a process beside this one."""

    def __init__(self, foundation: Foundation, devices: str | None = None) -> None:
        """Start the process, which sees only `devices`, a value of CUDA_VISIBLE_DEVICES."""
        self.token = secrets.token_urlsafe(24)
        self.url = ""
        self._seen = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        layout = foundation.layout if devices is None else replace(foundation.layout, local_rank=0)
        self._given = foundation.config, self.token, layout
        self._start()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        what = "the process that generates completions"
        self._process = Companion(__name__, what, log=self._log, environ=self._seen)
        self._process.send(self._given)

    def revive(self, lost: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Restart the process if its URL is in `lost`; return its new URL and token by the old URL."""
        before = self.url
        if before not in lost:
            return {}
        self._process.kill()
        log.warning("starting a generator again, after %s", self._process.died().have)
        self.close()
        self._start()
        try:
            self.wait()
        except BurnishError as error:
            log.error("%s", error)
            return {}
        return {before: (self.url, self.token)}

    def wait(self) -> None:
        """Wait until the generator listens. Raises `BurnishError` if it does not."""
        answer: str | BurnishError | None = self._process.answer(_START_SECONDS)
        if answer is None:
            self._process.kill()
            answer = BurnishError(
                "the process that generates completions does not start",
                have=f"nothing in {_START_SECONDS:g} s; it was ended: {self._process.died().have}",
                want="a generator that listens",
                do="look at its last lines, for a slow disk or a model that takes long to load",
            )
        if isinstance(answer, BurnishError):
            raise answer
        self.url = answer

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._log.close()


def serve_at(foundation: Foundation, host: str, port: int) -> None:
    """Serve the foundation's run until SIGTERM or ctrl-C. Raises `UsageError` for a taken address."""
    config = foundation.config
    token = secrets.token_urlsafe(24)
    server = _make_server(foundation, token, host, port)
    directory = RunDirectory(config.directory).servers
    directory.mkdir(0o700, parents=True, exist_ok=True)  # the notes hold tokens
    note = directory / f"{urlsplit(server.url).netloc}.json"
    with catch_signals() as stopper, tuned(foundation.device), suppress(StopRequested):
        try:
            _write_note(note, {"url": server.url, "token": token})
            log.info("serving run %s at %s", config.run_name, server.url)
            server.run(stopper.check)
        finally:
            note.unlink(missing_ok=True)


def _make_server(foundation: Foundation, token: str, host: str, port: int) -> GeneratorServer:
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]  # this process is no rank, whoever started it
    engine = foundation.config.rollout.engine
    about = {"model": _digest_of([*chain(*_specs(foundation))]), "engine": engine}
    # SGLang and vLLM's adapters take weights in host memory.
    in_place = engine != "sglang" and foundation.config.rollout.tensor_parallel == 1
    in_place = in_place and foundation.config.model.adapter_beside is None
    device = foundation.device if in_place else torch.device("cpu")
    generator = local_generator(foundation)
    return GeneratorServer(
        generator,
        token=token,
        about=about,
        host=host,
        port=port,
        timeout=foundation.config.rollout.timeout_seconds,
        receivers=generator.receivers or OwnProcess(device),
    )


def _specs(foundation: Foundation) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return the tensors that a generator gets with every publication, and those that it gets once."""
    dtype = compute_dtype(foundation.config.engine)
    model = build_on_meta(foundation.hf_config)
    lora = foundation.config.model.adapter_beside
    sides: tuple[tuple[Region, ...], tuple[Region, ...]] = (regions(model), ())
    if lora is not None:
        from burnish.models.lora.adapter import Adapter

        adapter = Adapter(model, lora)
        sides = adapter.weights, adapter.base
    changing, fixed = ([TensorSpec(r.name, r.shape, dtype) for r in side] for side in sides)
    return changing, fixed


def _digest_of(specs: Sequence[TensorSpec]) -> str:
    """Return a digest of tensors' names, shapes and dtypes, equal for a generator and its trainer."""
    return xxhash.xxh3_128_hexdigest(repr(sorted(map(str, specs))).encode())


def _servers(look: Callable[[], dict[str, str]], wanted: int) -> list[tuple[str, str]]:
    began = time.monotonic()
    is_announced = False
    while True:
        answering = look()
        if len(answering) >= wanted:
            return sorted(answering.items())[:wanted]
        if time.monotonic() - began > _START_SECONDS:
            raise UsageError(
                "too few generators serve this run",
                have=f"{len(answering)} that answer",
                want=f"rollout.servers: {wanted}",
                do="start burnish serve with this run's configuration, once for each",
            )
        if not is_announced:
            is_announced = True
            log.info(
                "waiting for %d servers: burnish serve CONFIG starts one", wanted - len(answering)
            )
        time.sleep(0.2)


def _replacements(
    look: Callable[[], dict[str, str]], layout: Layout, lost: Sequence[str], others: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """Return free servers for lost ones, perhaps the same, restarted."""
    if not layout.is_main:
        return {}
    try:
        free = sorted(each for each in look().items() if each[0] not in others)
    except UsageError as error:
        log.error("%s", error)
        return {}
    return dict(zip(lost, free, strict=False))


def _answering_servers(directory: Path, model: str, heard: set[str]) -> dict[str, str]:
    """Return addresses and tokens of the servers that answer. Raises `UsageError` for one with another model.

    Warns once of each problem of another one, and adds it to `heard`.
    """
    notes = dict(filter(None, map(_read_note, directory.glob("*.json"))))
    with ThreadPoolExecutor(max(1, len(notes))) as pool:
        told = dict(zip(notes, pool.map(_about, notes, notes.values()), strict=True))
    for url, about in told.items():
        if isinstance(about, str):
            if about not in heard:
                heard.add(about)
                log.warning("a server of this run does not answer as one. %s", about)
        elif about.get("model") != model:
            raise UsageError(
                f"the server at {url} has another model or precision than this run",
                do="start burnish serve with this run's configuration",
            )
    return {url: token for url, token in notes.items() if not isinstance(told[url], str)}


def _write_note(path: Path, note: Mapping[str, str]) -> None:
    """Write a note that only this user can read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(note) + "\n")
    temporary.rename(path)


def _read_note(path: Path) -> tuple[str, str] | None:
    try:
        with open_regular(path) as file:
            note = json.loads(file.read(_NOTE_BYTES))
        return str(note["url"]), str(note["token"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _about(url: str, token: str) -> dict[str, Any] | str:
    """Return a server's description, or why there is none."""
    try:
        return Server(url, token, _PROBE_SECONDS).about()
    except ServerLost as error:
        return str(error)
    except BurnishError as error:
        return f"{url}: {error.problem}"


def serve(pipe: int, parent: int) -> None:
    """Run the generator beside the rank with process id `parent`."""
    accompany(parent)
    os.set_inheritable(pipe, False)
    with Connection(pipe) as connection:
        config, token, layout = connection.recv()
        try:
            share_cores(layout.local_world)
            device = pick_device(layout.local_rank)
            # Rank 0 sends requests to the generators of all ranks, which may be on other machines.
            host = "127.0.0.1" if layout.world == layout.local_world else "0.0.0.0"
            server = _make_server(lay_foundation(config, Layout(), device), token, host, 0)
        except BurnishError as error:
            connection.send(error)
            sys.exit(error.exit_code)
        connection.send(server.url)
    with tuned(device):
        server.run()

"""Find out what a machine has and lacks for training.

Checks take seconds. They write and remove a file of at most 64 MiB in each place where runs will write.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import resource
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from burnish.distributed.accelerators import nvidia_smi
from burnish.distributed.device import (
    device_name,
    free_memory,
    has_bf16_products,
    total_memory,
)
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, bytes_text, install
from burnish.files.remote import Remote
from burnish.files.urls import is_url

_PACKAGES = ("torch", "transformers", "numpy", "safetensors")
_LEAST_DESCRIPTORS = 16384
_LEAST_SHARED_MEMORY = 1 << 30
_PROBE_BYTES = 64 << 20
_LEAST_DISK_SPEED = 100e6
_LONGEST_SYNC_SECONDS = 0.1
_TIMEOUT_SECONDS = 5.0
# Share of a device's memory that other processes may use without a warning.
_BUSY_SHARE = 0.05
# TIME_ERROR in ntp_adjtime(3).
_UNSYNCHRONIZED = 5
# More than `struct timex` takes.
_TIMEX_BYTES = 512
_NODES = {"cuda": "/dev/nvidia0", "cuda (ROCm)": "/dev/kfd", "npu": "/dev/davinci0"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of a part of a machine."""

    part: str
    found: str
    want: str = ""
    """"" if all is well."""
    do: str = ""
    """The command to type, or the thing to change."""
    stops: bool = False
    """Whether runs fail in this state."""

    @property
    def verdict(self) -> str:
        """Return `ok`, `warning` or `error`."""
        return "ok" if not self.want else "error" if self.stops else "warning"


def look(places: Sequence[str], layout: Layout, device: torch.device) -> Iterator[Finding]:
    """Yield findings about this machine; local ranks other than 0 only check their own cores.

    `places` are directories and URLs to which runs will write.
    """
    yield from _affinity(layout, device)
    if layout.local_rank:
        return
    yield from _versions()
    yield from _devices()
    yield from _kernels(device)
    yield _processor()
    yield _memory()
    yield _descriptors()
    yield from _shared_memory()
    for place in places:
        yield _object_store(place) if is_url(place) else _disk(Path(place))
    yield _clock()
    yield _ports(alone=layout.world == layout.local_world)
    yield _hub()


def _versions() -> Iterator[Finding]:
    versions = [f"{name} {version(name)}" for name in ("burnish", *_PACKAGES)]
    yield Finding("versions", f"Python {sys.version.split()[0]}, {', '.join(versions)}")
    have: list[str] = []
    lack: list[str] = []
    about = metadata("burnish")
    for extra in about.get_all("Provides-Extra") or []:
        needs = [
            Requirement(text)
            for text in about.get_all("Requires-Dist") or []
            if f'extra == "{extra}"' in text
        ]
        if extra != "dev":
            (have if all(map(_is_installed, needs)) else lack).append(extra)
    missing = f"; not: {', '.join(lack)} ({install('EXTRA')})" if lack else ""
    yield Finding("extras", f"{', '.join(have) or 'none'} installed{missing}")


def _is_installed(need: Requirement) -> bool:
    try:
        return need.specifier.contains(version(need.name), prereleases=True)
    except PackageNotFoundError:
        return False


def _devices() -> Iterator[Finding]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        kind = next((kind for kind, node in _NODES.items() if Path(node).exists()), None)
        if kind is None:
            yield Finding("devices", "no accelerator; the processor is used")
        else:
            yield Finding(
                "devices",
                f"torch {torch.__version__} sees none of this machine's {kind} devices",
                want="a build of torch for them, and a driver that it knows",
                do="nvidia-smi shows the driver; install torch as pytorch.org/get-started says for it",
                stops=True,
            )
        return
    for index in range(torch.accelerator.device_count()):
        device = torch.device(accelerator.type, index)
        total = total_memory(device)
        free = free_memory(device)
        numa = _numa_node(device)
        where = "" if numa is None else f", NUMA node {numa}"
        yield Finding(
            f"device {index}",
            f"{device_name(device)}, {bytes_text(free)} of {bytes_text(total)} free{where}",
            want="" if free > (1 - _BUSY_SHARE) * total else "memory that nobody else uses",
            do="nvidia-smi lists the processes; end those that are left over",
        )
    libraries = [f"{accelerator.type} {torch.version.cuda or torch.version.hip or ''}".strip()]
    if accelerator.type == "cuda" and torch.distributed.is_nccl_available():
        libraries.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")  # type: ignore[no-untyped-call]
    if driver := nvidia_smi("driver_version"):
        libraries.append(f"driver {driver}")
    yield Finding("libraries", ", ".join(libraries))


def _kernels(device: torch.device) -> Iterator[Finding]:
    if device.type == "cuda":
        from burnish.models.kernels.missing import missing_kernels

        for missing in missing_kernels(device):
            yield Finding("kernels", missing.found, f"them: {missing.cost}", missing.do)


def _affinity(layout: Layout, own: torch.device) -> Iterator[Finding]:
    node = _numa_node(own)
    cores = Path(f"/sys/devices/system/node/node{node}/cpulist")
    if node is not None and cores.exists():
        allowed = os.sched_getaffinity(0)
        far = len(allowed - _cores(cores.read_text()))
        yield Finding(
            f"cores of rank {layout.rank}",
            f"{len(allowed)}, of which {far} are far from device {own.index}",
            want="those of the device's NUMA node" if far else "",
            do=f"start it with numactl --cpunodebind={node} --membind={node}, or srun with --cpu-bind",
        )


def _numa_node(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    place = [getattr(about, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    file = Path("/sys/bus/pci/devices/{:04x}:{:02x}:{:02x}.0/numa_node".format(*place))
    node = int(file.read_text()) if file.exists() else -1
    return None if node < 0 else node


def _cores(text: str) -> set[int]:
    """Read the kernel's list of cores, as 0-3,8-11."""
    numbers = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _processor() -> Finding:
    cpu = torch.device("cpu")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    bf16 = "bf16 products" if has_bf16_products(cpu) else "no bf16 products: use fp32 on it"
    description = f"{device_name(cpu)}, {cores} cores for this process, {bf16}"
    quota = Path("/sys/fs/cgroup/cpu.max")
    limit, _, period = (quota.read_text() if quota.exists() else "max").strip().partition(" ")
    share = float(cores or 1) if limit == "max" else int(limit) / int(period)
    return Finding(
        "processor",
        description,
        want=""
        if share >= (cores or 1)
        else f"a CPU quota for all of them; its control group has {share:g} cores' time",
        do="raise the container's CPU limit, or set OMP_NUM_THREADS to it",
    )


def _memory() -> Finding:
    cpu = torch.device("cpu")
    return Finding(
        "memory", f"{bytes_text(free_memory(cpu))} of {bytes_text(total_memory(cpu))} free"
    )


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < _LEAST_DESCRIPTORS
    return Finding(
        "descriptors",
        f"{soft} open files, at most {hard}",
        want=f"{_LEAST_DESCRIPTORS} for many ranks and files" if few else "",
        do=f"ulimit -n {_LEAST_DESCRIPTORS}; as root, or docker run --ulimit, where the most is less",
    )


def _shared_memory() -> Iterator[Finding]:
    place = Path("/dev/shm")
    if place.is_dir():
        size = shutil.disk_usage(place)
        yield Finding(
            "shared memory",
            f"{bytes_text(size.free)} of {bytes_text(size.total)} free in {place}",
            want="" if size.free >= _LEAST_SHARED_MEMORY else bytes_text(_LEAST_SHARED_MEMORY),
            do="start the container with --ipc=host or --shm-size=16g",
        )


def _disk(place: Path) -> Finding:
    """Write 64 MiB with an fsync; read them past the page cache where possible."""
    part = f"disk {place}"
    folder = next(each for each in (place, *place.absolute().parents) if each.is_dir())
    file = folder / f".burnish-doctor-{secrets.token_hex(4)}"
    data = os.urandom(1 << 20) * (_PROBE_BYTES >> 20)
    try:
        with open(file, "xb", buffering=0) as out:
            begin = time.perf_counter()
            out.write(data)
            os.fsync(out.fileno())
            written = time.perf_counter() - begin
            begin = time.perf_counter()
            out.write(b"\n")
            os.fsync(out.fileno())
            sync = time.perf_counter() - begin
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        with open(file, "rb", buffering=0) as back:
            same = back.read(len(data)) == data
        read = time.perf_counter() - begin
    except OSError as error:
        return Finding(
            part,
            f"{error.strerror} in {folder}",
            want="a directory that can be written",
            do="give another place for run_dir, or change who may use this one",
            stops=True,
        )
    finally:
        file.unlink(missing_ok=True)
    speed = _PROBE_BYTES / written
    slow = speed < _LEAST_DISK_SPEED or sync > _LONGEST_SYNC_SECONDS
    return Finding(
        part,
        f"{bytes_text(shutil.disk_usage(folder).free)} free; write with fsync {bytes_text(speed)}/s, an fsync "
        f"{1e3 * sync:.1f} ms, read {bytes_text(_PROBE_BYTES / read)}/s",
        want="the written bytes back" if not same else f"{bytes_text(_LEAST_DISK_SPEED)}/s" * slow,
        do="keep checkpoints on another disk (run_dir), and mirror them with checkpoint.mirror",
        stops=not same,
    )


def _object_store(url: str) -> Finding:
    name = f".burnish-doctor-{secrets.token_hex(4)}"
    content = secrets.token_bytes(64)
    part = f"store {url}"
    begin = time.perf_counter()
    try:
        remote = Remote(url)
        remote.put(name, content)
        try:
            back = remote.read(name, len(content))
        finally:
            remote.remove(name)
    except BurnishError as error:
        failure = f"{error.problem}: {error.have}"
        return Finding(part, failure, want="writing and reading", do=error.do or "", stops=True)
    seconds = time.perf_counter() - begin
    return Finding(
        part,
        f"a small file written, read and removed in {seconds:.2f} s",
        want="" if back == content else "the written bytes back",
        do="look for a cache or a proxy in between",
        stops=back != content,
    )


def _clock() -> Finding:
    adjtime = getattr(ctypes.CDLL(None), "ntp_adjtime", None)
    state = None if adjtime is None else adjtime(ctypes.create_string_buffer(_TIMEX_BYTES))
    if state is None:
        return Finding("clock", "the system does not say whether it is synchronized")
    wrong = state == _UNSYNCHRONIZED
    return Finding(
        "clock",
        "not synchronized" if wrong else "synchronized",
        want="one time on all machines, for logs and leases of files" if wrong else "",
        do="start chrony or systemd-timesyncd",
    )


def _ports(*, alone: bool) -> Finding:
    """Connect to this machine by name, as other ranks will."""
    host = socket.gethostname()
    do = f"give {host} its address in /etc/hosts or the name server, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    try:
        with (
            closing(socket.create_server(("", 0))) as listener,
            closing(
                socket.create_connection((host, listener.getsockname()[1]), _TIMEOUT_SECONDS)
            ) as connection,
        ):
            address = str(connection.getpeername()[0])
    except OSError as error:
        return Finding("ports", f"{host} cannot be reached: {error}", "a name that works", do)
    astray = not alone and ipaddress.ip_address(address).is_loopback
    want = "an address that other machines reach" if astray else ""
    return Finding("ports", f"{host} is {address}", want, do)


def _hub() -> Finding:
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    token = "with a token" if get_token() else "without a token"
    if constants.HF_HUB_OFFLINE:
        return Finding("hub", f"HF_HUB_OFFLINE is set; models come from {constants.HF_HUB_CACHE}")
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT_SECONDS)
    except Exception as error:  # noqa: BLE001 - any error of the HTTP library becomes a finding
        return Finding(
            "hub",
            f"{constants.ENDPOINT} does not answer: {type(error).__name__}",
            want="access, if models or data are named by their id",
            do="set HTTPS_PROXY or HF_ENDPOINT; or download elsewhere and set HF_HUB_OFFLINE=1",
        )
    return Finding("hub", f"{constants.ENDPOINT} answers, {token}")

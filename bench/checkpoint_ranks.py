"""One rank of `bench.checkpoint` on our side: Burnish, the machine's own limits, torch and safetensors.

All sides use the same tensors in the same process, and take turns. Left out: verl, which has its own
environment (`bench.checkpoint_verl`).
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from ctypes import CDLL
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardDim
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.checkpoint_state import model_settings
from bench.peers import Turns
from burnish.boxes.box import Box
from burnish.boxes.shards import Shard, TensorSpec
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.save import Contents, ModelContents
from burnish.checkpoint.steps import newest
from burnish.checkpoint.write_plan import MAIN
from burnish.distributed.device import peak_memory, reset_peak_memory, used_memory
from burnish.distributed.host_memory import Arena
from burnish.distributed.layout import Layout

CPU = torch.device("cpu")
CHUNK = 4 << 20
SLOTS = ("exp_avg", "exp_avg_sq")
Answer = dict[str, Any]


def cut(shape: torch.Size, dim: int, rank: int, world: int, *, even: bool = True) -> Box:
    """Return a rank's part along a dim: cut as by `torch.chunk`, or, not `even`, growing with the rank."""
    extent = shape[dim]
    step = -(-extent // world)
    parts = world * (world + 1) // 2
    edges = [
        min(n * step, extent) if even else extent * n * (n + 1) // 2 // parts
        for n in range(world + 1)
    ]
    offsets = [0] * len(shape)
    sizes = list(shape)
    offsets[dim], sizes[dim] = edges[rank], edges[rank + 1] - edges[rank]
    return Box(tuple(offsets), tuple(sizes))


class State:
    """A rank's part of weights and optimizer state, in the form that each side needs."""

    def __init__(self, gigabytes: float, mesh: DeviceMesh, fill: float | None = None) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(Qwen3Config(**model_settings(gigabytes)))
        weights = {name: weight.shape for name, weight in model.named_parameters()}
        self.mesh = mesh
        self.shapes = weights | {f"{slot}/{n}": s for slot in SLOTS for n, s in weights.items()}
        self.tensors = self.part(0, fill=fill)

    def part(self, dim: int, *, even: bool = True, fill: float | None = None) -> dict[str, Tensor]:
        """Allocate this rank's part of every tensor, cut along `dim` or the last one: filled with `fill`, or random."""
        generator = torch.Generator().manual_seed(dist.get_rank())
        found = {}
        for name, box in self.boxes(dim, even=even).items():
            empty = torch.empty(box.sizes)
            found[name] = (
                empty.fill_(fill) if fill is not None else empty.normal_(generator=generator)
            )
        return found

    def boxes(self, dim: int, *, even: bool = True) -> dict[str, Box]:
        rank = dist.get_rank()
        world = dist.get_world_size()
        return {
            name: cut(shape, min(dim, len(shape) - 1), rank, world, even=even)
            for name, shape in self.shapes.items()
        }

    def shards(self, tensors: Mapping[str, Tensor], dim: int, *, even: bool = True) -> list[Shard]:
        boxes = self.boxes(dim, even=even)
        return [
            Shard(TensorSpec(name, tuple(self.shapes[name]), torch.float32), boxes[name], tensor)
            for name, tensor in tensors.items()
        ]

    def dtensors(self, tensors: Mapping[str, Tensor], dim: int) -> dict[str, DTensor]:
        return {
            name: DTensor.from_local(
                tensor,
                self.mesh,
                [ShardDim(min(dim, tensor.ndim - 1))],
                run_check=False,
                shape=self.shapes[name],
                stride=torch.empty(self.shapes[name], device="meta").stride(),
            )
            for name, tensor in tensors.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def as_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


def sync_tree(directory: Path) -> None:
    """Sync all files below a directory, as Burnish does, so that they survive a power loss."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def bytes_read() -> int:
    found = re.search(r"^rchar: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


class Rank:
    """Does the work of each question, together with the other ranks, and answers how long it took."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        rank = settings["rank"]
        world = settings["world"]
        address = f"tcp://127.0.0.1:{settings['port']}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
        self.layout = Layout(rank, world, rank, world)
        self.mesh = init_device_mesh("cpu", (world,))
        self.directory = Path(settings["directory"])
        self.state = State(settings["gigabytes"], self.mesh)
        self.step = 0
        self.arena = Arena(CPU)  # kept between saves, as in an engine
        self.open = ExitStack()
        self.held: dict[Path, Checkpoints] = {}
        self.copies: dict[str, Tensor] = {}
        self.stager = DefaultStager(StagingOptions(False, False, False, False))  # as a CPU needs

    # Saving

    def contents(self, state: State | None = None) -> Contents:
        state = state or self.state
        shards = state.shards(state.tensors, 0)
        training = [s for s in shards if s.spec.name.startswith("exp_avg")]
        weights = [s for s in shards if not s.spec.name.startswith("exp_avg")]
        models = {MAIN: ModelContents(weights, training, {"config.json": b"{}"})}
        return Contents(models, {"step": self.step}, check_finite=True, arena=self.arena)

    def save_raw(self, path: Path) -> None:
        descriptor = os.open(path / f"raw-{self.layout.rank}", os.O_CREAT | os.O_WRONLY)
        os.posix_fallocate(descriptor, 0, self.state.nbytes)
        at = 0
        for tensor in self.state.tensors.values():
            data = as_bytes(tensor)
            for start in range(0, len(data), CHUNK):
                at += os.pwrite(descriptor, data[start : start + CHUNK], at)
        os.fsync(descriptor)
        os.close(descriptor)

    def save_ours(self, path: Path) -> None:
        self.checkpoints(path).save(self.step, self.contents())

    def save_dcp(self, path: Path) -> None:
        dcp.save(self.state.dtensors(self.state.tensors, 0), checkpoint_id=path)

    def save_dcp_hf(self, path: Path) -> None:
        tensors = self.state.dtensors(self.state.tensors, 0)
        index = dict.fromkeys(tensors, 1)
        writer = HuggingFaceStorageWriter(
            str(path), index, save_distributed=True, enable_consolidation=True
        )
        dcp.save(tensors, storage_writer=writer)
        if self.layout.is_main:
            sync_tree(path)

    def save_torch(self, path: Path) -> None:
        with (path / f"rank-{self.layout.rank}.pt").open("wb") as file:
            torch.save(self.state.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def save_safetensors(self, path: Path) -> None:
        name = path / f"rank-{self.layout.rank}.safetensors"
        save_file(self.state.tensors, name)
        with name.open("rb") as file:
            os.fsync(file.fileno())

    # Time that training is blocked

    def block_copy(self, path: Path) -> None:
        if not self.copies:
            self.copies = {n: torch.empty_like(t) for n, t in self.state.tensors.items()}
        for name, tensor in self.state.tensors.items():
            self.copies[name].copy_(tensor)

    def block_ours(self, path: Path) -> Callable[[], None]:
        checkpoints = self.checkpoints(path, background_timeout=600.0)
        checkpoints.begin_save(self.step, self.contents())

        def finish() -> None:
            done = checkpoints.finished(wait=True)
            if done is None or done.error is not None:
                raise RuntimeError(done)

        return finish

    def block_dcp(self, path: Path) -> Callable[[], None]:
        tensors = self.state.dtensors(self.state.tensors, 0)
        future = dcp.async_save(
            tensors, checkpoint_id=path / f"{self.step}", async_stager=self.stager
        )
        assert isinstance(future, Future)
        return future.result

    # Loading

    def load_raw(self, path: Path) -> None:
        """Read as many bytes as this rank's part has, from files that Burnish wrote, into this part's memory."""
        written = (path.parent / "ours").rglob("*.safetensors")
        files = sorted(written, key=lambda file: -file.stat().st_size)
        descriptors = [os.open(file, os.O_RDONLY) for file in files]
        sizes = [file.stat().st_size for file in files]
        share = [size // self.layout.world for size in sizes]
        at = 0
        which = 0
        for tensor in self.state.tensors.values():
            data = as_bytes(tensor)
            for start in range(0, len(data), CHUNK):
                some = data[start : start + CHUNK]
                while which + 1 < len(files) and at + len(some) > share[which]:
                    which = which + 1
                    at = 0
                place = min(self.layout.rank * share[which] + at, sizes[which] - len(some))
                at += os.preadv(descriptors[which], [some], max(0, place))
        for descriptor in descriptors:
            os.close(descriptor)

    def load_ours(self, path: Path) -> None:
        step = newest(path / "ours")
        assert step is not None
        shards = self.state.shards(self.state.tensors, 0)
        CheckpointSource(step, self.layout).fill(shards)

    def load_dcp(self, path: Path) -> None:
        dcp.load(self.state.dtensors(self.state.tensors, 0), checkpoint_id=path)

    def load_torch(self, path: Path) -> None:
        found = torch.load(path / f"rank-{self.layout.rank}.pt", weights_only=True)
        for name, tensor in self.state.tensors.items():
            tensor.copy_(found[name])

    def load_safetensors(self, path: Path) -> None:
        found = load_file(path / f"rank-{self.layout.rank}.safetensors")
        for name, tensor in self.state.tensors.items():
            tensor.copy_(found[name])

    # Running

    def checkpoints(self, path: Path, background_timeout: float | None = None) -> Checkpoints:
        """Return the checkpoints below `path`, which stay open from their first use on, as in a run."""
        if path not in self.held:
            root = path / "ours"
            keep = Retention(1 << 20)
            checkpoints = Checkpoints(
                root, self.layout, retention=keep, background_timeout=background_timeout
            )
            self.held[path] = self.open.enter_context(checkpoints)
        return self.held[path]

    def timed(self, kind: str, side: str) -> Answer:
        """Time one save, blocked time or load of one side, in the side's directory. Its last save is removed before."""
        path = self.directory / ("block" if kind == "block" else side)
        self.step += 1
        if self.layout.is_main:
            path.mkdir(exist_ok=True)
            if kind != "load":
                for old in [*path.glob("ours/step-*"), *path.glob("[!o]*")]:
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
        dist.barrier()
        start = time.perf_counter()
        finish = getattr(self, f"{kind}_{side}")(path)
        seconds = time.perf_counter() - start
        if finish:
            finish()
        dist.barrier()
        return {"seconds": seconds}

    def memory(self, kind: str, side: str) -> Answer:
        """Measure the peak of resident memory in a save or a load, beyond the memory held before. Save before you load."""
        self._warm_up(kind, side)
        path = self._made(f"memory-{side}")
        gc.collect()
        CDLL(None).malloc_trim(0)
        reset_peak_memory(CPU)
        before = used_memory(CPU)
        getattr(self, f"{kind}_{side}")(path)
        most = peak_memory(CPU) - before
        self.step += 1
        dist.barrier()
        return {"bytes": most}

    def _warm_up(self, kind: str, side: str) -> None:
        """Do the same with a tiny state, so that memory which code and libraries take once is not counted."""
        full = self.state
        path = self._made(f"tiny-{kind}-{side}")
        self.state = State(0.004, self.mesh)
        getattr(self, f"save_{side}")(path)
        dist.barrier()
        if kind == "load":
            getattr(self, f"load_{side}")(path)
        self.state = full

    def _made(self, name: str) -> Path:
        """Make a directory of this name, which all ranks then see."""
        path = self.directory / name
        if self.layout.is_main:
            path.mkdir(exist_ok=True)
        dist.barrier()
        return path

    def read(self, side: str, dim: int) -> Answer:
        """Load a step that was saved by rows, as uneven rows (dim 0) or as columns. Return the bytes read and wanted."""
        path = self.directory / side
        even = dim > 0
        tensors = self.state.part(dim, even=even, fill=0.0)
        dist.barrier()
        before = bytes_read()
        if side == "ours":
            step = newest(path / "ours")
            assert step is not None
            CheckpointSource(step, self.layout).fill(self.state.shards(tensors, dim, even=even))
        else:
            dcp.load(self.state.dtensors(tensors, dim), checkpoint_id=path)
        return {"read": bytes_read() - before, "wanted": sum(t.nbytes for t in tensors.values())}


def main() -> None:
    warnings.simplefilter("ignore")
    turns = Turns()
    rank = Rank(turns.next())
    turns.answer(bytes=rank.state.nbytes)
    try:
        while True:
            question = turns.next()
            turns.answer(**getattr(rank, question.pop("do"))(**question))
    finally:
        rank.open.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

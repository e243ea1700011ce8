"""For tests of saving and loading: small states, cut by rows over any number of ranks."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from burnish.boxes.box import Box, whole
from burnish.boxes.shards import Shard, TensorSpec
from burnish.checkpoint.manager import Checkpoints
from burnish.checkpoint.retention import Retention
from burnish.checkpoint.save import Contents, ModelContents
from burnish.checkpoint.steps import CommittedStep, open_step, step_paths
from burnish.checkpoint.write_plan import MAIN
from burnish.distributed.layout import Layout
from burnish.errors import CorruptError, IncompatibleError
from burnish.files.storage import LOCAL, LocalStorage

SHAPES = {
    "embed.weight": (37, 16),
    "layers.0.norm.weight": (16,),
    "layers.0.up.weight": (24, 16),
    "scale": (),
    "layers.0.none": (0, 4),
}
BIG_SHAPES = SHAPES | {"head.weight": (1101, 2000)}  # several blocks, cut in the middle of rows


def make_state(seed, shapes=None):
    """fp32 weights (special values in the first) and optimizer slots, by name."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=generator) for name, shape in (shapes or SHAPES).items()
    }
    next(iter(weights.values()))[0, :6] = torch.tensor(
        [float("inf"), float("-inf"), float("nan"), -0.0, 1e-45, 3.4028235e38]
    )
    slots = {
        f"{slot}/{name}": torch.randn(tensor.shape, generator=generator)
        for slot in ("exp_avg", "exp_avg_sq")
        for name, tensor in weights.items()
    }
    return weights, slots


def shards_of(tensors, layout, dim=0):
    """This rank's pieces: equal parts along a dim, as torch.chunk cuts; scalars on every rank."""
    shards = []
    for name, tensor in tensors.items():
        spec = TensorSpec(name, tuple(tensor.shape), tensor.dtype)
        box = whole(spec.shape)
        if tensor.ndim > dim:
            size = -(-tensor.shape[dim] // layout.world)
            start = min(layout.rank * size, tensor.shape[dim])
            stop = min(start + size, tensor.shape[dim])
            offsets = [0] * tensor.ndim
            sizes = list(tensor.shape)
            offsets[dim], sizes[dim] = start, stop - start
            box = Box(tuple(offsets), tuple(sizes))
        shards.append(Shard(spec, box, tensor[box.slices]))
    return shards


ASSETS = {
    "config.json": b'{"model_type": "llama"}\n',
    "chat_templates/default.jinja": b"{{ messages }}",
}


def written_by(write) -> dict[str, bytes]:
    """The files that a function writes into a directory."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write(directory)
        paths = [path for path in directory.rglob("*") if path.is_file()]
        return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def contents_of(weights, slots, layout=None, /, **changes):
    """Of one model; `changes` are fields of `ModelContents` or `Contents`."""
    layout = layout or Layout()
    model = {
        "weights": shards_of(weights, layout),
        "training": shards_of(slots, layout),
        "assets": ASSETS,
    }
    model |= {name: changes.pop(name) for name in model if name in changes}
    fields = {"models": {MAIN: ModelContents(**model)}, "state": {"step": 1, "cursor": 5}}
    return Contents(**(fields | changes))


def save_once(root, step=1, seed=0, storage=LOCAL, **changes):
    """One step in `root`, by one process."""
    with Checkpoints(root, Layout(), retention=Retention(10), storage=storage) as checkpoints:
        return checkpoints.save(step, contents_of(*make_state(seed), **changes))


def committed(root, storage=LOCAL) -> list[CommittedStep]:
    """The steps that open, oldest first."""
    found = []
    for path in step_paths(root, storage).values():
        with suppress(CorruptError, IncompatibleError):
            found.append(open_step(path, storage))
    return found


def bits(tensor):
    """The tensor's bits as integers, so that NaNs compare."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def fill_and_compare(source, weights, slots, layout, dim=0):
    """Fill empty shards from a source and compare them bit for bit with the whole tensors."""
    for tensors in (weights, slots):
        empty = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
        wanted = shards_of(empty, layout, dim)
        source.fill(wanted)
        for got, expected in zip(wanted, shards_of(tensors, layout, dim), strict=True):
            assert torch.equal(bits(got.tensor), bits(expected.tensor)), got.spec.name


class FaultyStorage(LocalStorage):
    """A disk on which the n-th operation that changes something fails, and those after it if `lasting`."""

    def __init__(self, fail_at=None, error=errno.ENOSPC, lasting=True):
        self.fail_at, self.error, self.lasting = fail_at, error, lasting
        self.operations = []
        self.healed = False

    def note(self, operation):
        self.operations.append(operation)
        if self.fail_at is None or self.healed:
            return
        number = len(self.operations)
        if number == self.fail_at or (self.lasting and number > self.fail_at):
            raise OSError(self.error, "made to fail", operation)

    def create(self, path, size):
        self.note(f"create {path.name}")
        return FaultyFile(super().create(path, size), self, path.name)

    def open(self, path, *, write=False):
        file = super().open(path, write=write)
        return FaultyFile(file, self, path.name) if write else file

    def make_dirs(self, path):
        self.note(f"make_dirs {path.name}")
        super().make_dirs(path)

    def sync_dir(self, path):
        self.note(f"sync_dir {path.name}")
        super().sync_dir(path)

    def rename(self, source, target):
        self.note(f"rename {source.name} {target.name}")
        super().rename(source, target)


class OnceFullStorage(FaultyStorage):
    """A disk without room for the first thing that is written, and with room for all that is later, whoever writes it.

    `full` is a path that is there once it was full: the process that writes may be another by then.
    """

    def __init__(self, full):
        super().__init__()
        self.full = full

    def note(self, operation):
        """Fail at the first write."""
        if operation.startswith("pwrite") and not self.full.exists():
            self.full.touch()
            raise OSError(errno.ENOSPC, "made to fail", operation)


class DeadlyStorage(FaultyStorage):
    """A machine that is switched off at the n-th operation that changes something."""

    def note(self, operation):
        self.operations.append(operation)
        if len(self.operations) == self.fail_at:
            os.kill(os.getpid(), signal.SIGKILL)


class FaultyFile:
    def __init__(self, file, storage, name):
        self.file, self.storage, self.name = file, storage, name

    def size(self):
        return self.file.size()

    def pread_into(self, buffer, offset):
        self.file.pread_into(buffer, offset)

    def pwrite(self, data, offset):
        self.storage.note(f"pwrite {self.name}")
        self.file.pwrite(data, offset)

    def sync(self):
        self.storage.note(f"sync {self.name}")
        self.file.sync()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.__exit__(*error)


def save_forever(pipe, root, first, fail_at):
    """Commit step after step, each with the state of its own seed; tell the step after each."""
    torch.set_num_threads(1)
    storage = DeadlyStorage(fail_at)
    with Checkpoints(root, Layout(), retention=Retention(1), storage=storage) as checkpoints:
        pipe.send(first - 1)
        step = first
        while True:
            checkpoints.save(step, contents_of(*make_state(step)))
            pipe.send(step)
            step += 1


class StubbornStorage(LocalStorage):
    """A disk that keeps what lies in the trash, as a network mount does with a file that somebody has open."""

    def remove(self, path):
        if path.parent.name == "trash":
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        super().remove(path)


class SlowStorage(LocalStorage):
    """A disk on which every block takes a while, long enough to do something in its middle."""

    def __init__(self, seconds=0.2):
        self.seconds = seconds

    def open(self, path, *, write=False):
        file = super().open(path, write=write)
        return SlowFile(file, self.seconds) if write else file


class OnceHangingStorage(SlowStorage):
    """A disk that hangs at the first thing that is written. `hung` is a path that is there from then on."""

    def __init__(self, hung):
        super().__init__()
        self.hung = hung

    def open(self, path, *, write=False):
        if not write or self.hung.exists():
            return LocalStorage.open(self, path, write=write)
        self.hung.touch()
        return SlowFile(LocalStorage.open(self, path, write=True), 600)


class SlowFile:
    def __init__(self, file, seconds):
        self.file, self.seconds = file, seconds

    def pwrite(self, data, offset):
        time.sleep(self.seconds)
        self.file.pwrite(data, offset)

    def sync(self):
        self.file.sync()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.__exit__(*error)


def save_in_background_forever(pipe, root):
    """Tell the writer's process id, then begin one save after the other."""
    torch.set_num_threads(1)
    with Checkpoints(
        root, Layout(), background_timeout=30, storage=SlowStorage(0.05)
    ) as checkpoints:
        pipe.send(writer_pid(checkpoints))
        for step in range(1, 1000):
            checkpoints.begin_save(step, contents_of(*make_state(step)))
            pipe.send(step)
            assert checkpoints.finished(wait=True).error is None


def writer_pid(checkpoints):
    """The process that saves in the background."""
    return checkpoints._background._writer._process.pid

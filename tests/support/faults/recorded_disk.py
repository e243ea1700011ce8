"""A disk that remembers every operation, and what a loss of power could leave of them at any moment.

`RecordingStorage` is the real disk with a log. `crash_states` makes from a log the directories that a
machine may find after losing power at some moment: what was synced is there; of what was not, any
part may be, in any order. The rules are those of POSIX at its worst:

- a write, and a file's length, is certain only after the file's `sync` has returned;
- a name in a directory (created, renamed, removed) is certain only after the directory's `sync_dir`;
- a write may be half there; a rename is there or not, never half.

Left out: disks that lie about a sync, and single flipped bits (the hashes are tested elsewhere).
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from burnish.files.storage import LocalStorage


@dataclass(frozen=True)
class Op:
    """One operation, by path. `at` orders those of several processes."""

    at: float
    kind: str  # mkdir, create, write, sync, sync_dir, rename, unlink, rmdir, ack
    path: Path
    target: Path | None = None
    offset: int = 0
    data: bytes = b""
    size: int = 0
    step: int = 0

    def __str__(self):
        return f"{self.kind} {self.path.name}{f' -> {self.target.name}' if self.target else ''}"


class RecordingStorage(LocalStorage):
    """The real disk, every change to it noted in `log`.

    An effect may be there as soon as it was asked for, and is certain only after a sync has
    returned; so changes are noted before they are made, and syncs after.
    """

    def __init__(self):
        self.log = []

    def note(self, kind, path, **more):
        self.keep(Op(time.monotonic(), kind, Path(path), **more))

    def keep(self, op):
        self.log.append(op)

    def ack(self, step):
        """The save of a step has returned."""
        self.note("ack", "", step=step)

    def create(self, path, size):
        self.note("create", path, size=size)
        return RecordingFile(super().create(path, size), self, path)

    def open(self, path, *, write=False):
        file = super().open(path, write=write)
        return RecordingFile(file, self, path) if write else file

    def make_dirs(self, path):
        missing = [each for each in (path, *path.parents) if not each.exists()]
        for each in reversed(missing):
            self.note("mkdir", each)
        super().make_dirs(path)

    def sync_dir(self, path):
        super().sync_dir(path)
        self.note("sync_dir", path)

    def rename(self, source, target):
        self.note("rename", source, target=target)
        super().rename(source, target)

    def remove(self, path):
        if path.is_dir() and not path.is_symlink():
            for each in sorted(path.iterdir()):
                self.remove(each)
            self.note("rmdir", path)
            path.rmdir()
        else:
            self.note("unlink", path)
            path.unlink()


class SharedRecordingStorage(RecordingStorage):
    """The same for several processes that it is sent to: each has its log in a file of a directory, which lies elsewhere."""

    def __init__(self, directory: Path):
        super().__init__()
        self.directory = Path(directory)

    def keep(self, op):
        with (self.directory / f"{os.getpid()}.log").open("ab") as file:
            pickle.dump(op, file)

    def together(self) -> list[Op]:
        """What all of them did."""
        found = []
        for path in self.directory.iterdir():
            with path.open("rb") as file, suppress(EOFError):
                while True:
                    found.append(pickle.load(file))  # noqa: S301 - written by this test's processes
        return found


class RecordingFile:
    def __init__(self, file, storage, path):
        self.file, self.storage, self.path = file, storage, path

    def size(self):
        return self.file.size()

    def pread_into(self, buffer, offset):
        self.file.pread_into(buffer, offset)

    def pwrite(self, data, offset):
        self.storage.note("write", self.path, offset=offset, data=bytes(data))
        self.file.pwrite(data, offset)

    def sync(self):
        self.file.sync()
        self.storage.note("sync", self.path)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.__exit__(*error)


@dataclass
class Node:
    """A file or a directory of the model, whatever its name."""

    is_directory: bool
    data: bytearray = field(default_factory=bytearray)
    names: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Effect:
    """What one operation does to one node."""

    index: int
    kind: str  # link, move, drop, length, write
    node: int
    parent: int = 0
    name: str = ""
    to_parent: int = 0
    to_name: str = ""
    offset: int = 0
    data: bytes = b""


class History:
    """A log, understood: effects on numbered nodes, and which sync makes which effect certain.

    `base` is what lay below `root` before, all of it certain, with step `saved` in it.
    """

    def __init__(self, root: Path, ops: Sequence[Op], base: Path | None = None, saved: int = 0):
        self.root, self.saved = root, saved
        self.ops = sorted(ops, key=lambda op: op.at)
        self.base = [Node(True)]
        if base is not None:
            self._read(base, 0)
        self._tree = [Node(node.is_directory, names=dict(node.names)) for node in self.base]
        self.effects: list[Effect] = []
        self.certain: dict[int, int] = {}  # position among the effects -> index of the op
        self._open: dict[int, list[int]] = {}  # node -> effects that wait for its sync
        self._waiting: dict[int, int] = {}  # effect -> syncs it still waits for
        for index, op in enumerate(self.ops):
            self._understand(index, op)

    def _read(self, path: Path, number: int) -> None:
        for each in sorted(path.iterdir()):
            node = Node(
                each.is_dir(), bytearray() if each.is_dir() else bytearray(each.read_bytes())
            )
            self.base.append(node)
            child = len(self.base) - 1
            self.base[number].names[each.name] = child
            if node.is_directory:
                self._read(each, child)

    def _find(self, path: Path) -> int:
        number = 0
        for part in path.relative_to(self.root).parts:
            number = self._tree[number].names[part]
        return number

    def _add(self, effect: Effect, *syncs: int) -> None:
        self.effects.append(effect)
        self._waiting[len(self.effects) - 1] = len(syncs)
        for node in syncs:
            self._open.setdefault(node, []).append(len(self.effects) - 1)

    def _understand(self, index: int, op: Op) -> None:
        if op.kind == "ack" or not op.path.is_relative_to(self.root):
            return
        if op.kind in ("sync", "sync_dir"):
            for position in self._open.pop(self._find(op.path), []):
                self._waiting[position] -= 1
                if self._waiting[position] == 0:
                    self.certain[position] = index
            return
        if op.kind == "write":
            node = self._find(op.path)
            self._add(Effect(index, "write", node, offset=op.offset, data=op.data), node)
            return
        if op.path == self.root:
            return  # the disk itself
        parent = self._find(op.path.parent)
        names = self._tree[parent].names
        name = op.path.name
        if op.kind in ("mkdir", "create"):
            self._tree.append(Node(op.kind == "mkdir"))
            node = names[name] = len(self._tree) - 1
            self._add(Effect(index, "link", node, parent, name), parent)
            if op.kind == "create":
                self._add(Effect(index, "length", node, offset=op.size), node)
        elif op.kind == "rename":
            node, to_parent = names.pop(name), self._find(op.target.parent)
            self._tree[to_parent].names[op.target.name] = node
            effect = Effect(index, "move", node, parent, name, to_parent, op.target.name)
            self._add(effect, *{parent, to_parent})
        else:
            node = names.pop(name)
            self._add(Effect(index, "drop", node, parent, name), parent)

    def uncertain(self, moment: int) -> list[int]:
        """The effects asked for before a moment (a number of operations) that may or may not be there."""
        return [
            position
            for position, effect in enumerate(self.effects)
            if effect.index < moment and self.certain.get(position, moment) >= moment
        ]

    def leave(self, moment: int, lost: set[int], torn: set[int]) -> list[Node]:
        """What is there after a loss of power at a moment, without some effects and with half of some writes."""
        total = len(self._tree)
        nodes = [Node(n.is_directory, bytearray(n.data), dict(n.names)) for n in self.base]
        nodes += [Node(self._tree[i].is_directory) for i in range(len(nodes), total)]
        for position, effect in enumerate(self.effects):
            if effect.index >= moment:
                break
            if position not in lost:
                _apply(nodes, effect, position in torn)
        return nodes

    def acked(self, moment: int) -> int:
        """The newest step whose save had returned, or that was there before."""
        return max((op.step for op in self.ops[:moment] if op.kind == "ack"), default=self.saved)


def _apply(nodes: list[Node], effect: Effect, torn: bool) -> None:
    node = nodes[effect.node]
    if effect.kind == "link":
        nodes[effect.parent].names[effect.name] = effect.node
    elif effect.kind == "move":
        if nodes[effect.parent].names.get(effect.name) == effect.node:
            del nodes[effect.parent].names[effect.name]
        nodes[effect.to_parent].names[effect.to_name] = effect.node
    elif effect.kind == "drop":
        if nodes[effect.parent].names.get(effect.name) == effect.node:
            del nodes[effect.parent].names[effect.name]
    elif effect.kind == "length":
        node.data.extend(bytes(max(0, effect.offset - len(node.data))))
    else:
        data = effect.data[: len(effect.data) // 2] if torn else effect.data
        node.data.extend(bytes(max(0, effect.offset + len(data) - len(node.data))))
        node.data[effect.offset : effect.offset + len(data)] = data


def write_out(nodes: list[Node], directory: Path, number: int = 0) -> None:
    """Make the directory of a crash state."""
    directory.mkdir(parents=True)
    for name, child in nodes[number].names.items():
        if nodes[child].is_directory:
            write_out(nodes, directory / name, child)
        else:
            (directory / name).write_bytes(nodes[child].data)


def _fingerprint(nodes: list[Node], number: int = 0) -> int:
    return hash(
        tuple(
            (
                name,
                _fingerprint(nodes, child)
                if nodes[child].is_directory
                else bytes(nodes[child].data),
            )
            for name, child in sorted(nodes[number].names.items())
        )
    )


def choices(open_effects: Sequence[int], rng: random.Random, extra: int) -> Iterator[set[int]]:
    """Which uncertain effects are lost: all subsets where these are few, else none, all, each, all but each, and some."""
    if 2 ** len(open_effects) <= 2 * len(open_effects) + 2 + extra:
        for bits in range(2 ** len(open_effects)):
            yield {each for place, each in enumerate(open_effects) if bits >> place & 1}
        return
    yield set()
    yield set(open_effects)
    for each in open_effects:
        yield {each}
        yield set(open_effects) - {each}
    for _ in range(extra):
        share = rng.random()
        yield {each for each in open_effects if rng.random() < share}


def crash_states(
    history: History, rng: random.Random, extra: int
) -> Iterator[tuple[int, list[Node]]]:
    """Everything that may be found at every moment, each once: (moment, nodes). `extra` random choices a moment."""
    seen: set[tuple[int, int]] = set()
    for moment in range(len(history.ops) + 1):
        open_effects = history.uncertain(moment)
        writes = [each for each in open_effects if history.effects[each].kind == "write"]
        for lost in choices(open_effects, rng, extra):
            torn = {each for each in writes if rng.random() < 0.3}
            nodes = history.leave(moment, lost, torn - lost)
            mark = (history.acked(moment), _fingerprint(nodes))
            if mark not in seen:
                seen.add(mark)
                yield moment, nodes


def fresh(directory: Path) -> Path:
    """The directory, empty and not there."""
    shutil.rmtree(directory, ignore_errors=True)
    return directory

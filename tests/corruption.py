"""Single flipped bits in a committed step: each has to be found, and named, by whoever reads the file it is in.

The step holds what a run's holds, tokenizer included. A flip is made in place and undone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checkpoints_for_tests import make_state, save_once, shards_of
from tokenizers_for_tests import save_char_tokenizer

from burnish.checkpoint.committed import open_step
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manifest import COMMIT, MANIFEST, Commit, Manifest, record_of, sha256
from burnish.checkpoint.verify import DamagedBlock, verify
from burnish.errors import CorruptError
from burnish.files.safetensors import read_header
from burnish.files.storage import LocalStorage
from burnish.parallel.layout import Layout

READ_BY_LOADING = ("COMMIT", "manifest.json", "state.json")
"""Beside the tensors. The files of a Hugging Face directory are for others, who find them checked by `verify`."""


def make_step(root: Path) -> Path:
    """A step to flip bits in, of some tens of kilobytes."""
    return save_once(root, 1, write_assets=_write_assets)


def _write_assets(directory: Path) -> None:
    save_char_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 37}))
    (directory / "generation_config.json").write_text('{"do_sample": true}\n')


@dataclass(frozen=True)
class Flip:
    """One bit."""

    name: str
    """The file, below the step."""
    bit: int
    """Counted from its first."""

    def __str__(self):
        return f"bit {self.bit % 8} of byte {self.bit // 8} of {self.name}"

    def apply(self, step: Path) -> None:
        """Turn the bit over; twice is as before."""
        with (step / self.name).open("r+b") as file:
            file.seek(self.bit // 8)
            byte = file.read(1)[0] ^ 1 << self.bit % 8
            file.seek(self.bit // 8)
            file.write(bytes([byte]))


def flips(step: Path, rng: random.Random) -> Iterator[Flip]:
    """Without end: half of them anywhere in the step, half in any file, so that small ones have their share."""
    sizes = {
        path.relative_to(step).as_posix(): path.stat().st_size
        for path in sorted(step.rglob("*"))
        if path.is_file()
    }
    names = list(sizes)
    while True:
        weights = list(sizes.values()) if rng.random() < 0.5 else None
        [name] = rng.choices(names, weights)
        yield Flip(name, rng.randrange(8 * sizes[name]))


def check_flip(step: Path, flip: Flip) -> list[str]:
    """Make the flip, look for it in every way there is, undo it; what was overlooked or wrongly named."""
    part = _part(step, flip)
    flip.apply(step)
    try:
        found = {"verify": _verified(step)}
        if flip.name in READ_BY_LOADING or flip.name.endswith(".safetensors"):
            found["loading"] = _loaded(step)
    finally:
        flip.apply(step)
    return [
        f"{who} does not name {part or flip.name} for {flip}: {error}"
        for who, error in found.items()
        if not _names(error, step, flip, part)
    ]


def _part(step: Path, flip: Flip) -> str | None:
    """The tensor that the bit is in, or the header; None for a file without tensors."""
    if not flip.name.endswith(".safetensors"):
        return None
    header = read_header(step / flip.name)
    entries = header.entries.values()
    return next((e.name for e in entries if e.begin <= flip.bit // 8 < e.end), "the header")


def _names(error: CorruptError | None, step: Path, flip: Flip, part: str | None) -> bool:
    """Whether this says which file is damaged, and what lies there."""
    if error is None or str(step / flip.name) not in str(error):
        return False
    return part is None or (isinstance(error, DamagedBlock) and part in error.holds)


def _verified(step: Path) -> CorruptError | None:
    try:
        return next(verify(step), None)
    except CorruptError as error:
        return error


def load_all(source: CheckpointSource) -> None:
    """Fill weights and slots from a step of `make_step`."""
    weights, slots = make_state(7)
    source.fill(shards_of(weights | slots, Layout()))


def _loaded(step: Path) -> CorruptError | None:
    try:
        load_all(CheckpointSource(open_step(step, LocalStorage()), Layout()))
    except CorruptError as error:
        return error
    return None


def reseal(step: Path) -> None:
    """Write manifest and COMMIT for the files as they are, as one who wants to be believed would."""
    files = {
        path.relative_to(step).as_posix(): record_of(path.read_bytes())
        for path in sorted(step.rglob("*"))
        if path.is_file() and path.name not in (COMMIT, MANIFEST)
    }
    before = json.loads((step / COMMIT).read_bytes())
    seal(step, Manifest(before["uuid"], before["step"], 1, files))


def seal(step: Path, manifest: Manifest) -> None:
    """Write this manifest, and a COMMIT that fits it."""
    data = manifest.encode()
    (step / MANIFEST).write_bytes(data)
    commit = Commit("0.1", manifest.uuid, manifest.step, sha256(data), manifest.total_bytes, True)
    (step / COMMIT).write_bytes(commit.encode())

"""Single flipped bits in a committed step: each has to be found, and named, by whoever reads the file it is in.

The step holds what a run's holds, tokenizer included; a large one has files of several blocks, of which
the damaged one and no other has to be named, in the text that people read and in JSON. A flip is made
in place and undone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manifest import (
    BLOCK_BYTES,
    COMMIT,
    MANIFEST,
    Commit,
    Manifest,
    record_of,
    sha256,
)
from burnish.checkpoint.steps import DamagedBlock, open_step
from burnish.cli.ckpt import verify_steps
from burnish.distributed.layout import Layout
from burnish.errors import CorruptError, few
from burnish.files.safetensors import SUFFIX, read_header
from burnish.files.storage import LocalStorage
from support.checkpoints.states import (
    BIG_SHAPES,
    SHAPES,
    make_state,
    save_once,
    shards_of,
    written_by,
)
from support.models.tokenizers import save_char_tokenizer

READ_BY_LOADING = ("COMMIT", "manifest.json", "state.json")
"""Beside the tensors. The files of a Hugging Face directory are for others, who find them checked by `verify`."""


def make_step(root: Path, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Path:
    """A step to flip bits in: of some tens of kilobytes, or with `BIG_SHAPES` of some tens of megabytes."""
    weights, slots = (shards_of(each, Layout()) for each in make_state(0, shapes))
    return save_once(root, 1, weights=weights, training=slots, assets=written_by(_write_assets))


def _write_assets(directory: Path) -> None:
    save_char_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 37}))
    (directory / "generation_config.json").write_text('{"do_sample": true}\n')


def flip(path: Path, byte: int = -1, bit: int = 0) -> None:
    """Turn over one bit of a file, in place; a negative `byte` counts from the end."""
    with path.open("r+b") as file:
        at = byte if byte >= 0 else path.stat().st_size + byte
        file.seek(at)
        found = file.read(1)[0]
        file.seek(at)
        file.write(bytes([found ^ 1 << bit]))


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
        flip(step / self.name, self.bit // 8, self.bit % 8)


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
    block = _block(step, flip)
    flip.apply(step)
    try:
        wrong = _wrongly_told(step, flip, block)
        if flip.name in READ_BY_LOADING or flip.name.endswith(SUFFIX):
            wrong += _wrongly_raised(step, flip, block)
    finally:
        flip.apply(step)
    return [f"{flip}: {each}" for each in wrong]


@dataclass(frozen=True)
class _Block:
    """Where a bit lies in a file of tensors."""

    start: int
    stop: int
    holds: tuple[str, ...]
    """All tensors that have bytes in it, and "the header"; of a damaged header no more can be known."""
    is_known: bool
    """Whether the bit is in no header."""

    def is_told(self, holds: Sequence[str]) -> bool:
        """Whether this is what is said to lie in it."""
        return (
            tuple(holds) == self.holds if self.is_known else next(iter(holds), "") == "the header"
        )


def _block(step: Path, flip: Flip) -> _Block | None:
    """None for a file without tensors."""
    if not flip.name.endswith(SUFFIX):
        return None
    header, size = read_header(step / flip.name), (step / flip.name).stat().st_size
    block_bytes = open_step(step, LocalStorage()).manifest.files[flip.name].block_bytes
    start = flip.bit // 8 // block_bytes * block_bytes
    stop = min(start + block_bytes, size)
    names = [e.name for e in header.entries.values() if e.begin < stop and start < e.end]
    holds = (*["the header"] * (start < header.size), *names)
    return _Block(start, stop, holds, flip.bit // 8 >= header.size)


def _wrongly_told(step: Path, flip: Flip, block: _Block | None) -> list[str]:
    """What `burnish ckpt verify` leaves out of its text, and of its JSON."""
    lines: list[str] = []
    [report] = verify_steps(lines.append, step, fast=False)["steps"]
    text, problems = "\n".join(lines), json.loads(json.dumps(report["problems"]))
    wrong = [] if _says(text, step, flip, block) else [f"verify says {text}"]
    if block is None:
        return wrong if problems else [*wrong, "verify has no problem in its JSON"]
    told = [(each["file"], each["start"], each["stop"]) for each in problems]
    if told != [(flip.name, block.start, block.stop)] or not block.is_told(problems[0]["tensors"]):
        wrong.append(f"verify has {problems} in its JSON")
    return wrong


def _wrongly_raised(step: Path, flip: Flip, block: _Block | None) -> list[str]:
    """The same of loading."""
    error = _loaded(step)
    holds = error.holds if isinstance(error, DamagedBlock) else ()
    if not (_says(str(error), step, flip, block) and (block is None or block.is_told(holds))):
        return [f"loading says {error}, of {holds}"]
    return []


def _says(text: str, step: Path, flip: Flip, block: _Block | None) -> bool:
    """Whether people are told which file is damaged, where, and what lies there: the first, and how many more."""
    if str(step / flip.name) not in text:
        return False
    if block is None:
        return True
    holds = few(block.holds) if block.is_known else "the header"
    return f"bytes {block.start} to {block.stop} " in text and f"they hold {holds}" in text


def load_all(source: CheckpointSource, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
    """Fill weights and slots from a step of `make_step`."""
    weights, slots = make_state(7, shapes)
    source.fill(shards_of(weights | slots, Layout()))


def _loaded(step: Path) -> CorruptError | None:
    """What loading all of it raises."""
    large = (step / "model/model.safetensors").stat().st_size > BLOCK_BYTES
    try:
        source = CheckpointSource(open_step(step, LocalStorage()), Layout())
        load_all(source, BIG_SHAPES if large else SHAPES)
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

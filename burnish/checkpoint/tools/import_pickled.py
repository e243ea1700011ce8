"""Import weights that must be unpickled: torch's DCP directories, Megatron's among them, and verl's FSDP checkpoints.

A child process unpickles (`burnish.checkpoint.tools.unpickle`) and leaves safetensors files, whose tensors get canonical names
here. Left out: optimizer states, LoRA adapters.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor

from burnish.boxes.box import Box
from burnish.boxes.shards import Shard, TensorSpec
from burnish.checkpoint.tools.assets import read_assets
from burnish.checkpoint.tools.foreign_pieces import ForeignPiece
from burnish.checkpoint.tools.importing import mapped_tensors
from burnish.checkpoint.tools.torch_dist import is_torch_dist, shards_of, tensor_names
from burnish.checkpoint.tools.unpickle import PIECES, known_part
from burnish.config.schema import ModelConfig
from burnish.errors import CorruptError, IncompatibleError, MissingError, UsageError, few
from burnish.files.durable import read_whole
from burnish.files.sandbox import landlock_version
from burnish.files.storage import LocalStorage
from burnish.files.strict_json import parse_json
from burnish.models.loading import build_on_meta, read_model_config
from burnish.models.megatron_names import Naming
from burnish.models.names import Region, regions, tied_names

_DCP_METADATA = ".metadata"
_VERL = re.compile(r"model_world_size_([0-9]{1,6})_rank_([0-9]{1,6})\.pt")
_PIECES_LIMIT = 256 << 20
_CHILD = """
import json, sys
task = json.load(sys.stdin)
sys.path[:] = task.pop("path")
from pathlib import Path
from burnish.files.sandbox import keep_writes_to, limit_files
if task.pop("sandboxed"):
    keep_writes_to(Path(task["target"]))
limit_files(task.pop("most_bytes"))
from burnish.checkpoint.tools.unpickle import convert
task |= {name: Path(task[name]) for name in ("source", "target")}
try:
    convert(**task | {"names": frozenset(task["names"])})
except Exception as error:
    sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
"""


def pickled_kind(source: Path) -> str | None:
    """ "dcp", "torch_dist" (Megatron's) or "verl" where `source` is such a directory, None for any other."""
    if (source / _DCP_METADATA).is_file():
        return "torch_dist" if is_torch_dist(source) else "dcp"
    return "verl" if any(_VERL.fullmatch(path.name) for path in source.glob("*.pt")) else None


def guarded_by(version: int) -> str:
    """Say in a sentence what a Landlock of this version, 0 for none, forbids to the unpickling process."""
    if version:
        network = ", and from TCP" if version >= 4 else ""
        return f"unpickled by a process that Landlock {version} kept from writing elsewhere, from starting programs{network}"
    return "unpickled by a process of its own; this kernel has no Landlock to keep it from writing"


class Pickled:
    """A DCP directory, one of Megatron's iterations or verl's `actor/`; a `Foreign` that unpickles on demand.

    `assets` is a Hugging Face directory with the model's config.json. `landlock` is the kernel's version, asked if None. Raises
    `UsageError` without Landlock, unless `without_sandbox`, and `MissingError` for missing files.
    """

    def __init__(
        self,
        source: Path,
        assets: Path,
        *,
        without_sandbox: bool = False,
        landlock: int | None = None,
    ) -> None:
        kind = pickled_kind(source)
        if kind is None:
            raise MissingError(
                f"{source} is no checkpoint of DCP, Megatron or verl",
                have="no such directory" if not source.is_dir() else "none of their files",
                want=f"{_DCP_METADATA} and *.distcp, or model_world_size_*_rank_*.pt",
                do="give the directory that these files lie in",
            )
        self.kind, self.source = kind, source
        self._files = _verl_files(source) if kind == "verl" else _dcp_files(source)
        version = landlock_version() if landlock is None else landlock
        if not version and not without_sandbox:
            raise UsageError(
                f"{source} cannot be unpickled in a sandbox",
                have="a kernel without Landlock",
                want="one that keeps the process from writing and from starting programs",
                do="import it on a machine with Linux 5.13 or later; or, where its origin is trusted, add --without-sandbox",
            )
        self._sandboxed = bool(version)
        self.guard = guarded_by(version)
        self.assets: Mapping[str, bytes] = read_assets(assets)
        hf_config = read_model_config(ModelConfig(path=str(assets)))
        self._naming = Naming.of(hf_config) if kind == "torch_dist" else None
        model = build_on_meta(hf_config)
        self._regions: dict[str, list[Region]] = {}
        for region in regions(model):
            self._regions.setdefault(region.parameter, []).append(region)
        self._canonical = {each.name: each for found in self._regions.values() for each in found}
        self._tied = tied_names(model)
        self._shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        self._names: Collection[str] = self._shapes.keys() | self._canonical.keys()
        if self._naming is not None:
            self._names = tensor_names(self._canonical)

    def weights(self, scratch: Path) -> list[Shard]:
        """Unpickle in a child process and name the tensors.

        Raises `CorruptError` if unpickling fails or meets anything but tensors, `MissingError` for an absent tensor, `IncompatibleError`
        for another shape.
        """
        task = _Task(self.kind, self.source, self._files, self._names, self._sandboxed)
        _unpickle(task, scratch)
        pieces = self._below_one_prefix(list(_pieces(scratch, self.source)))
        present = {piece.name for piece in pieces}
        shards = [shard for piece in pieces for shard in self._shards(piece, present)]
        absent = self._canonical.keys() - {shard.spec.name for shard in shards}
        if absent:
            raise MissingError(
                f"{self.source} lacks {len(absent)} tensors of the model",
                have=f"{len(present)} that the model has",
                want=few(sorted(absent)),
                do="give the config.json that belongs to these weights with --assets",
            )
        return shards

    def _below_one_prefix(self, pieces: list[ForeignPiece]) -> list[ForeignPiece]:
        """The pieces below the prefix that most of the model's names have, less the prefix."""
        known = {piece.name: known_part(piece.name, self._names) for piece in pieces}
        counts = Counter(key.removesuffix(known[key]) for key in known)
        prefix = min(counts, key=lambda each: (-counts[each], len(each)), default="")
        return [
            ForeignPiece(known[p.name], p.shape, p.box, p.tensor)
            for p in pieces
            if p.name == prefix + known[p.name]
        ]

    def _shards(self, piece: ForeignPiece, present: set[str]) -> Iterator[Shard]:
        """The canonical tensors' parts that a piece is made of."""
        if self._naming is not None:
            shapes = {each: region.shape for each, region in self._canonical.items()}
            yield from shards_of(piece, self._naming, shapes)
            return
        name = piece.name
        if name in self._tied and self._tied[name] not in present:
            name = self._tied[name]
        found = self._regions.get(name, [])
        wanted = self._shapes[name] if found else None
        if name in self._canonical and piece.shape == self._canonical[name].shape != wanted:
            spec = TensorSpec(name, piece.shape, piece.tensor.dtype)
            yield Shard(spec, piece.box, piece.tensor)
            return
        if found and piece.shape != wanted:
            raise IncompatibleError(
                f"tensor {piece.name} in {self.source} has another shape than the model's",
                have=list(piece.shape),
                want=list(wanted or ()),
                do="give the config.json that belongs to these weights with --assets",
            )
        for region in found:
            yield from piece.part_of(region)


def _verl_files(source: Path) -> list[str]:
    """The ranks' files, by rank."""
    found = {path.name: _VERL.fullmatch(path.name) for path in source.glob("*.pt")}
    worlds = sorted({int(match[1]) for match in found.values() if match})
    if len(worlds) > 1:
        raise IncompatibleError(
            f"{source} holds checkpoints of several sizes",
            have=worlds,
            want="one world size",
            do="move the files of all others away",
        )
    names = [f"model_world_size_{worlds[0]}_rank_{rank}.pt" for rank in range(worlds[0])]
    absent = [name for name in names if name not in found]
    if absent:
        raise MissingError(
            f"{source} lacks {absent[0]}",
            have=f"{worlds[0] - len(absent)} files",
            want=f"the files of {worlds[0]} ranks",
            do="get those of all ranks: each machine may have its own",
        )
    return names


def _dcp_files(source: Path) -> list[str]:
    found = sorted(path.name for path in source.glob("*.distcp"))
    if not found:
        raise MissingError(
            f"{source} lacks tensors",
            have=_DCP_METADATA,
            want="*.distcp",
            do="get those of all ranks: each machine may have its own",
        )
    return found


@dataclass(frozen=True, slots=True)
class _Task:
    """What the child is to do."""

    kind: str
    source: Path
    files: list[str]
    names: Collection[str]
    sandboxed: bool


def _unpickle(task: _Task, scratch: Path) -> None:
    """Run the child, with an empty environment; raises `CorruptError` where it fails."""
    source = task.source
    told = {
        "path": sys.path,
        "kind": task.kind,
        "source": str(source.absolute()),
        "files": task.files,
        "names": sorted(task.names),
        "sandboxed": task.sandboxed,
        "target": str(scratch.absolute()),
        "most_bytes": sum((source / name).stat().st_size for name in task.files) + (64 << 20),
    }
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-I", "-c", _CHILD],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        check=False,
        cwd=scratch,
        env=kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise CorruptError(
            f"{source} cannot be unpickled safely",
            have=said[-1][:1000] if said else f"a child process that ended with {done.returncode}",
            want="tensors, and nothing that has to run code",
            do="convert it to safetensors with the program that wrote it",
        )


def _pieces(scratch: Path, source: Path) -> Iterator[ForeignPiece]:
    """What the child left, read as if a stranger had written it."""
    wrong = CorruptError(
        f"what was unpickled from {source} is not in order",
        do="do not trust it; convert it to safetensors with the program that wrote it",
    )
    try:
        listed = parse_json(read_whole(LocalStorage(), scratch / PIECES, _PIECES_LIMIT), PIECES)
    except (OSError, ValueError) as error:
        raise wrong from error
    opened: dict[str, dict[str, Tensor]] = {}
    if not isinstance(listed, list):
        raise wrong
    for each in listed:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            raise wrong
        file, shape, offsets = str(each.get("file")), each.get("shape"), each.get("offsets")
        if Path(file).name != file or not _counts(shape) or not _counts(offsets):
            raise wrong
        if file not in opened:
            opened[file] = mapped_tensors(scratch / file)
        tensor = opened[file].get(str(each.get("tensor")))
        if tensor is None or not len(tensor.shape) == len(shape) == len(offsets):
            raise wrong
        box = Box(tuple(offsets), tuple(tensor.shape))
        if not box.fits(tuple(shape)):
            raise wrong
        yield ForeignPiece(each["name"], tuple(shape), box, tensor)


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)

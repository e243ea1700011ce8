"""Import weights that must be unpickled: torch's DCP directories, Megatron's among them, and verl's FSDP checkpoints.

Megatron's `torch_dist` is DCP with a metadata.json (`burnish.checkpoint.tools.import_megatron`). Left out: optimizer states and LoRA
adapters.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from burnish.boxes.box import Box
from burnish.boxes.shards import Shard, TensorSpec
from burnish.checkpoint.tools import sandbox
from burnish.checkpoint.tools.assets import CONFIG, read_assets
from burnish.checkpoint.tools.import_megatron import (
    MegatronPieces,
    require_known_layout,
    saved_parameters,
)
from burnish.checkpoint.tools.importing import ForeignCheckpoint, mapped_tensors
from burnish.checkpoint.tools.unpickle import known_part, without_numbers
from burnish.config.schema import ModelConfig
from burnish.errors import CorruptError, IncompatibleError, MissingError, UsageError, few
from burnish.files.strict_json import parse_json
from burnish.models.composite import language_within
from burnish.models.loading import read_model_config
from burnish.models.meta_init import build_on_meta
from burnish.models.names import Region, regions, tied_names

_DCP_METADATA = ".metadata"
_METADATA = "metadata.json"
_METADATA_LIMIT = 1 << 16
_VERL = re.compile(r"model_world_size_([0-9]{1,6})_rank_([0-9]{1,6})\.pt")
_CHILD = """
import json, sys
task = json.load(sys.stdin)
sys.path[:] = task.pop("path")
from pathlib import Path
from burnish.checkpoint.tools import sandbox
if task.pop("sandboxed"):
    sandbox.keep_writes_to(Path(task["target"]))
if sandbox.has_seccomp():
    sandbox.forbid_calls()
sandbox.limit_files(most_bytes := task.pop("most_bytes"))
from burnish.checkpoint.tools.unpickle import convert
sandbox.limit_memory((1 << 30) + 2 * most_bytes)
task |= {name: Path(task[name]) for name in ("source", "target")}
try:
    convert(**task | {"names": frozenset(task["names"])})
except Exception as error:
    sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))
"""


def pickled_kind(source: Path) -> str | None:
    """Return "dcp", "torch_dist" (Megatron's), "verl" or None."""
    if not (source / _DCP_METADATA).is_file():
        return "verl" if any(_VERL.fullmatch(path.name) for path in source.glob("*.pt")) else None
    path = source / _METADATA
    if not path.is_file() or path.stat().st_size > _METADATA_LIMIT:
        return "dcp"
    metadata = parse_json(path.read_bytes(), str(path))
    is_megatron = isinstance(metadata, dict) and metadata.get("sharded_backend") == "torch_dist"
    return "torch_dist" if is_megatron else "dcp"


def guarded_by(version: int, *, seccomp: bool) -> str:
    """Say which of the child's rights this version of Landlock and seccomp remove, and which remain."""
    forbidden = {
        "writing elsewhere and starting programs": version > 0,
        "TCP": seccomp or version >= sandbox.TCP_VERSION,
        "signals to other processes": seccomp or version >= sandbox.SCOPES_VERSION,
        "other sockets and changing files' modes, owners and times": seccomp,
    }
    prevented = ", ".join(right for right, is_so in forbidden.items() if is_so) or "nothing"
    possible = ", ".join(right for right, is_so in forbidden.items() if not is_so)
    lacks = f"; this kernel could not keep it from: {possible}" if possible else ""
    guards = f"Landlock {version or 'absent'}, seccomp {'present' if seccomp else 'absent'}"
    return f"unpickled by a process that was kept from: {prevented} ({guards}){lacks}"


def pickled(
    kind: str, source: Path, assets: Path, *, without_sandbox: bool = False
) -> ForeignCheckpoint:
    """Return the model of a directory of this `pickled_kind`; `ForeignCheckpoint.weights` unpickles its weights.

    `assets` is a directory with config.json. Raises `UsageError` without Landlock, unless `without_sandbox`, `MissingError`
    for missing files, and `IncompatibleError` for a model that also reads images.

    Asking for the weights raises `CorruptError` for anything but tensors, `MissingError`, and `IncompatibleError` for another
    shape.
    """
    assets_by_name = read_assets(assets)
    if language_within(assets_by_name[CONFIG]) is not None:
        raise IncompatibleError(
            f"{assets} describes a model that also reads images; an import would keep only its language model",
            want="the configuration of its language model",
            do="save that configuration beside the tokenizer (AutoConfig.from_pretrained(...).get_text_config().save_pretrained(...)), and give "
            "its directory with --assets",
        )
    files = _verl_files(source) if kind == "verl" else _dcp_files(source)
    version = sandbox.landlock_version()
    if not version and not without_sandbox:
        raise UsageError(
            f"{source} cannot be unpickled in a sandbox",
            have="a kernel without Landlock",
            want="one that keeps the process from writing and from starting programs",
            do="import it on a machine with Linux 5.13 or later; or, where its origin is trusted, add --without-sandbox",
        )
    hf_config = read_model_config(ModelConfig(path=str(assets)))
    model = build_on_meta(hf_config)
    parts = regions(model)
    name_pieces: Callable[[Iterable[Shard]], Iterator[Shard]]
    canonical = {region.name: region.shape for region in parts}
    if kind == "torch_dist":
        require_known_layout(source)
        names = saved_parameters()
        name_pieces = MegatronPieces(hf_config, canonical).shards_of
    else:
        names = frozenset(map(without_numbers, [*model.state_dict(), *canonical]))
        name_pieces = partial(_of_module, model=model, parts=parts)

    def weights(scratch: Path) -> list[Shard]:
        _unpickle(kind, source, files, names, scratch, sandboxed=bool(version))
        pieces = _below_one_prefix(_pieces(scratch, source), names)
        shards = list(name_pieces(pieces))
        if absent := canonical.keys() - {shard.spec.name for shard in shards}:
            raise MissingError(
                f"{source} lacks {len(absent)} tensors of the model",
                have=f"{len(canonical) - len(absent)} that the model has",
                want=few(sorted(absent)),
                do="give the config.json that belongs to these weights with --assets",
            )
        return shards

    return ForeignCheckpoint(
        kind, source, assets_by_name, weights, guarded_by(version, seccomp=sandbox.has_seccomp())
    )


def _of_module(
    pieces: Sequence[Shard], model: PreTrainedModel, parts: Iterable[Region]
) -> Iterator[Shard]:
    by_parameter: dict[str, list[Region]] = {}
    for region in parts:
        by_parameter.setdefault(region.parameter, []).append(region)
    canonical = {region.name: region.shape for region in parts}
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tied = tied_names(model)
    present = {piece.spec.name for piece in pieces}
    for piece in pieces:
        name = piece.spec.name
        shape = piece.spec.shape
        if tied.get(name, name) not in present:
            name = tied[name]
        if name in canonical and shape == canonical[name] != shapes.get(name):
            yield _renamed(piece, name)
            continue
        for region in by_parameter.get(name, ()):
            if shape != shapes[name]:
                raise IncompatibleError(
                    f"tensor {piece.spec.name} has another shape than the model's",
                    have=list(shape),
                    want=list(shapes[name]),
                    do="give the config.json that belongs to these weights with --assets",
                )
            if (shard := region.shard_of(piece.tensor, piece.box)) is not None:
                yield shard


def _below_one_prefix(pieces: Sequence[Shard], names: Collection[str]) -> list[Shard]:
    """Return the pieces below the commonest prefix of known names."""
    known = {piece.spec.name: known_part(piece.spec.name, names) for piece in pieces}
    counts = Counter(key.removesuffix(part) for key, part in known.items())
    prefix = min(counts, key=lambda each: (-counts[each], len(each)), default="")
    return [
        _renamed(piece, known[piece.spec.name])
        for piece in pieces
        if piece.spec.name == prefix + known[piece.spec.name]
    ]


def _renamed(piece: Shard, name: str) -> Shard:
    return replace(piece, spec=piece.spec._replace(name=name))


def _verl_files(source: Path) -> list[str]:
    matches = {path.name: _VERL.fullmatch(path.name) for path in source.glob("*.pt")}
    worlds = sorted({int(match[1]) for match in matches.values() if match})
    if len(worlds) > 1:
        raise IncompatibleError(
            f"{source} holds checkpoints of several sizes",
            have=worlds,
            want="one world size",
            do="move the files of all others away",
        )
    names = [f"model_world_size_{worlds[0]}_rank_{rank}.pt" for rank in range(worlds[0])]
    absent = [name for name in names if name not in matches]
    if absent:
        have = f"{worlds[0] - len(absent)} files"
        want = f"the files of {worlds[0]} ranks"
        raise _missing(source, absent[0], have, want)
    return names


def _dcp_files(source: Path) -> list[str]:
    names = sorted(path.name for path in source.glob("*.distcp"))
    if not names:
        raise _missing(source, "tensors", _DCP_METADATA, "*.distcp")
    return names


def _missing(source: Path, what: str, have: str, want: str) -> MissingError:
    do = "get the files of all ranks: each machine may have its own"
    return MissingError(f"{source} lacks {what}", have=have, want=want, do=do)


def _unpickle(
    kind: str,
    source: Path,
    files: list[str],
    names: Collection[str],
    scratch: Path,
    *,
    sandboxed: bool,
) -> None:
    """Run the child with an empty environment. Raises `CorruptError`."""
    task = {
        "path": sys.path,
        "kind": kind,
        "source": str(source.absolute()),
        "files": files,
        "names": sorted(names),
        "target": str(scratch.absolute()),
        "sandboxed": sandboxed,
        "most_bytes": sum((source / name).stat().st_size for name in files) + (64 << 20),
    }
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    child = subprocess.run(
        [sys.executable, "-I", "-c", _CHILD],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        check=False,
        cwd=scratch,
        env=environment,
    )
    if child.returncode:
        lines = child.stderr.strip().splitlines()
        raise CorruptError(
            f"{source} cannot be unpickled safely",
            have=lines[-1][:1000]
            if lines
            else f"a process that ended with code {child.returncode}",
            want="tensors, and nothing that has to run code",
            do="convert it to safetensors with the program that wrote it",
        )


def _pieces(scratch: Path, source: Path) -> list[Shard]:
    pieces = []
    for path in sorted(scratch.glob("*.safetensors")):
        for key, tensor in mapped_tensors(path).items():
            match parse_json(key.encode(), f"the name of a tensor in {path}"):
                case [str(name), [*shape], [*offsets]] if all(
                    type(size) is int and size >= 0 for size in [*shape, *offsets]
                ):
                    box = Box(tuple(offsets), tuple(tensor.shape))
                    if box.fits(tuple(shape)):
                        spec = TensorSpec(name, tuple(shape), tensor.dtype)
                        pieces.append(Shard(spec, box, tensor))
                        continue
            raise CorruptError(
                f"a tensor that was unpickled from {source} has an invalid name or shape",
                have=key,
                do="do not trust it; convert it to safetensors with the program that wrote it",
            )
    return pieces

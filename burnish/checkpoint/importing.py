"""A committed step out of somebody else's weights: those alone, for there is no training state to take over.

The source's files are mapped, not read into memory: pages of them come and go as the system likes,
and beside them there is what saving needs. Left out: files that have to be unpickled
(`burnish.checkpoint.pickled`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from burnish.checkpoint.assets import CONFIG, read_assets, with_dtype
from burnish.checkpoint.dtypes import BY_NAME
from burnish.checkpoint.save import Assets, Contents, save_step
from burnish.checkpoint.streams import model_files
from burnish.errors import CorruptError, IncompatibleError
from burnish.files.durable import naming_failures
from burnish.files.lease import Lease
from burnish.files.safetensors import TensorEntry, read_header
from burnish.files.storage import LocalStorage, Storage
from burnish.parallel.boxes import whole
from burnish.parallel.layout import Layout
from burnish.parallel.shards import Shard, TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class Foreign:
    """Weights that another program wrote."""

    kind: str
    """What wrote them: "huggingface", "dcp", "verl"."""
    source: Path
    """Where they lie."""
    weights: Sequence[Shard]
    """Pieces by canonical name, which together are the model."""
    assets: Mapping[str, bytes]
    """config.json and what else belongs to the model, by name."""


def read_directory(source: Path) -> Foreign:
    """The model of a Hugging Face directory.

    Raises `MissingError` where config.json or weights are missing, `CorruptError` for a file that
    is not what it says, `IncompatibleError` for a dtype that is not handled.
    """
    assets = read_assets(source)
    weights: dict[str, Shard] = {}
    for name in model_files(source):
        for tensor, value in mapped_tensors(source / name).items():
            if tensor in weights:
                raise CorruptError(f"tensor {tensor} is in two files of {source}")
            shape = tuple(value.shape)
            weights[tensor] = Shard(TensorSpec(tensor, shape, value.dtype), whole(shape), value)
    return Foreign("huggingface", source, list(weights.values()), assets)


def save_foreign(foreign: Foreign, root: Path, step: int, storage: Storage | None = None) -> Path:
    """Commit foreign weights as a step below `root`; returns its directory.

    fp32 weights are split into the bf16 of `model/` and a residual, and so come back exact; other
    dtypes stay as they are. Weights that are not finite make the step unhealthy. Raises
    `BurnishError` where the step exists or another run uses `root`.
    """
    storage = storage or LocalStorage()
    assets = dict(foreign.assets)
    if any(shard.spec.dtype == torch.float32 for shard in foreign.weights):
        assets[CONFIG] = with_dtype(assets[CONFIG], torch.bfloat16, foreign.source / CONFIG)
    origin = {"kind": foreign.kind, "source": str(foreign.source.absolute())}
    contents = Contents(
        weights=foreign.weights,
        training=[],
        state={"step": step, "imported": origin, "training": "absent"},
        write_assets=Assets(assets),
        healthy=all(map(_is_finite, foreign.weights)),
    )
    with naming_failures(f"{root} cannot be used"), Lease(root / ".lease"):
        return save_step(root, step, contents, Layout(), storage, reserve_bytes=0)


def _is_finite(shard: Shard) -> bool:
    """Whether it holds no NaN and no infinity; what has no norm (integers, 8-bit floats) counts as finite."""
    tensor = shard.tensor
    if not tensor.numel() or not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        return True
    return bool(torch.linalg.vector_norm(tensor, torch.inf).isfinite())


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, as views of the file: nothing is read yet, and nothing written back.

    Raises `CorruptError` and `IncompatibleError` naming the file.
    """
    entries = read_header(path).entries
    size = path.stat().st_size
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return {name: _view(path, raw, entry) for name, entry in entries.items()}


def _view(path: Path, raw: Tensor, entry: TensorEntry) -> Tensor:
    if entry.dtype not in BY_NAME:
        raise IncompatibleError(
            f"tensor {entry.name} in {path} has a dtype that is not handled",
            have=entry.dtype,
            want=", ".join(BY_NAME),
        )
    dtype = BY_NAME[entry.dtype]
    data = raw[entry.begin : entry.end]
    if entry.begin % dtype.itemsize:  # allowed by the format, and seen in old files
        data = data.clone()
    return data.view(dtype).view(entry.shape)

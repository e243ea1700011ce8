"""Make a committed step of somebody else's weights; there is no training state.

Source files are mapped, not read into memory.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from burnish.boxes.box import whole
from burnish.boxes.shards import Shard, TensorSpec
from burnish.boxes.tensor_reader import TORCH_DTYPES
from burnish.checkpoint.manifest import IMPORTED
from burnish.checkpoint.naming import MAIN
from burnish.checkpoint.retention import require_room
from burnish.checkpoint.save import (
    Assets,
    Contents,
    ModelContents,
    all_finite,
    check_new,
    save_step,
)
from burnish.checkpoint.steps import INFLIGHT, require_outside_steps
from burnish.checkpoint.tools.assets import CONFIG, read_assets, with_dtype
from burnish.checkpoint.writer import SavePlanner
from burnish.distributed.layout import Layout
from burnish.errors import CorruptError, IncompatibleError, MissingError, few
from burnish.files.durable import make_dirs_durably, naming_failures
from burnish.files.lease import Lease
from burnish.files.safetensors import TensorEntry, indexed_tensors, read_header, weight_files
from burnish.files.storage import LocalStorage, Storage


class Foreign(Protocol):
    """Weights of another program. Making one checks that all is there, and reads nothing."""

    kind: str
    """What wrote them: "huggingface", "dcp", "torch_dist" (Megatron), "verl"."""
    source: Path
    """Where they lie."""
    assets: Mapping[str, bytes]
    """config.json and what else belongs to the model, by name."""

    def weights(self, scratch: Path) -> list[Shard]:
        """Return pieces by canonical name that together are the model. `scratch` is an empty directory for the time of the block."""


class HuggingFace:
    """The model of a Hugging Face directory.

    Raises `MissingError` for missing files, `CorruptError` for a broken one, `IncompatibleError` for an unknown dtype.
    """

    kind = "huggingface"

    def __init__(self, source: Path) -> None:
        self.source = source
        self.assets: Mapping[str, bytes] = read_assets(source)
        self._weights: dict[str, Shard] = {}
        for path in weight_files(source):
            for tensor, value in mapped_tensors(path).items():
                if tensor in self._weights:
                    raise CorruptError(
                        f"tensor {tensor} is in two files of {source}",
                        have=f"it again in {path.name}",
                        do="remove the file that is not the model's",
                    )
                shape = tuple(value.shape)
                spec = TensorSpec(tensor, shape, value.dtype)
                self._weights[tensor] = Shard(spec, whole(shape), value)
        absent = sorted(indexed_tensors(source) - self._weights.keys())
        if absent:
            raise MissingError(
                f"{source} lacks tensors that its index names",
                have=f"no {few(absent)}",
                want="the model as a whole",
                do="get its files again",
            )

    def weights(self, scratch: Path) -> list[Shard]:
        """Every tensor, whole."""
        return list(self._weights.values())


def save_foreign(foreign: Foreign, root: Path, step: int, storage: Storage | None = None) -> Path:
    """Commit foreign weights as a step below `root`, and return its directory.

    A model all in fp32 is split into bf16 and a residual, and so stays exact. Non-finite weights make the step unhealthy. Raises
    `BurnishError` if the step exists or another run uses `root`.
    """
    storage = storage or LocalStorage()
    require_outside_steps(root, storage)
    with naming_failures(f"{root} cannot be used"):
        make_dirs_durably(storage, root, above=3)
    with naming_failures(f"{root} cannot be used"), Lease(root / ".lease"):
        check_new(root, step, storage)
        scratch = root / f"{INFLIGHT}{step:08d}.{uuid.uuid4().hex}"
        try:
            storage.make_dirs(scratch)
            weights = foreign.weights(scratch)
        finally:
            storage.remove(scratch)  # what is mapped stays until it is let go
        room = partial(require_room, root, step, reserve=0, storage=storage)
        contents = _contents(foreign, weights, step)
        return save_step(root, step, contents, SavePlanner(Layout()), storage, room)


def _contents(foreign: Foreign, weights: list[Shard], step: int) -> Contents:
    assets = dict(foreign.assets)
    split = {s.spec.dtype for s in weights if s.spec.dtype.is_floating_point} == {torch.float32}
    if split:
        assets[CONFIG] = with_dtype(assets[CONFIG], torch.bfloat16, foreign.source / CONFIG)
    origin = {"kind": foreign.kind, "source": str(foreign.source.absolute())}
    return Contents(
        models={MAIN: ModelContents(weights, [], Assets(assets))},
        state={"step": step, IMPORTED: origin, "training": "absent"},
        healthy=all_finite(weights),
        split=split,
    )


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, as read-only views of the mapped file.

    Raises `CorruptError` and `IncompatibleError` naming the file.
    """
    entries = read_header(path).entries
    size = path.stat().st_size
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return {name: _view(path, raw, entry) for name, entry in entries.items()}


def _view(path: Path, raw: Tensor, entry: TensorEntry) -> Tensor:
    if entry.dtype not in TORCH_DTYPES:
        raise IncompatibleError(
            f"tensor {entry.name} in {path} has a dtype that is not handled",
            have=entry.dtype,
            want=", ".join(TORCH_DTYPES),
            do="convert the model to bf16 or fp32 with the program that wrote it",
        )
    dtype = TORCH_DTYPES[entry.dtype]
    data = raw[entry.begin : entry.end]
    if entry.begin % dtype.itemsize:  # allowed by the format, and seen in old files
        data = data.clone()
    return data.view(dtype).view(entry.shape)

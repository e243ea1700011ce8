"""Commit another program's weights as a step, without training state. They are mapped, not read into memory."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from burnish.boxes.box import whole
from burnish.boxes.shards import Shard, TensorSpec
from burnish.boxes.tensor_reader import DirectoryReader, TensorInfo, locate
from burnish.checkpoint.manifest import IMPORTED
from burnish.checkpoint.save import Contents, ModelContents, Saver, check_new
from burnish.checkpoint.steps import INFLIGHT
from burnish.checkpoint.tools.assets import CONFIG, read_assets, require_outside_steps, with_dtype
from burnish.checkpoint.write_plan import MAIN
from burnish.distributed.layout import Layout
from burnish.errors import MissingError, few
from burnish.files.durable import make_dirs_durably, naming_failures
from burnish.files.lease import LEASE, holding_lease
from burnish.files.safetensors import read_header, unread_files, weight_map
from burnish.files.storage import LOCAL
from burnish.models.composite import kept_beside

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """Weights of another program, not yet read."""

    kind: str
    """The format: "huggingface", "dcp", "torch_dist" (Megatron), "verl"."""
    source: Path
    assets: Mapping[str, bytes]
    """config.json and the model's other small files, by name."""
    weights: Callable[[Path], list[Shard]]
    """Returns the model's pieces by canonical name. Its argument is an empty directory to work in."""
    guard: str | None = None
    """For the report: how this machine was protected from code in the source."""


def hugging_face(source: Path) -> ForeignCheckpoint:
    """Return the model of a Hugging Face directory.

    Raises `MissingError` for missing files, `CorruptError` for a broken one, `IncompatibleError` for an unknown dtype.
    """
    assets = read_assets(source)
    locations = DirectoryReader(source).locations
    if absent := sorted(weight_map(source).keys() - locations.keys()):
        raise MissingError(
            f"{source} lacks tensors that its index names",
            have=f"no {few(absent)}",
            want="the model as a whole",
            do="get its files again",
        )

    if others := unread_files(source):
        _log.warning("%s: %s is not imported", source, ", ".join(others))

    def weights(_: Path) -> list[Shard]:
        files = dict.fromkeys(location.file for location in locations.values())
        tensors = [item for file in files for item in load_file(source / file).items()]
        return [
            Shard(TensorSpec(name, tuple(t.shape), t.dtype), whole(tuple(t.shape)), t)
            for name, t in tensors
        ]

    return ForeignCheckpoint("huggingface", source, assets, weights)


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; writing to them does not change it. Raises `CorruptError` and
    `IncompatibleError`.
    """
    locate(path.parent, [("", path.name, read_header(path))])
    return load_file(path)


def save_foreign(foreign: ForeignCheckpoint, root: Path, step: int) -> Path:
    """Commit foreign weights as a step, split if all are fp32; return its directory.

    Raises `BurnishError` if the step exists or another run uses `root`.
    """
    require_outside_steps(root, LOCAL)
    with (
        naming_failures(f"{root} cannot be used"),
        _making(root),
        holding_lease(root / LEASE) as token,
    ):
        check_new(root, step, LOCAL)
        scratch = root / f"{INFLIGHT}{step:08d}.{uuid.uuid4().hex}"
        try:
            LOCAL.make_dirs(scratch)
            weights = foreign.weights(scratch)
        finally:
            LOCAL.remove(scratch)  # the mappings keep the files' content alive
        saver = Saver(root, Layout(), LOCAL, token=token)
        return saver.save(step, _contents(foreign, weights, step)).path


@contextmanager
def _making(root: Path) -> Iterator[None]:
    """Make a directory; if the block fails, remove what was made."""
    absent = [directory for directory in (root, *root.parents) if LOCAL.kind(directory) is None]
    make_dirs_durably(LOCAL, root, above=3)
    try:
        yield
    except BaseException:
        if absent:
            LOCAL.remove(root)
        with suppress(OSError):  # another process may be using them by now
            for directory in absent[1:]:
                directory.rmdir()
        raise


def _contents(foreign: ForeignCheckpoint, weights: list[Shard], step: int) -> Contents:
    assets = dict(foreign.assets)
    dtypes = {s.spec.dtype for s in weights}
    split = {dtype for dtype in dtypes if dtype.is_floating_point} == {torch.float32}
    if split or dtypes in ({torch.bfloat16}, {torch.float16}):
        dtype = torch.bfloat16 if split else dtypes.pop()
        assets[CONFIG] = with_dtype(assets[CONFIG], dtype, f"the model's {CONFIG}")
    origin = {"kind": foreign.kind, "source": str(foreign.source.absolute())}
    described = {s.spec.name: TensorInfo(s.spec.dtype, s.spec.shape) for s in weights}
    whole = kept_beside(foreign.assets[CONFIG], described)
    return Contents(
        models={MAIN: ModelContents(weights, [], assets, whole)},
        state={"step": step, IMPORTED: origin, "training": "absent"},
        check_finite=True,
        split=split,
    )

"""`burnish ckpt diff`, `export` and `import`: what looks into tensors, and so loads torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Literal

import torch

from burnish.boxes.tensor_reader import DirectoryReader, TensorReader
from burnish.checkpoint.naming import MODEL
from burnish.checkpoint.reader import StepReader
from burnish.checkpoint.steps import Committed
from burnish.checkpoint.tools.diff import Compared, compare
from burnish.checkpoint.tools.export import Exportable, MergedModel, StepModel, adapter_of, export
from burnish.checkpoint.tools.import_pickled import pickled, pickled_kind
from burnish.checkpoint.tools.importing import Foreign, hugging_face, save_foreign
from burnish.cli.ckpt_paths import Say, is_step, one_step, source_of
from burnish.cli.columns import bytes_text, count_text
from burnish.errors import UsageError
from burnish.files.cache import copied, select_directory
from burnish.files.remote import Remote
from burnish.files.safetensors import SUFFIX
from burnish.files.urls import is_url
from burnish.tracking.progress import Progress
from burnish.tracking.rundir import CHECKPOINTS
from burnish.train.localize import local_directory

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
"""What a model can be exported in."""

Unpickling = Literal["never", "sandboxed", "anyhow"]
"""What may be done with a source that has to be unpickled; "anyhow": without a sandbox too, where the kernel has none."""


def diff(a: PurePath, b: PurePath, say: Say) -> dict[str, Any]:
    """Compare two steps or Hugging Face directories, tensor by tensor; `same` says whether all are equal."""
    verdicts: Counter[str] = Counter()
    found = []
    with _open(a) as first, _open(b) as second:
        say(f"A  {first.path}\nB  {second.path}")
        for each in compare(first, second):
            verdicts[each.verdict] += 1
            found.append(each.as_json())
            if each.verdict != "equal":
                say(f"  {each.key}  {_words(each)}")
        counts = ", ".join(f"{verdict}: {count}" for verdict, count in sorted(verdicts.items()))
        say(f"tensors {counts or 'none'}")
        paths = {"a": str(first.path), "b": str(second.path)}
    return {**paths, "same": set(verdicts) <= {"equal"}, "counts": dict(verdicts), "tensors": found}


def exportable(step: Committed, role: str, base: Path | None, *, merged: bool) -> Exportable:
    """Return a step's model, a role's, or an adapter's merged model.

    Raises `UsageError` for choices that exclude each other.
    """
    if merged and role:
        raise UsageError(
            "only the run's own model has an adapter",
            have=f"--merged --role {role}",
            do="leave out --role",
        )
    if base is not None and not merged:
        raise UsageError(
            "--base is for --merged",
            have=f"--base {base}",
            want="--merged",
            do="add it, or leave out --base",
        )
    source = source_of(step.path.parent)
    if merged:
        return MergedModel(step, base or _base(adapter_of(step)["base"]), source)
    return StepModel(step, role, source)


def _base(place: str) -> Path:
    """Return the model that an adapter was trained on, copied from its URL if needed."""
    return local_directory(place, Progress(True).phase) if is_url(place) else Path(place)


def export_step(
    step: Committed, model: Exportable, target: Path, dtype: str, shard_gb: float, say: Say
) -> dict[str, Any]:
    """Write a model of a step as a plain Hugging Face directory."""
    if not 0 < shard_gb < math.inf:
        raise UsageError(
            "files need a size",
            have=f"--shard-gb {shard_gb}",
            want="more than 0",
            do="leave it out for the usual size",
        )
    with model:
        files = export(model, target, DTYPES[dtype], int(shard_gb * 1e9))
    path, size = str(target.absolute()), sum(files.values())
    say(f"{path}: {model.what} of {step.path.name} in {dtype}, {bytes_text(size)}")
    for name in files:
        say(f"  {name}")
    report = {"path": path, "step": step.step, "dtype": dtype}
    return report | {"files": list(files), "bytes": size}


def import_weights(
    source: PurePath,
    run: Path,
    step: int,
    assets: Path | None,
    say: Say,
    *,
    unpickling: Unpickling,
) -> dict[str, Any]:
    """Make a step of somebody else's weights, copied from their URL if needed."""
    if step < 0:
        raise UsageError("a step is 0 or more", have=f"--step {step}", do="leave it out for step 0")
    foreign = _foreign(_here(source), assets, unpickling)
    path = save_foreign(foreign, run / CHECKPOINTS, step)
    done = one_step(path)
    size = done.manifest.total_bytes
    with StepReader(done) as tensors:
        count = len(tensors.tensors)
    say(f"{path}: {count_text(count, 'tensor')} from {source} ({foreign.kind}), {bytes_text(size)}")
    if foreign.guard:
        say(foreign.guard)
    if not done.healthy:
        say("it is marked unhealthy, for there are weights that are not finite")
    say("training state is absent: a run begins from this, with")
    say(f"  model.path={path / 'model'}")
    return {
        "path": str(path),
        "step": step,
        "kind": foreign.kind,
        "source": str(source),
        "tensors": count,
        "bytes": size,
        "healthy": done.healthy,
        "training": "absent",
        "guard": foreign.guard,
    }


def _here(source: PurePath) -> Path:
    """A path of this machine; a copy of all that is behind a URL."""
    if isinstance(source, Path):
        return source
    selection = select_directory(Remote(str(source)), lambda name: True, deep=True)
    return copied(selection, Progress(True).phase)


def _foreign(source: Path, assets: Path | None, unpickling: Unpickling) -> Foreign:
    kind = pickled_kind(source)
    if kind is None:
        return hugging_face(source)
    if unpickling == "never":
        raise UsageError(
            f"{source} has to be unpickled ({kind}), which can run code that is in it",
            want="--unsafe-pickle, for a checkpoint whose origin is trusted",
            do="it is then done with torch's weights_only, by a process of its own",
        )
    inside = source / "huggingface"  # where verl puts it
    assets = assets or (inside if inside.is_dir() else source)
    return pickled(kind, source, assets, without_sandbox=unpickling == "anyhow")


def _open(path: PurePath) -> TensorReader:
    """A step, a run's newest one, or a Hugging Face directory."""
    if (
        isinstance(path, Path)
        and path.is_dir()
        and not is_step(path)
        and any(path.glob(f"*{SUFFIX}"))
    ):
        return DirectoryReader(path, f"{MODEL}/")
    step = one_step(path)
    return StepReader(step, source_of(step.path.parent))


def _words(found: Compared) -> str:
    if found.verdict == "another shape" and found.a and found.b:
        return f"another shape: {list(found.a.shape)}, {list(found.b.shape)}"
    if found.verdict == "another kind" and found.a and found.b:
        return f"another kind: {found.a.dtype}, {found.b.dtype}"
    distance = found.distance
    if distance is None or found.a is None:
        return found.verdict
    apart = (
        f"{distance.different:,} of {found.a.elements:,} elements, at most {distance.max_ulp:,} ulp, "
        f"relative {distance.max_relative:.3g}, absolute {distance.max_absolute:.3g}"
    )
    return f"{apart}, {distance.nonfinite:,} not finite" if distance.nonfinite else apart

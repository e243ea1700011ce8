"""`burnish ckpt diff`, `export` and `import`: commands that read tensors, and so load torch."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import torch

from burnish.boxes.tensor_reader import DirectoryReader, TensorReader
from burnish.checkpoint.load import StepReader
from burnish.checkpoint.manifest import ADAPTER_STATE
from burnish.checkpoint.steps import CommittedStep
from burnish.checkpoint.tools.diff import Distance, TensorDiff, compare_steps
from burnish.checkpoint.tools.export import Exportable, MergedModel, StepModel, adapter_of, export
from burnish.checkpoint.tools.import_pickled import pickled, pickled_kind
from burnish.checkpoint.tools.importing import ForeignCheckpoint, hugging_face, save_foreign
from burnish.checkpoint.write_plan import MODEL
from burnish.cli.ckpt import Report, Say, is_step, one_step
from burnish.errors import MissingError, UsageError, bytes_text, count_text, neighbours
from burnish.files.hub import HubPlace, is_elsewhere
from burnish.files.quantized import GGUF
from burnish.files.remote import Remote
from burnish.files.remote_copy import copied, select
from burnish.files.safetensors import SUFFIX
from burnish.runs.remote_copies import local_directory
from burnish.tracking.progress import Progress
from burnish.tracking.rundir import CHECKPOINTS

FILE_BYTES = 5_000_000_000
"""Largest size of a weights file."""
# Without --tensors, only this many tensors are shown: those that differ most.
_SHOWN_TENSORS = 5
_VERDICTS = {
    "equal": "equal",
    "differs": "different",
    "only in A": "only in A",
    "only in B": "only in B",
    "another shape": "of another shape",
    "another kind": "of another kind",
}
# OWNER/NAME of a repository.
_HUB_PARTS = 2
_LLAMA_CPP = "https://github.com/ggml-org/llama.cpp"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def diff(say: Say, path: PurePath, other: PurePath, *, tensors: bool) -> Report:
    """Compare two steps or Hugging Face directories, and show the tensors that differ most; `same` says whether all are equal."""
    with _open(path) as first, _open(other) as second:
        say(f"A  {first.path}\nB  {second.path}")
        differences = list(compare_steps(first, second))
    sets: dict[str, Distance] = {}
    for difference in differences:
        total = sets.setdefault(difference.key.partition("/")[0], Distance())
        total.square += difference.distance.square if difference.distance else 0.0
        total.square_of_a += difference.distance.square_of_a if difference.distance else 0.0
    for name, total in sets.items():
        own = [each for each in differences if each.key.startswith(f"{name}/")]
        verdicts = sorted(Counter(each.verdict for each in own).items())
        counts = ", ".join(f"{count} {_VERDICTS[verdict]}" for verdict, count in verdicts)
        is_compared = any(each.distance is not None for each in own)
        far = f"relative L2 {total.relative_l2:.3g}" if is_compared else "nothing in common"
        say(f"{name}  {far}; tensors: {counts}")
    differing = [difference for difference in differences if difference.verdict != "equal"]
    differing.sort(key=lambda e: -e.distance.relative_l2 if e.distance else -math.inf)
    for difference in differing if tensors else differing[:_SHOWN_TENSORS]:
        say(f"  {difference.key}  {_words(difference)}")
    if not tensors and len(differing) > _SHOWN_TENSORS:
        say(f"  and {len(differing) - _SHOWN_TENSORS} more, which --tensors shows")
    all_verdicts = Counter(difference.verdict for difference in differences)
    report = {"a": str(first.path), "b": str(second.path), "same": not differing}
    plain = [difference.as_json() for difference in differences]
    return {**report, "counts": dict(all_verdicts), "tensors": plain}


def _open(path: PurePath) -> TensorReader:
    if isinstance(path, Path) and not is_step(path) and any(path.glob(f"*{SUFFIX}")):
        return DirectoryReader(path, f"{MODEL}/")
    return StepReader(one_step(path))


def _words(difference: TensorDiff) -> str:
    a = difference.a
    b = difference.b
    distance = difference.distance
    if difference.verdict == "another shape" and a and b:
        return f"another shape: {list(a.shape)}, {list(b.shape)}"
    if difference.verdict == "another kind" and a and b:
        return f"another kind: {a.dtype}, {b.dtype}"
    if distance is None or a is None:
        return difference.verdict
    apart = (
        f"{distance.different:,} of {a.elements:,} elements, at most {distance.max_ulp:,} ulp, "
        f"relative L2 {distance.relative_l2:.3g}, relative {distance.max_relative:.3g}, absolute {distance.max_absolute:.3g}"
    )
    return f"{apart}, {distance.nonfinite:,} not finite" if distance.nonfinite else apart


def export_step(
    say: Say,
    path: PurePath,
    target: Path,
    *,
    dtype: str,
    shard_gb: float,
    gguf: str | None,
    **which: Any,
) -> Report:
    """Write the model of a step that `which` names as a Hugging Face directory, and say how llama.cpp makes `gguf` of it."""
    if not 0 < shard_gb < math.inf:
        raise UsageError(
            "--shard-gb is not a size of files",
            have=f"--shard-gb {shard_gb}",
            want="more than 0",
            do="leave it out for the usual size",
        )
    step = one_step(path)
    if gguf and ADAPTER_STATE in step.state and not (which["merged"] or which["role"]):
        raise UsageError(
            "llama.cpp makes GGUF files of whole models",
            have=f"an adapter in {step.path}",
            want="--merged",
            do="add --merged",
        )
    with exportable(step, **which) as model:
        files = export(model, target, DTYPES[dtype], int(shard_gb * 1e9))
    where = str(target.absolute())
    size = sum(files.values())
    say(f"{where}: {model.what} of {step.path.name} in {dtype}, {bytes_text(size)}")
    for name in files:
        say(f"  {name}")
    report: Report = {"path": where, "step": step.step, "dtype": dtype}
    if gguf:
        report["gguf"] = commands = [*_conversion(target, gguf)]
        say(f"llama.cpp makes {gguf} of it with")
        for command in commands:
            say(f"  {command}")
    return {**report, "files": list(files), "bytes": size}


def _conversion(directory: Path, kind: str) -> Iterator[str]:
    """Yield the commands that make a GGUF file. No package that is well kept does it."""
    file = directory.with_name(f"{directory.name}-{kind}.gguf")
    yield f"git clone {_LLAMA_CPP} && pip install -r llama.cpp/requirements.txt"
    words = [str(directory), "--outtype", kind, "--outfile", str(file)]
    yield shlex.join(["python", "llama.cpp/convert_hf_to_gguf.py", *words])


def exportable(step: CommittedStep, *, role: str, merged: bool, base: Path | None) -> Exportable:
    """Return a step's model, a role's, or an adapter's merged model. Raises `UsageError` for choices that exclude each other."""
    if merged and role:
        raise UsageError(
            "--merged is for the adapter of the run's own model; PEFT merges that of a critic",
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
    if not merged:
        return StepModel(step, role)
    if base is None:
        recorded = adapter_of(step)["base"]
        phase = Progress(True).phase
        base = local_directory(recorded, phase) if is_elsewhere(recorded) else Path(recorded)
    return MergedModel(step, base)


def import_weights(
    say: Say,
    path: PurePath,
    run: Path,
    *,
    step: int,
    assets: Path | None,
    unsafe_pickle: bool,
    without_sandbox: bool,
) -> Report:
    """Make a step from another program's weights, or a model's directory from a GGUF file. Copy them first if they are at a URL."""
    if step < 0:
        raise UsageError("a step is 0 or more", have=f"--step {step}", do="leave it out for step 0")
    if path.name.endswith(GGUF):
        if step or assets:
            raise UsageError(
                "a GGUF file becomes a model's directory, and no step",
                have="--step" if step else f"--assets {assets}",
                do="leave it out",
            )
        return _import_gguf(say, path, run)
    source = path
    if not isinstance(source, Path):
        selection = select(Remote(str(path)), lambda name: True, deep=True)
        source = copied(selection, Progress(True).phase)
    elif is_elsewhere(str(source)):
        source = local_directory(str(source), Progress(True).phase)
    foreign = _foreign(source, assets, unsafe_pickle, without_sandbox)
    place = save_foreign(foreign, run / CHECKPOINTS, step)
    done = one_step(place)
    size = done.manifest.total_bytes
    with StepReader(done) as tensors:
        count = len(tensors.tensors)
    say(f"{place}: {count_text(count, 'tensor')} from {path} ({foreign.kind}), {bytes_text(size)}")
    if foreign.guard:
        say(foreign.guard)
    if not done.healthy:
        say("it is marked unhealthy, because some weights are not finite")
    say("it has no training state; a new run begins from it with")
    say(f"  model.path={place / 'model'}")
    return {
        "path": str(place),
        "step": step,
        "kind": foreign.kind,
        "source": str(path),
        "tensors": count,
        "bytes": size,
        "healthy": done.healthy,
        "training": "absent",
        "guard": foreign.guard,
    }


def _import_gguf(say: Say, path: PurePath, target: Path) -> Report:
    from burnish.checkpoint.tools.import_gguf import import_gguf, require_importable

    require_importable(target)
    if not isinstance(path, Path):
        sizes = import_gguf(_copied_file(path), target)
    elif path.is_file():
        sizes = import_gguf(path, target)
    elif len(path.parts) > _HUB_PARTS and not path.is_absolute() and not path.parent.exists():
        hub = HubPlace.of(f"hf://{path}", "model")
        sizes = import_gguf(hub or path, target)
    else:
        raise MissingError(f"there is no file {path}", have=neighbours(path), do="correct the path")
    say(
        f"{target}: the model of {path}, {bytes_text(sum(sizes.values()))}; a run begins from it with"
    )
    say(f"  model.path={target}")
    return {
        "path": str(target.absolute()),
        "source": str(path),
        "files": list(sizes),
        "bytes": sum(sizes.values()),
    }


def _copied_file(path: PurePath) -> Path:
    place = copied(select(Remote(str(path)), lambda _: True), Progress(True).phase)
    return place / path.name if place.is_dir() else place


def _foreign(
    source: Path, assets: Path | None, unsafe_pickle: bool, without_sandbox: bool
) -> ForeignCheckpoint:
    kind = pickled_kind(source)
    if kind is None:
        return hugging_face(source)
    if not unsafe_pickle:
        raise UsageError(
            f"{source} has to be unpickled ({kind}), which can run code that is in it",
            want="--unsafe-pickle, for a checkpoint whose origin you trust",
            do="add it: a separate process then reads the pickles with torch's weights_only",
        )
    inside = source / "huggingface"  # verl puts config and tokenizer there
    assets = assets or (inside if inside.is_dir() else source)
    return pickled(kind, source, assets, without_sandbox=without_sandbox)

"""`burnish ckpt diff`: what looks into tensors, and so loads torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from burnish.checkpoint.diff import Compared, compare
from burnish.checkpoint.streams import SUFFIX, DirectoryTensors, StepTensors, TensorStream
from burnish.cli.ckpt_inspect import Say
from burnish.cli.ckpt_paths import is_step, one_step


def diff(a: Path, b: Path, say: Say) -> dict[str, Any]:
    """Compare two steps, or Hugging Face directories, tensor by tensor; `same` in the report says whether all are equal."""
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


def _open(path: Path) -> TensorStream:
    """A step, a run's newest one, or a Hugging Face directory."""
    if path.is_dir() and not is_step(path) and any(path.glob(f"*{SUFFIX}")):
        return DirectoryTensors(path)
    return StepTensors(one_step(path))


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

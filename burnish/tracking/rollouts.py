"""Write a step's prompts, completions and rewards to `step-XXXXXXXX.jsonl`.

A validation's go to `validation-XXXXXXXX.jsonl`. The same rollouts give the same bytes, in any
order and on any rank. Left out: token ids and log-probs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from burnish.errors import CorruptError
from burnish.tracking.rundir import write_atomically
from burnish.tracking.trackers import json_line, json_number, json_numbers

if TYPE_CHECKING:  # the record's module loads torch, which readers of rollouts do not need
    from burnish.records import Rollout

Kind = Literal["step", "validation"]
"""What rollouts are of: a training step, or the validation after it."""

_REQUIRED = {"step", "prompt_index", "prompt", "completion", "reward"}
"""What every row has, whoever wrote it."""


def rollouts_path(directory: Path, step: int, kind: Kind = "step") -> Path:
    """Return the path of a step's rollouts (`step-00000010.jsonl`) or its validation's."""
    return directory / f"{kind}-{step:08d}.jsonl"


def write_rollouts(
    directory: Path, step: int, rollouts: Sequence[Rollout], advantages: Sequence[float] | None
) -> Path:
    """Write a step's rollouts atomically, one JSON object a line, by prompt index and sample.

    `advantages` has each rollout's mean over tokens; None for a validation. Numbers that are not
    finite become strings (see `burnish.tracking.trackers`).
    """
    known = [None] * len(rollouts) if advantages is None else advantages
    rows = [_row(step, *pair) for pair in zip(rollouts, known, strict=True)]
    rows.sort(key=lambda row: (row["prompt_index"], row["sample"]))
    path = rollouts_path(directory, step, "validation" if advantages is None else "step")
    write_atomically(path, "".join(json_line(row) for row in rows))
    return path


def _row(step: int, rollout: Rollout, advantage: float | None) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_index": rollout.prompt.index,
        "sample": rollout.sample,
        "prompt": rollout.prompt.text,
        "completion": rollout.text,
        "answer": None if rollout.prompt.answer is None else str(rollout.prompt.answer),
        "reward": json_number(float(rollout.reward)),
        "reward_parts": json_numbers(rollout.reward_parts),
        "reward_error": rollout.reward_error,
        "advantage": None if advantage is None else json_number(float(advantage)),
        "stop_reason": rollout.completion.stop_reason,
        "length": len(rollout.completion.token_ids),
        "weights_version": rollout.completion.weights_version,
        "source": rollout.prompt.source,
    }


def rollout_files(directory: Path, kind: Kind = "step") -> list[tuple[int, Path]]:
    """Return steps and paths of this kind's files, ascending; empty without the directory."""
    paths = directory.glob(f"{kind}-*.jsonl")
    steps = ((path.stem.removeprefix(f"{kind}-"), path) for path in paths)
    return sorted((int(digits), path) for digits, path in steps if digits.isdecimal())


def discard_rollouts_after(directory: Path, step: int) -> None:
    """Remove later steps' files: a run that resumes from `step` makes them again."""
    for later, path in rollout_files(directory) + rollout_files(directory, "validation"):
        if later > step:
            path.unlink()


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """Return a file's rows. Raises `CorruptError` for a line that is not a rollout."""
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise CorruptError(f"{path}, line {number}, is not JSON", have=error) from error
            if not isinstance(row, dict) or not row.keys() >= _REQUIRED:
                raise CorruptError(
                    f"{path}, line {number}, is not a rollout",
                    have=line[:80],
                    want=f"an object with {', '.join(sorted(_REQUIRED))}",
                )
            yield row

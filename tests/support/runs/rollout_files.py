"""For tests of the viewer: rollout files as somebody else may have written them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.tracking.rollouts import Kind, rollouts_path


def row(index: int = 0, sample: int = 0, **values: Any) -> dict[str, Any]:
    made = {"prompt": f"prompt {index}", "completion": "yes", "reward": 1.0, "length": 3}
    return {"step": 0, "prompt_index": index, "sample": sample, **made, "source": "s", **values}


def write(
    directory: Path,
    step: int,
    rows: Sequence[dict[str, Any]],
    kind: Kind = "step",
    *,
    rest: bool = False,
    per_block: int = 2,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = rollouts_path(directory, step, kind, rest=rest)
    lines = [
        json.dumps(each, ensure_ascii=False).encode("utf-8", "backslashreplace") for each in rows
    ]
    starts = range(0, len(lines), per_block)
    path.write_bytes(
        b"".join(gzip.compress(b"\n".join(lines[i : i + per_block]) + b"\n") for i in starts)
    )
    return path

"""Write the 100 sums of two digits as conversations with an answer, and as pairs of a right and a wrong answer: 80 sums to train on, 20 held out.

python examples/smollm/data.py [DIRECTORY]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HELD_OUT = 20
WRONG_BY = (-2, -1, 1, 2)


def write(directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl`, `validation.jsonl` and the same sums as pairs into a directory, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    sums = [(left, right) for left in range(10) for right in range(10)]
    random.Random(seed).shuffle(sums)
    for name, part in {"validation": sums[:HELD_OUT], "train": sums[HELD_OUT:]}.items():
        rows = [
            {"prompt": question(left, right), "answer": str(left + right)} for left, right in part
        ]
        _write(directory / f"{name}.jsonl", rows)
        pairs = [pair(*numbers, wrong) for numbers in part for wrong in WRONG_BY]
        _write(directory / f"{name}-pairs.jsonl", pairs)


def question(left: int, right: int) -> list[dict[str, str]]:
    """Return a prompt."""
    return [{"role": "user", "content": f"What is {left} + {right}?"}]


def pair(left: int, right: int, wrong: int) -> dict[str, Any]:
    """Return a row of preferences, whose rejected answer is wrong by so much."""
    chosen, rejected = (
        [{"role": "assistant", "content": f"{left} + {right} = {left + right + error}"}]
        for error in (0, wrong)
    )
    return {"prompt": question(left, right), "chosen": chosen, "rejected": rejected}


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/data"))

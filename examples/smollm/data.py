"""Write the 100 sums of two digits as conversations with an answer: 80 to train on, 20 held out to validate on.

python examples/smollm/data.py [DIRECTORY]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HELD_OUT = 20


def write(directory: Path, seed: int = 0) -> None:
    """Write `train.jsonl` and `validation.jsonl` into a directory, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    sums = [(left, right) for left in range(10) for right in range(10)]
    random.Random(seed).shuffle(sums)
    _write_rows(directory / "validation.jsonl", sums[:HELD_OUT])
    _write_rows(directory / "train.jsonl", sums[HELD_OUT:])


def _write_rows(path: Path, sums: list[tuple[int, int]]) -> None:
    rows = (
        {
            "prompt": [{"role": "user", "content": f"What is {left} + {right}?"}],
            "answer": str(left + right),
        }
        for left, right in sums
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/data"))

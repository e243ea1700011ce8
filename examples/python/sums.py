"""Train a model with a Python function as reward, in one process or under torchrun.

python examples/python/sums.py Qwen/Qwen3-0.6B
torchrun --nproc-per-node 2 examples/python/sums.py Qwen/Qwen3-0.6B
"""

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import burnish

DATA = Path("runs/sums.jsonl")


def close(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 for the right number, less for a number further away, and 0 for no number."""
    numbers = [text.strip() for text in completions]
    return [
        1 / (1 + abs(int(number) - int(right))) if number.isdecimal() else 0.0
        for number, right in zip(numbers, answer, strict=True)
    ]


def write_sums(count: int = 64) -> None:
    draw = random.Random(0)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(count)]
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(model: str, **settings: Any) -> burnish.Result:
    write_sums()
    return burnish.rl(
        {
            "name": "python",
            "steps": 4,
            "model": {"path": model},
            "data": {"train": [DATA]},
            "batch": {"prompts": 4, "tokens_per_device": 512},
            "rollout": {"n": 4, "max_response_length": 4},
            "optim": {"lr": 1e-5},
        },
        reward=close,
        **settings,
    )


if __name__ == "__main__":
    result = main(sys.argv[1])
    if os.environ.get("RANK", "0") == "0":
        print("rewards:", *(f"{row['reward/mean']:.3f}" for row in result.metrics))
        print("model:", result.model)

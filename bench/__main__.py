"""Run all benchmarks of `make bench`, one after the other, each in its own process.

    python -m bench [--json]

With `--json` the last line is one object with all results. Other benchmarks take long, or need an accelerator or further
packages: start them by name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

BENCHMARKS = (
    "attention",
    "balance",
    "checkpoint",
    "generate",
    "grpo",
    "loading",
    "logprobs",
    "scale",
    "sft",
    "start",
)


def run(name: str) -> dict[str, Any]:
    """Run one benchmark and print its table. Return its JSON object, without results if it failed."""
    print(f"bench.{name}", flush=True)
    command = [sys.executable, "-m", f"bench.{name}", "--json"]
    lines = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False
    ).stdout.splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        print(f"  bench.{name} failed; its error is above", flush=True)
        return {"machine": {}, "results": []}
    print("\n".join(lines[:-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    found = [run(name) for name in BENCHMARKS]
    if arguments.json:
        machine: dict[str, Any] = next((one["machine"] for one in found if one["machine"]), {})
        results = [result for one in found for result in one["results"]]
        print(json.dumps({"machine": machine, "results": results}))


if __name__ == "__main__":
    main()

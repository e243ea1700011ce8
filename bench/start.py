"""The time that a run takes to begin, beside the imports that TRL's trainer needs.

Starts `burnish rl` with a model of 5 M parameters. Measures the time until its first line, and the processor time
that it has used when it prints the first step's line, minus the time of the step.

    python -m bench.start [--rounds 5] [--json]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.machine import Result, command_line, ratio, report
from bench.peers import peer_python
from bench.words import model_config, write_prompts, write_tokenizer

_TICKS = os.sysconf("SC_CLK_TCK")
_IMPORTS = "from datasets import Dataset; from transformers import AutoModelForCausalLM; from trl import GRPOTrainer"


class Start(NamedTuple):
    """Seconds of one start."""

    first_line: float
    """Wall-clock time from the command to the first line."""
    first_step: float
    """Processor time from the command to the beginning of the first step."""


def start(directory: Path) -> Start:
    """Run one step, and measure its beginning."""
    name = f"run-{time.time_ns()}"
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "burnish", "rl", "rl.yaml", f"name={name}"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = []
    first_line = None
    for line in process.stdout:
        said.append(line)
        first_line = first_line or time.perf_counter() - begun
        if line.startswith("step 1/1"):
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            used = (int(fields[11]) + int(fields[12])) / _TICKS
            process.communicate()
            metrics = (directory / "runs" / name / "metrics.jsonl").read_text().splitlines()
            step = json.loads(metrics[-1])["timing_s/step"]
            return Start(first_line, used - step)
    raise RuntimeError("".join(said))


def trl_imports(python: Path) -> float:
    """Return the processor time of Python's start and the imports of TRL's trainer."""
    before = os.times()
    subprocess.run([python, "-W", "ignore", "-c", _IMPORTS], check=True, capture_output=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    arguments = command_line(__doc__, rounds=5).parse_args()
    python = peer_python("trl")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_world(directory)
        rounds = [(start(directory), trl_imports(python)) for _ in range(arguments.rounds + 1)][1:]
    ours = [own.first_step for own, _ in rounds]
    theirs = [imports for _, imports in rounds]
    line = median(own.first_line for own, _ in rounds)
    step = median(ours)
    report(
        [
            Result("first line after the command", line, None, 1.0, "s", 1 / line, 1.0),
            Result("processor time before the first step", step, None, 6.0, "s", 6 / step, 1.0),
            Result(
                "beside TRL's imports alone",
                step,
                median(theirs),
                None,
                "s",
                ratio(theirs, ours),
                0.8,
            ),
        ],
        arguments.json,
    )


def write_world(directory: Path) -> None:
    """Write a tokenizer, prompts, a model's configuration and a run of one step."""
    write_tokenizer(directory / "tokenizer")
    write_prompts(directory / "prompts.jsonl", 64, 8)
    (directory / "config.json").write_text(json.dumps(model_config("5m")))
    (directory / "rl.yaml").write_text(
        """
name: start
output_dir: runs
steps: 1
model: {fresh: config.json, tokenizer: tokenizer}
data: {train: [prompts.jsonl], max_prompt_length: 16}
batch: {prompts: 4, tokens_per_device: 512}
rollout: {n: 4, slots: 16, max_response_length: 8}
reward: {functions: [{function: exact_match}]}
"""
    )


if __name__ == "__main__":
    main()

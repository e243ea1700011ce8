"""What the planner says beside what the engine and the generator allocate.

    python -m bench.planning [--write] [--cases NAME ...]

Every case is a small model on the CPU, one process or two, in processes of their own. Measured are all bytes that
torch's allocator gave out and has not got back (its own report to the profiler), at their highest in each
phase, in that of the second to fourth step in which it is least, because gloo's threads free what was sent whenever
they come to it; the plan is that of `burnish plan` for the same settings. Sequences have mixed
lengths in supervised cases. `--write` puts the table where the command and the tests read it
(`burnish/planning/accuracy.json`).
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from burnish.algorithms.loss import sft_loss
from burnish.config.schema import DistributedConfig, RunConfig
from burnish.data.batching import make_batch
from burnish.engines.base import Part
from burnish.engines.torch_engine import TorchEngine
from burnish.launch.run import launch
from burnish.models.counting import count_flops
from burnish.models.sources import FreshSource
from burnish.parallel.layout import Layout
from burnish.planning.accuracy import TABLE, Measured, measured_table, planned
from burnish.planning.workload import Command
from burnish.records import Example, Request
from burnish.rollout.base import Sampling
from burnish.rollout.builtin import BuiltinGenerator

CPU = torch.device("cpu")
STEPS = 4
MIXED = (0.31, 0.22, 0.16, 0.12, 0.09, 0.06, 0.04)
"""Lengths of a supervised micro-batch's sequences, as parts of it."""
BASE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 192, "num_experts": 8, "num_experts_per_tok": 2},
    "gemma3_text": {
        "query_pre_attn_scalar": 32,
        "sliding_window": 128,
        "tie_word_embeddings": True,
    },
    "qwen2": {"tie_word_embeddings": True},
}


@dataclass(frozen=True)
class Case:
    """A model and how it is run."""

    family: str
    """Its `model_type`."""
    precision: str
    """`engine.precision`."""
    checkpointing: str
    """`engine.activation_checkpointing`."""
    tokens: int
    """Of a micro-batch on one process."""
    processes: int = 1
    """Over which the model is sharded."""
    microbatches: int = 1
    """Of a step."""
    model: dict[str, Any] = field(default_factory=dict)
    """Further fields of its config.json."""
    command: Command = "sft"
    """rl: with a generator, log-probs before the update, and a reference."""

    @property
    def name(self) -> str:
        """All of it in a few words."""
        more = [f"{key}={value}" for key, value in self.model.items()]
        more += [f"{self.microbatches} micro-batches"] if self.microbatches > 1 else []
        return ", ".join(
            [
                f"{self.command} {self.family} {self.precision}",
                f"checkpointing {self.checkpointing}",
                f"{self.tokens} tokens",
                f"{self.processes} process{'es' if self.processes > 1 else ''}",
                *more,
            ]
        )

    def settings(self) -> dict[str, Any]:
        """The run's configuration."""
        fresh = {"model_type": self.family, **BASE, **MORE.get(self.family, {}), **self.model}
        engine = {
            "precision": self.precision,
            "activation_checkpointing": self.checkpointing,
            "logprob_chunk": 512,
        }
        values: dict[str, Any] = {"model": {"fresh": fresh}, "engine": engine}
        values["batch"] = {"tokens_per_device": self.tokens}
        if self.command == "sft":
            examples = len(MIXED) * self.microbatches * self.processes
            values["data"] = {"max_length": self.tokens // len(MIXED)}
            values["batch"]["examples"] = examples
            return values
        sequence = self.tokens // 8
        values["data"] = {"max_prompt_length": sequence // 4}
        values["rollout"] = {"n": 4, "max_response_length": sequence - sequence // 4}
        values["batch"] |= {"prompts": 4 * self.processes, "minibatches": 2}
        values["algorithm"] = {"kl": {"coef": 0.001}}
        return values


def _cases() -> Iterator[Case]:
    for family in ("llama", "qwen3", "gemma3_text", "olmo2", "qwen3_moe"):
        yield Case(family, "fp32", "none", 1024)
        yield Case(family, "bf16", "full", 1024)
    for checkpointing in ("none", "selective", "full"):
        yield Case("qwen3", "bf16", checkpointing, 4096)
    yield Case("qwen3", "fp32", "selective", 2048)
    yield Case("qwen2", "bf16", "none", 512, model={"vocab_size": 32768})
    yield Case("llama", "fp32", "full", 1024, model={"vocab_size": 32768})
    yield Case("qwen3", "bf16", "none", 256, microbatches=3)
    for checkpointing in ("none", "full"):
        yield Case("qwen3", "bf16", checkpointing, 1024, processes=2)
    yield Case("llama", "fp32", "selective", 1024, processes=2)
    yield Case("qwen3_moe", "bf16", "selective", 512, processes=2)
    yield Case("qwen3", "fp32", "none", 256, processes=2, microbatches=3)
    yield Case("qwen3", "fp32", "none", 1024, command="rl")
    yield Case("qwen3", "bf16", "selective", 2048, command="rl")
    yield Case("llama", "bf16", "full", 1024, command="rl", processes=2)


CASES = {case.name: case for case in _cases()}


class Meter:
    """Bytes that are allocated, at their highest in every phase."""

    def __init__(self) -> None:
        self._left = 0
        self.peaks: dict[str, list[int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block. All that it allocates or frees has to have been allocated in such blocks."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            yield
        events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        running = np.cumsum([self._left, *(event.nbytes() for event in events)])
        self.peaks.setdefault(name, []).append(int(running.max()))
        self._left = int(running[-1])


class Subject:
    """What is measured: the engines and the generator of a case."""

    def __init__(self, case: Case, layout: Layout, meter: Meter) -> None:
        self._config = config = RunConfig.model_validate(case.settings())
        self._case, self._layout, self._meter = case, layout, meter
        fresh = dict(config.model.fresh) if isinstance(config.model.fresh, dict) else {}
        self._hf = AutoConfig.for_model(fresh.pop("model_type"), **fresh)
        with meter.phase("setup"):
            self._engine = TorchEngine(
                self._hf, config.engine, config.optim, layout=layout, device=CPU
            )
            self._engine.load(FreshSource(self._hf, 0), Part.WEIGHTS)
            if case.command == "rl":
                self._reference = TorchEngine(
                    self._hf, config.engine, None, layout=layout, device=CPU
                )
                self._reference.load(FreshSource(self._hf, 0), Part.WEIGHTS)
                dtype = torch.bfloat16 if config.engine.precision == "bf16" else torch.float32
                self._generator = BuiltinGenerator(
                    self._hf, layout=layout, device=CPU, dtype=dtype, slots=256, eos_token_ids=()
                )
                self._publish()

    def step(self) -> None:
        """All phases once."""
        rng, config = np.random.default_rng(0), self._config
        lengths = [int(self._case.tokens * part) for part in MIXED]
        first = [1] * len(lengths)
        if self._case.command == "rl":
            prompt = config.data.max_prompt_length or 0
            lengths = [prompt + config.rollout.max_response_length] * 8
            first = [prompt] * 8
            with self._meter.phase("rollout"):
                self._roll_out(prompt)
        many = self._case.microbatches * self._layout.world
        examples = [
            Example(rng.integers(3, 2048, length), np.arange(length) >= start)
            for length, start in zip(lengths * many, first * many, strict=True)
        ]
        batch = make_batch(
            examples, self._layout, config.batch.tokens_per_device, count_flops(self._hf)
        )
        assert len(batch.microbatches) == self._case.microbatches
        if self._case.command == "rl":
            with self._meter.phase("log-probs"):
                self._engine.forward(batch)
                self._reference.forward(batch)
        with self._meter.phase("update"):
            self._engine.forward_backward(batch, sft_loss)
            self._engine.optim_step(1e-5)
        if self._case.command == "rl":
            with self._meter.phase("publish"):
                self._publish()

    def _roll_out(self, prompt: int) -> None:
        config = self._config
        rng = np.random.default_rng(1)
        requests = [
            Request(key, rng.integers(3, 2048, prompt), samples=config.rollout.n)
            for key in range(config.batch.prompts // self._layout.world)
        ]
        self._generator.generate(requests, Sampling(config.rollout.max_response_length))

    def _publish(self) -> None:
        self._generator.load_weights(self._engine.shards(Part.WEIGHTS), 0)


def rank_main(cases: Sequence[Case], file: Path) -> None:
    """One rank, case by case; rank 0 adds a line to the file for each."""

    def run(layout: Layout, _: torch.device) -> None:
        for case in cases:
            peaks = peaks_of(case, layout)
            gc.collect()
            if layout.is_main:
                with file.open("a") as lines:
                    lines.write(json.dumps([case.name, peaks]) + "\n")

    launch(run, DistributedConfig())


def peaks_of(case: Case, layout: Layout) -> dict[str, int]:
    """Bytes by phase on this rank."""
    meter = Meter()
    subject = Subject(case, layout, meter)
    for _step in range(STEPS):
        subject.step()
    return {name: min(values[1:]) for name, values in meter.peaks.items() if name != "setup"}


def measure(cases: Sequence[Case], processes: int) -> Iterator[tuple[Case, dict[str, int]]]:
    """Bytes by phase, from fresh processes."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "peaks.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={processes}", "-m", "bench.planning"]
        command += ["--rank-of", str(file), "--cases", *(case.name for case in cases)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        for line in file.read_text().splitlines():
            name, peaks = json.loads(line)
            yield CASES[name], peaks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="keep the table")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = [CASES[name] for name in arguments.cases]
    if arguments.rank_of:
        rank_main(cases, arguments.rank_of)
        return
    table: list[Measured] = []
    for processes in sorted({case.processes for case in cases}):
        some = [case for case in cases if case.processes == processes]
        for case, peaks in measure(some, processes):
            of_plan = planned(case.settings(), case.command, processes)
            for phase, bytes_measured in peaks.items():
                row = Measured(case.name, phase, int(of_plan[phase]), int(bytes_measured))
                table.append(row)
                print(f"{row.error:+6.1%} of {row.measured / 1e6:6.1f} MB  {phase:9}  {case.name}")
    worst = max(table, key=lambda row: abs(row.error))
    print(
        f"{len(arguments.cases)} cases; the worst is {worst.error:+.1%}: {worst.phase}, {worst.case}"
    )
    if arguments.write:
        others = [
            row for row in measured_table() if row.case in CASES.keys() - set(arguments.cases)
        ]
        rows = sorted([*others, *table], key=lambda row: list(CASES).index(row.case))
        TABLE.write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

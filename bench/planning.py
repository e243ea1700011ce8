"""Memory that the planner expects, beside memory that the engine and the generator allocate.

    python -m bench.planning [--write] [--cases NAME ...]

Every case is a small model on the CPU. A figure is the most bytes that torch's allocator had given out at one time in a phase
(`bench.planning_meter`). It is that of the second step or, with several real processes, the smaller of the second and third step:
gloo's threads free sent tensors at any time. The Megatron engine has its state from the start, so its first step counts too.
The plan is that of `burnish plan` for the same settings, on CPUs.

If the values of exchanged tensors do not matter, one process stands for all. torch's fake process group, which takes no memory,
replaces the others. In reinforcement learning, between the stages of a pipeline and between the holders of experts, values matter.
There the processes are real, and the fullest counts. After the last step of reinforcement learning a save is measured, with
the host memory that it takes (`bench.planning_saves`).

`--tracked` measures with torch's memory tracker instead, for supervised cases, which have sequences of mixed lengths. For layers of
full size there is only that tracker's figure, on a simulated accelerator (`bench.planning_imagined`). `--write` writes the table to
`tests/plan/measured.json`, where the tests read it.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, PretrainedConfig

from bench.planning_cases import CASES, MIXED, Case
from bench.planning_imagined import imagined_peak
from bench.planning_meter import Meter
from bench.planning_saves import Saves
from burnish.algorithms.critic import value_loss_fn
from burnish.algorithms.fine_tuning import sft_loss
from burnish.checkpoint.write_plan import MAIN
from burnish.config.schema import DistributedConfig, LoraConfig, OptimConfig, RunConfig
from burnish.data.batching import make_batch
from burnish.distributed.collectives import gather_objects
from burnish.distributed.device import has_matrix_units
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.engines.base import Engine, LossFn, Part
from burnish.engines.factory import make_engine
from burnish.engines.torch.embedding_rows import EmbeddingRows
from burnish.methods.sft import SFT
from burnish.models.divergence import DivergenceProbe, UniformReference
from burnish.models.loading import FreshSource
from burnish.models.lora.adapter import FreshAdapter
from burnish.models.meta_init import count_flops
from burnish.models.value_head import value_config
from burnish.records import Batch, Example, Request
from burnish.rollout.base import Sampling
from burnish.rollout.builtin.generator import BuiltinGenerator

TABLE = Path(__file__).parents[1] / "tests/plan/measured.json"
CPU = torch.device("cpu")
STEPS = 3


class Subject:
    """The engines and the generator of a case."""

    def __init__(self, case: Case, layout: Layout, meter: Meter) -> None:
        self._config = config = RunConfig.model_validate(case.settings())
        self._case = case
        self._layout = layout
        self._meter = meter
        fresh = dict(config.model.fresh) if isinstance(config.model.fresh, dict) else {}
        self._hf = AutoConfig.for_model(fresh.pop("model_type"), **fresh)
        self._reference: Engine | None = None
        self._critic: Engine | None = None
        with meter.phase("setup"):
            self._engine = self._made(self._hf, config.optim, config.model.adapter)
            away = [self._engine]
            if case.command == "rl":
                if not config.model.adapter:
                    self._reference = make_engine(
                        self._hf,
                        config.engine,
                        None,
                        layout=layout,
                        device=CPU,
                        beside=self._engine,
                    )
                    self._reference.load(FreshSource(self._hf, 0), Part.WEIGHTS)
                    away.append(self._reference)
                if config.algorithm.advantage.name == "gae":
                    self._critic = self._made(value_config(self._hf), config.optim)
                    away.append(self._critic)
                dtype = torch.bfloat16 if config.engine.precision == "bf16" else torch.float32
                self._generator = BuiltinGenerator(
                    self._hf,
                    layout=layout,
                    device=CPU,
                    dtype=dtype,
                    slots=256,
                    eos_token_ids=(),
                    lora=config.model.adapter_beside,
                )
                self._publish()
        self._away = away if config.engine.offload_during_rollout else []

    def _made(
        self, hf: PretrainedConfig, optim: OptimConfig, lora: LoraConfig | None = None
    ) -> Engine:
        engine = make_engine(
            hf, self._config.engine, optim, layout=self._layout, device=CPU, lora=lora
        )
        engine.load(FreshSource(hf, 0), Part.FROZEN if lora else Part.WEIGHTS)
        if lora:
            engine.load(FreshAdapter(0), Part.WEIGHTS)
        return engine

    def tensors(self) -> list[Tensor]:
        """Return weights and optimizer slots of the trained model."""
        return [shard.tensor for part in Part for shard in self._engine.shards(part)]

    def save(self) -> None:
        """Measure a save."""
        critic = {"critic": self._critic} if self._critic else {}
        saves = Saves(self._layout, background=self._config.checkpoint.background)
        with self._meter.phase("save"):
            size = saves.save({MAIN: self._engine, **critic})
        self._meter.add("save", size)
        saves.close()

    def close(self) -> None:
        """Close the engines, with their process groups."""
        for engine in (self._reference, self._critic, self._engine):
            if engine:
                engine.close()

    def step(self) -> None:
        """Run and measure all phases once."""
        rng = np.random.default_rng(0)
        config = self._config
        lengths = [int(self._case.together * part) for part in MIXED]
        first = [1] * len(lengths)
        if self._case.command == "rl":
            prompt = config.data.max_prompt_length or 0
            lengths = [prompt + config.rollout.max_response_length] * 8
            first = [prompt] * 8
            self._roll_out(prompt)
        many = self._case.microbatches * self._case.shares
        examples = [
            Example(
                rng.integers(3, 2048, length),
                np.arange(length) >= start,
                returns=np.zeros(length, np.float32),
            )
            for length, start in zip(lengths * many, first * many, strict=True)
        ]
        batch = make_batch(
            examples, self._engine.layout, config.microbatch_tokens, count_flops(self._hf)
        )
        assert len(batch.microbatches) == self._case.microbatches
        if self._case.command == "rl":
            with self._meter.phase("log-probs"):
                self._score(batch)
        with self._meter.phase("update"):
            if self._critic:
                self._critic.forward_backward(batch, value_loss_fn("token_mean", None, 1))
                self._critic.optim_step(1e-5)
            self._engine.forward_backward(self._compared(batch), self._loss())
            self._engine.optim_step(1e-5)
        if self._case.command == "rl":
            with self._meter.phase("publish"):
                self._publish()

    def _loss(self) -> LossFn:
        return SFT().loss(self._config) if self._case.command == "sft" else sft_loss()

    def _compared(self, batch: Batch) -> Batch:
        """Return a batch with what compares its distributions, if the case has label smoothing."""
        if not self._config.method:
            return batch
        masks = [micro.loss_mask for micro in batch.microbatches]
        probes = [DivergenceProbe(UniformReference(), mask[mask]) for mask in masks]
        return batch.with_field("probe", probes)

    def _score(self, batch: Batch) -> None:
        self._engine.forward(batch)
        if self._reference:
            self._reference.forward(batch)
        else:
            self._engine.forward(batch, adapter=False)
        if self._critic:
            self._critic.forward(batch)

    def _roll_out(self, prompt: int) -> None:
        config = self._config
        rng = np.random.default_rng(1)
        requests = [
            Request(key, rng.integers(3, 2048, prompt), samples=config.rollout.n)
            for key in range(config.batch.prompts // self._layout.world)
        ]
        with ExitStack() as parked:
            with self._meter.phase("parking"):
                for engine in self._away:
                    parked.enter_context(engine.offloaded())
            with self._meter.phase("rollout"):
                self._generator.generate(requests, Sampling(config.rollout.max_response_length))
            with self._meter.phase("parking"):
                parked.close()

    def _publish(self) -> None:
        self._generator.load_weights(self._engine.published(), 0)


def run_cases(cases: Sequence[Case], file: Path, tracked: bool) -> None:
    """Measure cases in this process, and write a line to the file for each."""
    how = tracked_peaks if tracked else peaks_of
    if not all(case.stands_alone for case in cases):
        launch(lambda layout, _: _run(cases, layout, file, how), DistributedConfig())
        return
    for case in cases:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.processes)
        # Numbers of rows are sent, so what arrives must be such numbers.
        with mock.patch.object(EmbeddingRows, "exchanged", lambda _, messages: messages.clone()):
            _run([case], Layout(0, case.processes, 0, case.processes), file, how)
        dist.destroy_process_group()


def _run(
    cases: Sequence[Case],
    layout: Layout,
    file: Path,
    how: Callable[[Case, Layout], dict[str, int]],
) -> None:
    for case in cases:
        mine = imagined_peak(case, layout) if case.size else how(case, layout)
        ranks = [mine] if case.stands_alone else gather_objects(mine, layout)
        peaks = {phase: max(rank[phase] for rank in ranks) for phase in mine}
        gc.collect()
        if layout.is_main:
            with file.open("a") as lines:
                lines.write(json.dumps([case.name, peaks]) + "\n")


def peaks_of(case: Case, layout: Layout) -> dict[str, int]:
    """Return the bytes by phase on this rank."""
    meter = Meter()
    subject = Subject(case, layout, meter)
    for _step in range(2 if case.stands_alone else STEPS):
        subject.step()
    if case.saves:
        subject.save()
    subject.close()
    meant = meter.peaks.keys() - {"setup", "parking"}
    first = 0 if case.is_megatron else 1
    peaks = {name: values for name, values in meter.peaks.items() if name in meant}
    return {name: min(values[first:] or values) for name, values in peaks.items()}


def tracked_peaks(case: Case, layout: Layout) -> dict[str, int]:
    """Return the same for an update, by torch's memory tracker, which follows the tensors of every operation."""
    subject = Subject(case, layout, Meter())
    subject.step()
    tracker = MemTracker()
    tracker.track_external(*subject.tensors())
    with tracker:
        subject.step()
    subject.close()
    return {"update": int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])}


def measure(cases: Sequence[Case], tracked: bool) -> Iterator[tuple[Case, dict[str, int]]]:
    """Yield each case and its bytes by phase, measured in fresh processes."""
    alone = [case for case in cases if case.stands_alone and not case.size]
    full = [case for case in cases if case.size]
    groups = [(0, some) for some in (alone, full) if some]
    for processes in sorted({case.processes for case in cases if not case.stands_alone}):
        some = [c for c in cases if not c.stands_alone and c.processes == processes]
        groups.append((processes, some))
    for processes, some in groups:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "peaks.jsonl"
            command = [sys.executable, "-m"]
            if processes:
                command += ["torch.distributed.run", "--standalone"]
                command += [f"--nproc-per-node={processes}", "-m"]
            command += ["bench.planning", "--into", str(file), "--cases"]
            command += [*(case.name for case in some), *(["--tracked"] if tracked else [])]
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
    parser.add_argument("--write", action="store_true", help="write the table for the tests")
    parser.add_argument("--tracked", action="store_true", help="measure by torch's memory tracker")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = [CASES[name] for name in arguments.cases]
    if arguments.into:
        run_cases(cases, arguments.into, arguments.tracked)
        return
    rows: list[dict[str, Any]] = []
    worst = (0.0, "")
    for case, peaks in measure(cases, arguments.tracked):
        planned = case.planned(shared_cache=not has_matrix_units(CPU))
        for phase, measured in peaks.items():
            rows.append({"case": case.name, "phase": phase, "measured": measured})
            error = planned[phase] / measured - 1
            worst = max(worst, (error, f"{phase}, {case.name}"), key=lambda each: abs(each[0]))
            print(f"{error:+6.1%} of {measured / 1e6:6.1f} MB  {phase:9}  {case.name}")
    print(f"{len(cases)} cases; the worst is {worst[0]:+.1%}: {worst[1]}")
    if arguments.write:
        kept = CASES.keys() - set(arguments.cases)
        rows += [row for row in json.loads(TABLE.read_text()) if row["case"] in kept]
        rows.sort(key=lambda row: list(CASES).index(row["case"]))
        TABLE.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()

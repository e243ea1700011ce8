"""Training and generating on one accelerator: MFU beside TRL and plain transformers, memory beside the plan, the cost of offload.

    python -m bench.gpu [--cases NAME ...] [--peers trl transformers] [--rounds N] [--profile DIRECTORY] [--tiny]

Fresh weights in the shapes of Qwen3-0.6B and 1.7B (28 layers, 151,936 words, tied embeddings), bf16 compute, AdamW.

  sft-SIZE-4k, -32k   updates with 4,096 or 32,768 tokens packed into a micro-batch, sequences of 1,024
  grpo                0.6B: 16 prompts of 128 tokens, 8 samples of 256 each, one update, no KL
  generate            0.6B: the built-in generator beside transformers' generate
  offload             0.6B, 32k: with `engine.activation_offload`, beside without
  megatron            0.6B: `engine.kind: megatron` beside the torch engine

The sides run one after the other, so that each has the whole memory of the device. The figures hold for a device that
nobody else uses. TRL (`bench.trl_sft`, `bench.trl_grpo`) and transformers (`bench.hf_step`) run in their own processes, once
with fp32 and once with bf16 weights; the faster of the two counts. A peer that cannot be installed, and a case that fails, are
named, and the others go on. A step is timed from an idle device to an idle device. Figures are medians over rounds, after
one round to warm up. A case takes a few minutes: `--cases` selects some.

MFU counts the model's operations: three forward passes over the trained tokens and, in GRPO, one more over the same
tokens to generate them. Padding and recomputation do not count. Memory is the peak of torch's allocator, beside the
figure of `burnish plan` for the same configuration. `--profile` runs one more step of each SFT case, and a short round
of the generator, under torch's profiler: tables by device time and by CPU time, and a trace for Perfetto. The table is
Markdown, for `docs/benchmarks.md`. `--tiny` runs everything in small shapes, also on a CPU. Its figures mean nothing: there,
memory is that of the whole process.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.generate import Sides
from bench.gpu_world import LR, GrpoWork, SftWork, grpo_config, sft_config
from bench.grpo import ByFirstToken, Ours
from bench.machine import interleaved, machine
from bench.peers import Peer
from bench.sft_ranks import Sft, clock
from bench.words import model_config
from burnish.config.schema import RunConfig
from burnish.distributed.device import current_device, peak_flops, peak_memory, reset_peak_memory
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.families import ModelShape
from burnish.methods.table import METHODS
from burnish.models.flops import Passed
from burnish.models.meta_init import count_flops
from burnish.plan.devices import parse_devices
from burnish.plan.layout_search import Planner
from burnish.rewards.pool import RewardPool
from burnish.rollout.base import Sampling

PEERS = ("trl", "transformers")
OPTIONAL = ("triton", "liger-kernel", "megatron-core")
"""Packages that change figures."""
PEER_WEIGHTS = ("float32", "bfloat16")
SFT = {
    "sft-0.6b-4k": SftWork("0.6b", 1024, 4096, 8),
    "sft-0.6b-32k": SftWork("0.6b", 1024, 32768),
    "sft-1.7b-4k": SftWork("1.7b", 1024, 4096, 8),
    "sft-1.7b-32k": SftWork("1.7b", 1024, 32768, recomputes=True),
}
GRPO = GrpoWork("0.6b", 16, 8, 128, 256, 32, 8192)
TINY_SFT = SftWork("5m", 32, 64)
TINY_GRPO = GrpoWork("5m", 2, 4, 6, 8, 8, 128)
# The device to plan for; bytes do not depend on the kind of accelerator.
_DEVICES = "1xH100-80G"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: str
    """Name of the case."""
    figure: str
    """Name of the figure, with its unit."""
    ours: float
    """Burnish's figure."""
    beside: str = ""
    """Name of the peer; "" for none."""
    theirs: float | str = ""
    """The peer's figure, or why there is none."""

    def __str__(self) -> str:
        theirs = self.theirs
        share = ""
        if not isinstance(theirs, str):
            share = f"{self.ours / theirs:.2f}"
            theirs = f"{theirs:.4g}"
        cells = (self.case, self.figure, f"{self.ours:.4g}", self.beside, theirs, share)
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Settings:
    """Arguments of the command."""

    peers: Sequence[str]
    """Some of `PEERS`."""
    rounds: int
    """Timed steps of each side."""
    tiny: bool
    """Whether all shapes are small."""
    directory: Path
    """Directory of models, which cases share, and of texts."""
    profile: Path | None = None
    """Directory of profiles; None: nothing is profiled."""

    def config(self, work: SftWork) -> RunConfig:
        """Return a run of `work` with texts for the timed steps, one to warm up and one to profile."""
        return sft_config(self.directory, work, self.rounds + 2)

    def profiles(self, case: str, step: Callable[[], object]) -> None:
        """Profile one call if `--profile` is given."""
        if self.profile is None:
            return
        self.profile.mkdir(parents=True, exist_ok=True)
        kinds = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        with torch.profiler.profile(activities=kinds) as profiler:
            step()
        found = profiler.key_averages()
        for clock_of in ("device", "cpu"):
            order = f"self_{clock_of}_time_total"
            table = found.table(sort_by=order, row_limit=80, max_name_column_width=90)
            (self.profile / f"{case}.{clock_of}.txt").write_text(table)
        profiler.export_chrome_trace(str(self.profile / f"{case}.json.gz"))


@dataclass(frozen=True)
class Taken:
    """Time and memory of our steps."""

    seconds: float
    """Median of a step."""
    peak: int
    """Most bytes allocated at one time, over all rounds."""
    device: torch.device
    """The device of the steps."""


def sft(case: str, settings: Settings) -> Iterator[Row]:
    """Yield tokens per second and MFU beside both peers, and memory beside the plan."""
    work = TINY_SFT if settings.tiny else SFT[case]
    config = settings.config(work)
    ours = _sft(config, settings, case)
    yield from _planned(case, work.size, config, "sft", {"update": ours.peak})
    for name in settings.peers:
        seconds = _fastest(_sft_peers(name, config, work), {}, settings.rounds)
        yield from _rates(case, work.size, work.lengths, ours, (name, seconds))
    if not settings.peers:
        yield from _rates(case, work.size, work.lengths, ours, ("", ""))


def grpo(case: str, settings: Settings) -> Iterator[Row]:
    """Yield generated tokens per second of a whole step and MFU beside TRL, and memory of each phase beside the plan."""
    work = TINY_GRPO if settings.tiny else GRPO
    with ExitStack() as stack:
        config = grpo_config(settings.directory, work)
        pool = stack.enter_context(RewardPool(config.reward))

        def run(layout: Layout, device: torch.device) -> tuple[Taken, dict[str, int]]:
            marks = _Marks(device)
            rule = ByFirstToken(work.response, work.response)
            trained = Ours(config, rule, layout, device, pool, marks)
            taken = _timed(trained.step, settings.rounds, device)
            trained.engine.close()
            return taken, marks.peaks(("rollout", "update", "publish"))

        ours, peaks = launch(run, config.distributed)
        _give_back()
        yield from _planned(case, work.size, config, "rl", peaks)
        theirs: tuple[str, float | str] = ("", "")
        if "trl" in settings.peers:
            question = {"lengths": [work.response] * work.completions}
            theirs = "trl", _fastest(_grpo_peers(config, work), question, settings.rounds)
        flops = count_flops(Qwen3Config(**model_config(work.size)))
        lengths = [work.prompt + work.response] * work.completions
        operations = flops.training(Passed.all_of(lengths)) + flops.forward(lengths)
        share = operations / peak_flops(ours.device, torch.bfloat16)
        made = float(work.completions * work.response)
        done = {"generated tokens/s of a step": made, "MFU": share}
        yield from _per_second(case, done, ours, theirs)


def generate(case: str, settings: Settings) -> Iterator[Row]:
    """Yield tokens per second of the built-in generator, with 128 completions at once."""
    size, length = ("5m", 8) if settings.tiny else ("0.6b", 256)
    config = Qwen3Config(**model_config(size))
    torch.manual_seed(0)
    with current_device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    sides = Sides(model, Sampling(length), [], 128)
    runs = {"ours": sides.ours, "peer": sides.peer}
    seconds = {side: median(s) for side, s in interleaved(runs, settings.rounds).items()}
    ours, theirs = (sides.made[side] / seconds[side] for side in runs)
    yield Row(case, "tokens/s", ours, "transformers", theirs)
    sides.sampling = Sampling(min(length, 32))
    settings.profiles(case, sides.ours)


def offload(case: str, settings: Settings) -> Iterator[Row]:
    """Yield the time that activations on the host cost, and the memory that they save."""
    work = TINY_SFT if settings.tiny else SFT["sft-0.6b-32k"]
    moved = replace(work, engine={"activation_offload": True})
    taken = [_sft(settings.config(each), settings) for each in (moved, work)]
    yield Row(case, "s per step", taken[0].seconds, "without", taken[1].seconds)
    yield Row(case, "GB at the most", taken[0].peak / 1e9, "without", taken[1].peak / 1e9)


def megatron(case: str, settings: Settings) -> Iterator[Row]:
    """Yield figures of the Megatron engine beside the torch engine, with the same tokens in a micro-batch."""
    works = [TINY_SFT] if settings.tiny else [SFT["sft-0.6b-4k"], SFT["sft-0.6b-32k"]]
    for work in works:
        kinds = [replace(work, engine={"kind": kind}) for kind in ("megatron", "torch")]
        taken = [_sft(settings.config(each), settings) for each in kinds]
        theirs = ("the torch engine", taken[1].seconds)
        yield from _rates(f"{case}-{work.packed}", work.size, work.lengths, taken[0], theirs)


CASES: dict[str, Callable[[str, Settings], Iterator[Row]]] = {
    **dict.fromkeys(SFT, sft),
    "grpo": grpo,
    "generate": generate,
    "offload": offload,
    "megatron": megatron,
}


class _Marks:
    """A clock that also records the peak memory since its last reading. `bench.grpo` reads it between the phases of a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now = clock(device)
        self._peaks: list[int] = []

    def __call__(self) -> float:
        now = self._now()
        self._peaks.append(peak_memory(self._device))
        reset_peak_memory(self._device)
        return now

    def peaks(self, phases: Sequence[str]) -> dict[str, int]:
        """Return the peak of each phase over all steps but the first. A step reads the clock before its first and after each phase."""
        reads = len(phases) + 1
        return {
            phase: max(self._peaks[place::reads][1:]) for place, phase in enumerate(phases, start=1)
        }


def _sft(config: RunConfig, settings: Settings, case: str | None = None) -> Taken:
    """Time a run's steps, and profile one for a named `case`."""

    def run(layout: Layout, device: torch.device) -> Taken:
        trained = Sft(config, layout, device)
        taken = _timed(trained.step, settings.rounds, device)
        if case is not None:
            settings.profiles(case, trained.step)
        trained.close()
        return taken

    taken = launch(run, config.distributed)
    _give_back()
    return taken


def _timed(step: Callable[[], tuple[float, list[int]]], rounds: int, device: torch.device) -> Taken:
    step()
    reset_peak_memory(device)
    seconds = [step()[0] for _ in range(rounds)]
    taken = Taken(median(seconds), peak_memory(device), device)
    _say(f"steps of {_listed(seconds)} s, at most {taken.peak / 1e9:.1f} GB")
    return taken


def _give_back() -> None:
    """Give unused memory back to the device, for the next side."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _rates(
    case: str, size: str, lengths: Sequence[int], ours: Taken, theirs: tuple[str, float | str]
) -> Iterator[Row]:
    """Yield tokens per second and MFU of an update on sequences of these lengths."""
    flops = count_flops(Qwen3Config(**model_config(size)))
    operations = flops.training(Passed.all_of(lengths))
    share = operations / peak_flops(ours.device, torch.bfloat16)
    yield from _per_second(case, {"tokens/s": float(sum(lengths)), "MFU": share}, ours, theirs)


def _per_second(
    case: str, done: Mapping[str, float], ours: Taken, theirs: tuple[str, float | str]
) -> Iterator[Row]:
    """Yield the amounts that a step does, by figure, over the seconds of both sides."""
    name, seconds = theirs
    for figure, amount in done.items():
        rate = seconds if isinstance(seconds, str) else amount / seconds
        yield Row(case, figure, amount / ours.seconds, name, rate)


def _planned(
    case: str, size: str, config: RunConfig, command: Literal["sft", "rl"], peaks: Mapping[str, int]
) -> Iterator[Row]:
    """Yield the bytes of each phase beside those of the plan."""
    shape = ModelShape.of(model_config(size))
    plan, _ = Planner(shape, config, METHODS[command], parse_devices(_DEVICES)).as_configured()
    assert plan is not None
    phases = plan.phases
    for phase, peak in peaks.items():
        need = sum(phases[phase].values()) - phases[phase].get("host", 0.0)
        yield Row(case, f"GB at the most, {phase}", peak / 1e9, "planned", need / 1e9)


def _fastest(
    peers: Mapping[str, Callable[[], Peer]], question: dict[str, Any], rounds: int
) -> float | str:
    """Return the seconds per step of the fastest setting, or why there are none."""
    found = []
    reason = ""
    for weights, start in peers.items():
        _say(f"a peer, weights in {weights}")
        try:
            with start() as peer:
                seconds = [peer.ask(question)["seconds"] for _ in range(rounds + 1)]
            found.append(median(seconds[1:]))
            _say(f"steps of {_listed(seconds)} s")
        except RuntimeError as error:
            reason = "out of memory" if "out of memory" in str(error) else "failed"
            _say(str(error))
        except subprocess.CalledProcessError as error:  # pip, on a machine without a network
            _say(str(error))
            return "not installed"
    return min(found) if found else reason


def _sft_peers(name: str, config: RunConfig, work: SftWork) -> dict[str, Callable[[], Peer]]:
    own = {
        "model": config.model.path,
        "lr": LR,
        "rows": work.rows,
        "checkpointing": work.recomputes,
    }
    if name == "trl":
        module = "bench.trl_sft"
        own |= {"texts": config.data.train[0], "examples": len(work.lengths)}
        own |= {"packing": None, "seed": 0}
    else:
        module = "bench.hf_step"
        own |= {"length": work.sequence, "passes": work.microbatches}
    return _by_weights("trl" if name == "trl" else None, module, own)


def _grpo_peers(config: RunConfig, work: GrpoWork) -> dict[str, Callable[[], Peer]]:
    own = {
        "model": config.model.path,
        "lr": LR,
        "seed": 0,
        "prompts": config.data.train[0],
        "prompts_per_step": work.prompts,
        "samples": work.samples,
        "max_tokens": work.response,
        "rows": work.rows,
        "clock": "wall",
    }
    return _by_weights("trl", "bench.trl_grpo", own)


def _by_weights(
    environment: str | None, module: str, own: Mapping[str, Any]
) -> dict[str, Callable[[], Peer]]:
    def started(weights: str) -> Callable[[], Peer]:
        settings = {**own, "weights_dtype": weights}
        return lambda: Peer(environment, module, settings, torch.get_num_threads())

    return {weights: started(weights) for weights in PEER_WEIGHTS}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _listed(seconds: Sequence[float]) -> str:
    return ", ".join(f"{each:.3f}" for each in seconds)


def _say(text: str) -> None:
    """Print progress and errors beside the table, with the time of day."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see whether it runs")
    parser.add_argument("--profile", type=Path, help="write tables of torch's profiler there")
    arguments = parser.parse_args()
    found = machine() | {name: _version(name) for name in OPTIONAL}
    print(", ".join(f"{name} {value}" for name, value in found.items()), end="\n\n")
    header = "| case | figure | Burnish | beside | theirs | ratio |\n|---|---|---|---|---|---|"
    print(header, flush=True)
    failed = []
    asked = arguments.peers, arguments.rounds, arguments.tiny
    with tempfile.TemporaryDirectory() as directory:
        settings = Settings(*asked, Path(directory), arguments.profile)
        for case in arguments.cases:
            _say(case)
            try:
                for row in CASES[case](case, settings):
                    print(row, flush=True)
            except Exception:  # noqa: BLE001 - the minutes of a lent device are for the others
                failed.append(case)
                _say(f"{case} failed\n{traceback.format_exc()}")
            _give_back()
    _say(f"failed: {', '.join(failed)}" if failed else "done")
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())

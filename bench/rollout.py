"""Generators inside the trainer, in a process beside it, and in `burnish serve`.

    python -m bench.rollout [--json] [--rounds N] [--cases tokens vllm update weights shared ahead]

All processes have one thread and compute in fp32 on the CPU. vLLM takes part if it is installed.

- `tokens`: 16 prompts of 24 tokens, 8 samples of each, 64 tokens each, 5 M parameters; beside Hugging Face `generate`.
- `vllm`: the same completions from vLLM in a process beside the trainer, and from vLLM alone with draws of its own and their log-probs.
- `update`: the weights of a model of 350 MB, beside a copy of the tensors within this process, and vLLM's own `reload_weights`.
- `weights`: the same weights to a process beside the trainer: through memory that both map, by broadcast (gloo) and over HTTP as to another
  machine. The limits are a copy within this process, and a broadcast of as many bytes to a process that does nothing with them. Beside the
  time of all, there are the time of the main thread, and the bytes over HTTP.
- `shared`: the same weights to a server with vLLM's tensor parallelism over two processes, which both map the memory, beside gloo's broadcasts
  to both: the time of all, the time of the main thread, and the processor time of all processes.
- `ahead`: `burnish rl` with `rollout.place: child`, `rollout.ahead` 0 and 1, in turns. `SLOTS` is chosen so that generating
  and training take equally long. The figure is the median of a run's steps without the first two and the last two.

Ratios are medians over rounds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from bench.machine import Result, command_line, interleaved, ratio, report
from bench.peers import Peer
from bench.words import model_config, write_prompts, write_tokenizer
from burnish.boxes.shards import Publication, Shard, TensorSpec
from burnish.config.load import read_config
from burnish.methods.parts.generators import make_generator
from burnish.models.names import model_shards
from burnish.records import Request
from burnish.rollout import messages
from burnish.rollout.base import Generator, Sampling
from burnish.rollout.client import Server, Upload
from burnish.rollout.staging import Staging, make_stagings
from burnish.runs.setup import lay_foundation
from burnish.tracking.trackers import read_metrics

PROMPTS = 16
SAMPLES = 8
PROMPT_LENGTH = 24
TOKENS = 64
PLACES = {
    "inside": ("builtin", "inside"),
    "child": ("builtin", "child"),
    "servers": ("builtin", "servers"),
    "vLLM child": ("vllm", "child"),
    "vLLM servers": ("vllm", "servers"),
}
"""Engine and place of each side."""
SLOTS = 32
STEPS = 12
GOALS = {"child": 1 / 1.5, "servers": 1 / 3, "memory": 2.0, "gloo": 1.2}
"""Goals for the time of vLLM's own `reload_weights` over that of an update, by place, and for that of HTTP over that of another way."""


@contextmanager
def world(size: str) -> Iterator[Path]:
    """Yield a directory with prompts, a tokenizer and a configuration with a new model of `size`."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = model_config(size)
        write_tokenizer(directory / "tokenizer")
        write_prompts(directory / "prompts.jsonl", 64 * PROMPTS, PROMPT_LENGTH)
        config = {
            "name": "bench",
            "output_dir": name,
            "steps": STEPS,
            "model": {"fresh": model, "tokenizer": str(directory / "tokenizer")},
            "data": {"train": [str(directory / "prompts.jsonl")]},
            "batch": {"prompts": PROMPTS, "tokens_per_device": 4096},
            "rollout": {"n": SAMPLES, "max_response_length": TOKENS, "slots": 128},
            "engine": {"precision": "fp32"},
            "algorithm": {"mismatch_cap": 2.0},
            "reward": {"functions": [{"function": "bench.words:even_share"}]},
            "tracking": {"trackers": [], "report": False, "rollouts_every": 0},
            "checkpoint": {"save_every": 0},
        }
        (directory / "config.yaml").write_text(yaml.safe_dump(config))
        yield directory


@contextmanager
def generators(
    directory: Path, places: Sequence[str] = tuple(PLACES)
) -> Iterator[dict[str, Generator]]:
    """Yield the generator of each place, without weights."""
    file = str(directory / "config.yaml")
    with ExitStack() as stack:
        made: dict[str, Generator] = {}
        for name in places:
            engine, place = PLACES[name]
            if engine == "vllm" and find_spec("vllm") is None:
                continue
            settings = [f"name={engine}", f"rollout.engine={engine}", f"rollout.place={place}"]
            if place == "servers":
                stack.enter_context(server([file, *settings]))
            foundation = lay_foundation(read_config(file, settings))
            made[name] = stack.enter_context(closing(make_generator(foundation)))
        yield made


@contextmanager
def server(arguments: Sequence[str]) -> Iterator[None]:
    """Run `burnish serve` in a process."""
    command = [sys.executable, "-m", "burnish", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def fresh_model(directory: Path) -> PreTrainedModel:
    """Return the model of the configuration in `world`, with new weights."""
    shape = dict(yaml.safe_load((directory / "config.yaml").read_text())["model"]["fresh"])
    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tokens(rounds: int) -> list[Result]:
    """Measure tokens per second of each place and of Hugging Face `generate`."""
    with world("5m") as directory, generators(directory) as made:
        model = fresh_model(directory)
        rng = np.random.default_rng(0)
        prompts = rng.integers(100, model.config.vocab_size, size=(PROMPTS, PROMPT_LENGTH))
        requests = [Request(i, prompt, SAMPLES) for i, prompt in enumerate(prompts)]
        counts: dict[str, int] = {}

        def ours(name: str) -> None:
            groups = made[name].generate(requests, Sampling(TOKENS))
            counts[name] = sum(len(each.token_ids) for group in groups for each in group)

        def peer() -> None:
            ids = torch.from_numpy(prompts)
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                do_sample=True,
                num_return_sequences=SAMPLES,
                top_k=None,
                pad_token_id=0,
            )[:, PROMPT_LENGTH:]
            ends = (output == model.config.eos_token_id).int()
            counts["peer"] = int((ends.cumsum(1) - ends == 0).sum())

        for generator in made.values():
            generator.load_weights(Publication(model_shards(model)), 0)
        sides = {name: partial(ours, name) for name in made} | {"peer": peer}
        seconds = interleaved(sides, rounds)
    each = {name: [s / counts[name] for s in times] for name, times in seconds.items()}
    speed = {name: 1 / median(times) for name, times in each.items()}
    return [
        Result(
            f"rollout/tokens/{name}",
            speed[name],
            speed["peer"],
            None,
            "tokens/s",
            ratio(each["peer"], each[name]),
            1.0,
        )
        for name in made
    ]


def vllm(rounds: int) -> list[Result]:
    """Measure tokens per second of vLLM with Burnish's draws, and of vLLM alone."""
    settings = {"model": model_config("5m")}
    with (
        world("5m") as directory,
        generators(directory, ["vLLM child"]) as made,
        Peer(None, "bench.rollout_vllm", settings, 1) as peer,
    ):
        model = fresh_model(directory)
        rng = np.random.default_rng(0)
        prompts = rng.integers(100, model.config.vocab_size, size=(PROMPTS, PROMPT_LENGTH))
        requests = [Request(i, prompt, SAMPLES) for i, prompt in enumerate(prompts)]
        question = {"prompts": prompts.tolist(), "samples": SAMPLES, "tokens": TOKENS}
        generator = made["vLLM child"]
        generator.load_weights(Publication(model_shards(model)), 0)
        counts = {"alone": PROMPTS * SAMPLES * TOKENS}

        def ours() -> None:
            groups = generator.generate(requests, Sampling(TOKENS))
            counts["ours"] = sum(len(each.token_ids) for group in groups for each in group)

        seconds = interleaved({"ours": ours, "alone": partial(peer.ask, question)}, rounds)
    each = {name: [s / counts[name] for s in times] for name, times in seconds.items()}
    speed = {name: 1 / median(times) for name, times in each.items()}
    found = ratio(each["alone"], each["ours"])
    return [Result("rollout/vllm", speed["ours"], speed["alone"], None, "tokens/s", found, 0.9)]


def update(rounds: int) -> list[Result]:
    """Measure seconds of a weight update. The limits are a copy of the tensors in memory and, if installed, vLLM's own update."""
    with world("88m") as directory, generators(directory) as made, ExitStack() as stack:
        shards = list(model_shards(fresh_model(directory)))
        room = [torch.empty_like(shard.tensor) for shard in shards]

        def load(name: str) -> None:
            made[name].load_weights(Publication(shards), 0)

        sides: dict[str, Callable[[], object]] = {name: partial(load, name) for name in made}
        sides["copy"] = partial(copy, shards, room)
        if find_spec("vllm") is not None:
            settings = {"model": model_config("88m")}
            peer = stack.enter_context(Peer(None, "bench.rollout_vllm", settings, 1))
            sides["reload_weights"] = partial(peer.ask, {})
        seconds = interleaved(sides, rounds)
    limits = {"copy", "reload_weights"} & seconds.keys()
    return [
        Result(
            f"rollout/update/{name}, {limit}",
            median(seconds[name]),
            None,
            median(seconds[limit]),
            "s",
            ratio(seconds[limit], seconds[name]),
            GOALS.get(PLACES[name][1], 0.0) if limit == "reload_weights" else 0.0,
        )
        for name in made
        for limit in sorted(limits)
    ]


WAYS = ("memory", "gloo", "HTTP")


def unmappable(specs: Sequence[TensorSpec], device: torch.device | None) -> list[Staging]:
    """Return memory that no other process maps, as if it were on another machine."""
    stagings = make_stagings(specs, device)
    for staging in stagings:
        staging.offer["process"] = 1 << 30
    return stagings


def weights(rounds: int) -> list[Result]:
    """Measure the ways of weights to a process on this machine: GB/s, seconds of the main thread, and bytes over HTTP."""
    with world("88m") as directory, ExitStack() as stack:
        shards = list(model_shards(fresh_model(directory)))
        room = [torch.empty_like(shard.tensor) for shard in shards]
        foundation = lay_foundation(
            read_config(str(directory / "config.yaml"), ["rollout.place=child"])
        )
        made = {way: stack.enter_context(closing(make_generator(foundation))) for way in WAYS}
        loads = Loads(made, shards)
        threads = loads.threads
        over_http = loads.over_http
        sides: dict[str, Callable[[], object]] = {way: partial(loads.load, way) for way in WAYS}
        sides["copy"] = partial(copy, shards, room)
        sides["broadcast"] = stack.enter_context(plain_broadcast(shards))
        seconds = interleaved(sides, rounds)
    size = sum(shard.tensor.nbytes for shard in shards) / 1e9
    speed = {name: size / median(times) for name, times in seconds.items()}
    results = list[Result]()
    for way, limit in {"memory": "copy", "gloo": "broadcast"}.items():
        found = ratio(seconds["HTTP"], seconds[way])
        figures = speed[way], speed["HTTP"], speed[limit]
        results.append(Result(f"rollout/weights/{way}", *figures, "GB/s", found, GOALS[way]))
        found = ratio(threads["HTTP"], threads[way])
        pair = median(threads[way]) / size, median(threads["HTTP"]) / size
        results.append(
            Result(f"rollout/weights/{way}, main thread", *pair, None, "s/GB", found, 1.3)
        )
        pair = over_http[way] / size / 1e9, over_http["HTTP"] / size / 1e9
        name = f"rollout/weights/{way}, bytes over HTTP"
        results.append(Result(name, *pair, None, "of the weights'", pair[1] / pair[0], 100.0))
    return results


class Loads:
    """Sends the same weights by each way, and measures the sender."""

    def __init__(self, generators: Mapping[str, Generator], shards: Sequence[Shard]) -> None:
        self._generators = generators
        self._shards = shards
        self.threads: dict[str, list[float]] = {way: [] for way in generators}
        """Seconds of the main thread."""
        self.over_http = dict.fromkeys(generators, 0)
        """Bytes of the last load."""

    def load(self, way: str) -> None:
        """Send the weights."""
        stagings: dict[str, Any] = {"gloo": unmappable, "HTTP": lambda *given: []}
        plain_send = Server.send

        def send(server: Server, upload: Upload, message: messages.Parts) -> None:
            self.over_http[way] += sum(map(len, message))
            plain_send(server, upload, message)

        self.over_http[way] = 0
        begin = time.thread_time()
        target = "burnish.rollout.client.make_stagings"
        with (
            patch(target, stagings.get(way, make_stagings)),
            patch.object(Server, "send", send),
        ):
            self._generators[way].load_weights(Publication(self._shards), 0)
        self.threads[way].append(time.thread_time() - begin)


def shared(rounds: int) -> list[Result]:
    """Measure how weights reach two processes of one vLLM: through memory that both map, and by gloo's broadcasts."""
    if find_spec("vllm") is None:
        return []
    psutil = import_module("psutil")  # vLLM needs it

    processor: dict[str, list[float]] = {"memory": [], "gloo": []}
    with world("88m") as directory, ExitStack() as stack:
        file = str(directory / "config.yaml")
        settings = ["rollout.engine=vllm", "rollout.tensor_parallel=2", "rollout.place=servers"]
        stack.enter_context(server([file, *settings]))
        foundation = lay_foundation(read_config(file, settings))
        shards = list(model_shards(fresh_model(directory)))
        made = {way: stack.enter_context(closing(make_generator(foundation))) for way in processor}
        loads = Loads(made, shards)

        def spent() -> float:
            own = psutil.Process()
            return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))

        def load(way: str) -> None:
            begin = spent()
            loads.load(way)
            processor[way].append(spent() - begin)

        seconds = interleaved({way: partial(load, way) for way in processor}, rounds)
    size = sum(shard.tensor.nbytes for shard in shards) / 1e9
    measured = {"": seconds, ", main thread": loads.threads, ", processors": processor}
    return [
        Result(
            f"rollout/shared/memory{what}",
            median(times["memory"]) / size,
            median(times["gloo"]) / size,
            None,
            "s/GB",
            ratio(times["gloo"], times["memory"]),
            1.0,
        )
        for what, times in measured.items()
    ]


@contextmanager
def plain_broadcast(shards: Sequence[Shard]) -> Iterator[Callable[[], None]]:
    """Yield a function that broadcasts as many bytes as the shards have to another process, in buffers as Burnish's."""
    size = sum(shard.tensor.nbytes for shard in shards)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = (
        "import sys, torch\n"
        "from bench.rollout import gloo_pair\n"
        "port, size = map(int, sys.argv[1:])\n"
        "group, buffer = gloo_pair(port, 1), torch.empty(size, dtype=torch.uint8)\n"
        "while sys.stdin.readline():\n"
        "    for part in buffer.chunk(8):\n"
        "        group.broadcast(part, 0).wait()\n"
        "    print(flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(store.port), str(size)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        to_peer, from_peer = peer.stdin, peer.stdout
        group = gloo_pair(store.port, 0)
        buffer = torch.empty(size, dtype=torch.uint8)

        def broadcast() -> None:
            print(file=to_peer, flush=True)
            for part in buffer.chunk(8):
                group.broadcast(part, 0).wait()
            from_peer.readline()

        yield broadcast
        to_peer.close()


def gloo_pair(port: int, rank: int) -> Any:
    """Return a group of two processes that meet at a port of this machine."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, 2, options)


def copy(shards: Sequence[Shard], room: Sequence[torch.Tensor]) -> None:
    """Copy tensors."""
    for shard, there in zip(shards, room, strict=True):
        there.copy_(shard.tensor)


def ahead(rounds: int) -> list[Result]:
    """Measure seconds per step with and without generating ahead."""
    seconds: dict[int, list[float]] = {0: [], 1: []}
    parts: dict[str, list[float]] = {"rollout": [], "train": []}
    with world("5m") as directory:
        for number in range(rounds):
            for k in seconds:
                rows = run(directory, f"run{number}-{k}", k)
                steps = [row["timing_s/step"] for row in rows]
                seconds[k].append(median(steps))
                if k == 0:
                    drawn = [row["timing_s/rollout"] for row in rows]
                    parts["rollout"].append(median(drawn))
                    parts["train"].append(median(np.subtract(steps, drawn)))
    print(f"  ahead 0: { {name: round(float(median(x)), 3) for name, x in parts.items()} }")
    found = ratio(seconds[0], seconds[1])
    ours = median(seconds[1])
    theirs = median(seconds[0])
    return [Result("rollout/ahead", ours, theirs, None, "s/step", found, 1.6)]


def run(directory: Path, name: str, k: int) -> list[dict[str, Any]]:
    """Run `burnish rl`. Return the metrics of its steps without the first two and the last two."""
    settings = [f"name={name}", f"rollout.ahead={k}", "rollout.place=child"]
    settings += ["batch.prompts=4", f"rollout.slots={SLOTS}"]
    command = [sys.executable, "-m", "burnish", "rl", str(directory / "config.yaml"), *settings]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(done.stdout.decode())
    rows = read_metrics(directory / name / "metrics.jsonl")
    return [row for row in rows if "timing_s/step" in row][2:-2]


CASES = {
    "tokens": tokens,
    "vllm": vllm,
    "update": update,
    "weights": weights,
    "shared": shared,
    "ahead": ahead,
}


def main() -> None:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    results = [each for name in arguments.cases for each in CASES[name](arguments.rounds)]
    report(results, arguments.json)


if __name__ == "__main__":
    main()

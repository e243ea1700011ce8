"""SFT on a CPU: beside the machine's matrix products, plain transformers, TRL and transformers' Trainer; two ranks beside one.

    python -m bench.sft [--json] [--rounds N] [--threads N] [--cases products lengths ranks]

    products  forward, backward and optimizer step of a Qwen3-shaped model of 109 M parameters on 4,096 tokens, in sequences
              of 1,024 and of 512, bf16, with and without engine.compile. The figure is the share of the speed of matrix
              products of 2,048^3 in the same round, into warm memory. Peer: plain transformers in bf16 throughout, compiled
              and not.
    lengths   the 30 M model on texts of 32 to 1,024 tokens with a long tail, 64 per step: useful tokens per second.
              Peers: TRL's SFTTrainer with packing, and transformers' Trainer, which pads.
    ranks     the 30 M model on 16 sequences of 512 tokens: two processes (FSDP) of one thread each beside one of two threads.

All sides take turns within each round. Ratios are medians over rounds of the same round's times per token.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.checkpoint import ask_all, started
from bench.machine import Result, command_line, interleaved, ratio, report
from bench.peers import Peer
from bench.sft_ranks import Sft
from bench.words import model_config, sentence, write_tokenizer
from burnish.config.schema import RunConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.models.flops import Passed
from burnish.models.meta_init import count_flops

LR = 1e-5
SHORTEST = 32
LONGEST = 1024
EDGE = 2048
PRODUCTS = 8
"""Rows and columns of the matrix product that sets the limit, and the number of products that are timed together."""


def write_world(directory: Path, size: str, lengths: Sequence[int], examples: int) -> RunConfig:
    """Write weights, tokenizer and texts of these lengths. Return our configuration with them."""
    model = directory / "model"
    rows = directory / "texts.jsonl"
    shape = model_config(size)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(model)
    write_tokenizer(model, shape["vocab_size"])
    rng = random.Random(0)
    texts = [{"text": sentence(rng, length - 1)} for length in lengths]
    rows.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": [str(rows)]},
            "batch": {"examples": examples, "tokens_per_device": 4096},
            "engine": {"precision": "bf16"},
            "optim": {"lr": LR},
        }
    )


@contextmanager
def world(size: str, lengths: Sequence[int], examples: int) -> Iterator[RunConfig]:
    """Call `write_world` in a temporary directory."""
    with tempfile.TemporaryDirectory() as directory:
        yield write_world(Path(directory), size, lengths, examples)


def long_tail(count: int) -> list[int]:
    """Return lengths of which most are short and few are long: log-normal, clipped to the shortest and longest."""
    rng = random.Random(0)
    drawn = (int(rng.lognormvariate(5.0, 0.9)) for _ in range(count))
    return [min(max(length, SHORTEST), LONGEST) for length in drawn]


def products(rounds: int, threads: int) -> list[Result]:
    return [
        result
        for length in (1024, 512)
        for result in _products([length] * (4096 // length), rounds, threads)
    ]


def _products(lengths: list[int], rounds: int, threads: int) -> list[Result]:
    with world("109m", 16 * lengths, len(lengths)) as config:
        engine = config.engine.model_copy(update={"compile": True})
        compiling = config.model_copy(update={"engine": engine})
        shape = Qwen3Config(**model_config("109m"))

        def run(layout: Layout, device: torch.device) -> dict[str, list[float]]:
            torch.set_num_threads(threads)
            square, result = (torch.ones(EDGE, EDGE, dtype=torch.bfloat16) for _ in range(2))
            sides: dict[str, Callable[[], object]] = {
                "ours": Sft(config, layout, device).step,
                "ours, compiled": Sft(compiling, layout, device).step,
                "product": lambda: [torch.mm(square, square, out=result) for _ in range(PRODUCTS)],
                "transformers": plain_step(config, lengths, compiled=False),
                "transformers, compiled": plain_step(config, lengths, compiled=True),
            }
            return interleaved(sides, rounds)

        seconds = launch(run, config.distributed)
    operations = count_flops(shape).training(Passed.all_of(lengths))
    limit = [PRODUCTS * 2 * EDGE**3 / of_round for of_round in seconds["product"]]
    share = {
        side: median(
            operations / of_round / peak for of_round, peak in zip(times, limit, strict=True)
        )
        for side, times in seconds.items()
    }
    peak = median(limit) / 1e12
    print(f"  {peak:.2f} TFLOPS; " + _in_words(share), file=sys.stderr)
    best = max(share["transformers"], share["transformers, compiled"])
    return [
        Result(
            f"sft/109m {len(lengths)} x {lengths[0]} MFU, {side}",
            share[side],
            best,
            1.0,
            "of peak",
            share[side],
            0.45,
        )
        for side in ("ours", "ours, compiled")
    ]


def _in_words(share: dict[str, float]) -> str:
    return "; ".join(f"{side} {found:.3f}" for side, found in share.items() if side != "product")


def plain_step(config: RunConfig, lengths: Sequence[int], *, compiled: bool) -> Callable[[], None]:
    """Return a step of transformers' model in bf16 with torch's AdamW, on random tokens."""
    model = Qwen3ForCausalLM.from_pretrained(config.model.path, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    ids = torch.randint(2, model.config.vocab_size, (len(lengths), lengths[0]))
    forward: Callable[..., Any] = torch.compile(model) if compiled else model

    def step() -> None:
        forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def lengths(rounds: int, threads: int) -> list[Result]:
    texts = long_tail(64 * 2 * (rounds + 2))
    examples = 64
    with ExitStack() as stack:
        config = stack.enter_context(world("30m", texts, examples))
        common: dict[str, Any] = {"model": config.model.path, "texts": config.data.train[0]}
        common |= {"lr": LR, "seed": 0}
        packed = {"examples": 12, "rows": 4, "packing": LONGEST, "checkpointing": False}
        sides = {
            f"{name}, {weights}": stack.enter_context(
                Peer("trl", module, common | own | {"weights_dtype": weights}, threads)
            )
            for weights in ("float32", "bfloat16")
            for name, module, own in (
                ("TRL", "bench.trl_sft", packed),
                ("Trainer", "bench.hf_sft", {"examples": 64, "rows": 8}),
            )
        }

        def run(layout: Layout, device: torch.device) -> dict[str, list[float]]:
            torch.set_num_threads(threads)
            return _per_token(Sft(config, layout, device), sides, rounds)

        seconds = launch(run, config.distributed)
    results = []
    for name, goal in (("TRL", 1.5), ("Trainer", 2.0)):
        settings = [side for side in seconds if side.startswith(name)]
        for side in settings:
            found = ratio(seconds[side], seconds["ours"])
            print(
                f"  {side}: {1 / median(seconds[side]):.0f} tokens/s, {found:.2f}", file=sys.stderr
            )
        best = min(settings, key=lambda side: median(seconds[side]))
        ours = 1 / median(seconds["ours"])
        peer = 1 / median(seconds[best])
        found = ratio(seconds[best], seconds["ours"])
        results.append(Result(f"sft/lengths {name}", ours, peer, None, "tokens/s", found, goal))
    return results


def _per_token(ours: Sft, peers: dict[str, Peer], rounds: int) -> dict[str, list[float]]:
    """Return the seconds per token of each side in each round, after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ("ours", *peers)}
    for number in range(rounds + 1):
        mine, tokens = ours.step()
        found = {"ours": mine / sum(tokens)}
        for name, peer in peers.items():
            answer = peer.ask({})
            found[name] = answer["seconds"] / answer["tokens"]
        if number:
            for name, each in found.items():
                seconds[name].append(each)
    return seconds


def ranks(rounds: int, threads: int) -> list[Result]:
    del threads  # this case always uses two
    with ExitStack() as stack:
        config = stack.enter_context(world("30m", [512] * 16 * (rounds + 1), 16))
        teams = {
            count: stack.enter_context(
                started(
                    None,
                    "bench.sft_ranks",
                    {"config": config.model_dump(mode="json"), "threads": 2 // count},
                    count,
                )
            )
            for count in (1, 2)
        }
        for team in teams.values():
            for rank in team:
                rank.receive()
        seconds: dict[int, list[float]] = {1: [], 2: []}
        for number in range(rounds + 1):
            for count, team in teams.items():
                found = max(float(answer["seconds"]) for answer in ask_all(team, {}))
                if number:
                    seconds[count].append(found)
    tokens = 16 * 512
    one, two = (tokens / median(seconds[count]) for count in (1, 2))
    found = ratio(seconds[1], seconds[2])
    return [Result("sft/two ranks beside one", two, one, None, "tokens/s", found, 1 / 1.15)]


CASES: dict[str, Callable[[int, int], list[Result]]] = {
    "products": products,
    "lengths": lengths,
    "ranks": ranks,
}


def main() -> None:
    parser = command_line(__doc__, rounds=5, threads=torch.get_num_threads())
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    results = [
        result
        for case in arguments.cases
        for result in CASES[case](arguments.rounds, arguments.threads)
    ]
    report(results, arguments.json)


if __name__ == "__main__":
    main()

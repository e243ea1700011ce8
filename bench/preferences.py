"""DPO steps beside TRL's DPOTrainer, with the peak memory of both.

    python -m bench.preferences [--json] [--rounds N] [--threads N] [--cases long short] [--model SIZE]

    long    prompts of 512 tokens, two answers of 64
    short   prompts of 32 tokens, two answers of 64

Eight pairs a step, in passes of four. All sides compute in bf16. TRL has its weights in fp32 and in bf16, and computes the
reference's log-probs before training or in each step; the best of the four counts. Ours computes them before training, always.

    step    seconds of a step whose reference is known, beside TRL with precompute_ref_log_probs
    epoch   the same with the pass of the reference, which one epoch pays once, beside TRL without
    memory  the most that the process held, beside the TRL that is fastest by step

All sides take turns within each round. Ratios are medians over rounds.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.machine import Result, command_line, ratio, report
from bench.peers import Peer
from bench.words import SIZES, model_config, sentence, write_tokenizer

LR = 1e-6
PAIRS = 8
ROWS = 4
ANSWER = 64
CASES = {"long": (512, 2.0), "short": (32, 1.2)}
"""By name, the tokens of a prompt, and the goal."""
GIGA = 1e9


def write_pairs(path: Path, count: int, prompt: int) -> None:
    """Write pairs of answers. An end-of-sequence token is added to each answer."""
    rng = random.Random(0)
    rows = (
        {
            "prompt": sentence(rng, prompt) + " ",
            "chosen": sentence(rng, ANSWER - 1),
            "rejected": sentence(rng, ANSWER - 1),
        }
        for _ in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def measured(name: str, size: str, rounds: int, threads: int) -> list[Result]:
    """Return the figures of a case."""
    prompt, goal = CASES[name]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        directory = Path(folder)
        # So that the reference is not known yet.
        os.environ["BURNISH_CACHE"] = str(directory / "cache")
        model = directory / "model"
        shape = model_config(size)
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(model)
        write_tokenizer(model, shape["vocab_size"])
        pairs = directory / "pairs.jsonl"
        write_pairs(pairs, PAIRS * (rounds + 2), prompt)
        config = {
            "model": {"path": str(model)},
            "data": {"train": [str(pairs)], "shuffle": False},
            "batch": {"examples": PAIRS, "tokens_per_device": 2 * ROWS * (prompt + ANSWER)},
            "engine": {"precision": "bf16"},
            "optim": {"lr": LR},
        }
        own = {"config": config, "threads": threads}
        ours = Peer(None, "bench.preferences_own", own, threads)
        stack.callback(ours.close)
        reference = float(ours.receive()["reference"])
        common: dict[str, Any] = {"model": str(model), "pairs": str(pairs), "lr": LR, "seed": 0}
        common |= {"examples": PAIRS, "rows": ROWS}
        peers = {
            f"{how}, {weights}": stack.enter_context(
                Peer(
                    "trl",
                    "bench.trl_dpo",
                    common | {"weights_dtype": weights, "precompute": how == "before"},
                    threads,
                )
            )
            for how in ("before", "in each step")
            for weights in ("float32", "bfloat16")
        }
        sides = {"ours": ours, **peers}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        peaks = dict.fromkeys(sides, 0.0)
        for number in range(rounds + 1):
            for side, peer in sides.items():
                answer = peer.ask({})
                peaks[side] = float(answer["peak"])
                if number:
                    seconds[side].append(float(answer["seconds"]) / float(answer["tokens"]))
    for side, of_rounds in seconds.items():
        told = f"{median(of_rounds) * 1e3:.1f} ms a pair, {peaks[side] / GIGA:.2f} GB"
        print(f"  {name}, {side}: {told}", file=sys.stderr)
    print(f"  {name}, ours, reference: {reference * 1e3:.1f} ms a pair", file=sys.stderr)
    fastest = _fastest(seconds, "before")
    epoch = [each + reference for each in seconds["ours"]]
    beside = _fastest(seconds, "in each step")
    return [
        _result(f"{name} step", seconds["ours"], seconds[fastest], goal),
        _result(f"{name} epoch", epoch, seconds[beside], goal),
        Result(
            f"preferences/{name} memory",
            peaks["ours"] / GIGA,
            peaks[fastest] / GIGA,
            None,
            "GB",
            peaks[fastest] / peaks["ours"],
            1.0,
        ),
    ]


def _fastest(seconds: dict[str, list[float]], how: str) -> str:
    sides = [side for side in seconds if side.startswith(how)]
    return min(sides, key=lambda side: median(seconds[side]))


def _result(name: str, ours: Sequence[float], peer: Sequence[float], goal: float) -> Result:
    found = ratio(peer, ours)
    return Result(
        f"preferences/{name}", 1 / median(ours), 1 / median(peer), None, "pairs/s", found, goal
    )


def main() -> None:
    parser = command_line(__doc__, rounds=5, threads=torch.get_num_threads())
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--model", choices=SIZES, default="30m")
    arguments = parser.parse_args()
    results = [
        result
        for case in arguments.cases
        for result in measured(case, arguments.model, arguments.rounds, arguments.threads)
    ]
    report(results, arguments.json)


if __name__ == "__main__":
    main()

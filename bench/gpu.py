"""SFT and GRPO steps of a Qwen3-shaped model on one accelerator, beside TRL: tokens/s and MFU.

    python -m bench.gpu [--json] [--rounds N] [--size 0.6b] [--cases sft sft-varied grpo]

Fresh weights in the shape of Qwen3-0.6B (28 layers, 151,936 words, tied embeddings), bf16 compute, AdamW. SFT: 32
sequences of 1,024 tokens per step, or, `varied`, evenly spread over an eighth of that to all of it. GRPO: 16 prompts of
128 tokens, 8 samples of 256 tokens each, one update, no KL. TRL (`bench.trl_sft`, `bench.trl_grpo`) runs in its own
process, without gradient checkpointing, with fp32 and with bf16 weights; the ratio is against the faster.
Sides take turns on the same device; a step is timed from an idle device to an idle device. Ratios are medians over
rounds, after one round to warm up.

MFU counts the model's operations: three forward passes over the tokens trained on and, in GRPO, one over
the same tokens for making them; padding and recomputation count for nothing. `--size 5m` with a few short
sequences shows on a CPU that it runs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.grpo import ByFirstToken, Ours
from bench.machine import Result, ratio, report
from bench.peers import Peer
from bench.sft_ranks import Sft, clock
from bench.words import model_config, sentence, write_prompts, write_tokenizer
from burnish.config.schema import RunConfig
from burnish.launch.run import launch
from burnish.models.counting import count_flops
from burnish.parallel.device import peak_flops
from burnish.parallel.layout import Layout
from burnish.rewards.pool import RewardPool

LR = 1e-5
CASES = ("sft", "sft-varied", "grpo")
PEER_WEIGHTS = ("float32", "bfloat16")
Step = Callable[[], tuple[float, list[int]]]
"""One step of ours: its seconds, and the tokens of each sequence trained on or, in GRPO, of each completion."""


@dataclass(frozen=True)
class Work:
    """How much goes into a step."""

    examples: int
    """SFT: sequences."""
    sequence: int
    """SFT: tokens of the longest."""
    sft_rows: int
    """SFT: sequences in one pass of TRL's."""
    prompts: int
    """GRPO: prompts."""
    samples: int
    """GRPO: completions of each."""
    prompt: int
    """GRPO: tokens of a prompt."""
    response: int
    """GRPO: tokens of a completion."""
    grpo_rows: int
    """GRPO: sequences in one pass of TRL's."""
    tokens_per_device: int
    """Tokens in one pass of ours."""


WORK = {
    "0.6b": Work(32, 1024, 8, 16, 8, 128, 256, 32, 8192),
    "5m": Work(4, 32, 2, 2, 4, 6, 8, 8, 128),
}


def write_world(directory: Path, size: str, case: str) -> RunConfig:
    """Weights, tokenizer and data on disk, and our configuration of them."""
    work, model, rows = WORK[size], directory / "model", directory / "rows.jsonl"
    shape = model_config(size)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(model)
    write_tokenizer(model, shape["vocab_size"])
    if case == "grpo":
        write_prompts(rows, 64 * work.prompts, work.prompt)
    else:
        rng, lengths = random.Random(0), sft_lengths(work, varied=case == "sft-varied")
        texts = [{"text": sentence(rng, length - 1)} for length in 16 * lengths]
        rows.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": [str(rows)]},
            "batch": {
                "prompts": work.prompts,
                "examples": work.examples,
                "tokens_per_device": work.tokens_per_device,
            },
            "rollout": {"n": work.samples, "max_response_length": work.response},
            "reward": {"functions": [{"function": "bench.words:even_share"}]},
            "optim": {"lr": LR},
        }
    )


def sft_lengths(work: Work, varied: bool) -> list[int]:
    """Tokens of each sequence of a step, its end token included, in an order that mixes short and long."""
    if not varied:
        return [work.sequence] * work.examples
    shortest = work.sequence // 8
    spread = [
        shortest + (work.sequence - shortest) * i // (work.examples - 1)
        for i in range(work.examples)
    ]
    random.Random(0).shuffle(spread)
    return spread


def measure(case: str, size: str, rounds: int) -> list[Result]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = write_world(directory, size, case)
        peers = {
            weights: stack.enter_context(_peer(case, config, WORK[size], weights))
            for weights in PEER_WEIGHTS
        }
        pool = stack.enter_context(RewardPool(config.reward))

        def run(layout: Layout, device: torch.device) -> list[Result]:
            step = _ours(case, config, WORK[size], pool, layout, device)
            mine, theirs = _in_turns(step, peers, rounds)
            return list(_results(f"{case}/{size}", case, size, (mine, theirs), device))

        return launch(run, config.distributed)


def _peer(case: str, config: RunConfig, work: Work, weights: str) -> Peer:
    common = {"model": config.model.path, "lr": LR, "seed": 0, "weights_dtype": weights}
    rows = config.data.train[0]
    if case == "grpo":
        own: dict[str, Any] = {
            "prompts": rows,
            "prompts_per_step": work.prompts,
            "samples": work.samples,
            "max_tokens": work.response,
            "rows": work.grpo_rows,
            "clock": "wall",
        }
        return Peer("trl", "bench.trl_grpo", common | own, torch.get_num_threads())
    own = {"texts": rows, "examples": work.examples, "rows": work.sft_rows, "packing": None}
    return Peer("trl", "bench.trl_sft", common | own, torch.get_num_threads())


def _ours(
    case: str,
    config: RunConfig,
    work: Work,
    pool: RewardPool,
    layout: Layout,
    device: torch.device,
) -> Step:
    if case == "grpo":
        rule = ByFirstToken(work.response, work.response)
        return Ours(config, rule, layout, device, pool, clock(device)).step
    return Sft(config, layout, device).step


def _in_turns(
    step: Step, peers: dict[str, Peer], rounds: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds of our steps, and of the peers' by their setting, round by round."""
    mine: list[float] = []
    theirs: dict[str, list[float]] = {setting: [] for setting in peers}
    for number in range(rounds + 1):
        seconds, lengths = step()
        answers = {s: peer.ask({"lengths": lengths}) for s, peer in peers.items()}
        for setting, answer in answers.items():
            if answer["tokens"] != sum(lengths):
                raise RuntimeError(f"{setting}: {answer['tokens']} tokens, ours {sum(lengths)}")
        if number:
            mine.append(seconds)
            for setting, answer in answers.items():
                theirs[setting].append(answer["seconds"])
    return mine, theirs


def _results(
    name: str,
    case: str,
    size: str,
    seconds: tuple[list[float], dict[str, list[float]]],
    device: torch.device,
) -> Sequence[Result]:
    """Tokens per second (in GRPO: generated ones, of the whole step) and MFU."""
    mine, theirs = seconds
    for setting, of_peer in theirs.items():
        line = f"TRL, {setting}: {median(of_peer):.3f} s, ratio {ratio(of_peer, mine):.2f}"
        print(f"  {line}; ours {median(mine):.3f} s", file=sys.stderr)
    best = min(theirs, key=lambda setting: median(theirs[setting]))
    work, flops = WORK[size], count_flops(Qwen3Config(**model_config(size)))
    if case == "grpo":
        completions = work.prompts * work.samples
        lengths = [work.prompt + work.response] * completions
        tokens, operations = completions * work.response, flops.training(lengths)
        operations += flops.forward(lengths)
    else:
        lengths = sft_lengths(work, varied=case == "sft-varied")
        tokens, operations = sum(lengths), flops.training(lengths)
    ours, peer = 1 / median(mine), 1 / median(theirs[best])
    found = ratio(theirs[best], mine)
    share = operations / peak_flops(device, torch.bfloat16)
    return [
        Result(f"{name} tokens/s", ours * tokens, peer * tokens, None, "tokens/s", found, 1.0),
        Result(f"{name} MFU", ours * share, peer * share, 1.0, "of peak", found, 1.0),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", choices=WORK, default="0.6b")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    results = [
        result
        for case in arguments.cases
        for result in measure(case, arguments.size, arguments.rounds)
    ]
    report(results, arguments.json)


if __name__ == "__main__":
    main()

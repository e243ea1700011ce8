"""A GRPO step (generate, reward, update) beside TRL's GRPOTrainer, step by step in turns.

    python -m bench.grpo [--json] [--rounds N] [--threads N] [--clock wall|cpu]
                         [--cases 5m 30m 5m-varied]

Both start from the same Qwen3-shaped weights and see the same prompts: 16 of 24 tokens per step, 8
samples each, temperature 1, one update per step, no KL, AdamW, bf16 compute. Completions are 64
tokens each, or, `varied`, evenly spread over 8 to 256: the first token of our completion determines
its length, and TRL's completions of the same round get the same lengths. Both sides run all 128 sequences in
one pass. TRL runs in one process for each of `PEER_SETTINGS`, with a figure for each. fp32 weights and bf16 compute
are TRL's defaults, and the same training as ours. bf16 weights are faster, but a different training, because most updates
are smaller than the weights' precision. In every turn each side takes two steps, of which the second counts: the memory of a
process that has waited is cold, which it is not in training. Ratios are medians over
rounds of TRL's seconds over ours in the same round. On a machine that others use at the same time,
`--threads 1 --clock cpu` compares the processor time of the processes.

Our step has the parts of `burnish.methods.parts.online_training` without the run around it (metrics files, checkpoints), just as
TRL's is timed without its logging.
"""

from __future__ import annotations

import json
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
from bench.peers import CLOCKS, Clock, Peer
from bench.words import model_config, write_prompts, write_tokenizer
from burnish.algorithms.base import load_advantage
from burnish.algorithms.loss import policy_loss_fn
from burnish.config.schema import MOST_SLOTS, RunConfig
from burnish.data.loader import Loader
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.engines.base import Part
from burnish.methods.parts.policy_update import PolicyUpdate
from burnish.methods.parts.rollouts import Collector, GroupSampler
from burnish.records import StopReason
from burnish.rewards.overview import RewardFailures
from burnish.rewards.pool import RewardPool
from burnish.rollout.base import Sampling, Watch
from burnish.rollout.builtin.decoding import SlotSequence
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.rollout.running import StopRule
from burnish.runs.setup import lay_foundation, make_run_engine, prompt_dataset
from burnish.tracking.progress import Progress

PROMPTS = 16
SAMPLES = 8
PROMPT_WORDS = 24
LR = 1e-5
FIXED = 64
SHORTEST = 8
LONGEST = 256
CASES = {"5m": ("5m", False, 3.0), "30m": ("30m", False, 2.5), "5m-varied": ("5m", True, 4.0)}
"""By name: model size, whether lengths vary, goal."""
PEER_SETTINGS: dict[str, dict[str, Any]] = {
    "fp32 weights": {"weights_dtype": "float32", "rows": 128},
    "bf16 weights": {"weights_dtype": "bfloat16", "rows": 128},
}


class ByFirstToken(StopRule):
    """Ends a completion at a length that follows from its first token: evenly spread over `shortest` to `longest`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._choices = longest - shortest + 1

    def ended(self, tokens: Sequence[int], max_tokens: int) -> StopReason | None:
        """See `StopRule.ended`."""
        return "length" if len(tokens) >= self._shortest + tokens[0] % self._choices else None


class GivenLengths(BuiltinGenerator):
    """The built-in generator, with `rule` in place of its own stop rule."""

    rule: StopRule

    def _complete(
        self,
        running: Sequence[SlotSequence],
        sampling: Sampling,
        rule: StopRule,
        watch: Watch | None,
    ) -> None:
        super()._complete(running, sampling, self.rule, watch)


class Ours:
    """The parts of our trainer, and one step with them."""

    def __init__(
        self,
        config: RunConfig,
        rule: StopRule,
        layout: Layout,
        device: torch.device,
        pool: RewardPool,
        clock: Clock,
    ) -> None:
        self.config = config
        self.clock = clock
        foundation = lay_foundation(config, layout, device)
        self.flops = foundation.flops
        self.dataset = prompt_dataset(foundation, config.data.train, "data.train")
        self.engine = make_run_engine(foundation, config.optim)
        self.engine.load(foundation.source, Part.WEIGHTS)
        generator = GivenLengths(
            foundation.hf_config,
            layout=layout,
            device=device,
            dtype=torch.bfloat16,
            slots=MOST_SLOTS,
            eos_token_ids=foundation.eos_token_ids,
        )
        generator.rule = rule
        generator.load_weights(self.engine.published(), 0)
        tokenizer = foundation.tokenizer
        self.collector = Collector(
            generator,
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            pool.score,
            layout,
            lambda: None,
            Progress(enabled=False),
            RewardFailures(config.reward),
        )
        self.loader = Loader(len(self.dataset), config.seed, shuffle=False)
        self.loss = policy_loss_fn(config.algorithm, config.rollout.max_response_length)
        self.step_number = 0
        self.seconds: dict[str, list[float]] = {"rollout": [], "update": [], "publish": []}

    def step(self) -> tuple[float, list[int]]:
        """Take one step. Return its seconds, and the length of each completion, groups end to end."""
        config = self.config
        marks = [self.clock()]
        sampler = GroupSampler(config, self.collector, self.dataset, self.loader)
        groups = sampler.sample(self.step_number).groups
        marks.append(self.clock())
        advantage = load_advantage(config.algorithm.advantage)
        update = PolicyUpdate(self.engine, None, None, self.flops, config, advantage)
        credit = update.assign_credit(groups, update.minibatches(groups))
        for batch in update.with_logprobs(credit.batches, self.step_number):
            self.engine.forward_backward(batch, self.loss).values()
            self.engine.optim_step(config.optim.peak_lr)
        marks.append(self.clock())
        self.step_number += 1
        self.collector.generator.load_weights(self.engine.published(), self.step_number)
        marks.append(self.clock())
        for name, start, end in zip(self.seconds, marks[:-1], marks[1:], strict=True):
            self.seconds[name].append(end - start)
        lengths = [len(r.completion.token_ids) for group in groups for r in group]
        return marks[-1] - marks[0], lengths


def write_world(directory: Path, size: str) -> RunConfig:
    """Write weights, tokenizer and prompts. Return our configuration with them."""
    model = directory / "model"
    prompts = directory / "prompts.jsonl"
    one_pass = PROMPTS * SAMPLES * (PROMPT_WORDS + LONGEST)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**model_config(size))).save_pretrained(model)
    write_tokenizer(model)
    write_prompts(prompts, 64 * PROMPTS, PROMPT_WORDS)
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": [str(prompts)]},
            "batch": {"prompts": PROMPTS, "tokens_per_device": one_pass},
            "rollout": {"n": SAMPLES, "max_response_length": LONGEST},
            "engine": {"precision": "bf16"},
            "reward": {"functions": [{"function": "bench.words:even_share"}]},
            "optim": {"lr": LR},
        }
    )


def measure(name: str, rounds: int, threads: int, clock: str = "wall") -> list[Result]:
    """Measure our step beside TRL's with each of `PEER_SETTINGS`."""
    size, varied, goal = CASES[name]
    rule = ByFirstToken(SHORTEST, LONGEST) if varied else ByFirstToken(FIXED, FIXED)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = write_world(directory, size)
        common = {
            "model": config.model.path,
            "prompts": config.data.train[0],
            "prompts_per_step": PROMPTS,
            "samples": SAMPLES,
            "max_tokens": LONGEST if varied else FIXED,
            "lr": LR,
            "seed": 0,
            "clock": clock,
        }
        peers = {
            setting: stack.enter_context(Peer("trl", "bench.trl_grpo", common | values, threads))
            for setting, values in PEER_SETTINGS.items()
        }
        pool = stack.enter_context(RewardPool(config.reward))

        def run(layout: Layout, device: torch.device) -> list[Result]:
            torch.set_num_threads(threads)
            ours = Ours(config, rule, layout, device, pool, CLOCKS[clock])
            return _in_turns(name, ours, peers, rounds, goal)

        return launch(run, config.distributed)


def _in_turns(
    name: str, ours: Ours, peers: dict[str, Peer], rounds: int, goal: float
) -> list[Result]:
    mine: list[float] = []
    theirs: dict[str, list[float]] = {setting: [] for setting in peers}
    for _ in range(rounds):
        warm = ours.step()
        timed = ours.step()
        mine.append(timed[0])
        for setting, peer in peers.items():
            peer.ask({"lengths": warm[1]})
            theirs[setting].append(peer.ask({"lengths": timed[1]})["seconds"])
    parts = {part: round(median(s[1::2]), 3) for part, s in ours.seconds.items()}
    print(f"  ours: {json.dumps(parts)}", file=sys.stderr)
    return [
        Result(
            f"grpo/{name}, TRL with {setting}",
            median(mine),
            median(seconds),
            None,
            "s",
            ratio(seconds, mine),
            goal,
        )
        for setting, seconds in theirs.items()
    ]


def main() -> None:
    parser = command_line(__doc__, rounds=7, threads=torch.get_num_threads(), clock="wall")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    results = [
        result
        for name in arguments.cases
        for result in measure(name, arguments.rounds, arguments.threads, arguments.clock)
    ]
    report(results, arguments.json)


if __name__ == "__main__":
    main()

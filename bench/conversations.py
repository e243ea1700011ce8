"""Conversations of four turns beside single answers of as many tokens, and beside TRL's environments, step by step in turns.

    python -m bench.conversations [--json] [--rounds N] [--threads N] [--clock wall|cpu] [--cases 5m 30m]

Both start from the same Qwen3-shaped weights and see the same prompts: 8 a step, 8 samples each, temperature 1, one update per step, no KL,
AdamW, bf16 compute. A conversation has 4 turns of 32 tokens. After each but the last, a tool answers with 60 letters, a token each.
Untrained weights call no tool, so TRL reads any turn as a call, and our environment answers any turn. A single answer has 128 tokens.

The first goal compares our rollouts: tokens per second of conversations over those of single answers. A conversation's tokens are what
the model draws and what it reads of the tool's answers. The seconds of each part are printed as well. The second compares whole steps, TRL's seconds over ours. TRL runs with the two settings of `bench.grpo`. In every
turn each side takes two steps, of which the second counts. On a machine that others use, `--threads 1 --clock cpu` compares the
processor time of the processes. Environments run in processes of their own, which this clock leaves out: they do nothing but answer.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bench.grpo import LR, PEER_SETTINGS, Ours
from bench.looking import ANSWER, TURNS
from bench.machine import Result, command_line, ratio, report
from bench.peers import CLOCKS, Peer
from bench.words import EOS, model_config, sentence
from burnish.config.schema import RunConfig
from burnish.data.turn_bridge import TurnBridge
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.environments.pool import EnvironmentPool
from burnish.methods.parts.conversations import Conversations
from burnish.records import StopReason
from burnish.rewards.pool import RewardPool
from burnish.rollout.running import StopRule

PROMPTS = 8
SAMPLES = 8
PROMPT_WORDS = 12
TURN_TOKENS = 32
MOST_TOKENS = 640
CASES = ("5m", "30m")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Length(StopRule):
    """Stops after `count` tokens, whatever they are."""

    def __init__(self, count: int) -> None:
        self._count = count

    def ended(self, tokens: Sequence[int], max_tokens: int) -> StopReason | None:
        """See `StopRule.ended`."""
        return "stop" if len(tokens) >= self._count else None


class Talking(Ours):
    """Our trainer, with conversations."""

    def __init__(self, *arguments: Any, environments: EnvironmentPool) -> None:
        super().__init__(*arguments)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(self.config.model.path)
        tools = [dict(tool) for tool in environments.described.tools]
        bridge = TurnBridge(tokenizer, self.config.data, tools, [EOS])
        talks = Conversations(self.config.rollout.environment, environments, bridge)
        self.collector = replace(self.collector, conversations=talks)


def write_world(directory: Path, size: str) -> RunConfig:
    """Write weights, tokenizer and prompts. Return our configuration with them."""
    model = directory / "model"
    prompts = directory / "prompts.jsonl"
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**model_config(size))).save_pretrained(model)
    names = ["<pad>", "<|im_end|>", "<|im_start|>", *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteDecoder()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    ).save_pretrained(model)
    rng = random.Random(0)
    asked = [
        [{"role": "user", "content": sentence(rng, PROMPT_WORDS)}] for _ in range(64 * PROMPTS)
    ]
    prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in asked))
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": [str(prompts)]},
            "batch": {"prompts": PROMPTS, "tokens_per_device": PROMPTS * SAMPLES * 1024},
            "rollout": {
                "n": SAMPLES,
                "max_response_length": MOST_TOKENS,
                "environment": {"function": "bench.looking:Looking", "history": "appended"},
            },
            "engine": {"precision": "bf16"},
            "reward": {"functions": [{"function": "bench.looking:varied"}]},
            "optim": {"lr": LR},
        }
    )


def measure(size: str, rounds: int, threads: int, clock: str = "wall") -> list[Result]:
    """Measure our rollouts beside single answers, and our step beside TRL's with each of `PEER_SETTINGS`."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = write_world(directory, size)
        common = {
            "model": config.model.path,
            "prompts": config.data.train[0],
            "prompts_per_step": PROMPTS,
            "samples": SAMPLES,
            "max_tokens": MOST_TOKENS,
            "turns": TURNS,
            "turn_tokens": TURN_TOKENS,
            "answer": ANSWER,
            "lr": LR,
            "seed": 0,
            "clock": clock,
        }
        peers = {}
        for setting, values in PEER_SETTINGS.items():
            settings = common | values | {"rows": PROMPTS * SAMPLES}
            peer = Peer("trl", "bench.trl_conversations", settings, threads)
            peers[setting] = stack.enter_context(peer)
        pool = stack.enter_context(RewardPool(config.reward))
        environments = stack.enter_context(EnvironmentPool(config.rollout.environment))

        def run(layout: Layout, device: torch.device) -> list[Result]:
            torch.set_num_threads(threads)
            common = (layout, device, pool, CLOCKS[clock])
            talking = Talking(config, Length(TURN_TOKENS), *common, environments=environments)
            single = Ours(config, Length(TURNS * TURN_TOKENS), *common)
            return _in_turns(size, talking, single, peers, rounds)

        return launch(run, config.distributed)


def _in_turns(
    size: str, talking: Ours, single: Ours, peers: dict[str, Peer], rounds: int
) -> list[Result]:
    ours: list[float] = []
    rates: dict[Ours, list[float]] = {talking: [], single: []}
    theirs: dict[str, list[float]] = {setting: [] for setting in peers}
    for _ in range(rounds):
        for side, own in rates.items():
            side.step()
            step_seconds, lengths = side.step()
            own.append(sum(lengths) / side.seconds["rollout"][-1])
            if side is talking:
                ours.append(step_seconds)
        for setting, peer in peers.items():
            peer.ask({})
            answer = peer.ask({})
            assert answer["tokens"] == PROMPTS * SAMPLES * TURNS * TURN_TOKENS
            theirs[setting].append(answer["seconds"])
    for name, side in {"4 turns": talking, "single answers": single}.items():
        parts = {part: round(median(s[1::2]), 3) for part, s in side.seconds.items()}
        print(f"  {name}: {json.dumps(parts)}", file=sys.stderr)
    talks, answers = rates.values()
    name = f"conversations/{size}, tokens per second of 4 turns beside single answers"
    numbers = (median(talks), median(answers), None, "tok/s", ratio(talks, answers))
    results = [Result(name, *numbers, 0.8)]
    for setting, taken in theirs.items():
        name = f"conversations/{size}, TRL with {setting}"
        numbers = (median(ours), median(taken), None, "s", ratio(taken, ours))
        results.append(Result(name, *numbers, 2.0))
    return results


def main() -> None:
    parser = command_line(__doc__, rounds=5, threads=torch.get_num_threads(), clock="wall")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    results = [
        result
        for size in arguments.cases
        for result in measure(size, arguments.rounds, arguments.threads, arguments.clock)
    ]
    report(results, arguments.json)


if __name__ == "__main__":
    main()

"""Generation: the built-in generator against Hugging Face `generate`, interleaved in one process.

    python -m bench.generate [--json] [--rounds N] [--threads N] [--sizes 5m 30m]

A Qwen3-shaped model with fresh weights in bf16; 16 prompts of 24 tokens, 8 samples of each, on the
accelerator if there is one. Both sides start from the same weights. Fixed cases: all completions have 64 new
tokens, sampled or greedy. Varied cases: one token in a hundred ends a completion, of at most 256 tokens; only the
tokens up to the end count. Ratios are medians over rounds of our tokens/s over the peer's.
"""

from __future__ import annotations

from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from bench.machine import Result, command_line, interleaved, ratio, report
from burnish.boxes.shards import Publication
from burnish.distributed.device import current_device
from burnish.distributed.layout import Layout
from burnish.models.names import model_shards
from burnish.records import Request
from burnish.rollout.base import Sampling
from burnish.rollout.builtin.generator import BuiltinGenerator

PROMPTS = 16
SAMPLES = 8
PROMPT_LENGTH = 24
VOCAB = 4096
SIZES = {
    "5m": {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4},
    "30m": {"hidden_size": 640, "intermediate_size": 1664, "num_attention_heads": 10},
}


def make_model(size: str, device: torch.device) -> PreTrainedModel:
    shape = SIZES[size]
    config = Qwen3Config(
        vocab_size=VOCAB,
        num_hidden_layers=6,
        num_key_value_heads=shape["num_attention_heads"] // 2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **shape,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().to(device)


class Sides:
    """Both generators over one model. Each run records the number of its tokens in `made`."""

    def __init__(
        self, model: PreTrainedModel, sampling: Sampling, eos: list[int], slots: int
    ) -> None:
        self.model = model
        self.sampling = sampling
        self.eos = eos
        self.made = {"ours": 0, "peer": 0}
        rng = np.random.default_rng(0)
        self.prompts = rng.integers(100, VOCAB, size=(PROMPTS, PROMPT_LENGTH))
        self.generator = BuiltinGenerator(
            model.config,
            layout=Layout(),
            device=model.device,
            dtype=torch.bfloat16,
            slots=slots,
            eos_token_ids=eos,
        )
        self.generator.load_weights(Publication(model_shards(model)), 0)

    def ours(self) -> None:
        """Run one round of the built-in generator."""
        requests = [Request(i, prompt, SAMPLES) for i, prompt in enumerate(self.prompts)]
        groups = self.generator.generate(requests, self.sampling)
        self.made["ours"] = sum(len(c.token_ids) for group in groups for c in group)

    def peer(self) -> None:
        """Run one round of Hugging Face `generate`."""
        ids = torch.from_numpy(self.prompts).to(self.model.device)
        greedy = self.sampling.temperature == 0
        if greedy:
            ids = ids.repeat_interleave(SAMPLES, 0)
        output = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.sampling.max_tokens,
            do_sample=not greedy,
            num_return_sequences=1 if greedy else SAMPLES,
            eos_token_id=self.eos or None,
            pad_token_id=0,
            top_k=None if greedy else self.sampling.top_k,
            top_p=None if greedy else self.sampling.top_p,
        )
        new = output[:, PROMPT_LENGTH:]
        ends = torch.isin(new, torch.tensor(self.eos, device=new.device)).int()
        self.made["peer"] = int((ends.cumsum(1) - ends == 0).sum())


def measure(name: str, sides: Sides, rounds: int, goal: float) -> Result:
    seconds = interleaved({"ours": sides.ours, "peer": sides.peer}, rounds)
    work = {side: sides.made[side] for side in seconds}
    per_token = {side: [s / work[side] for s in times] for side, times in seconds.items()}
    ours, peer = (1 / median(per_token[side]) for side in ("ours", "peer"))
    found = ratio(per_token["peer"], per_token["ours"])
    return Result(f"generate/{name}", ours, peer, None, "tokens/s", found, goal)


def main() -> None:
    parser = command_line(__doc__, rounds=5, threads=torch.get_num_threads())
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["5m"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = current_device()
    results = []
    for size in arguments.sizes:
        model = make_model(size, device)
        few_ends = list(range(100, 100 + VOCAB // 100))
        cases = {
            "sampled": (Sampling(64), [], 128, 1.8),
            "greedy": (Sampling(64, temperature=0.0), [], 128, 1.8),
            "top_k_top_p": (Sampling(64, top_k=50, top_p=0.95), [], 128, 1.8),
            "varied": (Sampling(256), few_ends, 128, 1.8),
            "varied_64_slots": (Sampling(256), few_ends, 64, 1.8),
        }
        for name, (sampling, eos, slots, goal) in cases.items():
            sides = Sides(model, sampling, eos, slots)
            results.append(measure(f"{size}/{name}", sides, arguments.rounds, goal))
    report(results, arguments.json)


if __name__ == "__main__":
    main()

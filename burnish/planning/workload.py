"""How much a run does in a step, from its settings, taking every sequence to be as long as it may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from burnish.config.schema import RunConfig

Command = Literal["sft", "rl"]
"""What kind of run."""

_ASSUMED_PROMPT = 512
"""Tokens of a prompt where `data.max_prompt_length` is not set."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The sequences of a step, over all devices."""

    sequences: int
    """How many."""
    prompt: int
    """Tokens that each is given; 0 in supervised fine-tuning."""
    trained: int
    """Tokens of each that are trained on."""
    updates: int
    """Optimizer steps that they are divided among."""
    old_logprobs: bool
    """Whether log-probs are computed before the updates."""
    reference: bool
    """Whether a frozen reference scores them as well."""
    critic: bool
    """Whether a second model learns values."""
    slots: int
    """Most sequences that a device generates at one time; 0: none are generated."""
    nucleus: bool
    """Whether drawing sorts the vocabulary."""

    @classmethod
    def of(cls, config: RunConfig, command: Command) -> Workload:
        """What the settings say."""
        if command == "sft":
            longest = config.data.max_length or config.batch.tokens_per_device
            return cls(config.batch.examples, 0, longest, 1, False, False, False, 0, False)
        algorithm, rollout = config.algorithm, config.rollout
        updates = config.batch.minibatches
        return cls(
            sequences=config.batch.prompts * rollout.n,
            prompt=config.data.max_prompt_length or _ASSUMED_PROMPT,
            trained=rollout.max_response_length,
            updates=updates,
            old_logprobs=updates > 1 and algorithm.old_logprobs == "recompute",
            reference=algorithm.kl.coef > 0,
            critic=algorithm.advantage == "gae",
            slots=rollout.slots,
            nucleus=rollout.top_p < 1,
        )

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.trained

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.length

"""How much a run does in a step, from its settings, taking every sequence to be as long as it may be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from burnish.config.schema import RunConfig

Command = Literal["sft", "rl"]
"""What kind of run."""

ASSUMED_PROMPT = 512
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
    """Optimizer steps that they are divided among in one epoch."""
    reference: bool
    """Whether a frozen reference scores them as well."""
    scorings: int
    """Forward passes of policy and reference whose log-probs the updates start from."""
    critic: bool
    """Whether a second model learns values."""
    slots: int
    """Most sequences that a device generates at one time; 0: none are generated."""
    nucleus: bool
    """Whether drawing sorts the vocabulary."""
    samples: int
    """Sequences of each prompt, which the generator reads once for all of them."""
    replayed: bool = False
    """Whether the policy's updates are told which experts tokens go to."""
    epochs: int = 1
    """Times that all of them are learned from."""

    @classmethod
    def of(cls, config: RunConfig, command: Command) -> Workload:
        """What the settings say."""
        if command == "sft":
            longest = config.data.max_length or config.batch.tokens_per_device
            return cls(config.batch.examples, 0, longest, 1, False, 0, False, 0, False, 1)
        algorithm, rollout = config.algorithm, config.rollout
        updates, epochs = config.batch.minibatches, config.batch.epochs
        replay = algorithm.router_replay
        before = algorithm.old_logprobs == "recompute" or replay == "recompute"
        several = updates * epochs > 1
        recomputed = several and before
        compared = 0 if algorithm.kl.coef == 0 else 2 if algorithm.kl.place == "reward" else 1
        return cls(
            sequences=config.batch.prompts * rollout.n,
            prompt=config.data.max_prompt_length or ASSUMED_PROMPT,
            trained=rollout.max_response_length,
            updates=updates,
            reference=compared > 0,
            scorings=int(recomputed) + compared,
            critic=algorithm.advantage == "gae",
            slots=rollout.slots,
            nucleus=rollout.top_p < 1,
            samples=rollout.n,
            replayed=replay == "rollout" or (replay == "recompute" and several),
            epochs=epochs,
        )

    @property
    def alone(self) -> Workload:
        """What is asked of a critic, or of a model that judges."""
        return replace(self, critic=False, reference=False, slots=0)

    @property
    def scores(self) -> bool:
        """Whether anything is computed of the sequences between generating them and learning from them."""
        return self.scorings > 0 or self.critic

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.trained

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.length

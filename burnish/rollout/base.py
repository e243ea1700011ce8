"""The generation verbs: prompts in, completions out, weights in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from burnish.boxes.shards import Publication
from burnish.records import Completion, Request

Watch = Callable[[int], None]
"""Called between decoding steps with the number of completions that ended since the last call. What it raises
ends the generation, so it is where a signal or a deadline gets in."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw. The same values give the same completions, whatever the batching or the number of ranks."""

    max_tokens: int
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_k: int = 0
    """Keep only the k most probable; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches p (nucleus sampling, arXiv 1904.09751)."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable (arXiv 2407.01082)."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion (and stay in it)."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion."""
    seed: int = 0
    """The run's seed."""
    step: int = 0
    """The training step; part of every draw's derivation."""
    experts: bool = False
    """Whether completions say which experts their tokens went to, in a mixture of experts."""


class Generator(Protocol):
    """Something that samples from the current weights, on this process."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[list[Completion]]:
        """For each request, in order, its `samples` completions, in order.

        Token t of sample s of a request is drawn with a number derived from (`seed`, `step`,
        `prompt_key`, s, t) alone.
        """

    def load_weights(self, weights: Publication, version: int) -> None:
        """Take the weights, as `Shard.part` reads them; each rank passes its own pieces. Collective.

        What training never changes is taken the first time alone, so all that a generator is given has to be
        of one engine.
        """

    def close(self) -> None:
        """Free what it holds."""

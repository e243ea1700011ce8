"""The generator protocol: prompts in, completions out, weights in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from transformers import PretrainedConfig

from burnish.boxes.shards import Publication, TensorSpec
from burnish.config.schema import LoraConfig
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, UsageError
from burnish.records import Completion, Request

if TYPE_CHECKING:
    from burnish.rollout.weight_group import Receivers

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text, with or without special tokens."""
Watch = Callable[[int], None]
"""Called between decoding steps with the number of completions that ended since the last call. An exception that it raises
ends the generation."""

Follow = Callable[[Sequence[tuple[Request, Completion]], bool], Sequence[Request]]
"""Called between decoding steps with the completions that ended since the last call, each with its request for one sample, and with
whether nothing is left to decode. It returns further requests. If nothing is left, it waits for some, and none ends the generation."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. The configuration's schema has their ranges."""

    max_tokens: int
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set whose probability reaches p (nucleus sampling, arXiv 1904.09751)."""
    min_p: float = 0.0
    """Drop tokens less probable than min_p times the most probable (arXiv 2407.01082)."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion; the id is kept."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion."""
    seed: int = 0
    """The run's seed."""
    step: int = 0
    """The training step, part of every random number's key."""
    experts: bool = False
    """Whether completions record the experts of their tokens."""
    keeps: bool = False
    """Whether the generator may keep keys and values for the conversations' next turns, until `Generator.forget`."""


class RunningRequest(NamedTuple):
    """A running request, with its partial completions."""

    sampling: Sampling
    request: Request
    completions: list[Completion]


class Generator(Protocol):
    """Samples from the current weights. `rollout.engine` names the class. A subclass needs only `generate` and `load_weights`."""

    called_by_rank0: bool = False
    """Whether rank 0 alone calls `generate`, for all ranks, perhaps in a thread while training goes on."""
    receivers: Receivers | None = None
    """Other processes that hold the model, if they can take weights themselves."""

    def __init__(  # noqa: PLR0913
        self,
        hf_config: PretrainedConfig,
        *,
        layout: Layout,
        device: torch.device,
        dtype: torch.dtype,
        slots: int | Literal["auto"],
        eos_token_ids: Sequence[int],
        decode: Decode,
        max_length: int,
        tensor_parallel: int = 1,
        experts: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """Make the model of `hf_config` in `dtype`, without weights. Not collective.

        `layout` has the processes that load weights together: a single one with `rollout.place` child or servers. A
        completion ends at `eos_token_ids`. No prompt and completion together exceed `max_length` tokens.

        The last three come only where a setting asks for them: `rollout.tensor_parallel` above 1,
        `algorithm.router_replay` rollout, and `model.lora.publish` adapter.
        """

    @staticmethod
    def require_supported(hf_config: PretrainedConfig, device: torch.device) -> None:
        """Raise `IncompatibleError` if the generator cannot run the model here. A dry run calls it."""
        return

    @staticmethod
    def require_adaptable(
        targets: Sequence[str],
        hf_config: PretrainedConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Raise `IncompatibleError` if it cannot hold an adapter of the layers `targets` beside the model."""
        return

    @abstractmethod
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[list[Completion]]:
        """Return each request's `samples` completions, in order.

        Draw t of sample s depends on (`seed`, `step`, `prompt_key`, s, `turn`, t) alone; t counts `drawn` tokens.
        """

    @abstractmethod
    def load_weights(self, weights: Publication, version: int) -> None:
        """Copy weights from every rank's shards, frozen ones only once, so always from one engine. Collective."""

    def so_far(self) -> list[RunningRequest]:
        """Return the partial completions of a running `generate`. In one process, call it from `watch`."""
        return []

    def forget(self) -> None:
        """Free what is kept of conversations (`Sampling.keeps`)."""
        return

    def checksums(self) -> Iterator[tuple[TensorSpec, str]]:
        """Yield each tensor in use, by canonical name, and its `Shard.checksum`.

        A tied weight in two places appears twice.
        """
        return iter(())

    def release(self) -> None:
        """Free device memory until `load_weights` brings all weights; refuse `generate` meanwhile."""
        return

    def close(self) -> None:
        """Free all resources."""
        return


def limit_of(request: Request, sampling: Sampling) -> int:
    """Return the most tokens of a request's completions, `drawn` included."""
    return min(sampling.max_tokens, request.max_tokens or sampling.max_tokens)


def require_valid(
    requests: Sequence[Request], sampling: Sampling, max_positions: int | None
) -> None:
    """Raise `UsageError` for a prompt that is empty or leaves its completion no room."""
    for request in requests:
        length = len(request.token_ids) - request.drawn
        if length == 0:
            raise UsageError(
                f"prompt {request.prompt_key} is empty",
                want="at least one token",
                do="remove it, or correct the chat template",
            )
        room = limit_of(request, sampling)
        if max_positions is not None and length + room > max_positions:
            raise UsageError(
                f"prompt {request.prompt_key} and its completion may exceed the model's positions",
                have=f"{length} prompt tokens + {room} new ones",
                want=f"at most {max_positions}, the model's longest sequence",
                do="lower data.max_prompt_length or rollout.max_response_length",
            )


def not_finite() -> BurnishError:
    """Return the error for logits that are not finite."""
    return BurnishError(
        "the model's logits are not finite, so no token can be drawn",
        do="look at the loss and gradient norm of the steps before; the weights may hold NaN",
    )

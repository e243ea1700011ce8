"""Packed micro-batches, and an engine's outputs for them.

Losses are sums, divided once by global counts, so they do not depend on how the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from burnish.errors import BurnishError
from burnish.records.columns import TrainingArrays
from burnish.records.samples import Floats

Planned = TypeVar("Planned")
# Bytes: kernels load 16 at a time.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch(TrainingArrays[Tensor]):
    """Several sequences laid end to end, without padding. T tokens, S sequences."""

    input_ids: Tensor
    """[T] int64."""
    cu_seqlens: Tensor
    """[S + 1] int32, where each sequence starts; the last entry is T."""
    loss_mask: Tensor
    """[T] bool, True where the token's prediction is trained on."""
    num_tokens: int
    """Loss tokens in the *global* batch, over all ranks and micro-batches."""
    num_sequences: int
    """Sequences with at least one loss token in the *global* batch."""
    selected: Tensor | None = None
    """[T] bool or None; tokens that the policy loss treats differently (`algorithms.token_selection`)."""
    kl: float = 0.0
    """KTO's reference point: how far the policy is from the reference over the *global* batch, at least 0."""
    probe: Any = None
    """What reads the states that the head gets, besides log-probs (`burnish.models.divergence`)."""
    temperature: float = 1.0
    """Divides the logits before log-probs are taken: the policy that sampled at this temperature is the one trained."""

    def given(self, name: str) -> Tensor:
        """Return a field that a loss needs. Raises `BurnishError` if it is None."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise BurnishError(
                f"a loss needs {name}, and the micro-batch has none",
                have=f"{name}=None",
                want="one entry per token",
                do=f"make all examples of the batch with {name}",
            )
        return tensor

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy with every tensor on `device`."""
        return plan_on_device(self, device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor, to accelerators asynchronously."""
    if tensor.device.type == "cpu" and device.type not in ("cpu", "meta", "mps"):
        # A copy from memory that is not pinned waits for all work on CUDA, and for none on Ascend.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def plan_on_device(planned: Planned, device: torch.device) -> Planned:
    """Copy a dataclass of the host, with all tensors in it, to a device. Accelerators get one copy of all."""
    if device.type == "cpu":
        return planned
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _map_tensors(planned, note)
    bytes_of = [each.contiguous().view(-1).view(torch.uint8) for each in tensors]
    sizes = [-(-len(each) // _ALIGNMENT) * _ALIGNMENT for each in bytes_of]
    host = torch.zeros(sum(sizes), dtype=torch.uint8)
    for place, each in zip(torch.split(host, sizes), bytes_of, strict=True):
        place[: len(each)] = each
    pieces = iter(torch.split(to_device(host, device), sizes))

    def there(tensor: Tensor) -> Tensor:
        return next(pieces)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    found: Planned = _map_tensors(planned, there)
    return found


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and any(isinstance(each, tuple | Tensor) for each in value):
        return tuple(_map_tensors(each, function) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    parts = {each.name: getattr(value, each.name) for each in fields(value)}
    mapped = {name: _map_tensors(part, function) for name, part in parts.items()}
    changed = {name: part for name, part in mapped.items() if part is not parts[name]}
    return replace(value, **changed) if changed else value


def _nothing() -> Tensor:
    return torch.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """Per-token outputs of a model.

    Entry t of a sequence concerns the prediction of token t; the first entry is 0. A language model
    fills the first two fields, a value head `values`. Other fields are empty, [0].
    """

    logprobs: Tensor = field(default_factory=_nothing)
    """[T] fp32, log-probability of the token itself."""
    entropy: Tensor = field(default_factory=_nothing)
    """[T] fp32, entropy in nats of the distribution the token was predicted from."""
    values: Tensor = field(default_factory=_nothing)
    """[T] fp32, value of the state that the token was predicted from: all tokens before it."""
    experts: Tensor = field(default_factory=_nothing)
    """[T, L, k] uint8 or int16, the experts that each token went to in each of L routers, if they were requested."""
    probed: Any = field(default_factory=_nothing)
    """What `MicroBatch.probe` read, if there is one."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """This rank's share of one optimizer step. All ranks hold equally many micro-batches."""

    microbatches: tuple[MicroBatch, ...]
    """This rank's micro-batches, in the order they are run."""
    examples: tuple[tuple[int, ...], ...]
    """For each micro-batch and sequence, its index in the global example list (-1: filler that adds nothing)."""
    num_tokens: int
    """Loss tokens over all ranks."""
    num_sequences: int
    """Sequences with at least one loss token over all ranks."""
    total_tokens: int
    """All tokens over all ranks, trained on or not."""
    imbalance: float = 1.0
    """Sum over rounds of the costliest rank's estimated time, over the mean of the ranks' sums; 1: no rank waits."""
    seed: int = 0
    """The run's seed, from which dropout follows in a training pass."""
    sources: Sequence[str] = ()
    """By index in the global example list, an example's source, if a step needs it."""
    beside: Batch | None = None
    """Sequences that a step reads without training on them, such as KTO's mismatched answers."""

    @property
    def is_routed(self) -> bool:
        """Return whether micro-batches name experts. Raises `BurnishError` if only some do."""
        routed = [micro.experts is not None for micro in self.microbatches]
        if any(routed) and not all(routed):
            raise BurnishError(
                "some micro-batches name the experts of their tokens, and others do not",
                have=f"experts in {sum(routed)} of {len(routed)} micro-batches, none in number {routed.index(False) + 1}",
                want="experts of all tokens of a step, or of none",
                do="give every example its experts, or none (algorithm.router_replay=none)",
            )
        return all(routed)

    @property
    def is_filler(self) -> list[bool]:
        """Return, per micro-batch, whether it is filler."""
        return [numbers == (-1,) for numbers in self.examples]

    def by_example(self, arrays: Sequence[Floats]) -> dict[int, Floats]:
        """Split per-token arrays of micro-batches by index in the global example list."""
        parts: dict[int, Floats] = {}
        for array, spans in zip(arrays, self._spans(), strict=True):
            parts |= {number: array[span] for number, span in spans}
        return parts

    def by_trained_tokens(self, arrays: Sequence[Floats]) -> dict[int, Floats]:
        """Split as `by_example` does, and keep the entries of trained tokens."""
        masks = self.by_example([micro.loss_mask.cpu().numpy() for micro in self.microbatches])
        return {number: part[masks[number]] for number, part in self.by_example(arrays).items()}

    def _spans(self) -> Iterator[list[tuple[int, slice]]]:
        """Yield of each micro-batch the examples' indices and their places in it; filler has none."""
        for micro, numbers in zip(self.microbatches, self.examples, strict=True):
            ends = micro.cu_seqlens.tolist()
            spans = map(slice, ends[:-1], ends[1:])
            yield [pair for pair in zip(numbers, spans, strict=True) if pair[0] >= 0]

    def with_field(self, name: str, values: Iterable[Any]) -> Batch:
        """Replace a field of each micro-batch."""
        filled = []
        for micro, value in zip(self.microbatches, values, strict=True):
            change: dict[str, Any] = {name: value}
            filled.append(replace(micro, **change))
        return replace(self, microbatches=tuple(filled))

    def with_logprobs(self, name: str, outputs: Sequence[TokenOutputs]) -> Batch:
        """Add the field `name` from an engine's `forward` of this batch."""
        return self.with_field(name, [output.logprobs.detach() for output in outputs])

    def with_experts(self, outputs: Sequence[TokenOutputs]) -> Batch:
        """Add the experts that this batch's `Engine.forward` recorded, for later passes."""
        return self.with_field("experts", [output.experts for output in outputs])

    def without_experts(self) -> Batch:
        """Drop the experts, for a forward pass of another model."""
        return self.with_field("experts", [None] * len(self.microbatches))

    def with_columns(self, columns: Mapping[str, Mapping[int, Floats]]) -> Batch:
        """Add fields from fp32 arrays over all tokens of this rank's examples, or over the trained ones; others get 0 then."""
        batch = self
        for name, arrays in columns.items():
            filled = []
            for micro, spans in zip(self.microbatches, self._spans(), strict=True):
                mask = micro.loss_mask.numpy()
                whole = np.zeros(len(mask), dtype=np.float32)
                for number, span in spans:
                    own = arrays[number]
                    # An example's first token is never trained on, so the lengths differ.
                    if len(own) == span.stop - span.start:
                        whole[span] = own
                    else:
                        whole[span][mask[span]] = own
                filled.append(torch.from_numpy(whole))
            batch = batch.with_field(name, filled)
        return batch

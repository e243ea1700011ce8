"""Pack examples into this rank's micro-batches.

All ranks compute the same assignment.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from burnish.data.balance import Integers, Shares, share_out
from burnish.distributed.collectives import Parcel, deliver
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.models.flops import ModelFlops
from burnish.records import Batch, Example, Mask, MicroBatch
from burnish.records.columns import columns_of
from burnish.records.samples import digest_of

_FILLER_TOKENS = 2
_UNITS_PER_RANK = 8
"""Examples with one prompt stay together up to a rank's mean number of tokens divided by this."""
_MOST_TOGETHER = 128
"""Most neighbours that stay together."""


class Outlines(NamedTuple):
    """What every rank knows of N examples: enough to assign them without their tokens."""

    lengths: Integers
    """[N] number of tokens."""
    starts: Integers
    """[N] place of the first trained token; 0: no token is trained."""
    trained: Integers
    """[N] number of trained tokens."""
    prompts: Integers
    """[N] digest of the tokens before the first trained one."""
    columns: Mapping[str, tuple[int, ...]]
    """The per-token arrays that all examples have, with the shape of a token's entry."""

    @classmethod
    def joined(cls, parts: Iterable[tuple[Sequence[int], Outlines]], count: int) -> Outlines:
        """Return the outlines of `count` examples from those of numbered ones, which have no columns."""
        arrays = np.zeros((4, count), np.int64)
        for numbers, outlines in parts:
            arrays[:, numbers] = outlines[:4]
        lengths, starts, trained, prompts = arrays
        return cls(lengths, starts, trained, prompts, {})

    def take(self, numbers: Integers) -> Outlines:
        """Return the outlines of some examples."""
        lengths, starts, trained, prompts = (array[numbers] for array in self[:4])
        return Outlines(lengths, starts, trained, prompts, self.columns)


def make_batch(  # noqa: PLR0913
    examples: Sequence[Example] | Mapping[int, Example],
    layout: Layout,
    tokens_per_device: int,
    flops: ModelFlops,
    temperature: float = 1.0,
    *,
    outlines: Outlines | None = None,
    owners: Integers | None = None,
    together: Sequence[int] | None = None,
) -> Batch:
    """Pack examples into micro-batches of at most `tokens_per_device` tokens; return this rank's.

    Every rank gets equally many micro-batches: as few as the budget allows, of about equal cost by
    `flops`. Neighbours with the same prompt stay together if the ranks stay balanced. A micro-batch
    without examples gets two untrained tokens. Tensors are on the CPU.

    `together` divides the examples, in order, into as many neighbours as must share a micro-batch; by default none must.

    With `outlines` of all N examples, `examples` may hold some, by number. Then the `owners` [N] (-1: all
    ranks) send each example to the ranks that train on it. Collective then.

    Raises `UsageError` for no examples, for one over the budget, and as `outlines_of` does.
    """
    by_number = dict(examples if isinstance(examples, Mapping) else enumerate(examples))
    outlines = outlines or outlines_of(by_number)
    if not len(outlines.lengths):
        raise UsageError("a batch of no examples", want="at least one example")
    _check_lengths(outlines.lengths, tokens_per_device)
    shares = _assign(outlines, layout.data_size, tokens_per_device, flops, together)
    own = shares.microbatches(layout.data_rank)
    # Counts of the whole step, known before its first micro-batch runs: a loss is a sum that is divided once, by them.
    # A mean per micro-batch or rank would weigh tokens by how the batch happens to be cut.
    global_counts: dict[str, Any] = {
        "num_tokens": int(outlines.trained.sum()),
        "num_sequences": int(np.count_nonzero(outlines.trained)),
    }
    local = by_number
    if owners is not None and not (owners < 0).any():
        local = _brought(by_number, outlines, shares, layout)
    # A rank without examples in a round runs filler: with fewer rounds than the others it would miss their collectives.
    filler = _filler(outlines.columns)
    packed = [
        _pack([local[i] for i in numbers.tolist()] or [filler], outlines.columns) for numbers in own
    ]
    return Batch(
        microbatches=tuple(
            MicroBatch(**fields, **global_counts, temperature=temperature) for fields in packed
        ),
        examples=tuple(tuple(numbers.tolist()) or (-1,) for numbers in own),
        total_tokens=int(outlines.lengths.sum()),
        imbalance=shares.imbalance,
        **global_counts,
    )


def outlines_of(examples: Mapping[int, Example]) -> Outlines:
    """Return the `Outlines` of examples.

    Raises `UsageError` for arrays of another length than the tokens, for arrays on some examples only,
    and if a first token is trained on.
    """
    rows = []
    columns: dict[int, Mapping[str, tuple[int, ...]]] = {}
    for number, example in examples.items():
        mask = example.loss_mask
        length = len(example.token_ids)
        optional = {column: getattr(example, column) for column in columns_of(Example)}
        arrays = {column: array for column, array in optional.items() if array is not None}
        for column, array in {"loss_mask": mask, **arrays}.items():
            if len(array) != length:
                raise UsageError(
                    f"example {number}: {column} does not fit its tokens",
                    have=f"{len(array)} entries for {length} tokens",
                    want="one entry per token",
                )
        if mask[:1].any():
            raise UsageError(
                f"example {number} trains on its first token",
                want="loss_mask[0] = False: nothing predicts the first token",
            )
        count = int(mask.sum())
        start = int(mask.argmax()) if count else 0
        prompt = np.frombuffer(digest_of(example.token_ids[:start]), np.int64)[0]
        rows.append((length, start, count, prompt))
        columns[number] = {column: array.shape[1:] for column, array in arrays.items()}
    lengths, starts, trained, prompts = np.array(rows, np.int64).reshape(-1, 4).T.copy()
    return Outlines(lengths, starts, trained, prompts, _common(columns))


def _brought(
    examples: Mapping[int, Example], outlines: Outlines, shares: Shares, layout: Layout
) -> dict[int, Any]:
    """Return this rank's examples, which their owners send. Collective."""
    leaving: defaultdict[int, list[int]] = defaultdict(list)
    for number in examples:
        leaving[int(shares.ranks[number])].append(number)
    parcels: list[Parcel] = []
    for data_rank, numbers in leaving.items():
        others = [rank for rank in layout.peers(data_rank) if rank != layout.rank]
        if others:
            packet = _packet(examples, numbers, outlines.columns)
            parcels.append((others, pickle.dumps((numbers, packet))))
    own = {number: examples[number] for number in leaving[layout.data_rank]}
    for data in deliver(parcels, layout):
        numbers, packet = pickle.loads(data)  # noqa: S301 - from a rank of this run
        own |= _unpacked(outlines.lengths, numbers, packet)
    return own


def _packet(
    examples: Mapping[int, Any], numbers: list[int], columns: Iterable[str]
) -> dict[str, Any]:
    chosen = [examples[number] for number in numbers]
    joined = {
        name: np.concatenate([getattr(example, name) for example in chosen])
        for name in ("token_ids", "loss_mask", *columns)
    }
    joined["token_ids"] = joined["token_ids"].astype(np.int32)
    joined["loss_mask"] = np.packbits(joined["loss_mask"])
    return joined


def _unpacked(
    lengths: Integers, numbers: list[int], joined: dict[str, Any]
) -> Iterator[tuple[int, Example]]:
    ends = np.cumsum(lengths[numbers])
    joined["token_ids"] = joined["token_ids"].astype(np.int64)
    joined["loss_mask"] = np.unpackbits(joined["loss_mask"], count=ends[-1]).astype(np.bool_)
    parts = {name: np.split(array, ends[:-1]) for name, array in joined.items()}
    for number, *arrays in zip(numbers, *parts.values(), strict=True):
        yield number, Example(**dict(zip(parts, arrays, strict=True)))


def _assign(
    outlines: Outlines,
    ranks: int,
    budget: int,
    flops: ModelFlops,
    together: Sequence[int] | None = None,
) -> Shares:
    """Assign examples to ranks. Neighbours pay only once for a common prompt."""
    lengths = outlines.lengths
    # Samples of one prompt in one micro-batch compute it once. But a group that is too large is cut: a rank that gets one
    # group more than the others would hold them up by a whole group.
    fair = int(lengths.sum()) // (ranks * _UNITS_PER_RANK)
    follows = _follows(outlines.starts, outlines.prompts, lengths, min(fair, budget))
    groups = (~follows).cumsum() - 1
    if together is not None and max(together) > 1:
        groups = np.repeat(np.arange(len(together)), together)
        follows = _follows(outlines.starts, outlines.prompts, lengths, budget)
        follows[1:] &= groups[1:] == groups[:-1]
    costs = flops.each(lengths)
    costs -= flops.per_token * (follows * outlines.starts)
    return share_out(lengths, costs, ranks, budget, groups=groups)


def _follows(starts: Integers, prompts: Integers, lengths: Integers, limit: int) -> Mask:
    """Return [N] whether an example joins the one before it: same prompt, at most `limit` tokens."""
    follows = np.zeros(len(lengths), np.bool_)
    follows[1:] = (starts[1:] == starts[:-1]) & (prompts[1:] == prompts[:-1])
    places = np.arange(len(lengths))
    places -= np.maximum.accumulate(places * ~follows)
    follows &= places % _MOST_TOGETHER > 0
    current = np.flatnonzero(~follows)
    last = np.append(current[1:], len(lengths))
    tokens = np.zeros_like(current)
    while len(current):  # each pass takes the next example of every run
        own = lengths[current]
        tokens += own
        over = tokens > limit
        follows[current] &= ~over
        tokens -= over * (tokens - own)
        current = current + 1
        if not (goes_on := current < last).all():
            current = current[goes_on]
            last = last[goes_on]
            tokens = tokens[goes_on]
    return follows


def _check_lengths(lengths: Integers, budget: int) -> None:
    longest = int(np.argmax(lengths))
    if lengths[longest] > budget:
        over = int((lengths > budget).sum())
        raise UsageError(
            f"example {longest} is longer than a micro-batch may be",
            have=f"{lengths[longest]} tokens"
            + (f"; {over} examples are too long" if over > 1 else ""),
            want=f"at most batch.tokens_per_device={budget}",
            do=f"set batch.tokens_per_device={lengths[longest]} or more, or limit the lengths",
        )
    if not lengths.all():
        raise UsageError(f"example {int(np.argmin(lengths))} has no tokens", want="at least one")


def _common(columns: Mapping[int, Mapping[str, tuple[int, ...]]]) -> Mapping[str, tuple[int, ...]]:
    first = next(iter(columns.values()), {})
    for index, shapes in columns.items():
        if odd := shapes.keys() ^ first.keys():
            raise UsageError(
                f"only some examples have {', '.join(sorted(odd))}",
                have=f"{', '.join(shapes) or 'none'} of example {index}, {', '.join(first) or 'none'} of the first",
                want="all or none",
            )
    return first


def _pack(packed: Sequence[Example], columns: Mapping[str, Any]) -> dict[str, Any]:
    lengths = np.fromiter((len(e.token_ids) for e in packed), np.int64, len(packed))
    ends = np.cumsum(lengths)
    return {
        "input_ids": _joined(packed, "token_ids", np.int64),
        "cu_seqlens": torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        "loss_mask": _joined(packed, "loss_mask", np.bool_),
        **{name: _joined(packed, name, columns_of(Example)[name].dtype) for name in columns},
    }


def _joined(examples: Sequence[Example], name: str, dtype: npt.DTypeLike) -> Tensor:
    arrays = [getattr(example, name) for example in examples]
    return torch.from_numpy(np.concatenate(arrays).astype(dtype, copy=False))


def _filler(columns: Mapping[str, tuple[int, ...]]) -> Example:
    arrays: dict[str, Any] = {
        name: np.zeros((_FILLER_TOKENS, *shape), columns_of(Example)[name].dtype)
        for name, shape in columns.items()
    }
    if "experts" in arrays:  # a token's experts differ from each other
        arrays["experts"] += np.arange(arrays["experts"].shape[-1], dtype=arrays["experts"].dtype)
    mask = np.zeros(_FILLER_TOKENS, dtype=np.bool_)
    return Example(token_ids=np.zeros(_FILLER_TOKENS, dtype=np.int64), loss_mask=mask, **arrays)

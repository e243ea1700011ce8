"""Pack examples into this rank's micro-batches.

All ranks hold all examples and compute the same assignment; each makes tensors of its own share.
Token and sequence counts are global, so the cut does not change a loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from burnish.data.balance import Integers, Shares, share_out
from burnish.distributed.layout import Layout
from burnish.errors import UsageError
from burnish.models.flops import ModelFlops
from burnish.records import Batch, Example, MicroBatch

_OPTIONAL: Mapping[str, type[np.generic]] = {
    "advantages": np.float32,
    "old_logprobs": np.float32,
    "sampled_logprobs": np.float32,
    "ref_logprobs": np.float32,
    "returns": np.float32,
    "old_values": np.float32,
    "experts": np.int16,
}
"""What examples may have for each token, as it is packed."""
_FILLER_TOKENS = 2
_UNITS_PER_RANK = 8
"""Examples with one prompt are parted where together they would be more than this share of a rank's tokens."""


def make_batch(
    examples: Sequence[Example],
    layout: Layout,
    tokens_per_device: int,
    flops: ModelFlops,
    temperature: float = 1.0,
) -> Batch:
    """Pack examples into micro-batches of at most `tokens_per_device` tokens; return this rank's.

    Every rank gets equally many micro-batches: as few as the budget allows, of about equal cost by
    `flops`. Neighbours with the same prompt stay together if the ranks stay balanced, because an
    engine may compute their prompt once. Two untrained tokens replace a missing example. Tensors
    are on the CPU.

    Raises `UsageError` for no examples and for one over the budget. Also for arrays of another
    length than the tokens, and for advantages or log-probs on some examples only.
    """
    if not examples:
        raise UsageError("a batch of no examples", want="at least one example")
    lengths = np.fromiter((len(e.token_ids) for e in examples), np.int64, len(examples))
    _check_lengths(lengths, tokens_per_device)
    optional = [name for name in _OPTIONAL if _present(examples, name)]
    _check_aligned(examples, lengths, ["loss_mask", *optional])
    trained = _trained_tokens(examples, lengths)
    shares = _assign(examples, lengths, layout.data_size, tokens_per_device, flops)
    mine = shares.microbatches[layout.data_rank]
    whole: dict[str, Any] = {
        "num_tokens": int(trained.sum()),
        "num_sequences": int(np.count_nonzero(trained)),
    }
    filler = _filler(examples[0], optional)
    packed = (_pack([examples[i] for i in items] or [filler], optional) for items in mine)
    return Batch(
        microbatches=tuple(MicroBatch(**p, **whole, temperature=temperature) for p in packed),
        examples=tuple(tuple(items.tolist()) or (-1,) for items in mine),
        total_tokens=int(lengths.sum()),
        imbalance=shares.imbalance,
        **whole,
    )


def _assign(
    examples: Sequence[Example], lengths: Integers, ranks: int, budget: int, flops: ModelFlops
) -> Shares:
    """Assign examples to ranks. One that follows others with its prompt costs only its own tokens."""
    prompts = np.array([e.loss_mask.argmax() if e.loss_mask.any() else 0 for e in examples])
    fair = int(lengths.sum()) // (ranks * _UNITS_PER_RANK)
    groups = _groups(examples, prompts, lengths, min(fair, budget))
    follows = np.diff(groups, prepend=-1) == 0
    costs = np.array(flops.each(lengths)) - flops.per_token * np.where(follows, prompts, 0)
    return share_out(lengths, costs, ranks, budget, groups=groups)


def _groups(
    examples: Sequence[Example], prompts: Integers, lengths: Integers, limit: int
) -> Integers:
    """Number runs of neighbours with one prompt, each of at most `limit` tokens."""
    groups = np.zeros(len(examples), dtype=np.int64)
    first, total = 0, int(lengths[0])
    for index in range(1, len(examples)):
        prompt, length = int(prompts[index]), int(lengths[index])
        total += length
        alike = (
            total <= limit
            and prompt == prompts[first]
            and np.array_equal(
                examples[index].token_ids[:prompt], examples[first].token_ids[:prompt]
            )
        )
        if not alike:
            first, total = index, length
        groups[index] = groups[index - 1] + (not alike)
    return groups


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


def _present(examples: Sequence[Example], name: str) -> bool:
    """Return whether all examples have this array, or raise if only some do."""
    have = [getattr(example, name) is not None for example in examples]
    if any(have) and not all(have):
        raise UsageError(
            f"{name} on some examples only",
            have=f"{sum(have)} of {len(have)} have it; example {have.index(False)} has not",
            want="all or none",
        )
    return have[0]


def _check_aligned(examples: Sequence[Example], lengths: Integers, names: Sequence[str]) -> None:
    for name in names:
        sizes = np.fromiter((len(getattr(e, name)) for e in examples), np.int64, len(examples))
        if (sizes != lengths).any():
            bad = int(np.flatnonzero(sizes != lengths)[0])
            raise UsageError(
                f"example {bad}: {name} does not fit its tokens",
                have=f"{sizes[bad]} entries for {lengths[bad]} tokens",
                want="one entry per token",
            )


def _trained_tokens(examples: Sequence[Example], lengths: Integers) -> Integers:
    masks = np.concatenate([example.loss_mask for example in examples])
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    if masks[starts].any():
        raise UsageError(
            f"example {int(np.flatnonzero(masks[starts])[0])} trains on its first token",
            want="loss_mask[0] = False: nothing predicts the first token",
        )
    return np.add.reduceat(masks, starts, dtype=np.int64)


def _pack(packed: Sequence[Example], optional: Sequence[str]) -> dict[str, Any]:
    lengths = np.fromiter((len(e.token_ids) for e in packed), np.int64, len(packed))
    ends = np.cumsum(lengths)
    return {
        "input_ids": _joined(packed, "token_ids", np.int64),
        "cu_seqlens": torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        "loss_mask": _joined(packed, "loss_mask", np.bool_),
        **{name: _joined(packed, name, _OPTIONAL[name]) for name in optional},
    }


def _joined(examples: Sequence[Example], name: str, dtype: npt.DTypeLike) -> Tensor:
    arrays = [getattr(example, name) for example in examples]
    return torch.from_numpy(np.concatenate(arrays).astype(dtype, copy=False))


def _filler(like: Example, optional: Sequence[str]) -> Example:
    arrays: dict[str, Any] = {
        name: np.zeros((_FILLER_TOKENS, *getattr(like, name).shape[1:]), dtype=_OPTIONAL[name])
        for name in optional
    }
    if "experts" in arrays:  # a token goes to several, never twice to one
        arrays["experts"] += np.arange(arrays["experts"].shape[-1], dtype=_OPTIONAL["experts"])
    mask = np.zeros(_FILLER_TOKENS, dtype=np.bool_)
    return Example(token_ids=np.zeros(_FILLER_TOKENS, dtype=np.int64), loss_mask=mask, **arrays)

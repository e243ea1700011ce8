"""Put a completion together from its parts, and the arrays of many completions end to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from burnish.records.columns import columns_of
from burnish.records.samples import Completion, StopReason


def of_environment(ids: Sequence[int], weights_version: int) -> Completion:
    """Return tokens that an environment wrote, as a part of a completion."""
    zeros = np.zeros(len(ids), np.float32)
    mask = np.zeros(len(ids), np.bool_)
    return Completion(
        np.array(ids, np.int64), zeros, zeros, None, weights_version, response_mask=mask
    )


def joined_completions(parts: Sequence[Completion]) -> Completion:
    """Return parts that follow each other as one completion. Its text and the reason of its end are the last part's."""
    filled = [part for part in parts if len(part.token_ids)] or parts[-1:]
    if len(filled) == 1 and filled[0] is parts[-1]:
        return parts[-1]
    versions = list[tuple[int, int]]()
    start = 0
    for part in filled:
        for version, first in ((part.weights_version, 0), *part.later_versions):
            if not versions or versions[-1][0] != version:
                versions.append((version, start + first))
        start += len(part.token_ids)
    joined: dict[str, Any] = {}
    for name, kind in columns_of(Completion).items():
        # What covers the prompt is the last part's, whose prompt is all that stands before it.
        if not kind.covers_prompt and any(getattr(part, name) is not None for part in filled):
            attribute = "drawn" if name == "response_mask" else name
            joined[name] = np.concatenate([getattr(part, attribute) for part in filled])
    timed = [part.times for part in filled if part.times]
    return replace(
        parts[-1],
        **joined,
        weights_version=versions[0][0],
        later_versions=tuple(versions[1:]),
        times=(*timed[0][:2], timed[-1][2]) if timed else None,
    )


def described_arrays(completion: Completion) -> dict[str, int]:
    """Return how many entries a completion's arrays have, for `split_arrays`: `tokens`, and each optional array that is there."""
    counts = {"tokens": len(completion.token_ids)}
    for name, kind in columns_of(Completion).items():
        array = getattr(completion, name)
        if kind.is_optional and array is not None:
            counts[name] = len(array)
    return counts


def joined_arrays(
    completions: Sequence[Completion], ids: npt.DTypeLike
) -> dict[str, npt.NDArray[Any]]:
    """Join completions' arrays, by name; `ids` is the type of token ids."""
    stored = {"token_ids": ids, "response_mask": np.uint8}
    joined = {}
    for name in columns_of(Completion):
        arrays = [getattr(completion, name) for completion in completions]
        there = [array for array in arrays if array is not None]
        if there:
            joined[name] = np.concatenate(there)
            joined[name] = joined[name].astype(stored.get(name, joined[name].dtype), copy=False)
    return joined


def split_arrays(
    described: Sequence[Mapping[str, Any]], arrays: Mapping[str, npt.NDArray[Any]]
) -> Iterator[Completion]:
    """Undo `joined_arrays`; `described` has each completion's other fields and lengths. Raises `ValueError` for wrong lengths."""
    kinds = columns_of(Completion)
    parts = {}
    for name, kind in kinds.items():
        key = name if kind.is_optional else "tokens"
        counts = [fields.get(key, 0) for fields in described]
        array = arrays.get(name, np.zeros(0, np.float32))
        if len(array) != sum(counts):
            raise ValueError(f"there are {len(array)} {name} of {sum(counts)} tokens")
        if kind.dims == 1:  # experts keep the type that the generator chose
            array = array.astype(kind.dtype, copy=False)
        parts[name] = np.split(array, np.cumsum(counts, dtype=int)[:-1])
    for fields, *own in zip(described, *parts.values(), strict=False):
        columns = {
            name: array
            for name, array in zip(kinds, own, strict=True)
            if not kinds[name].is_optional or name in fields
        }
        reason = fields["stop_reason"]
        times = fields.get("times")
        yield Completion(
            stop_reason=reason if reason in get_args(StopReason) else None,
            weights_version=int(fields["weights_version"]),
            later_versions=tuple(
                (int(number), int(first)) for number, first in fields["later_versions"]
            ),
            times=tuple(times) if times else None,
            **columns,
        )

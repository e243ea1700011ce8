"""Messages between training and generator servers: a line of JSON and the bytes of the arrays that it names.

No pickle goes over the network.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch

from burnish.boxes.box import Box
from burnish.boxes.shards import Shard, TensorSpec
from burnish.errors import BurnishError, IncompatibleError, MissingError, UsageError
from burnish.records import Completion, Request
from burnish.records.columns import columns_of
from burnish.records.completion_parts import described_arrays, joined_arrays, split_arrays
from burnish.rollout.base import Sampling, limit_of

Array = np.ndarray[Any, Any]
Parts = list[bytes | memoryview]
"""A message in parts, which are sent one after the other. Parts that hold arrays are views."""
_MOST_BYTES_OF_A_LINE = 64 << 20
# Most that rounding adds to the log-prob of a certain token, and the end of the year 9999 in seconds since 1970.
_ROUNDING = 0.01
_LAST_TIME = 253_402_300_800
_DTYPES = {np.dtype(name): name for name in ("int64", "int16", "uint8", "float32")}
_ERRORS = {kind.__name__: kind for kind in (UsageError, IncompatibleError, MissingError)}
NONSENSE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""Exceptions that reading functions raise for bytes that no encoding function makes."""


class Message(NamedTuple):
    """Fields of JSON, and arrays by name."""

    fields: Mapping[str, Any]
    arrays: Mapping[str, Array]


def encode(fields: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> Parts:
    """Encode a message without copying its arrays."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    kinds = {name: [_DTYPES[array.dtype], array.shape] for name, array in contiguous.items()}
    line = json.dumps({**fields, "arrays": kinds}, allow_nan=False).encode() + b"\n"
    return [line, *(array.reshape(-1).view(np.uint8).data for array in contiguous.values())]


def read_message(stream: BinaryIO) -> Message | None:
    """Return the next message, or None at the end. Raises `NONSENSE`. Only received bytes take memory."""
    line = stream.readline(_MOST_BYTES_OF_A_LINE)
    if not line:
        return None
    fields = json.loads(line)
    arrays = {}
    for name, (kind, shape) in fields.pop("arrays").items():
        if kind not in _DTYPES.values() or any(size < 0 for size in shape):
            raise ValueError(f"an array cannot have dtype {kind} and shape {shape}")
        arrays[name] = _read_array(stream, kind, shape)
    return Message(fields, arrays)


def _read_array(stream: BinaryIO, kind: str, shape: Sequence[int]) -> Array:
    """Read into an array, whose pages the system commits as bytes arrive."""
    array = torch.empty(math.prod(shape) * np.dtype(kind).itemsize, dtype=torch.uint8).numpy()
    room = array.data
    received = 0
    while received < len(room):
        read = cast(Any, stream).readinto(room[received:])
        if not read:
            raise ValueError(f"{received} of {len(room)} bytes arrived")
        received += read
    return array.view(kind).reshape(shape)


def encode_shard(shard: Shard) -> Parts:
    """Return a piece of weights as a message."""
    spec = shard.spec
    box = shard.box
    data = shard.tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    fields = {
        "name": spec.name,
        "shape": spec.shape,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "offsets": box.offsets,
        "sizes": box.sizes,
    }
    return encode(fields, {"data": data})


def read_shards(
    stream: BinaryIO, read_wave: Callable[[Sequence[Any], int, int], Iterator[Shard]] | None = None
) -> Iterator[Shard]:
    """Yield pieces of weights up to `LAST`. Raises `NONSENSE`. `read_wave` yields those that come another way."""
    while (message := read_message(stream)) is not None:
        fields = message.fields
        if fields.get("last"):
            return
        if read_wave is not None and "wave" in fields:
            yield from read_wave(fields["wave"], *fields["span"])
            continue
        dtype = getattr(torch, fields["dtype"])
        spec = TensorSpec(fields["name"], tuple(fields["shape"]), dtype)
        box = Box(tuple(fields["offsets"]), tuple(fields["sizes"]))
        flat = torch.from_numpy(message.arrays["data"])
        # numpy gives an empty array strides that torch cannot view.
        flat = flat.view(dtype) if flat.numel() else torch.empty(0, dtype=dtype)
        yield Shard(spec, box, flat.view(box.sizes))
    raise ValueError("the weights ended too early")


def encode_requests(
    requests: Sequence[Request],
    sampling: Sampling,
    version: int,
    owner: str = "",
    *,
    in_flight: bool,
) -> Parts:
    """Encode requests for completions by a version of `owner`'s weights, `in_flight` also by later ones."""
    rows = [
        [
            each.prompt_key,
            len(each.token_ids),
            each.samples,
            each.first_sample,
            each.drawn,
            each.turn,
            each.max_tokens,
        ]
        for each in requests
    ]
    ids = np.concatenate([np.zeros(0, np.int64), *(each.token_ids for each in requests)])
    fields = {
        "version": version,
        "owner": owner,
        "in_flight": in_flight,
        "sampling": asdict(sampling),
        "requests": rows,
    }
    return encode(fields, {"token_ids": ids.astype(np.int64)})


def read_requests(message: Message) -> tuple[list[Request], Sampling, int]:
    """Return the requests, their sampling, and the weights' version. Raises `NONSENSE`."""
    fields = message.fields
    settings: dict[str, Any] = {
        name: tuple(x) if isinstance(x, list) else x for name, x in fields["sampling"].items()
    }
    rows = fields["requests"]
    ids = np.split(message.arrays["token_ids"], np.cumsum([length for _, length, *_ in rows])[:-1])
    requests = [
        Request(key, tokens, samples, first, drawn=drawn, turn=turn, max_tokens=most)
        for (key, _, samples, first, drawn, turn, most), tokens in zip(rows, ids, strict=bool(rows))
    ]
    return requests, Sampling(**settings), int(fields["version"])


def encode_completions(groups: Sequence[Sequence[Completion]]) -> Parts:
    """Return each request's completions as a message."""
    completions = [completion for group in groups for completion in group]
    described = [
        {
            **described_arrays(completion),
            "stop_reason": completion.stop_reason,
            "weights_version": completion.weights_version,
            "later_versions": completion.later_versions,
            "times": completion.times,
        }
        for completion in completions
    ]
    arrays = joined_arrays(completions, np.int64)
    return encode({"groups": [len(group) for group in groups], "completions": described}, arrays)


def read_completions(
    message: Message,
    requests: Sequence[Request],
    sampling: Sampling,
    version: int,
    vocabulary: int,
    *,
    in_flight: bool,
    partial: bool = False,
) -> list[list[Completion]]:
    """Return each request's completions, `partial` ones if set.

    Raises `NONSENSE` if they do not fit the requests, or have token ids that are not below `vocabulary`.
    """
    described = message.fields["completions"]
    if list(message.fields["groups"]) != [request.samples for request in requests]:
        raise ValueError("these are not the completions that were asked for")
    request_of = [request for request in requests for _ in range(request.samples)]
    for fields, request in zip(described, request_of, strict=True):
        _require_length(fields, request, sampling, partial=partial)
    for name, array in message.arrays.items():
        kind = columns_of(Completion)[name]
        general = np.floating if issubclass(kind.dtype, np.floating) else np.integer
        if not np.issubdtype(array.dtype, general) or array.ndim != kind.dims:
            raise ValueError(f"{name} cannot be {array.dtype} of shape {array.shape}")
    completions = list(split_arrays(described, message.arrays))
    for fields, completion in zip(described, completions, strict=True):
        if fields["stop_reason"] not in ("stop", "length", None)[: 2 + partial]:
            raise ValueError("a completion has no stop reason that is known")
        _require_versions(completion, version, in_flight=in_flight)
        _require_tokens(completion, vocabulary)
    remaining = iter(completions)
    return [[next(remaining) for _ in range(request.samples)] for request in requests]


def _require_length(
    fields: Mapping[str, Any], request: Request, sampling: Sampling, *, partial: bool
) -> None:
    count = fields["tokens"]
    limit = limit_of(request, sampling)
    room = limit - request.drawn
    if type(count) is not int or not (1 - partial) <= count <= room:
        raise ValueError(f"a completion does not have 1 to {limit} tokens")
    if fields["stop_reason"] == "length" and count != room:
        raise ValueError(f"a completion ends at {count} tokens, and its limit is {room}")
    read = len(request.token_ids) + count - 1
    if sampling.experts and not partial and fields.get("experts") != read:
        raise ValueError(
            f"a completion has experts of {fields.get('experts', 0)} tokens instead of {read}"
        )


def _require_versions(completion: Completion, version: int, *, in_flight: bool) -> None:
    first = completion.weights_version
    later = completion.later_versions
    if (first != version and not (in_flight and first > version)) or (later and not in_flight):
        raise ValueError(f"weights of version {first} made a completion")
    drawn = [(first, 0), *later, (sys.maxsize, len(completion.token_ids) + 1)]
    if any(before[0] >= after[0] or before[1] > after[1] for before, after in pairwise(drawn)):
        raise ValueError("the versions of a completion's weights do not follow each other")


def _require_tokens(completion: Completion, vocabulary: int) -> None:
    if completion.response_mask is not None:
        raise ValueError("a completion has tokens that no generator drew")
    ids = completion.token_ids
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise ValueError(f"a completion has token ids that are not below {vocabulary}")
    for logprobs in (completion.logprobs, completion.sampled_logprobs):
        if not (np.isfinite(logprobs).all() and (logprobs <= _ROUNDING).all()):
            raise ValueError("a completion has log-probs that are not finite, or above 0")
    if completion.times is not None and not (
        len(completion.times) == 3 and all(0 <= moment < _LAST_TIME for moment in completion.times)
    ):
        raise ValueError("a completion has impossible times")


LAST = encode({"last": True})
"""The message after the last piece of weights."""


def encode_error(error: BurnishError) -> Parts:
    """Return an error as a message."""
    return encode({"error": {"kind": type(error).__name__, **error.parts()}})


def error_of(fields: Mapping[str, Any]) -> BurnishError | None:
    """Return a message's error, if it has one."""
    parts = fields.get("error")
    if parts is None:
        return None
    kind = _ERRORS.get(parts.pop("kind", ""), BurnishError)
    return kind(parts.pop("problem"), **parts)

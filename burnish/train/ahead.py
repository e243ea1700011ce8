"""The files of batches that are drawn and not trained on, in a step's `ahead/`.

`batch-N.safetensors` has the tokens of the batch that step N trains on, all rollouts end to end; `batch-N.jsonl` has a line for each group.
A group read back has no messages and no columns: its rewards are given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from burnish.checkpoint.manifest import AHEAD
from burnish.checkpoint.steps import Committed
from burnish.errors import IncompatibleError
from burnish.files.safetensors import build_header, header_size, parse_header
from burnish.files.strict_json import clipped, parse_json
from burnish.records import Completion, Prompt, Rollout, StopReason
from burnish.tracking.trackers import json_number, json_numbers
from burnish.train.collect import DrawnBatch

Array = np.ndarray[Any, Any]

_DTYPES: Mapping[str, np.dtype[Any]] = {
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
}
_KINDS = {
    "prompt_ids": [("i", 1)],
    "token_ids": [("i", 1)],
    "logprobs": [("f", 1)],
    "sampled_logprobs": [("f", 1)],
    "experts": [("u", 3), ("i", 3)],
}
# What kind of numbers each tensor has, and in how many dimensions.
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_GROUP = {
    "index": (int,),
    "prompt_tokens": (int,),
    "text": (str,),
    "answer": (str, type(None)),
    "source": (str,),
    "kept": (bool,),
    "rollouts": (list,),
}
_ROLLOUT = {
    "sample": (int,),
    "tokens": (int,),
    "experts": (int,),
    "text": (str,),
    "stop_reason": (str,),
    "weights_version": (int,),
    "reward": (float, str),
    "reward_parts": (dict,),
    "greedy_reward": (float, str, type(None)),
    "reward_error": (str, type(None)),
}
# The fields of a line and of its rollouts, and their types in JSON. Numbers of tokens count rows of the tensors.


def ahead_files(batches: Sequence[DrawnBatch]) -> dict[str, bytes]:
    """Return the files of pending batches, by path below the step."""
    files = {}
    for batch in batches:
        lines = [_line(group, kept=True) for group in batch.groups]
        lines += [_line(group, kept=False) for group in batch.left_out]
        files[_path(batch.step, ".jsonl")] = "".join(lines).encode()
        files[_path(batch.step, ".safetensors")] = _tensors([*batch.groups, *batch.left_out])
    return files


def read_ahead(step: Committed, files: Mapping[str, bytes]) -> tuple[DrawnBatch, ...]:
    """Return the pending batches of a step from the content of its `ahead/`, in order.

    Raises `IncompatibleError` unless they are those of the steps that follow, as `ahead_files` writes them.
    """
    count = len(files) // 2
    expected = range(step.step, step.step + count)
    names = {_path(number, suffix) for number in expected for suffix in (".jsonl", ".safetensors")}
    told = step.state.get("ahead", 0)
    if files.keys() != names or told != count:
        raise _not_ours(step.path / AHEAD, f"{', '.join(files) or 'no file'}, ahead {told}")
    batches = []
    for number in expected:
        lines, tensors = _path(number, ".jsonl"), _path(number, ".safetensors")
        groups = [
            _checked(parse_json(line, str(step.path / lines)), _GROUP, step.path / lines)
            for line in files[lines].splitlines()
        ]
        arrays = _arrays(step.path / tensors, files[tensors])
        batches.append(_batch(number, groups, arrays, step.path / tensors))
    return tuple(batches)


def _path(step: int, suffix: str) -> str:
    return f"{AHEAD}batch-{step + 1:08d}{suffix}"


def _line(group: Sequence[Rollout], *, kept: bool) -> str:
    prompt = group[0].prompt
    fields = {
        "index": prompt.index,
        "prompt_tokens": len(prompt.token_ids),
        "text": prompt.text,
        "answer": None if prompt.answer is None else str(prompt.answer),
        "source": prompt.source,
        "kept": kept,
        "rollouts": [
            {
                "sample": rollout.sample,
                "tokens": len(rollout.completion.token_ids),
                "experts": _rows(rollout.completion.experts),
                "text": rollout.text,
                "stop_reason": rollout.completion.stop_reason,
                "weights_version": rollout.completion.weights_version,
                "reward": json_number(float(rollout.reward)),
                "reward_parts": json_numbers(rollout.reward_parts),
                "greedy_reward": None
                if rollout.greedy_reward is None
                else json_number(float(rollout.greedy_reward)),
                "reward_error": rollout.reward_error,
            }
            for rollout in group
        ],
    }
    return json.dumps(fields, allow_nan=False) + "\n"


def _rows(experts: Array | None) -> int:
    return 0 if experts is None else len(experts)


def _tensors(groups: Sequence[Sequence[Rollout]]) -> bytes:
    completions = [rollout.completion for group in groups for rollout in group]
    tokens, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    arrays: dict[str, Array] = {
        "prompt_ids": np.concatenate([tokens, *(group[0].prompt.token_ids for group in groups)]),
        "token_ids": np.concatenate([tokens, *(each.token_ids for each in completions)]),
        "logprobs": np.concatenate([logprobs, *(each.logprobs for each in completions)]),
        "sampled_logprobs": np.concatenate(
            [logprobs, *(each.sampled_logprobs for each in completions)]
        ),
    }
    for name in ("prompt_ids", "token_ids"):
        arrays[name] = arrays[name].astype(np.int32)
    experts = [each.experts for each in completions if each.experts is not None]
    if experts:
        arrays["experts"] = np.concatenate(experts)
    names = {dtype: name for name, dtype in _DTYPES.items()}
    described = [(name, names[each.dtype], each.shape) for name, each in arrays.items()]
    header, _ = build_header(described, {})
    return b"".join([header, *(each.tobytes() for each in arrays.values())])


def _arrays(path: PurePath, data: bytes) -> dict[str, Array]:
    header = parse_header(path, data[: header_size(path, data, len(data))], len(data))
    found: dict[str, Array] = {}
    for entry in header.entries.values():
        if entry.dtype not in _DTYPES:
            raise _not_ours(path, entry.dtype)
        flat = np.frombuffer(data[entry.begin : entry.end], _DTYPES[entry.dtype])
        found[entry.name] = flat.reshape(entry.shape).copy()
    return found


def _batch(
    step: int, groups: Sequence[dict[str, Any]], arrays: Mapping[str, Array], path: PurePath
) -> DrawnBatch:
    rollouts = [
        _checked(rollout, _ROLLOUT, path) for group in groups for rollout in group["rollouts"]
    ]
    tokens = [rollout["tokens"] for rollout in rollouts]
    rows = {
        "prompt_ids": [group["prompt_tokens"] for group in groups],
        "token_ids": tokens,
        "logprobs": tokens,
        "sampled_logprobs": tokens,
        "experts": [rollout["experts"] for rollout in rollouts],
    }
    given = {"experts": np.zeros((0, 0, 0), np.uint8), **arrays}
    sizes = {
        name: len(each) if (each.dtype.kind, each.ndim) in _KINDS.get(name, ()) else -1
        for name, each in given.items()
    }
    if sizes != {name: sum(counts) for name, counts in rows.items()}:
        raise _not_ours(path, f"{sizes} rows")
    parts = {name: _parts(given[name], counts) for name, counts in rows.items()}
    found: dict[bool, list[list[Rollout]]] = {True: [], False: []}
    for group in groups:
        ids = next(parts["prompt_ids"]).astype(np.int64)
        answer, source = group["answer"], group["source"]
        prompt = Prompt(group["index"], ids, group["text"], None, answer, source, {})
        told = group["rollouts"]
        found[group["kept"]].append([_rollout(prompt, each, parts, path) for each in told])
    return DrawnBatch(step, found[True], found[False])


def _parts(rows: Array, counts: Sequence[int]) -> Iterator[Array]:
    return iter(np.split(rows, np.cumsum(counts)[:-1]) if counts else [])


def _rollout(
    prompt: Prompt,
    fields: Mapping[str, Any],
    parts: Mapping[str, Iterator[Array]],
    path: PurePath,
) -> Rollout:
    experts, greedy = next(parts["experts"]), fields["greedy_reward"]
    reason: StopReason = "length" if fields["stop_reason"] == "length" else "stop"
    if fields["stop_reason"] != reason:
        raise _not_ours(path, f"stop_reason {fields['stop_reason']}")
    completion = Completion(
        token_ids=next(parts["token_ids"]).astype(np.int64),
        sampled_logprobs=next(parts["sampled_logprobs"]),
        logprobs=next(parts["logprobs"]),
        stop_reason=reason,
        weights_version=fields["weights_version"],
        experts=experts if fields["experts"] else None,
    )
    return Rollout(
        prompt,
        fields["sample"],
        completion,
        fields["text"],
        reward=_number(fields["reward"], path),
        reward_parts={name: _number(x, path) for name, x in fields["reward_parts"].items()},
        greedy_reward=None if greedy is None else _number(greedy, path),
        reward_error=fields["reward_error"],
    )


def _number(value: Any, path: PurePath) -> float:
    if type(value) is not float and value not in _NOT_FINITE:
        raise _not_ours(path, f"the number {value!r}")
    return float(value)


def _checked(value: Any, kinds: Mapping[str, tuple[type, ...]], path: PurePath) -> dict[str, Any]:
    """Return a JSON object with exactly these fields. Raises `IncompatibleError` for anything else."""
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    wrong = {name for name, kind in kinds.items() if type(fields.get(name)) not in kind}
    wrong |= fields.keys() - kinds.keys()
    wrong |= {n for n, each in fields.items() if type(each) is int and each < 0}
    if wrong:
        raise _not_ours(path, f"a wrong {', '.join(sorted(wrong))}")
    return fields


def _not_ours(path: PurePath, have: str) -> IncompatibleError:
    return IncompatibleError(
        f"{path} was not written by this trainer",
        have=clipped(have),
        want="a file of tokens and one of rewards for each batch that was drawn ahead",
        do="resume with the version of Burnish that wrote it",
    )

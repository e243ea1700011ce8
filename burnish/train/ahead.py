"""The files of batches that are drawn and not trained on, in a step's `ahead/`.

`batch-N.safetensors` has the tokens of the batch that step N trains on, rollouts end to end; `batch-N.jsonl` has a line for each group.
Messages and columns of prompts are left out: the rewards are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from burnish.checkpoint.manifest import AHEAD
from burnish.checkpoint.steps import Committed
from burnish.errors import IncompatibleError
from burnish.files.safetensors import build_header, header_size, parse_header
from burnish.files.strict_json import clipped, parse_json
from burnish.records import Completion, Prompt, Rollout
from burnish.tracking.trackers import json_number, json_numbers, numbers
from burnish.train.collect import DrawnBatch

Array = np.ndarray[Any, Any]

_DTYPES = {"I32": np.int32, "F32": np.float32, "U8": np.uint8, "I16": np.int16}


def ahead_files(batches: Sequence[DrawnBatch]) -> dict[str, bytes]:
    """Return the files of pending batches, by path below the step."""
    files = {}
    for batch in batches:
        kept = [True] * len(batch.groups) + [False] * len(batch.left_out)
        groups = [*batch.groups, *batch.left_out]
        lines, tensors = _paths(batch.step)
        files[lines] = "".join(map(_line, groups, kept)).encode()
        files[tensors] = _tensors(groups)
    return files


def read_ahead(step: Committed, files: Mapping[str, bytes]) -> tuple[DrawnBatch, ...]:
    """Return the pending batches of a step from the content of its `ahead/`, in order.

    Raises `IncompatibleError` unless they are exactly what `ahead_files` writes for the steps that follow.
    """
    told, batches = step.state.get("ahead", 0), list[DrawnBatch]()
    problem = f"{', '.join(sorted(files)) or 'no files'}, and ahead {told} in the state"
    try:
        for number in range(step.step, step.step + told):
            lines, tensors = (files[path] for path in _paths(number))
            batches.append(_batch(number, step, lines, tensors))
        is_ours = ahead_files(batches) == files
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        is_ours, problem = False, f"{type(error).__name__}: {error}"
    if not is_ours:
        raise IncompatibleError(
            f"{step.path / AHEAD} was not written by this trainer",
            have=clipped(problem),
            want="the batches that were drawn ahead, in two files each",
            do="resume with the version of Burnish that wrote it",
        )
    return tuple(batches)


def _paths(step: int) -> tuple[str, str]:
    name = f"{AHEAD}batch-{step + 1:08d}"
    return f"{name}.jsonl", f"{name}.safetensors"


def _line(group: Sequence[Rollout], kept: bool) -> str:
    prompt = group[0].prompt
    fields = {
        "index": prompt.index,
        "prompt_tokens": len(prompt.token_ids),
        "text": prompt.text,
        "answer": None if prompt.answer is None else str(prompt.answer),
        "source": prompt.source,
        "kept": kept,
        "rollouts": [_fields(rollout) for rollout in group],
    }
    return json.dumps(fields, allow_nan=False) + "\n"


def _fields(rollout: Rollout) -> dict[str, Any]:
    completion, greedy = rollout.completion, rollout.greedy_reward
    return {
        "sample": rollout.sample,
        "tokens": len(completion.token_ids),
        "experts": 0 if completion.experts is None else len(completion.experts),
        "text": rollout.text,
        "stop_reason": completion.stop_reason,
        "weights_version": completion.weights_version,
        "later_versions": completion.later_versions,
        "reward": json_number(float(rollout.reward)),
        "reward_parts": json_numbers(rollout.reward_parts),
        "greedy_reward": None if greedy is None else json_number(float(greedy)),
        "reward_error": rollout.reward_error,
    }


def _tensors(groups: Sequence[Sequence[Rollout]]) -> bytes:
    made = [rollout.completion for group in groups for rollout in group]
    parts: dict[str, list[Array]] = {
        "prompt_ids": [group[0].prompt.token_ids.astype(np.int32) for group in groups],
        "token_ids": [each.token_ids.astype(np.int32) for each in made],
        "logprobs": [each.logprobs for each in made],
        "sampled_logprobs": [each.sampled_logprobs for each in made],
        "experts": [each.experts for each in made if each.experts is not None],
    }
    arrays = {name: np.concatenate(each) for name, each in parts.items() if each}
    names = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
    described = [(name, names[each.dtype], each.shape) for name, each in arrays.items()]
    return b"".join([build_header(described, {})[0], *(each.tobytes() for each in arrays.values())])


def _batch(number: int, step: Committed, lines: bytes, tensors: bytes) -> DrawnBatch:
    paths = [step.path / path for path in _paths(number)]
    groups = [parse_json(line, str(paths[0])) for line in lines.splitlines()]
    size = header_size(paths[1], tensors, len(tensors))
    arrays = {
        entry.name: np.frombuffer(tensors[entry.begin : entry.end], _DTYPES[entry.dtype])
        .reshape(entry.shape)
        .copy()
        for entry in parse_header(paths[1], tensors[:size], len(tensors)).entries.values()
    }
    tokens = [rollout["tokens"] for group in groups for rollout in group["rollouts"]]
    rows = dict.fromkeys(("token_ids", "logprobs", "sampled_logprobs"), tokens)
    rows["prompt_ids"] = [group["prompt_tokens"] for group in groups]
    rows["experts"] = [rollout["experts"] for group in groups for rollout in group["rollouts"]]
    nothing = np.zeros((0, 0, 0), np.uint8)
    parts = {
        name: iter(np.split(arrays.get(name, nothing), np.cumsum(counts)[:-1]))
        for name, counts in rows.items()
    }
    batch = DrawnBatch(number, [], [])
    for group in groups:
        ids, answer = next(parts["prompt_ids"]).astype(np.int64), group["answer"]
        prompt = Prompt(
            index=int(group["index"]),
            token_ids=ids,
            text=str(group["text"]),
            messages=None,
            answer=None if answer is None else str(answer),
            source=str(group["source"]),
            columns={},
        )
        rollouts = []
        for told in group["rollouts"]:
            each = {name: next(part) for name, part in parts.items() if name != "prompt_ids"}
            completion = Completion(
                each["token_ids"].astype(np.int64),
                each["sampled_logprobs"],
                each["logprobs"],
                "length" if told["stop_reason"] == "length" else "stop",
                int(told["weights_version"]),
                each["experts"] if told["experts"] else None,
                tuple((int(number), int(first)) for number, first in told["later_versions"]),
            )
            greedy, error = told["greedy_reward"], told["reward_error"]
            rollout = Rollout(prompt, int(told["sample"]), completion, str(told["text"]))
            rollouts.append(
                replace(
                    rollout,
                    reward=float(told["reward"]),
                    reward_parts=numbers(told["reward_parts"]),
                    greedy_reward=None if greedy is None else float(greedy),
                    reward_error=None if error is None else str(error),
                )
            )
        (batch.groups if group["kept"] else batch.left_out).append(rollouts)
    return batch

"""Write and read a step's `ahead/`: batches drawn but not yet trained on (docs/reference/checkpoint-format.md).

Prompts lack messages and columns, because rewards are computed already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import numpy as np

from burnish.checkpoint.manifest import AHEAD
from burnish.checkpoint.steps import CommittedStep
from burnish.errors import IncompatibleError
from burnish.files.safetensors import build_header, header_size, parse_header
from burnish.files.strict_json import clipped, parse_json
from burnish.records import Completion, Prompt, Rollout
from burnish.records.completion_parts import described_arrays, joined_arrays, split_arrays
from burnish.records.rollout_table import RolloutTable
from burnish.records.samples import Turn
from burnish.rollout.in_flight import SampleKey
from burnish.runs.drawn_batch import DrawnBatch
from burnish.tracking.trackers import json_number, json_numbers, numbers

Array = np.ndarray[Any, Any]

_DTYPES = {"I32": np.int32, "F32": np.float32, "U8": np.uint8, "I16": np.int16}


def ahead_files(
    batches: Sequence[DrawnBatch], begun: Mapping[SampleKey, Completion]
) -> dict[str, bytes]:
    """Return the files of pending batches and begun completions, by path."""
    files = {}
    for batch in batches:
        is_kept = [True] * len(batch.groups) + [False] * len(batch.left_out)
        groups = [*batch.groups, *batch.left_out]
        lines, tensors = _paths(batch.step)
        files[lines] = "".join(map(_line, groups, is_kept)).encode()
        files[tensors] = _tensors(groups)
    for step in sorted({key.step for key in begun}):
        of_step = {key: completion for key, completion in sorted(begun.items()) if key.step == step}
        for key, completion in of_step.items():
            if not completion.stop_reason:  # the generator recomputes the experts when it continues
                of_step[key] = replace(completion, experts=None)
        lines, tensors = _paths(step, "partial")
        files[lines] = "".join(
            _partial_line(*completion) for completion in of_step.items()
        ).encode()
        files[tensors] = _safetensors(joined_arrays(list(of_step.values()), np.int32))
    return files


def read_ahead(
    step: CommittedStep, files: Mapping[str, bytes]
) -> tuple[tuple[DrawnBatch, ...], dict[SampleKey, Completion]]:
    """Return pending batches and begun completions from a step's files.

    Raises `IncompatibleError` unless `ahead_files` would write exactly these files.
    """
    count = step.state.get("ahead", 0)
    batches = list[DrawnBatch]()
    begun: dict[SampleKey, Completion] = {}
    problem = f"{', '.join(sorted(files)) or 'no files'}, and ahead {count} in the state"
    try:
        for number in range(step.step, step.step + count):
            lines, tensors = (files[path] for path in _paths(number))
            batches.append(_batch(number, step, lines, tensors))
        for path in sorted(files):
            if path.startswith(f"{AHEAD}partial-") and path.endswith(".jsonl"):
                number = int(path.removeprefix(f"{AHEAD}partial-").removesuffix(".jsonl")) - 1
                begun |= _partial(number, step, files)
        is_ours = ahead_files(batches, begun) == files
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        is_ours = False
        problem = f"{type(error).__name__}: {error}"
    if not is_ours:
        raise IncompatibleError(
            f"{step.path / AHEAD} was not written by this trainer",
            have=clipped(problem),
            want="the batches that were drawn ahead or begun, in two files each",
            do="resume with the version of Burnish that wrote it",
        )
    return tuple(batches), begun


def _paths(step: int, kind: str = "batch") -> tuple[str, str]:
    name = f"{AHEAD}{kind}-{step + 1:08d}"
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
    completion = rollout.completion
    greedy = rollout.greedy_reward
    return {
        "sample": rollout.sample,
        **described_arrays(completion),
        "text": rollout.text,
        "stop_reason": completion.stop_reason,
        "weights_version": completion.weights_version,
        "later_versions": completion.later_versions,
        "reward": json_number(float(rollout.reward)),
        "reward_parts": json_numbers(rollout.reward_parts),
        "greedy_reward": None if greedy is None else json_number(float(greedy)),
        "reward_error": rollout.reward_error,
        **({"branch": rollout.branch} if rollout.branch else {}),
        **(_of_conversation(rollout) if rollout.end else {}),
    }


def _of_conversation(rollout: Rollout) -> dict[str, Any]:
    return {
        "end": rollout.end,
        "metrics": json_numbers(rollout.metrics),
        "turns": rollout.turns,
        "conversation": rollout.conversation,
    }


def _partial_line(key: SampleKey, completion: Completion) -> str:
    fields = {
        "prompt_key": key.prompt_key,
        "sample": key.sample,
        "greedy": key.greedy,
        "prompt": key.prompt,
        **described_arrays(completion),
        "stop_reason": completion.stop_reason,
        "weights_version": completion.weights_version,
        "later_versions": completion.later_versions,
    }
    return json.dumps(fields, allow_nan=False) + "\n"


def _tensors(groups: Sequence[Sequence[Rollout]]) -> bytes:
    completions = [rollout.completion for group in groups for rollout in group]
    prompts = [group[0].prompt.token_ids.astype(np.int32) for group in groups]
    arrays = {"prompt_ids": np.concatenate(prompts)} if prompts else {}
    return _safetensors(arrays | joined_arrays(completions, np.int32))


def _safetensors(arrays: Mapping[str, Array]) -> bytes:
    names = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
    described = [(name, names[each.dtype], each.shape) for name, each in arrays.items()]
    return b"".join([build_header(described, {})[0], *(each.tobytes() for each in arrays.values())])


def _batch(number: int, step: CommittedStep, lines: bytes, tensors: bytes) -> DrawnBatch:
    paths = [step.path / path for path in _paths(number)]
    groups = [parse_json(line, str(paths[0])) for line in lines.splitlines()]
    arrays = _arrays(paths[1], tensors)
    rollouts = [rollout for group in groups for rollout in group["rollouts"]]
    completions = split_arrays(rollouts, arrays)
    ends = np.cumsum([group["prompt_tokens"] for group in groups])[:-1]
    prompts = iter(np.split(arrays.get("prompt_ids", np.zeros(0, np.int32)), ends))
    kept_groups = list[list[Rollout]]()
    left_out = list[list[Rollout]]()
    for group in groups:
        ids = next(prompts).astype(np.int64)
        answer = group["answer"]
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
        for row in group["rollouts"]:
            completion = next(completions)
            greedy = row["greedy_reward"]
            error = row["reward_error"]
            rollout = Rollout(prompt, int(row["sample"]), completion, str(row["text"]))
            rollouts.append(
                replace(
                    rollout,
                    reward=float(row["reward"]),
                    reward_parts=numbers(row["reward_parts"]),
                    greedy_reward=None if greedy is None else float(greedy),
                    reward_error=None if error is None else str(error),
                    end=row.get("end"),
                    branch=row.get("branch", 0),
                    metrics=numbers(row.get("metrics", {})),
                    turns=tuple(
                        Turn(int(tokens), float(reward), int(state))
                        for tokens, reward, state in row.get("turns", ())
                    ),
                    conversation=tuple(row.get("conversation", ())),
                )
            )
        (kept_groups if group["kept"] else left_out).append(rollouts)
    return DrawnBatch(number, RolloutTable.of(kept_groups, 0), RolloutTable.of(left_out, 0))


def _partial(
    number: int, step: CommittedStep, files: Mapping[str, bytes]
) -> dict[SampleKey, Completion]:
    lines, tensors = _paths(number, "partial")
    rows = [parse_json(line, str(step.path / lines)) for line in files[lines].splitlines()]
    completions = split_arrays(rows, _arrays(step.path / tensors, files[tensors]))
    keys = [
        SampleKey(
            number,
            int(each["prompt_key"]),
            int(each["sample"]),
            bool(each["greedy"]),
            str(each["prompt"]),
        )
        for each in rows
    ]
    return dict(zip(keys, completions, strict=True))


def _arrays(path: PurePath, tensors: bytes) -> dict[str, Array]:
    size = header_size(path, tensors, len(tensors))
    return {
        entry.name: np.frombuffer(tensors[entry.begin : entry.end], _DTYPES[entry.dtype])
        .reshape(entry.shape)
        .copy()
        for entry in parse_header(path, tensors[:size], len(tensors)).entries.values()
    }

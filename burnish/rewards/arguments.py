"""What reward functions are told of rollouts, in the words of the signature they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from burnish.records import Rollout
from burnish.rewards.load import TRL_ARGUMENTS, Signature

_NO_COLUMNS = TRL_ARGUMENTS | {"prompt", "completion"}


def arguments(
    signature: Signature, kwargs: Mapping[str, Any], rollouts: Sequence[Rollout]
) -> dict[str, Any]:
    """Return the keyword arguments of one call about `rollouts` (one of them for a verl function).

    Only those that the function takes; the configuration's `kwargs` win over others.
    """
    known = _trl(rollouts) if signature.style == "trl" else _verl(*rollouts)
    known |= kwargs
    accepts = signature.accepts
    return known if accepts is None else {key: known[key] for key in known.keys() & accepts}


def _trl(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return lists with one entry per rollout: prompts, completions and every column of the data.

    If the prompt was messages, prompt and completion are lists of messages, else texts. A missing column is None. As in TRL, columns
    named prompt or completion are left out.
    """
    names = {name for rollout in rollouts for name in rollout.prompt.columns} - _NO_COLUMNS
    columns: dict[str, Any] = {
        name: [rollout.prompt.columns.get(name) for rollout in rollouts] for name in names
    }
    return columns | {
        "prompts": [rollout.prompt.messages or rollout.prompt.text for rollout in rollouts],
        "completions": [
            [{"role": "assistant", "content": rollout.text}]
            if rollout.prompt.messages
            else rollout.text
            for rollout in rollouts
        ],
        "completion_ids": [rollout.completion.token_ids.tolist() for rollout in rollouts],
    }


def _verl(rollout: Rollout) -> dict[str, Any]:
    """`extra_info` is the column of that name, and where the data has none, all columns."""
    columns = rollout.prompt.columns
    return {
        "data_source": rollout.prompt.source,
        "solution_str": rollout.text,
        "ground_truth": rollout.prompt.answer,
        "extra_info": columns["extra_info"] if "extra_info" in columns else dict(columns),
    }

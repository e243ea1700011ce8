"""Held-out answers with their rewards, in the form of rollouts: so they are written, shown and sent as those are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from burnish.data.chat import shared_beginning
from burnish.data.tasks import ItemSequence
from burnish.records import Completion, Example, Prompt, Rollout, TokenIds
from burnish.records.rollout_table import RolloutTable
from burnish.tracking.rollouts import LABEL, MARGIN


def answers_as_rollouts(
    items: ItemSequence[tuple[Example, ...]],
    rewards: Mapping[int, Sequence[float]],
    subsets: Mapping[int, str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_judged: bool,
) -> RolloutTable:
    """Return the items of `rewards` as samples of one prompt each: the chosen answer and the rejected one, or a single answer.

    With `is_judged` the last token of an example follows its text, and what both texts begin with is their prompt.
    """
    rows = sorted(rewards)
    groups = []
    for row, item in zip(rows, items.items(rows), strict=True):
        answers = item[:: len(item) // len(rewards[row])]  # without mismatched ones
        start = int(answers[0].loss_mask.argmax())
        texts = [example.token_ids[:-1] if is_judged else example.token_ids for example in answers]
        if is_judged:
            start = shared_beginning(texts[0].tolist(), texts[1])
        prompt = _prompt(row, texts[0][:start], subsets[row], tokenizer)
        parts = _parts(answers, rewards[row])
        groups.append(
            [
                _rollout(prompt, sample, ids[start:], reward, parts, tokenizer)
                for sample, (ids, reward) in enumerate(zip(texts, rewards[row], strict=True))
            ]
        )
    return RolloutTable.of(groups)


def _parts(answers: Sequence[Example], rewards: Sequence[float]) -> dict[str, float]:
    """Return by how much the chosen answer leads, or how far a single one is on its label's side; and this label."""
    if len(rewards) == 2:
        return {MARGIN: rewards[0] - rewards[1]}
    labels = answers[0].labels
    label = 0.0 if labels is None else float(labels[0])
    return {MARGIN: label * rewards[0], LABEL: label}


def _prompt(row: int, ids: TokenIds, subset: str, tokenizer: Any) -> Prompt:
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return Prompt(row, ids, text, None, None, subset, {})


def _rollout(
    prompt: Prompt,
    sample: int,
    ids: TokenIds,
    reward: float,
    parts: Mapping[str, float],
    tokenizer: Any,
) -> Rollout:
    unknown = np.full(len(ids), np.nan, np.float32)
    completion = Completion(ids, unknown, unknown, None, 0)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Rollout(prompt, sample, completion, text, reward, {**parts})

"""Held-out pairs with their rewards, in the form of rollouts: so they are written, shown and sent as those are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from burnish.data.chat import shared_beginning
from burnish.data.tasks import ItemSequence
from burnish.records import Completion, Example, Prompt, Rollout, TokenIds
from burnish.records.rollout_table import RolloutTable
from burnish.tracking.rollouts import MARGIN


def pairs_as_rollouts(
    items: ItemSequence[tuple[Example, ...]],
    rewards: Mapping[int, Sequence[float]],
    subsets: Mapping[int, str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_judged: bool,
) -> RolloutTable:
    """Return the items of `rewards` as two samples each of one prompt: the chosen answer, and the rejected one.

    With `is_judged` the last token of an example follows its text, and what both texts begin with is their prompt.
    """
    rows = sorted(rewards)
    groups = []
    for row, pair in zip(rows, items.items(rows), strict=True):
        start = int(pair[0].loss_mask.argmax())
        texts = [example.token_ids[:-1] if is_judged else example.token_ids for example in pair]
        if is_judged:
            start = shared_beginning(texts[0].tolist(), texts[1])
        prompt = _prompt(row, texts[0][:start], subsets[row], tokenizer)
        margin = rewards[row][0] - rewards[row][1]
        answers = zip(texts, rewards[row], strict=True)
        groups.append(
            [
                _rollout(prompt, sample, ids[start:], reward, margin, tokenizer)
                for sample, (ids, reward) in enumerate(answers)
            ]
        )
    return RolloutTable.of(groups)


def _prompt(row: int, ids: TokenIds, subset: str, tokenizer: Any) -> Prompt:
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return Prompt(row, ids, text, None, None, subset, {})


def _rollout(
    prompt: Prompt, sample: int, ids: TokenIds, reward: float, margin: float, tokenizer: Any
) -> Rollout:
    unknown = np.full(len(ids), np.nan, np.float32)
    completion = Completion(ids, unknown, unknown, None, 0)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Rollout(prompt, sample, completion, text, reward, {MARGIN: margin})

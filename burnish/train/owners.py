"""What all ranks know of rollouts that one rank has: lengths, rewards and who has them, but neither tokens nor texts.

`burnish.data.batching` sends tokens to the ranks that train on them, and `arriving` texts to rank 0, which writes them.
"""

from __future__ import annotations

import pickle
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from burnish.distributed.collectives import deliver
from burnish.distributed.layout import Layout
from burnish.records import Completion, Prompt, Rollout
from burnish.records.samples import digest_of

Groups = list[list[Rollout]]
"""Rollouts by prompt."""
Told = list[tuple[tuple[Any, ...], list[tuple[Any, ...]]]]
"""What all ranks know of groups, in plain values: of each its prompt, and each rollout."""

_MOST_TOKENS = 1 << 40
_ROUND_TOKENS = 1 << 20
# Of the rollouts that rank 0 gets at a time.


def tell(groups: Sequence[Sequence[Rollout]]) -> Told:
    """Return what all ranks are to know of these groups."""
    return [(_prompt(group[0].prompt), [_numbers(each) for each in group]) for group in groups]


def heard(told: Told, owner: int) -> Groups:
    """Return groups that another rank has, without tokens and texts."""
    return list(_heard(told, owner))


def owned(groups: Sequence[Sequence[Rollout]], owner: int) -> Groups:
    """Return this rank's own groups, which it alone has."""
    return [[replace(each, owner=owner) for each in group] for group in groups]


def owners_of(rollouts: Sequence[Rollout]) -> list[int] | None:
    """Return which rank has each rollout; None where every rank has all."""
    owners = [each.owner for each in rollouts if each.owner is not None]
    return owners if len(owners) == len(rollouts) else None


def on_main(rollouts: Sequence[Rollout], layout: Layout) -> list[Rollout]:
    """Return the rollouts, all of them whole on rank 0. Collective."""
    found, everything = list(rollouts), range(len(rollouts))
    for number, rollout in arriving(rollouts, everything, everything, layout):
        found[number] = rollout
    return found


def arriving(
    rollouts: Sequence[Rollout], order: Sequence[int], whole: Container[int], layout: Layout
) -> Iterator[tuple[int, Rollout]]:
    """Yield rollouts by number, in this order, on rank 0 with their texts, and those of `whole` with all. Collective.

    They come in rounds of about a million tokens, so rank 0 never has all of them. All ranks must take all.
    """
    owners = owners_of(rollouts)
    if owners is None or not any(owners):
        yield from ((number, rollouts[number]) for number in order)
        return
    sizes = np.cumsum([1 + len(rollouts[number].completion.token_ids) for number in order])
    for numbers in np.split(np.asarray(order, np.int64), _ends(sizes // _ROUND_TOKENS)):
        mine = [n for n in numbers.tolist() if owners[n] == layout.rank]
        parts = {n: rollouts[n] if n in whole else _texts(rollouts[n]) for n in mine}
        parcels = [] if layout.is_main or not mine else [([0], pickle.dumps(parts))]
        came: dict[int, Any] = {}
        for data in deliver(parcels, layout):
            came |= pickle.loads(data)  # noqa: S301 - of this run
        for number in numbers.tolist():
            yield number, _with_texts(rollouts[number], came.get(number))


def _ends(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where another value begins."""
    return np.flatnonzero(np.diff(values)) + 1


def _texts(rollout: Rollout) -> tuple[str, str, Any]:
    return rollout.text, rollout.prompt.text, rollout.prompt.answer


def _with_texts(known: Rollout, came: Rollout | tuple[str, str, Any] | None) -> Rollout:
    if came is None or isinstance(came, Rollout):
        return came or known
    text, asked, answer = came
    return replace(known, text=text, prompt=replace(known.prompt, text=asked, answer=answer))


def _prompt(prompt: Prompt) -> tuple[Any, ...]:
    digest = prompt.digest or digest_of(prompt.token_ids)
    is_chat = prompt.messages is not None
    return prompt.index, len(prompt.token_ids), digest, is_chat, prompt.source


def _numbers(rollout: Rollout) -> tuple[Any, ...]:
    made = rollout.completion
    experts = None if made.experts is None else (made.experts.shape, made.experts.dtype.str)
    of_completion = (made.stop_reason, made.weights_version, made.later_versions, experts)
    judged = (rollout.reward, rollout.reward_parts, rollout.greedy_reward, rollout.reward_error)
    return rollout.sample, len(made.token_ids), of_completion, judged


def _heard(told: Told, owner: int) -> Iterator[list[Rollout]]:
    """Yield groups whose arrays take no memory: -1 is no token, and NaN no log-prob."""
    no_ids = np.broadcast_to(np.int64(-1), _MOST_TOKENS)
    no_logprobs = np.broadcast_to(np.float32(np.nan), _MOST_TOKENS)
    for (index, size, digest, is_chat, source), rollouts in told:
        messages: list[dict[str, Any]] | None = [] if is_chat else None
        prompt = Prompt(index, no_ids[:size], "", messages, None, source, {}, digest)
        group = []
        for sample, length, (reason, version, later, experts), judged in rollouts:
            nowhere = (
                None if experts is None else np.broadcast_to(np.zeros((), experts[1]), experts[0])
            )
            numbers = no_logprobs[:length]
            completion = Completion(
                no_ids[:length], numbers, numbers, reason, version, nowhere, later
            )
            reward, parts, greedy, error = judged
            group.append(
                Rollout(prompt, sample, completion, "", reward, parts, greedy, error, (), owner)
            )
        yield group

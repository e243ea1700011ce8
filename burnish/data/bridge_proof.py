"""Prove before a run that conversations which grow in token ids are what the chat template writes of them."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from burnish.config.schema import DataConfig, RolloutConfig
from burnish.data.chat import shared_beginning
from burnish.data.messages import Message
from burnish.data.tool_forms import Called
from burnish.data.turn_bridge import CLOSES, OPENS, Thoughts, TurnBridge, result_of, tool_name
from burnish.errors import UsageError

_CONVERSATIONS = 20
_WORDS = ("seven", "17", "the blue box", "x = 3", "Ωmega", "\nnext line", '{"a": 1}', "end.")


class FirstDifference(NamedTuple):
    """The first token at which a conversation in parts differs from the whole one."""

    place: int
    whole: str
    in_parts: str


class Comparison(NamedTuple):
    """What random conversations show."""

    turns: int
    """How many turns were compared."""
    difference: FirstDifference | None = None
    unsayable: FirstDifference | None = None
    """Where the template writes a turn otherwise than its own opening, so that no model could have said it."""


def compare_turns(
    bridge: TurnBridge,
    role: str,
    thoughts: Thoughts = "none",
    seed: int = 0,
    *,
    rendered: bool = False,
) -> Comparison:
    """Compare random conversations in parts with whole ones, up to the first difference.

    `role` answers the model: tool or user. Turns that do not tokenize to the same ids alone and within the whole say nothing.
    `rendered`: compare what is written of turns that were read with what is written of the turns themselves.
    """
    rng = random.Random(seed)
    turns = 0
    unsayable = None
    for _ in range(_CONVERSATIONS):
        compared = _compared(bridge, rng, role, thoughts, rendered)
        turns += compared.turns
        unsayable = unsayable or compared.unsayable
        if compared.difference is not None:
            return Comparison(turns, compared.difference)
    return Comparison(turns, unsayable=unsayable)


def _compared(
    bridge: TurnBridge, rng: random.Random, role: str, thoughts: Thoughts, rendered: bool
) -> Comparison:
    """Compare a random conversation."""
    messages: list[Message] = [{"role": "user", "content": _some(rng)}]
    read = [*messages]
    ids = bridge.first(messages, "a conversation")
    earlier = 0
    for turn in range(rng.randint(1, 4)):
        has_calls = role == "tool" or (bridge.tools and rng.random() < 0.5)
        calls: Sequence[Called] = _some_calls(bridge, rng) if has_calls else []
        thought = _some(rng).strip() if thoughts != "none" else ""
        opened = bridge.whole(messages, "a conversation")
        if thoughts == "inside" and opened.rstrip().endswith(CLOSES):
            return Comparison(turn)
        said, calls, alone = bridge.turn_of(
            messages, calls, _some(rng).strip(), thought, thoughts, earlier
        )
        if not alone.startswith(opened):
            return Comparison(turn, unsayable=_first_of(bridge, alone, bridge.ids_of(opened)))
        spoken = alone[len(opened) :]
        if thoughts == "inside" and thought not in spoken:
            if rendered:  # the template leaves out what the model would say
                return Comparison(turn)
            missing = said["content"].removeprefix(opened[-len(OPENS) - 1 :])
            return Comparison(turn, _first_of(bridge, alone, bridge.ids_of(opened + missing)))
        new = [*_results(rng, calls, earlier)] or [{"role": "user", "content": _some(rng)}]
        spoken = bridge.up_to_stop(spoken, calls, new, earlier)
        # The part of a text that a model could have said: it may not lean on what stands before it.
        said_ids = bridge.ids_of(spoken)
        if bridge.ids_of(opened + spoken) != [*bridge.ids_of(opened), *said_ids]:
            return Comparison(turn)
        messages += [said, *new]
        whole = bridge.whole(messages, "a conversation")
        if rendered:
            if bridge.loses(said_ids):
                return Comparison(turn)
            text = bridge.text_of(said_ids)
            read += [bridge.message_of(bridge.read(said_ids), text, earlier), *new]
            again = bridge.first(read, "a conversation")
            if bridge.ids_of(whole) != again:
                return Comparison(turn, _first_of(bridge, whole, again))
            earlier += len(calls)
            continue
        ids += said_ids
        if bridge.ids_of(whole)[: len(ids)] != ids:
            return Comparison(turn, _first_of(bridge, whole, ids))
        ids += bridge.following(calls, new, ended_by=bridge.end_of(said_ids), earlier=earlier)
        earlier += len(calls)
        if bridge.ids_of(whole) != ids:
            return Comparison(turn, _first_of(bridge, whole, ids))
    return Comparison(turn + 1)


def _some_calls(bridge: TurnBridge, rng: random.Random) -> list[Called]:
    # The names are not those of a schema, whose types would say how a text is read.
    return [
        (
            tool_name(rng.choice(bridge.tools)),
            {"qzjxtext": _some(rng), "qzjxcount": rng.randint(0, 99)},
        )
        for _ in range(rng.randint(1, 2))
    ]


def _first_of(bridge: TurnBridge, text: str, ids: list[int]) -> FirstDifference:
    whole = bridge.ids_of(text)
    place = shared_beginning(whole, np.array(ids, np.int64))
    names = [
        bridge.text_of(part[place : place + 1], special=True) if place < len(part) else "nothing"
        for part in (whole, ids)
    ]
    return FirstDifference(place, *names)


def proven_bridge(
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    rollout: RolloutConfig,
    eos_token_ids: Collection[int],
    environments: Any,
) -> TurnBridge:
    """Return the bridge for an `EnvironmentPool`, proven as `rollout.environment.history` says."""
    stops = (*eos_token_ids, *rollout.stop_token_ids)
    tools = [dict(tool) for tool in environments.described.tools]
    bridge = TurnBridge(tokenizer, data, tools, stops)
    history = rollout.environment.history
    if history != "appended" and rollout.environment.verifiers is None:
        prove_bridge(bridge, "tool" if tools else "user", rendered=history == "rendered")
    return bridge


def prove_bridge(bridge: TurnBridge, role: str, *, rendered: bool = False) -> None:
    """Raise `UsageError` unless conversations in parts have the ids of whole ones; or with `rendered`, turns that are read and written again.

    `role` answers the model: tool or user. Turns with thoughts are compared too if the template writes them: many templates drop those
    of earlier turns.
    """
    compared = {
        thoughts: compare_turns(bridge, role, thoughts, rendered=rendered)
        for thoughts in bridge.thoughts
    }
    if rendered:
        for difference in (comparison.difference for comparison in compared.values()):
            if difference is not None:
                raise UsageError(
                    f"a turn that is read and written again differs from what the chat template writes of it, once a {role} answers",
                    have=f"token {difference.place} of a conversation: {difference.whole!r} of the turn, {difference.in_parts!r} when it was read",
                    want="the same token ids",
                    do="set rollout.environment.history=appended, or set model.chat_template",
                )
        return
    differences = {thoughts: each.difference for thoughts, each in compared.items()}
    if not any([*differences.values(), *(each.turns for each in compared.values())]):
        differences = {thoughts: each.unsayable for thoughts, each in compared.items()}
    for thoughts, difference in differences.items():
        if difference is not None:
            what = "" if thoughts == "none" else " with thoughts"
            raise UsageError(
                f"the chat template writes earlier turns{what} otherwise than the model said them, once a {role} answers",
                have=f"token {difference.place} of a conversation: {difference.whole!r} in the whole, {difference.in_parts!r} in parts",
                want="the same token ids",
                do="set rollout.environment.history=rendered to train on each turn after what the template writes before it, appended to train on conversations as they were said, or set model.chat_template to a template that keeps earlier turns",
            )
    if not any(each.turns for each in compared.values()):
        raise UsageError(
            "it cannot be proven how the chat template writes earlier turns",
            have="no turn of the model that has the same token ids alone and in the whole",
            want="a template that opens the assistant's turn with add_generation_prompt",
            do="set rollout.environment.history=appended if you know that it keeps earlier turns, or set model.chat_template",
        )


def _results(rng: random.Random, calls: Sequence[Called], earlier: int) -> Iterator[Message]:
    for number, (name, _) in enumerate(calls):
        yield result_of(earlier + number, name, json.dumps({"value": _some(rng)}))


def _some(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(1, 4)))

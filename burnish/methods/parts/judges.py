"""Reward models: trained models that judge completions, beside the reward functions.

A reward model is a frozen sequence or token classifier with one label; its reward is the output at the last token. It reads
conversations with its own tokenizer and template.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np

from burnish.config.frozen_models import reward_models
from burnish.data.batching import Outlines, make_batch, outlines_of
from burnish.data.chat import ChatEncoder, shared_beginning
from burnish.distributed.collectives import gather_objects, gather_rows
from burnish.engines.base import Engine
from burnish.methods.parts.rollouts import Judge
from burnish.models.flops import ModelFlops
from burnish.models.meta_init import count_flops, longest_sequence
from burnish.records import Example, RewardCall, Rollout, TokenIds
from burnish.records.rollout_table import Column, RolloutTable
from burnish.runs.frozen_engines import LoadedModel
from burnish.runs.setup import Foundation


@dataclass(frozen=True, slots=True)
class _RewardModel:
    part: str
    """The model's name in `Rollout.reward_parts`."""
    weight: float
    engine: Engine
    encoder: ChatEncoder
    flops: ModelFlops
    positions: int
    """Most tokens that the model takes. The longest text has one less, because `_examples` appends a token."""

    def values(self, table: RolloutTable, tokens_per_device: int) -> tuple[Column, Column]:
        """Return [N] each rollout's reward, and [N] whether the model has enough positions. Collective."""
        layout = self.engine.layout
        own = table.of_rank(layout.rank)
        texts = [table.rollout(i) for i in own]
        mine = dict(zip(own, _examples(_read(self.encoder, texts), texts), strict=True))
        shares = gather_objects((own, outlines_of(mine)), layout)
        outlines = Outlines.joined(shares, len(table.owners))
        lengths = outlines.lengths
        rewards = np.zeros(len(lengths))
        is_read = lengths <= self.positions
        short = np.flatnonzero(is_read)
        if not len(short):
            return rewards, is_read
        batch = make_batch(
            {place: mine[i] for place, i in enumerate(short.tolist()) if i in mine},
            layout,
            max(tokens_per_device, int(lengths[short].max())),
            self.flops,
            outlines=outlines.take(short),
            owners=table.owners[short],
        )
        said = [output.values.cpu().double().numpy() for output in self.engine.forward(batch)]
        last = {number: each[-1] for number, each in batch.by_example(said).items()}
        places, values = gather_rows([*last], np.array([*last.values()], np.float64), layout)
        rewards[short[places]] = values
        return rewards, is_read


def load_judge(foundation: Foundation, loaded: Mapping[str, LoadedModel]) -> Judge:
    """Return what judges by the models of `reward.models`; they are `loaded`, by setting."""
    config = foundation.config
    names = config.reward.part_names[len(config.reward.functions) :]
    models = []
    for settings, name, frozen in zip(
        config.reward.models, names, reward_models(config), strict=True
    ):
        engine, hf_config, tokenizer = loaded[frozen.setting]
        positions = longest_sequence(hf_config) or sys.maxsize
        encoder = ChatEncoder(tokenizer)
        flops = count_flops(hf_config)
        models.append(_RewardModel(name, settings.weight, engine, encoder, flops, positions))
    on_error = math.nan if config.reward.on_error == "drop" else config.reward.on_error
    return partial(_judged, models, config.microbatch_tokens, on_error)


def _judged(
    models: Sequence[_RewardModel], budget: int, on_error: float, table: RolloutTable
) -> RolloutTable:
    for model in models:
        began = time.time()
        values, is_read = model.values(table, budget)
        when = (began, time.time() - began)
        short = f"reads less than {model.positions} tokens"
        errors = {
            n: f"said {float(values[n])}" if is_read[n] else short
            for n in np.flatnonzero(~(is_read & np.isfinite(values))).tolist()
        }
        objects = list(table.objects)
        for n, place in zip(
            np.flatnonzero(table.places >= 0), table.places[table.places >= 0], strict=True
        ):
            why = errors.get(int(n))
            rollout = objects[place]
            call = RewardCall(model.part, None if why else float(values[n]), why, *when)
            objects[place] = replace(rollout, calls=(*rollout.calls, call))
        values[[*errors]] = on_error
        named = {n: f"{model.part}: {why}" for n, why in errors.items()}
        table = replace(table, objects=objects)
        table = table.with_part(model.part, values, model.weight, named)
    return table


def _read(encoder: ChatEncoder, rollouts: Sequence[Rollout]) -> list[TokenIds]:
    ids_by_rollout: dict[int, TokenIds] = {}
    for plain in (True, False):
        chosen = [i for i, rollout in enumerate(rollouts) if plain == (not rollout.prompt.messages)]
        texts = [_text(encoder, rollouts[i]) for i in chosen]
        ids = (np.array(each, dtype=np.int64) for each in encoder.ids(texts, special=plain))
        ids_by_rollout |= dict(zip(chosen, ids, strict=True))
    return [ids_by_rollout[i] for i in range(len(rollouts))]


def _text(encoder: ChatEncoder, rollout: Rollout) -> str:
    prompt = rollout.prompt
    if not prompt.messages:
        return prompt.text + rollout.text
    return encoder.answered(prompt.messages, rollout.text, f"prompt {prompt.index}")


def _examples(texts: Sequence[TokenIds], rollouts: Sequence[Rollout]) -> Iterator[Example]:
    """Yield each text with one more token: a value belongs to the state before a token."""
    ids = iter(texts)
    for _, group in groupby(rollouts, key=lambda rollout: rollout.prompt.index):
        same = [next(ids) for _ in group]
        shared = max(1, min(shared_beginning(same[0], each) for each in same))
        for each in same:
            ended = np.append(each, each[-1:])
            yield Example(ended, np.arange(len(ended)) >= shared)

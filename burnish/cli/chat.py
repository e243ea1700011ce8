"""`burnish chat`: ask a model in the terminal."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from burnish.api import config_at
from burnish.checkpoint.load import CheckpointSource
from burnish.cli.output import print_text
from burnish.config.load import read_config
from burnish.config.schema import DataConfig, RewardConfig
from burnish.data.chat import ChatEncoder
from burnish.data.tokenizer import completion_decoder
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.engines.base import compute_dtype
from burnish.methods.parts.rollouts import sampling
from burnish.models.meta_init import longest_sequence
from burnish.records import Request
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.runs.download_inputs import local_inputs
from burnish.runs.hub_revisions import at_newest_steps, newest_model
from burnish.runs.setup import Foundation, lay_foundation, load_frozen, prove_model
from burnish.runs.verify_inputs import Intact
from burnish.tracking.progress import Progress

# A decoded text ends with this character while tokens of its last character are missing.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def chat(args: Namespace) -> None:
    """Answer each line of standard input with a model, or a run's newest step; `/reset` begins anew."""
    place = args.config
    step = None
    file, run = config_at(place) if place else (None, None)
    named = [f"model.path={place}"] if place and file is None else []
    config = read_config(file, [*named, *args.overrides])
    if run is None:
        model = at_newest_steps(config.model_dump()).model
    else:
        model, step = newest_model(run, config.model)
    rendering = {"chat_template_kwargs", "chat_template_name", "system_prompt"}
    data = DataConfig(**config.data.model_dump(include=rendering))
    settings = config.model_copy(update={"model": model, "data": data, "reward": RewardConfig()})

    def talk(layout: Layout, device: torch.device) -> None:
        local = local_inputs(settings, device, layout, trains=False)[1]
        foundation = lay_foundation(local, layout, device)
        prove_model(foundation.hf_config, layout, device, generates=True)
        Intact(layout, Progress(True)).require(*foundation.places(fresh=step is None))
        if step is not None:
            foundation = replace(foundation, source=CheckpointSource(step, layout))
        generator = BuiltinGenerator(
            foundation.hf_config,
            layout=layout,
            device=device,
            dtype=compute_dtype(local.engine),
            slots=local.rollout.slots,
            eos_token_ids=foundation.eos_token_ids,
            decode=foundation.tokenizer.decode,
            lora=local.model.adapter_beside,
        )
        generator.load_weights(load_frozen(foundation).published(), version=0)
        _converse(foundation, generator)

    launch(talk, config.distributed)


def _converse(foundation: Foundation, generator: BuiltinGenerator) -> None:
    tokenizer = foundation.tokenizer
    config = foundation.config
    encoder = ChatEncoder(tokenizer, config.data)
    decode = completion_decoder(tokenizer, config.rollout.stop, foundation.eos_token_ids)
    positions = longest_sequence(foundation.hf_config)
    system = config.data.system_prompt
    has_place = system is not None and tokenizer.chat_template
    opening = [{"role": "system", "content": str(system)}] if has_place else []
    messages = list(opening)
    for turn, line in enumerate(_lines()):
        if line == "/reset":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        text = "".join(each["content"] for each in messages)
        if tokenizer.chat_template:
            text = encoder.prompt(messages, "the conversation")
        [ids] = encoder.ids([text], special=not tokenizer.chat_template)
        how = sampling(config.rollout, config.rollout, config.seed, turn)
        if positions is not None:
            how = replace(how, max_tokens=max(1, min(how.max_tokens, positions - len(ids))))
        shown = ""

        def show(token_ids: Sequence[int], *, ended: bool = False) -> None:
            nonlocal shown
            answer = decode(token_ids)
            if ended or (answer.startswith(shown) and not answer.endswith(_INCOMPLETE)):
                print_text(answer.removeprefix(shown), end="\n" if ended else "")
                shown = answer

        def watch(_: int) -> None:
            [under_way] = generator.so_far()
            show(under_way.completions[0].token_ids.tolist())

        [[completion]] = generator.generate([Request(turn, np.array(ids), 1)], how, watch)
        show(completion.token_ids.tolist(), ended=True)
        messages.append({"role": "assistant", "content": shown})


def _lines() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line:
            yield line

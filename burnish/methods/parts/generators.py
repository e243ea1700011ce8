"""Make the generator that the settings name, and the collector around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from burnish.data.tokenizer import completion_decoder
from burnish.engines.base import compute_dtype
from burnish.extend import GENERATORS
from burnish.methods.parts.rollouts import Collector, Judge
from burnish.rewards.overview import RewardFailures
from burnish.rewards.pool import RewardPool
from burnish.rollout.base import Generator
from burnish.runs.setup import Foundation, TextFoundation, ends_of
from burnish.tracking.progress import Progress


def make_generator(foundation: TextFoundation) -> Generator:
    """Make the generator of `rollout.engine` and `rollout.place`, without weights. Collective."""
    if not isinstance(foundation, Foundation):
        from burnish.rollout.openai import EndpointGenerator

        return EndpointGenerator(
            foundation.config.rollout,
            encode=partial(foundation.tokenizer.encode, add_special_tokens=False),
            template_variables=foundation.config.data.chat_template_kwargs,
            eos_token_ids=ends_of(foundation),
        )
    if foundation.config.rollout.place == "inside":
        return local_generator(foundation)
    from burnish.methods.parts.serve import served_generator

    return served_generator(foundation)


def local_generator(foundation: Foundation) -> Generator:
    """Make the generator in this process, without weights."""
    config = foundation.config
    name = config.rollout.engine
    options = config.generator_options
    longest = config.longest_completed
    is_limited = config.data.max_prompt_length is not None
    generator = GENERATORS.load(name, "rollout.engine", options)(
        foundation.hf_config,
        layout=foundation.layout,
        device=foundation.device,
        dtype=compute_dtype(config.engine),
        slots=config.rollout.slots,
        eos_token_ids=foundation.eos_token_ids,
        decode=foundation.tokenizer.decode,
        max_length=longest if is_limited else config.sequence_limit(longest),
        **options,
    )
    GENERATORS.require_complete(generator, name, "rollout.engine")
    return generator


def make_collector(
    foundation: TextFoundation,
    pool: RewardPool,
    check: Callable[[], None],
    progress: Progress,
    judge: Judge | None,
    spans: Any = nullcontext,
) -> Collector:
    """Make a collector; its generator has no weights. `spans` measures the parts of conversations."""
    generator = make_generator(foundation)
    tokenizer = foundation.tokenizer
    ends = ends_of(foundation)
    decode = completion_decoder(tokenizer, foundation.config.rollout.stop, ends)

    failures = RewardFailures(foundation.config.reward)
    layout = foundation.layout
    stragglers = None
    if layout.world > 1 and not generator.called_by_rank0:
        from burnish.runs.stragglers import Stragglers

        stragglers = Stragglers(warns=layout.is_main)
    common = (layout, check, progress, failures, judge, stragglers)
    shares_device = foundation.config.rollout.place == "child"
    collector = Collector(generator, decode, pool.score, *common, shares_device=shares_device)
    if pool.environments is None:
        return collector
    from burnish.methods.parts.sessions import make_conversations

    talks = make_conversations(foundation, pool.environments, ends, spans)
    return replace(collector, conversations=talks)

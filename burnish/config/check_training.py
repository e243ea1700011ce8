"""Check the settings of a step against each other: its size, its lengths, its formula."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from burnish.config.problems import Problem, either
from burnish.config.schema import AdvantageName, PolicyLossName, RunConfig

GROUP_ADVANTAGES = frozenset(get_args(AdvantageName)) - {"remax", "reinforce_plus_plus", "gae"}
"""Advantages that compare the completions of one prompt with each other; a group of one has none."""


def of_sft(config: RunConfig, shares: int) -> Iterator[Problem]:
    """What keeps supervised fine-tuning from running on so many groups of processes that share a micro-batch."""
    yield from _of_learning_rate(config)
    yield from of_examples(config, shares)
    if config.engine.park:
        yield Problem(
            "engine.park is for reinforcement learning: nothing is generated here",
            have="engine.park: true",
            want="false",
            do="remove engine.park; engine.optimizer_offload and engine.activation_offload save memory here",
        )


def of_rl(config: RunConfig, shares: int) -> Iterator[Problem]:
    """What keeps reinforcement learning from running on so many groups of processes that share a micro-batch."""
    yield from _of_learning_rate(config, config.critic.warmup_steps)
    yield from of_completions(config, shares)
    yield from _of_buffer(config)
    yield from _of_rollout(config)
    yield from _of_algorithm(config)
    yield from _of_critic(config)


def _of_learning_rate(config: RunConfig, waiting: int = 0) -> Iterator[Problem]:
    """Of the schedule, which begins after so many steps of `waiting` for a critic."""
    optim, steps = config.optim, config.steps
    if optim.schedule == "wsd" and optim.decay_steps == 0:
        yield Problem(
            "optim.schedule wsd has no decay",
            have="optim.decay_steps: 0",
            want="1 or more",
            do="set optim.decay_steps, or optim.schedule=constant",
        )
    if optim.schedule != "wsd" and optim.decay_steps:
        yield Problem(
            "optim.decay_steps is for optim.schedule wsd only",
            have=f"optim.decay_steps: {optim.decay_steps}, optim.schedule: {optim.schedule}",
            want="0, or schedule wsd",
            do="remove optim.decay_steps, or set optim.schedule=wsd",
        )
    if optim.schedule == "constant" and optim.min_lr_ratio:
        yield Problem(
            "optim.min_lr_ratio is for a learning rate that decays",
            have=f"optim.min_lr_ratio: {optim.min_lr_ratio}, optim.schedule: constant",
            want="0, or schedule linear, cosine or wsd",
            do="remove optim.min_lr_ratio, or set optim.schedule",
        )
    ramps = optim.warmup_steps + optim.decay_steps
    if steps is not None and ramps > steps - waiting > 0:
        waits = f", critic.warmup_steps: {waiting}" if waiting else ""
        both = f" + optim.decay_steps: {optim.decay_steps}" if optim.decay_steps else ""
        yield Problem(
            "the learning rate's warm-up and decay are longer than the run",
            have=f"optim.warmup_steps: {optim.warmup_steps}{both}, steps: {steps}{waits}",
            want=f"at most {steps - waiting} together",
            do=f"shorten them, or set steps={ramps + waiting} or more",
        )


def of_examples(config: RunConfig, shares: int) -> Iterator[Problem]:
    """What keeps a step's examples from being shared out among so many groups of processes."""
    batch, longest = config.batch, config.data.max_length
    if longest is not None and longest > config.microbatch_tokens:
        yield Problem(
            "the longest example does not fit into a micro-batch",
            have=f"data.max_length: {longest}, {_budget(config)}",
            want=f"data.max_length at most {config.microbatch_tokens}",
            do=f"set batch.tokens_per_device={_per_device(longest, config)}, or lower data.max_length",
        )
    if batch.examples < shares:
        yield Problem(
            "a step has fewer examples than there are processes",
            have=f"batch.examples: {batch.examples}, {_processes(shares, config)}",
            want=f"{shares} or more",
            do=f"set batch.examples={shares}, or start fewer processes",
        )


def of_completions(config: RunConfig, shares: int) -> Iterator[Problem]:
    """What keeps a step's completions from being shared out among so many groups of processes."""
    yield from _of_batch(config, shares)
    yield from _of_lengths(config)


def _budget(config: RunConfig) -> str:
    """How many tokens a micro-batch may have, by the settings that say so."""
    device, ranks = config.batch.tokens_per_device, config.engine.sequence_parallel
    shared = f" × engine.sequence_parallel: {ranks}" if ranks > 1 else ""
    return f"batch.tokens_per_device: {device}{shared}"


def _per_device(tokens: int, config: RunConfig) -> int:
    """The `batch.tokens_per_device` at which a micro-batch has room for `tokens`."""
    return -(-tokens // config.engine.sequence_parallel)


def _processes(shares: int, config: RunConfig) -> str:
    sharing = config.engine.sharing
    return f"{shares} groups of {sharing} processes" if sharing > 1 else f"{shares} processes"


def _of_batch(config: RunConfig, shares: int) -> Iterator[Problem]:
    prompts, parts = config.batch.prompts, config.batch.minibatches
    if prompts % parts:
        whole = prompts - prompts % parts
        sizes = [each for each in (whole, whole + parts) if each]
        divisors = [each for each in range(1, prompts + 1) if prompts % each == 0]
        around = [max(each for each in divisors if each < parts)]
        around += [each for each in divisors if each > parts][:1]
        yield Problem(
            f"batch.prompts {prompts} does not divide by batch.minibatches {parts}",
            have=f"{prompts} / {parts} = {prompts / parts:.2f} prompts per optimizer step",
            want="a whole number",
            do=f"set batch.prompts to {either(sizes)}, or batch.minibatches to {either(around)}",
        )
        return
    sequences = prompts // parts * config.rollout.n
    if sequences < shares:
        yield Problem(
            "an optimizer step has fewer completions than there are processes",
            have=f"batch.prompts / batch.minibatches × rollout.n = {sequences}, {_processes(shares, config)}",
            want=f"{shares} or more",
            do="raise batch.prompts or rollout.n, or start fewer processes",
        )


def _of_lengths(config: RunConfig) -> Iterator[Problem]:
    response, budget = config.rollout.max_response_length, config.microbatch_tokens
    prompt = config.data.max_prompt_length
    needed = config.longest_completed
    if needed > budget:
        have = "a prompt of 1" if prompt is None else f"data.max_prompt_length: {prompt}"
        yield Problem(
            "the longest prompt and completion do not fit into a micro-batch",
            have=f"{have} + rollout.max_response_length: {response} = {needed} tokens, {_budget(config)}",
            want=f"at most {budget} together",
            do=f"set batch.tokens_per_device={_per_device(needed, config)} or more, or lower the lengths",
        )


def _of_buffer(config: RunConfig) -> Iterator[Problem]:
    buffer, response = config.algorithm.overlong.buffer, config.rollout.max_response_length
    if buffer > response:
        yield Problem(
            "algorithm.overlong.buffer is longer than a completion",
            have=f"algorithm.overlong.buffer: {buffer}, rollout.max_response_length: {response}",
            want=f"at most {response}",
            do="lower algorithm.overlong.buffer",
        )


def _of_rollout(config: RunConfig) -> Iterator[Problem]:
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.temperature == 0:
        yield Problem(
            "rollout.temperature 0 always takes the same completion, so there is nothing to compare",
            have="rollout.temperature: 0",
            want="more than 0",
            do="set rollout.temperature=1.0; evaluation.temperature may be 0",
        )
    elif algorithm.old_logprobs == "rollout" and rollout.temperature != 1:
        yield Problem(
            "algorithm.old_logprobs rollout needs completions drawn at temperature 1",
            have=f"rollout.temperature: {rollout.temperature}",
            want="1.0",
            do="set algorithm.old_logprobs=recompute, or rollout.temperature=1.0",
        )
    if rollout.n < 2 and algorithm.advantage in GROUP_ADVANTAGES:
        yield Problem(
            f"algorithm.advantage {algorithm.advantage} compares the completions of a prompt, and there is only one",
            have="rollout.n: 1, so every advantage would be 0",
            want="rollout.n 2 or more",
            do="set rollout.n=8, or algorithm.advantage=reinforce_plus_plus",
        )
    if rollout.n < 2 and algorithm.dynamic_sampling.enabled:
        yield Problem(
            "algorithm.dynamic_sampling replaces groups without variance, and a group of one has none",
            have="rollout.n: 1",
            want="rollout.n 2 or more",
            do="set rollout.n=8, or algorithm.dynamic_sampling.enabled=false",
        )
    yield from _of_compared_part(config)


def _of_compared_part(config: RunConfig) -> Iterator[Problem]:
    """A part FUNCTION/NAME is known by its answers alone: of it only the function is looked for."""
    part, names = config.algorithm.dynamic_sampling.part, config.reward.part_names
    if part is None:
        return
    if not config.algorithm.dynamic_sampling.enabled:
        yield Problem(
            "algorithm.dynamic_sampling.part is set, and there is no dynamic sampling",
            have=f"algorithm.dynamic_sampling.part: {part}, algorithm.dynamic_sampling.enabled: false",
            want="both, or neither",
            do="set algorithm.dynamic_sampling.enabled=true, or remove the part",
        )
    if part not in names and part.rpartition("/")[0] not in names:
        yield Problem(
            "algorithm.dynamic_sampling.part is no part of the reward",
            have=f"algorithm.dynamic_sampling.part: {part}",
            want=f"one of {', '.join(names)}",
            do="set algorithm.dynamic_sampling.part to one of them, or remove it",
        )


_LOSS_SETTINGS = {
    "dual_clip": ("ppo", "clip_cov"),
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "cov_ratio": ("clip_cov", "kl_cov"),
    "cov_low": ("clip_cov",),
    "cov_high": ("clip_cov",),
    "cov_penalty": ("kl_cov",),
}
"""Settings of `algorithm` that some built-in losses alone read; a function of the user's may read all."""


def _of_algorithm(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    given = algorithm.model_dump(exclude_defaults=True)
    for name, losses in _LOSS_SETTINGS.items():
        builtin = algorithm.policy_loss in get_args(PolicyLossName)
        if name in given and builtin and algorithm.policy_loss not in losses:
            yield Problem(
                f"algorithm.{name} is for algorithm.policy_loss {' and '.join(losses)} only",
                have=f"algorithm.{name}: {given[name]}, algorithm.policy_loss: {algorithm.policy_loss}",
                want=f"policy_loss {' or '.join(losses)}",
                do=f"remove algorithm.{name}",
            )
    if algorithm.top_entropy is not None and algorithm.policy_loss in ("clip_cov", "kl_cov"):
        yield Problem(
            "algorithm.top_entropy and algorithm.policy_loss both choose tokens",
            have=f"algorithm.top_entropy: {algorithm.top_entropy}, algorithm.policy_loss: {algorithm.policy_loss}",
            want="one of both",
            do="remove algorithm.top_entropy, or set algorithm.policy_loss=ppo",
        )
    kl = algorithm.kl
    if kl.target is not None and (kl.place != "reward" or not kl.coef):
        yield Problem(
            "algorithm.kl.target adapts the KL term in the reward, and there is none",
            have=f"algorithm.kl.place: {kl.place}, algorithm.kl.coef: {kl.coef:g}",
            want="place reward, and a coefficient to begin with",
            do="set algorithm.kl.place=reward and algorithm.kl.coef=0.1, or remove algorithm.kl.target",
        )
    used = "mismatch_cap" if algorithm.mismatch_cap is not None else "mismatch_reject"
    corrects = algorithm.mismatch_cap is not None or algorithm.mismatch_reject != "none"
    if corrects and algorithm.old_logprobs == "rollout":
        yield Problem(
            f"algorithm.{used} has nothing to correct",
            have=f"algorithm.{used}: {getattr(algorithm, used)}, algorithm.old_logprobs: rollout, so updates are measured against the generator itself",
            want="algorithm.old_logprobs recompute, or no correction",
            do=f"set algorithm.old_logprobs=recompute, or remove algorithm.{used}",
        )


def _of_critic(config: RunConfig) -> Iterator[Problem]:
    critic, steps = config.critic, config.steps
    if config.algorithm.advantage != "gae":
        given = critic.model_dump(exclude_defaults=True)
        if given:
            yield Problem(
                f"critic.{next(iter(given))} is for algorithm.advantage gae only",
                have=f"algorithm.advantage: {config.algorithm.advantage}, which has no critic",
                want="algorithm.advantage gae, or no settings of a critic",
                do=f"set algorithm.advantage=gae, or remove {_and(f'critic.{name}' for name in given)}",
            )
    elif steps is not None and critic.warmup_steps >= steps:
        yield Problem(
            "the policy would wait for the critic in all steps of the run",
            have=f"critic.warmup_steps: {critic.warmup_steps}, steps: {steps}",
            want=f"less than {steps}",
            do="lower critic.warmup_steps, or raise steps",
        )


def _and(names: Iterable[str]) -> str:
    return " and ".join(names)

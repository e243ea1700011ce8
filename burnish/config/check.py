"""Whether the settings make sense together, before anything heavy is loaded.

Each check compares settings with each other; bounds of single settings are in the schema. All that
is wrong is reported at once. Left out: whether the files that settings name exist
(`burnish.cli.inputs`), and what only the model or the data can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from burnish.config.places import is_remote
from burnish.config.problems import Problem, refusal
from burnish.config.schema import LoraConfig, ModelConfig, RunConfig

Command = Literal["sft", "rl", "eval"]
"""What the configuration is for."""

GROUP_ADVANTAGES = frozenset({"grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"})
"""Advantages that compare the completions of one prompt with each other; a group of one has none."""


def check(config: RunConfig, command: Command, world: int = 1) -> None:
    """Raise `UsageError` with everything that keeps `command` from running on `world` processes."""
    problems = list(_of_run(config))
    problems += _of_model(config)
    problems += _of_data(config, command)
    problems += _of_layout(config, world)
    if command in ("sft", "rl"):
        problems += _of_learning_rate(config)
    if command == "sft":
        problems += _of_sft(config, world // _sharing(config))
    if command == "rl":
        problems += _of_batch(config, world // _sharing(config))
        problems += _of_lengths(config)
        problems += _of_rollout(config)
        problems += _of_algorithm(config)
        problems += _of_critic(config)
    problems += _of_evaluation(config, command)
    problems += _of_retention(config, command)
    problems += _of_mirror(config)
    if problems:
        raise refusal(problems, "this configuration")


def _of_run(config: RunConfig) -> Iterator[Problem]:
    if config.name in ("", ".", "..") or any(each in config.name for each in "/\\\0"):
        yield Problem(
            "name cannot be used as a directory's name",
            have=repr(config.name),
            want="a plain name without slashes",
            do="set name, and output_dir for where it lies",
        )


def _of_model(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if (model.path is None) == (model.fresh is None):
        yield Problem(
            "exactly one of model.path and model.fresh has to be set",
            have="neither" if model.path is None else f"both, model.path={model.path}",
            want="a model directory to start from, or a configuration to make a new model from",
            do="set model.path" if model.path is None else "remove model.path or model.fresh",
        )
    yield from _of_adapter(model)
    if model.fresh is not None and model.tokenizer is None:
        yield Problem(
            "model.fresh comes without a tokenizer",
            have="model.tokenizer: null",
            want="the directory of a tokenizer",
            do="set model.tokenizer",
        )


def _of_adapter(model: ModelConfig) -> Iterator[Problem]:
    if model.lora.rank == 0 and model.lora != LoraConfig():
        yield Problem(
            "model.lora is set, and there is no adapter",
            have="model.lora.rank: 0",
            want="1 or more",
            do="set model.lora.rank=16, or remove model.lora",
        )
    if model.lora.rank and model.path is None:
        yield Problem(
            "model.lora needs a model that the adapter belongs to",
            have=f"model.lora.rank: {model.lora.rank}, and a new model, of which only the adapter would be saved",
            want="model.path",
            do="set model.path to a model directory, or model.lora.rank=0",
        )


def _of_data(config: RunConfig, command: Command) -> Iterator[Problem]:
    if command == "eval" and not config.data.validation:
        yield Problem(
            "there is nothing to evaluate on",
            have="data.validation: []",
            want="at least one file",
            do="set data.validation=[FILE]",
        )
    if command != "eval" and not config.data.train:
        yield Problem(
            "there is nothing to train on",
            have="data.train: []",
            want="at least one file",
            do="set data.train=[FILE]",
        )
    if command == "rl" and not config.reward.functions:
        yield Problem(
            "there is no reward to learn from",
            have="reward.functions: []",
            want="at least one reward function",
            do="set reward.functions='[{function: numeric}]', or module:function of your own",
        )


def _of_learning_rate(config: RunConfig) -> Iterator[Problem]:
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
    if steps is not None and ramps > steps:
        both = f" + optim.decay_steps: {optim.decay_steps}" if optim.decay_steps else ""
        yield Problem(
            "the learning rate's warm-up and decay are longer than the run",
            have=f"optim.warmup_steps: {optim.warmup_steps}{both}, steps: {steps}",
            want=f"at most {steps} together",
            do=f"shorten them, or set steps={ramps} or more",
        )


def _sharing(config: RunConfig) -> int:
    """Processes that work on the same micro-batch."""
    return config.engine.sequence_parallel * config.engine.tensor_parallel


def _of_layout(config: RunConfig, world: int) -> Iterator[Problem]:
    engine, sharing, replicas = config.engine, _sharing(config), config.engine.replicas
    if config.model.adapter is not None and engine.tensor_parallel > 1:
        yield Problem(
            "an adapter cannot be trained with tensor parallelism",
            have=f"model.lora.rank: {config.model.lora.rank}, engine.tensor_parallel: {engine.tensor_parallel}",
            want="one of them",
            do="set engine.tensor_parallel=1, and engine.sequence_parallel for long sequences",
        )
    if world % sharing:
        yield Problem(
            "the processes cannot be divided into groups that share a micro-batch",
            have=f"engine.sequence_parallel: {engine.sequence_parallel}, engine.tensor_parallel: {engine.tensor_parallel}, {world} processes",
            want="a number of processes that their product divides",
            do=f"make the product {_near(sharing, world)}, or start another number of processes",
        )
    elif world // sharing % replicas:
        yield Problem(
            "the copies of the model do not divide the processes",
            have=f"engine.replicas: {replicas}, {world} processes"
            + (f" in groups of {sharing}" if sharing > 1 else ""),
            want="a whole number of processes for each copy",
            do=f"set engine.replicas={_near(replicas, world // sharing)}, or start another number of processes",
        )


def _near(number: int, total: int) -> str:
    """The divisors of `total` next to `number`."""
    divisors = [each for each in range(1, total + 1) if total % each == 0]
    return _or(sorted(sorted(divisors, key=lambda each: abs(each - number))[:2]))


def _of_sft(config: RunConfig, shares: int) -> Iterator[Problem]:
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


def _budget(config: RunConfig) -> str:
    """How many tokens a micro-batch may have, by the settings that say so."""
    device, ranks = config.batch.tokens_per_device, config.engine.sequence_parallel
    shared = f" × engine.sequence_parallel: {ranks}" if ranks > 1 else ""
    return f"batch.tokens_per_device: {device}{shared}"


def _per_device(tokens: int, config: RunConfig) -> int:
    """The `batch.tokens_per_device` at which a micro-batch has room for `tokens`."""
    return -(-tokens // config.engine.sequence_parallel)


def _processes(shares: int, config: RunConfig) -> str:
    sharing = _sharing(config)
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
            do=f"set batch.prompts to {_or(sizes)}, or batch.minibatches to {_or(around)}",
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


def _or(numbers: list[int]) -> str:
    return " or ".join(str(each) for each in numbers)


def _of_lengths(config: RunConfig) -> Iterator[Problem]:
    response, budget = config.rollout.max_response_length, config.microbatch_tokens
    prompt = config.data.max_prompt_length
    needed = response + (1 if prompt is None else prompt)
    if needed > budget:
        have = "a prompt of 1" if prompt is None else f"data.max_prompt_length: {prompt}"
        yield Problem(
            "the longest prompt and completion do not fit into a micro-batch",
            have=f"{have} + rollout.max_response_length: {response} = {needed} tokens, {_budget(config)}",
            want=f"at most {budget} together",
            do=f"set batch.tokens_per_device={_per_device(needed, config)} or more, or lower the lengths",
        )
    buffer = config.algorithm.overlong.buffer
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


def _of_algorithm(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.dual_clip is not None and algorithm.policy_loss != "ppo":
        yield Problem(
            "algorithm.dual_clip is for algorithm.policy_loss ppo only",
            have=f"algorithm.dual_clip: {algorithm.dual_clip}, algorithm.policy_loss: {algorithm.policy_loss}",
            want="null, or policy_loss ppo",
            do="remove algorithm.dual_clip",
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


def _of_evaluation(config: RunConfig, command: Command) -> Iterator[Problem]:
    evaluation = config.evaluation
    if command != "eval" and evaluation.every and not config.data.validation:
        yield Problem(
            "there is nothing to validate on",
            have=f"evaluation.every: {evaluation.every}, data.validation: []",
            want="at least one file",
            do="set data.validation=[FILE], or evaluation.every=0",
        )
    if command != "sft" and evaluation.n > 1 and evaluation.temperature == 0:
        yield Problem(
            "evaluation.n completions at temperature 0 are all the same",
            have=f"evaluation.n: {evaluation.n}, evaluation.temperature: 0",
            want="one completion, or a temperature above 0",
            do="set evaluation.n=1, or evaluation.temperature=1.0",
        )


def _of_retention(config: RunConfig, command: Command) -> Iterator[Problem]:
    best, save_every = config.checkpoint.keep_best, config.checkpoint.save_every
    if (best.metric is None) != (best.mode is None):
        missing, given = ("mode", "metric") if best.mode is None else ("metric", "mode")
        yield Problem(
            f"checkpoint.keep_best.{given} is set without checkpoint.keep_best.{missing}",
            have=f"checkpoint.keep_best.{given}: {getattr(best, given)}",
            want="both, or neither",
            do="set checkpoint.keep_best.mode=min or max"
            if best.mode is None
            else "set checkpoint.keep_best.metric=val/NAME, or remove the mode",
        )
    if command != "eval" and best.metric is not None and not config.evaluation.every:
        yield Problem(
            "checkpoint.keep_best needs validations to compare",
            have="evaluation.every: 0",
            want="1 or more",
            do="set evaluation.every, or remove checkpoint.keep_best",
        )
    if save_every and config.checkpoint.keep_every % save_every:
        yield Problem(
            "checkpoint.keep_every keeps steps that are not saved",
            have=f"checkpoint.keep_every: {config.checkpoint.keep_every}, checkpoint.save_every: {save_every}",
            want="a multiple of checkpoint.save_every",
            do=f"set checkpoint.keep_every={-(-config.checkpoint.keep_every // save_every) * save_every}",
        )


def _of_mirror(config: RunConfig) -> Iterator[Problem]:
    mirror = config.checkpoint.mirror
    if mirror is not None and not is_remote(mirror):
        yield Problem(
            "checkpoint.mirror is no URL",
            have=f"checkpoint.mirror: {mirror}",
            want="hdfs://, s3://, gs:// or file://",
            do=f"set checkpoint.mirror=file://{Path(mirror).absolute()}",
        )
    if mirror is not None and is_remote(config.output_dir):
        yield Problem(
            "output_dir is a URL, and checkpoint.mirror is set",
            have=f"output_dir: {config.output_dir}, checkpoint.mirror: {mirror}",
            want="one of them: both say where the run is copied to",
            do="remove checkpoint.mirror, or set output_dir to a directory of this machine",
        )
    if config.checkpoint.mirror_keep_last and mirror is None and not is_remote(config.output_dir):
        yield Problem(
            "checkpoint.mirror_keep_last is set, and there is no mirror",
            have=f"checkpoint.mirror_keep_last: {config.checkpoint.mirror_keep_last}",
            want="checkpoint.mirror, or an output_dir that is a URL",
            do="set checkpoint.mirror, or remove checkpoint.mirror_keep_last",
        )

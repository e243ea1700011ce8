"""What a run will do, in a screenful, for `--dry-run`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from burnish.cli.columns import bytes_text, count_text
from burnish.config.constraints import Command
from burnish.config.schema import CriticConfig, EngineConfig, ModelConfig, RunConfig, SamplingConfig
from burnish.train.preflight import committed_steps, data_sizes


def summary(
    config: RunConfig,
    command: Command,
    world: int,
    run_dir: Path | None = None,
    memory: str | None = None,
) -> str:
    """Return aligned lines: model, data, sizes, formula, length, saving, outputs, and `memory`."""
    rows = list(_rows(config, command, world, run_dir))
    rows += [("memory", memory)] if memory else []
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def _rows(
    config: RunConfig, command: Command, world: int, run_dir: Path | None
) -> Iterator[tuple[str, str]]:
    yield "model", _model(config.model, run_dir)
    yield (
        "engine",
        f"{config.engine.kind}, {config.engine.precision}, {count_text(world, 'process')}",
    )
    if world > 1 and command != "eval":
        yield "layout", _layout(config.engine, world)
    if command != "eval":
        yield "train on", _files(config.data.train)
    if command == "eval" or config.evaluation.every:
        yield "validate on", _files(config.data.validation)
    if command == "sft":
        yield "step", f"{count_text(config.batch.examples, 'example')}"
    if command == "rl":
        yield from _rl_rows(config)
    if command == "eval" and config.reward.given:
        evaluation = config.evaluation
        yield "completions", f"{evaluation.n} per prompt, {_sampling(evaluation)}"
    elif command == "eval":
        yield "measures", "loss per token of held-out examples (there are no reward.functions)"
    yield "micro-batch", f"at most {config.batch.tokens_per_device} tokens on each device"
    if command != "eval":
        yield from _training_rows(config)


def _layout(engine: EngineConfig, world: int) -> str:
    """How many processes there are along each dimension of the engine's mesh, outermost first."""
    sizes = {"sequence": engine.sequence_parallel, "tensor": engine.tensor_parallel}
    if engine.kind == "megatron":
        data = world // engine.sharing
        sizes = {"pipeline": engine.pipeline_parallel, "data": data, **sizes}
    else:
        shard = world // (engine.replicas * math.prod(sizes.values()))
        sizes = {"replicas": engine.replicas, "shard": shard, **sizes}
    return " × ".join(f"{size} {name}" for name, size in sizes.items())


def _rl_rows(config: RunConfig) -> Iterator[tuple[str, str]]:
    batch, rollout, algorithm = config.batch, config.rollout, config.algorithm
    yield (
        "step",
        f"{count_text(batch.prompts, 'prompt')} × {count_text(rollout.n, 'completion')} = "
        f"{batch.prompts * rollout.n} sequences, {count_text(batch.minibatches * batch.epochs, 'optimizer step')}",
    )
    prompt = config.data.max_prompt_length
    yield (
        "lengths",
        f"{f'prompt at most {prompt} tokens, ' if prompt else ''}completion at most {rollout.max_response_length} tokens",
    )
    yield "completions", _sampling(rollout)
    reference = f", KL {algorithm.kl.coef} in the {algorithm.kl.place}" if algorithm.kl.coef else ""
    yield (
        "formula",
        f"{algorithm.advantage}, {algorithm.policy_loss}, {algorithm.aggregation}{reference}",
    )
    if algorithm.advantage == "gae":
        yield "critic", _critic(config.critic)
    yield (
        "reward",
        " + ".join(
            f"{weight:g} × {name}"
            for name, weight in [
                *((each.function, each.weight) for each in config.reward.functions),
                *((each.path, each.weight) for each in config.reward.models),
            ]
        ),
    )


def _training_rows(config: RunConfig) -> Iterator[tuple[str, str]]:
    optim, checkpoint = config.optim, config.checkpoint
    warmup = f", {count_text(optim.warmup_steps, 'step')} of warm-up" if optim.warmup_steps else ""
    yield "learning rate", f"{optim.lr:g}, {optim.schedule}{warmup}"
    length = (
        count_text(config.steps, "step") if config.steps else count_text(config.epochs, "epoch")
    )
    yield "length", length
    every = (
        f"every {count_text(checkpoint.save_every, 'step')} and " if checkpoint.save_every else ""
    )
    kept = [f"the last {checkpoint.keep_last}"]
    kept += [f"every {checkpoint.keep_every} steps"] if checkpoint.keep_every else []
    best = checkpoint.keep_best
    kept += [f"the best {best.count} by {best.metric}"] if best.metric else []
    yield (
        "checkpoints",
        f"{every}at the end, {', '.join(kept)} kept{', in the background' if checkpoint.background else ''}",
    )
    directory = config.directory
    saved = committed_steps(directory)
    yield "writes", f"{directory}{f', which continues from {saved[-1].name}' if saved else ''}"
    mirror, count = config.mirror_url, checkpoint.mirror_keep_last
    if mirror:
        yield "mirror", f"{mirror}, {f'the last {count}' if count else 'all'} steps kept"


def _model(model: ModelConfig, run_dir: Path | None) -> str:
    if run_dir is not None:
        return f"newest checkpoint of {run_dir}"
    if model.path is not None:
        return f"{model.path}{_adapter(model)}"
    made_from = model.fresh if isinstance(model.fresh, str) else "model.fresh"
    return f"new, random weights, from {made_from}"


def _adapter(model: ModelConfig) -> str:
    if model.adapter is None:
        return ""
    if model.adapter.path is not None:
        return f", from the adapter {model.adapter.path}"
    layers = ", ".join(model.adapter.targets) or "all linear layers"
    return f", an adapter of rank {model.adapter.rank} on {layers}"


def _critic(critic: CriticConfig) -> str:
    origin = critic.path or "the policy's model with a fresh head"
    alone = f", alone for {count_text(critic.warmup_steps, 'step')}" if critic.warmup_steps else ""
    return f"{origin}, learning rate {critic.lr:g}{alone}, γ {critic.gamma:g}, λ {critic.lam:g}"


def _sampling(sampling: SamplingConfig) -> str:
    parts = [f"temperature {sampling.temperature:g}"]
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
    return ", ".join(parts)


def _files(paths: list[str]) -> str:
    sizes = [size for path in paths for size in data_sizes(path)]
    return f"{', '.join(paths)} ({count_text(len(sizes), 'file')}, {bytes_text(sum(sizes))})"

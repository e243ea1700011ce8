"""What a run will do, in a screenful, for `--dry-run`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from burnish.cli.output import count_text
from burnish.config.constraints import Command
from burnish.config.schema import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    CriticConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from burnish.errors import bytes_text, table
from burnish.train.own_directory import committed_steps
from burnish.train.preflight import data_sizes

_Row = tuple[str, str]


def summary(
    config: RunConfig,
    command: Command,
    world: int,
    run_dir: Path | None = None,
    memory: str | None = None,
) -> str:
    """Return aligned lines: model, data, sizes, formula, length, saving, outputs, and `memory`."""
    engine, data, evaluation = config.engine, config.data, config.evaluation
    processes = count_text(world, "process")
    rows = [
        ("model", _model(config.model, run_dir)),
        ("engine", f"{engine.kind}, {engine.precision}, {processes}"),
    ]
    if command == "eval":
        rows.append(("validate on", _files(data.validation, "data.validation")))
        measures = "loss per token of held-out examples (there are no reward.functions)"
        sampled = f"{evaluation.n} per prompt, {_sampling(evaluation)}"
        rows.append(("completions", sampled) if config.reward.given else ("measures", measures))
    else:
        rows += [("layout", _layout(engine, world))] if world > 1 else []
        rows.append(("train on", _files(data.train, "data.train")))
        rows += (
            [("validate on", _files(data.validation, "data.validation"))]
            if evaluation.every
            else []
        )
    if command == "sft":
        rows.append(("step", count_text(config.batch.examples, "example")))
    if command == "rl":
        rows += _sampling_rows(config.batch, config.rollout, data.max_prompt_length)
        rows += _formula_rows(config.algorithm, config.critic, config.reward)
    budget = config.batch.tokens_per_device
    rows.append(("micro-batch", f"at most {budget} tokens on each device"))
    if command != "eval":
        length = config.steps or config.epochs
        rows += [
            ("learning rate", _learning_rate(config.optim)),
            ("length", count_text(length, "step" if config.steps else "epoch")),
        ]
        saved = [] if config.resume == "fresh" else committed_steps(config.directory)
        rows += _output_rows(config.checkpoint, config.directory, config.mirror_url, saved)
    rows += [("memory", memory)] if memory else []
    return "\n".join(f"  {line}" for line in table(rows))


def _layout(engine: EngineConfig, world: int) -> str:
    """Return the number of processes along each dimension of the engine's mesh, outermost first."""
    sizes = {"sequence": engine.sequence_parallel, "tensor": engine.tensor_parallel}
    if engine.kind == "megatron":
        data = world // engine.sharing
        sizes = {"pipeline": engine.pipeline_parallel, "data": data, **sizes}
    else:
        shard = world // (engine.replicas * math.prod(sizes.values()))
        sizes = {"replicas": engine.replicas, "shard": shard, **sizes}
    return " × ".join(f"{size} {name}" for name, size in sizes.items())


def _sampling_rows(
    batch: BatchConfig, rollout: RolloutConfig, longest_prompt: int | None
) -> Iterator[_Row]:
    completions = f"{count_text(batch.prompts, 'prompt')} × {count_text(rollout.n, 'completion')}"
    updates = count_text(batch.minibatches * batch.epochs, "optimizer step")
    yield "step", f"{completions} = {batch.prompts * rollout.n} sequences, {updates}"
    prompt = f"prompt at most {longest_prompt} tokens, " if longest_prompt else ""
    yield "lengths", f"{prompt}completion at most {rollout.max_response_length} tokens"
    yield "completions", _sampling(rollout)


def _formula_rows(
    algorithm: AlgorithmConfig, critic: CriticConfig, reward: RewardConfig
) -> Iterator[_Row]:
    kl = f", KL {algorithm.kl.coef} in the {algorithm.kl.place}" if algorithm.kl.coef else ""
    formula = (algorithm.advantage, algorithm.policy_loss, algorithm.aggregation)
    yield "formula", f"{', '.join(formula)}{kl}"
    if algorithm.advantage == "gae":
        origin = critic.path or "the policy's model with a fresh head"
        warmup = count_text(critic.warmup_steps, "step")
        alone = f", alone for {warmup}" if critic.warmup_steps else ""
        rates = f"learning rate {critic.lr:g}{alone}, γ {critic.gamma:g}, λ {critic.lam:g}"
        yield "critic", f"{origin}, {rates}"
    parts = [(each.weight, each.function) for each in reward.functions]
    parts += [(each.weight, each.path) for each in reward.models]
    yield "reward", " + ".join(f"{weight:g} × {name}" for weight, name in parts)


def _learning_rate(optim: OptimConfig) -> str:
    warmup = f", {count_text(optim.warmup_steps, 'step')} of warm-up" if optim.warmup_steps else ""
    return f"{optim.lr:g}, {optim.schedule}{warmup}"


def _output_rows(
    checkpoint: CheckpointConfig, directory: Path, mirror: str | None, saved: Sequence[Path]
) -> Iterator[_Row]:
    interval, best = checkpoint.save_every, checkpoint.keep_best
    often = "about every 30 minutes" if interval == "auto" else f"every {interval} steps"
    parts = [f"{often} and at the end" if interval else "at the end"]
    parts.append(f"the last {checkpoint.keep_last}")
    parts += [f"every {checkpoint.keep_every} steps"] if checkpoint.keep_every else []
    parts += [f"the best {best.count} by {best.metric}"] if best.metric else []
    background = ", in the background" if checkpoint.background else ""
    yield "checkpoints", f"{', '.join(parts)} kept{background}"
    yield "writes", f"{directory}{f', which continues from {saved[-1].name}' if saved else ''}"
    if mirror:
        count = checkpoint.mirror_keep_last
        yield "mirror", f"{mirror}, {f'the last {count}' if count else 'all'} steps kept"


def _model(model: ModelConfig, run_dir: Path | None) -> str:
    if run_dir is not None:
        return f"newest checkpoint of {run_dir}"
    if model.path is None:
        made_from = model.fresh if isinstance(model.fresh, str) else "model.fresh"
        return f"new, random weights, from {made_from}"
    if model.adapter is None:
        return model.path
    if model.adapter.path is not None:
        return f"{model.path}, from the adapter {model.adapter.path}"
    layers = ", ".join(model.adapter.targets) or "all linear layers"
    return f"{model.path}, an adapter of rank {model.adapter.rank} on {layers}"


def _sampling(sampling: SamplingConfig) -> str:
    parts = [f"temperature {sampling.temperature:g}"]
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
    return ", ".join(parts)


def _files(paths: Sequence[str], setting: str) -> str:
    sizes = [size for path in paths for size in data_sizes(path, setting)]
    return f"{', '.join(paths)} ({count_text(len(sizes), 'file')}, {bytes_text(sum(sizes))})"

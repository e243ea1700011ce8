"""A dry run: look into a run's inputs, and say what the run will do.

It looks at columns, weight headers, tokenizers and the sources of functions, in about a second: without `datasets`, and without
torch unless a formula is the user's. Left out: URLs, later rows, and everything that only a run finds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from burnish.cli.output import bytes_text, count_text
from burnish.config.constraints import Command
from burnish.config.schema import (
    AlgorithmConfig,
    BatchConfig,
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from burnish.data.columns import MissingColumn, answer_column, example_format, prompt_column
from burnish.data.peek import Columns, columns_of, has_column
from burnish.errors import BurnishError, CorruptError, MissingError, UsageError, few, together
from burnish.files.safetensors import read_header, weight_files
from burnish.files.urls import is_url
from burnish.functions import require_function
from burnish.rewards.signature import BUILTINS
from burnish.train.preflight import TOKENIZER_FILES, committed_steps, data_files, data_sizes

_Look = Callable[[], object]
_Row = tuple[str, str]


def require_contents(config: RunConfig, command: Command, run_dir: Path | None = None) -> None:
    """Raise a `BurnishError` with everything in the inputs of `command` that would stop it.

    `burnish.train.preflight` has checked that the inputs exist. With `run_dir` model and tokenizer are that run's.
    """
    prompts = command == "rl" or (command == "eval" and config.reward.given)
    model, looks = config.model, list[_Look]()
    if run_dir is None:
        judges = [judge.path for judge in config.reward.models] if command != "sft" else []
        looks += _looks_at_models(model, config.critic.path if command == "rl" else None, judges)
        if prompts and model.path is not None and not is_url(model.path):
            positions = partial(_positions, model.path)
            looks.append(lambda: config.prompt_limits(positions()))
    for setting in ("validation",) if command == "eval" else ("train", "validation"):
        paths = [path for path in getattr(config.data, setting) if not is_url(path)]
        looks += [partial(_columns, path, config.data, prompts=prompts) for path in paths]
    if command != "sft":
        looks += [
            partial(require_function, reward.function, "reward.functions", BUILTINS)
            for reward in config.reward.functions
        ]
    if command == "rl":
        looks.append(partial(_formula, config.algorithm))
    if command != "eval":
        looks += [
            partial(require_function, tracker, "tracking.trackers")
            for tracker in config.tracking.trackers
        ]
    found = []
    for look in looks:
        try:
            look()
        except BurnishError as error:
            found.append(error)
    if found:
        raise together(found, "what the inputs of this run hold")


def _looks_at_models(
    model: ModelConfig, critic: str | None, judges: Sequence[str]
) -> Iterator[_Look]:
    for path in [model.path, critic, *judges]:
        if path is not None and not is_url(path):
            yield partial(_json_object, Path(path).expanduser() / "config.json")
            yield partial(_weights, path)
    if model.lora.path is not None and not is_url(model.lora.path):
        yield partial(_weights, model.lora.path)
    for path in [model.tokenizer or model.path, *judges]:
        if path is not None and not is_url(path):
            yield partial(_tokenizer, path)
    if isinstance(model.fresh, str) and not is_url(model.fresh):
        yield partial(_json_object, Path(model.fresh).expanduser())


def _formula(algorithm: AlgorithmConfig) -> None:
    """Require that functions of the user's exist, and run on made-up data."""
    advantage, loss = algorithm.advantage, algorithm.policy_loss
    if ":" in advantage:
        require_function(advantage, "algorithm.advantage")
        from burnish.algorithms.advantages import load_advantage

        load_advantage(advantage)
    if ":" in loss:
        require_function(loss, "algorithm.policy_loss")
        from burnish.algorithms.policy_loss import load_policy_loss

        load_policy_loss(algorithm)


def _positions(path: str) -> int | None:
    """Return the number of positions that a model's config.json names."""
    found = _json_object(Path(path).expanduser() / "config.json").get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _weights(path: str) -> None:
    """Require that every file of the directory has the size and the tensors that its header says."""
    for file in weight_files(Path(path).expanduser()):
        read_header(file)


def _tokenizer(path: str) -> None:
    folder = Path(path).expanduser()
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise MissingError(
            f"{path} holds no tokenizer",
            have=few(sorted(each.name for each in folder.iterdir())) or "nothing",
            want=" or ".join(TOKENIZER_FILES),
            do="set model.tokenizer to the directory of one",
        )
    for file in present:
        fields = _json_object(file)
        if file.name == "tokenizer.json" and not isinstance(fields.get("model"), dict):
            raise CorruptError(
                f"{file} is no tokenizer",
                have=f"the keys {few(sorted(fields))}" if fields else "an empty object",
                want="a key model, as save_pretrained writes it",
                do="get the file again",
            )


def _json_object(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise CorruptError(
            f"{file} is not JSON", have=error, want="a JSON object", do="get the file again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptError(
            f"{file} is not a JSON object",
            have=type(value).__name__,
            want="a JSON object",
            do="get the file again",
        )
    return value


def _columns(path: str, data: DataConfig, *, prompts: bool) -> None:
    """Require the columns of prompts or examples in an entry's first file."""
    files = sorted(data_files(path))
    file = next((each for each in files if each.stat().st_size), files[0])
    columns = columns_of(file, lambda columns: _lack(columns, data, prompts=prompts) is None)
    if columns is None or (lack := _lack(columns, data, prompts=prompts)) is None:
        return
    if not columns:
        raise UsageError(
            f"{file} has no rows", have="no columns", want="at least one row", do="correct the file"
        )
    near = [close for name in lack.names for close in get_close_matches(name, columns, n=1)]
    raise MissingError(
        f"no usable columns in {file}",
        have=f"columns {', '.join(columns)}",
        want=lack.want,
        do=f"did you mean {near[0]}? Name the column in {lack.setting}"
        if near
        else f"name the column in {lack.setting}",
    )


def _lack(columns: Columns, data: DataConfig, *, prompts: bool) -> MissingColumn | None:
    """Return the column that a run would not find."""
    has = partial(has_column, columns)
    finders = (prompt_column, answer_column) if prompts else (example_format,)
    found = (finder(data, has) for finder in finders)
    return next((each for each in found if isinstance(each, MissingColumn)), None)


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
        rows.append(("validate on", _files(data.validation)))
        measures = "loss per token of held-out examples (there are no reward.functions)"
        sampled = f"{evaluation.n} per prompt, {_sampling(evaluation)}"
        rows.append(("completions", sampled) if config.reward.given else ("measures", measures))
    else:
        rows += [("layout", _layout(engine, world))] if world > 1 else []
        rows.append(("train on", _files(data.train)))
        rows += [("validate on", _files(data.validation))] if evaluation.every else []
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
        rows += _output_rows(config.checkpoint, config.directory, config.mirror_url)
    rows += [("memory", memory)] if memory else []
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


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
    checkpoint: CheckpointConfig, directory: Path, mirror: str | None
) -> Iterator[_Row]:
    interval, best = checkpoint.save_every, checkpoint.keep_best
    parts = [f"every {count_text(interval, 'step')} and at the end" if interval else "at the end"]
    parts.append(f"the last {checkpoint.keep_last}")
    parts += [f"every {checkpoint.keep_every} steps"] if checkpoint.keep_every else []
    parts += [f"the best {best.count} by {best.metric}"] if best.metric else []
    background = ", in the background" if checkpoint.background else ""
    yield "checkpoints", f"{', '.join(parts)} kept{background}"
    saved = committed_steps(directory)
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


def _files(paths: Sequence[str]) -> str:
    sizes = [size for path in paths for size in data_sizes(path)]
    return f"{', '.join(paths)} ({count_text(len(sizes), 'file')}, {bytes_text(sum(sizes))})"

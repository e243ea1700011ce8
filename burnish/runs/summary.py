"""Summarize what a run will do: briefly at its start, fully for `--dry-run`. Loads no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from burnish.config.algorithm import AlgorithmConfig
from burnish.config.environment import EnvironmentConfig
from burnish.config.schema import (
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
from burnish.config.shares import every_text, part_of
from burnish.data.entries import entry_files
from burnish.errors import BurnishError, UsageError, bytes_text, count_text, table
from burnish.families import ModelShape
from burnish.files.hub import is_elsewhere
from burnish.files.safetensors import read_header, weight_files
from burnish.method import Method
from burnish.runs.preflight import data_sizes, is_asked_here, model_fields
from burnish.runs.run_directory import committed_steps
from burnish.tracking.rundir import parameters_text

_BRIEF = (
    "model",
    "engine",
    "layout",
    "train on",
    "validate on",
    "learning rate",
    "length",
    "writes",
)
_OF_MEASUREMENTS = ("completions", "measures", "environment")
"""Rows at the start of a run, and further ones at the start of a measurement."""
_BROUGHT = "rows of the environment"
# Most seconds for counting the rows of a data set.
_COUNTING_SECONDS = 0.3
_CHUNK = 1 << 20
Row = tuple[str, str]
"""A name and what is said of it."""


def summary(
    config: RunConfig,
    method: Method,
    world: int,
    run_dir: Path | None = None,
    memory: Sequence[Row] = (),
    *,
    brief: bool = False,
    adapted: int = 0,
) -> str:
    """Return aligned lines that say what a run with `adapted` numbers does; unless `brief`, also sizes, formula, saving and `memory`."""
    engine = config.engine
    data = config.data
    processes = count_text(world, "process")
    count = parameter_count(config.model)
    size = f", {parameters_text(count, adapted)}" if count else ""
    # What "auto" is, a run says once it has measured the processor.
    precision = "" if engine.precision == "auto" else f"precision {engine.precision}"
    rows = [
        ("model", f"{_model(config.model, run_dir)}{size}"),
        ("engine", ", ".join(filter(None, (engine.kind, precision, processes)))),
    ]
    if not method.trains and config.rollout.engine == "openai":
        rows = [("model", f"{config.rollout.model} at {config.rollout.url}")]
    rows += [("layout", _layout(engine, world))] if method.trains and world > 1 else []
    rows += [("megatron", _megatron(engine, world))] if engine.kind == "megatron" else []
    count = 0
    about = ""
    if method.trains:
        if data.train:
            text, count, about = _data(data.train, "data.train")
        else:
            text = _BROUGHT
        if data.max_rows is not None:
            text += f", the first {count_text(data.max_rows, 'row')}"
            count, about = (data.max_rows, "") if count > data.max_rows else (count, about)
        rows.append(("train on", text))
        count -= part_of(data.held_out, count) if data.held_out else 0
    if data.validation or data.held_out or not method.trains:
        text = f"{data.held_out} of the rows of data.train" if data.held_out else _BROUGHT
        if data.validation and not data.held_out:
            text, *_ = _data(data.validation, "data.validation")
        rows.append(("validate on", text))
    rows += method.facts(config)
    if beside := [*method.frozen(config)]:
        from burnish.config.frozen_models import frozen_rows

        rows += frozen_rows(beside, rows)
    auto = " (auto)" if config.batch.is_auto else ""
    rows.append(("micro-batch", f"at most {config.batch.tokens} tokens on each device{auto}"))
    if method.trains:
        kind = f"{method.title}{' with an adapter' if config.model.adapter else ''}"
        rows.append(
            ("learning rate", _learning_rate(config.optim, method.default_lr(config), kind))
        )
        length = count_text(config.steps or config.epochs, "step" if config.steps else "epoch")
        if count and not config.steps:
            steps = _steps(
                count, method.rows_per_step(config), config.epochs, method.stays_in_epoch(config)
            )
            length += f", {about}{count_text(steps, 'step')}"
        rows.append(("length", length))
        saved = [] if config.resume == "fresh" else committed_steps(config.directory)
        rows += _output_rows(config.checkpoint, config.directory, config.mirror_url, saved)
    rows += memory
    if brief:
        named = _BRIEF if method.trains else (*_BRIEF, *_OF_MEASUREMENTS)
        rows = [row for row in rows if row[0] in named]
    return "\n".join(f"  {line}" for line in table(rows))


def _steps(rows: int, taken: int, epochs: int, stays_in_epoch: bool) -> int:
    if stays_in_epoch:
        return epochs * math.ceil(rows / taken)
    return math.ceil(epochs * rows / taken)


def _layout(engine: EngineConfig, world: int) -> str:
    sizes = {"sequence": engine.sequence_parallel, "tensor": engine.tensor_parallel}
    if engine.kind == "megatron":
        data = world // engine.sharing
        sizes = {"pipeline": engine.pipeline_parallel, "data": data, **sizes}
    else:
        shard = world // (engine.replicas * math.prod(sizes.values()))
        sizes = {"replicas": engine.replicas, "shard": shard, **sizes}
    text = " × ".join(f"{size} {name}" for name, size in sizes.items())
    if engine.kind == "torch" and engine.expert_parallel > 1:
        text += f"; experts shared by {engine.expert_parallel} neighbours, which exchange tokens"
    return text


def _megatron(engine: EngineConfig, world: int) -> str:
    copies = max(1, world // (engine.tensor_parallel * engine.pipeline_parallel))
    reduces, gathers = engine.megatron.overlaps(copies)
    exchanged = {"gradients": reduces, "stepped weights": gathers}
    parts = [
        f"{name} exchanged {'during passes' if overlaps else 'between passes'}"
        for name, overlaps in exchanged.items()
    ]
    if engine.megatron.pipeline_model_parallel_layout:
        parts.append(f"stages {engine.megatron.pipeline_model_parallel_layout}")
    if engine.activation_checkpointing == "selective":
        parts.append(f"{' and '.join(engine.megatron.recompute_modules)} recomputed")
    if engine.expert_parallel > 1:
        parts.append(f"experts reached by {engine.megatron.moe_token_dispatcher_type}")
    return ", ".join(parts)


def sampling_rows(
    batch: BatchConfig, rollout: RolloutConfig, longest_prompt: int | None
) -> Iterator[Row]:
    """Yield the size of a step that draws completions."""
    completions = f"{count_text(batch.prompts, 'prompt')} × {count_text(rollout.n, 'completion')}"
    updates = count_text(batch.minibatches * batch.epochs, "optimizer step")
    yield "step", f"{completions} = {batch.prompts * rollout.n} sequences, {updates}"
    prompt = f"prompt at most {longest_prompt} tokens, " if longest_prompt else ""
    yield "lengths", f"{prompt}completion at most {rollout.max_response_length} tokens"
    yield "completions", sampling_text(rollout)
    yield from environment_rows(rollout.environment)


def environment_rows(environment: EnvironmentConfig) -> Iterator[Row]:
    """Yield what the model talks with, if it talks."""
    turns = f"at most {count_text(environment.max_turns, 'turn')}"
    for name, value in environment.named.items():
        yield "environment", f"{value if name == 'function' else f'{name} {value}'}, {turns}"


def formula_rows(
    algorithm: AlgorithmConfig, critic: CriticConfig, reward: RewardConfig, *, has_environment: bool
) -> Iterator[Row]:
    """Yield the formula, the critic and the reward."""
    kl = f", KL {algorithm.kl.coef} in the {algorithm.kl.place}" if algorithm.kl.coef else ""
    formula = (str(algorithm.advantage), str(algorithm.policy_loss), algorithm.aggregation)
    yield "formula", f"{', '.join(formula)}{kl}"
    if algorithm.advantage.name == "gae":
        origin = critic.path or "the policy's model with a fresh head"
        origin += f", an adapter of rank {critic.lora_rank}" if critic.lora_rank else ""
        warmup = count_text(critic.warmup_steps, "step")
        alone = f", alone for {warmup}" if critic.warmup_steps else ""
        rates = f"learning rate {critic.lr:g}{alone}"
        yield "critic", f"{origin}, {rates}"
    parts = [(each.weight, each.function) for each in reward.functions]
    parts += [(each.weight, each.path) for each in reward.models]
    named = " + ".join(f"{weight:g} × {name}" for weight, name in parts)
    yield "reward", named or ("the environment's" if has_environment else "none")


def _learning_rate(optim: OptimConfig, default: float, kind: str) -> str:
    lr = default if optim.lr == "auto" else optim.lr
    why = f" (the default for {kind})" if lr == default else ""
    steps = optim.warmup_steps
    length = count_text(steps, "step") if isinstance(steps, int) else f"{steps} of the steps"
    warmup = f", {length} of warm-up" if steps else ""
    return f"{lr:g}{why}, {optim.schedule}{warmup}"


def _output_rows(
    checkpoint: CheckpointConfig, directory: Path, mirror: str | None, saved: Sequence[Path]
) -> Iterator[Row]:
    interval = checkpoint.save_every
    best = checkpoint.keep_best
    often = "about every 30 minutes" if interval == "auto" else every_text(interval)
    parts = [f"{often} and at the end" if interval else "at the end"]
    parts.append(f"the last {checkpoint.keep_last}")
    parts += [f"every {checkpoint.keep_every} steps"] if checkpoint.keep_every else []
    parts += [f"the best {best.count} by {best.metric}"] if best.metric else []
    background = ", in the background" if checkpoint.background else ""
    yield "checkpoints", f"{', '.join(parts)} kept{background}"
    yield (
        "writes",
        f"metrics, report.html and checkpoints in {directory}{f', which continues from {saved[-1].name}' if saved else ''}",
    )
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
        only = f", trained in {', '.join(model.train)}" if model.train else ""
        return model.path + only
    base = f"{model.path} in 4 bits" if model.adapter.quantize_base == "nf4" else model.path
    if model.adapter.path is not None:
        return f"{base}, from the adapter {model.adapter.path}"
    layers = ", ".join(model.adapter.targets) or "all linear layers"
    return f"{base}, an adapter of rank {model.adapter.rank} on {layers}"


def sampling_text(sampling: SamplingConfig) -> str:
    """Return how tokens are drawn, on one line."""
    parts = [f"temperature {sampling.temperature:g}"]
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    parts += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
    return ", ".join(parts)


def parameter_count(model: ModelConfig) -> int:
    """Return how many parameters the model has, by its configuration or else its weights; 0 if neither says."""
    try:
        if model.path is None or is_asked_here(model.path, "model"):
            return ModelShape.of(model_fields(model)).elements
    except UsageError:
        if model.path and not is_elsewhere(model.path):
            return _elements(Path(model.path).expanduser())
    except BurnishError:  # the run itself reports what is missing
        pass
    return 0


def _elements(directory: Path) -> int:
    try:
        headers = [read_header(path) for path in weight_files(directory)]
    except (OSError, BurnishError):
        return 0
    return sum(math.prod(entry.shape) for each in headers for entry in each.entries.values())


def _data(paths: Sequence[str], setting: str) -> tuple[str, int, str]:
    """Return a line about the files of `setting`, and their `_count`."""
    named = ", ".join(paths)
    if not all(is_asked_here(path, "dataset") for path in paths):
        return named, 0, ""
    sizes = [size for path in paths for size in data_sizes(path, setting)]
    parts = [count_text(len(sizes), "file"), bytes_text(sum(sizes))]
    rows, about = _count(paths, setting)
    if rows:
        parts.append(f"{about}{count_text(rows, 'row')}")
    return f"{named} ({', '.join(parts)})", rows, about


def _count(paths: Sequence[str], setting: str) -> tuple[int, str]:
    """Count rows for a moment: 0 if that fails; with "about ", the count is extrapolated."""
    deadline = time.monotonic() + _COUNTING_SECONDS
    rows = 0
    read = 0
    try:
        if any(is_elsewhere(path, "dataset") for path in paths):
            return 0, ""
        files = [file for path in paths for file in entry_files(path, setting).files]
        if not all(file.is_file() and file.suffix in _COUNTERS for file in files):
            return 0, ""
        total = sum(file.stat().st_size for file in files)
        for file in files:
            for found, size in _COUNTERS[file.suffix](file):
                rows = rows + found
                read = read + size
                if time.monotonic() > deadline and 0 < read < total:
                    return round(rows * total / read), "about "
    except (OSError, ValueError):  # the run reports what is wrong when it reads the data
        return 0, ""
    return rows, ""


def _lines(path: Path) -> Iterator[tuple[int, int]]:
    """Yield rows and bytes of parts of a JSON Lines file. Raises `ValueError` for an array."""
    piece = b""
    with path.open("rb") as file:
        while more := file.read(_CHUNK):
            if not piece and more.lstrip().startswith(b"["):
                raise ValueError("an array")
            piece = more
            yield piece.count(b"\n"), len(piece)
    if piece and not piece.endswith(b"\n"):
        yield 1, 0


def _parquet(path: Path) -> Iterator[tuple[int, int]]:
    parquet = import_module("pyarrow.parquet")
    yield parquet.read_metadata(path).num_rows, path.stat().st_size


def _arrow(path: Path) -> Iterator[tuple[int, int]]:
    arrow = import_module("pyarrow")
    with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as batches:
        for batch in batches:
            yield batch.num_rows, batch.nbytes


_COUNTERS: Mapping[str, Callable[[Path], Iterator[tuple[int, int]]]] = {
    ".jsonl": _lines,
    ".json": _lines,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
"""How to count the rows of a file, by suffix."""

"""Validate on held-out data, during training or alone.

The first reward function scores n completions of each prompt (mean@n, pass@n, maj@n). `val/reward` is the weighted sum of all.
Examples are scored by their loss. Every step samples with the same seed. Benchmarks with their own harnesses are not supported.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import xxhash

from burnish.algorithms.evaluation import evaluation_stats
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manifest import ADAPTER_STATE
from burnish.checkpoint.steps import CommittedStep
from burnish.checkpoint.write_plan import MODEL, RESIDUAL, set_of
from burnish.config.document import dump_yaml
from burnish.config.schema import EvaluationConfig, RunConfig
from burnish.data.tasks import ItemSequence
from burnish.distributed.collectives import agree, gather_objects, reduce_stats, same_on_all_ranks
from burnish.distributed.device import device_name
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine
from burnish.errors import IncompatibleError, StoppedError
from burnish.method import Method
from burnish.methods.offline import OfflineMethod
from burnish.methods.parts.generators import make_collector
from burnish.methods.parts.judges import load_judge
from burnish.methods.parts.offline_training import Models
from burnish.methods.parts.rollouts import Collector, Judge, sampling
from burnish.models.heads import has_value_head
from burnish.records import Batch, Prompt
from burnish.records.rollout_table import RolloutTable
from burnish.records.seeds import derive_seed
from burnish.rewards.builtin import extract_answer
from burnish.rewards.overview import rollout_stats
from burnish.runs.download_inputs import local_inputs
from burnish.runs.frozen_engines import load_beside
from burnish.runs.models_of_runs import newest_model
from burnish.runs.rollout_transfer import arriving
from burnish.runs.run import Validation
from burnish.runs.setup import (
    Foundation,
    TextFoundation,
    lay_foundation,
    load_frozen,
    model_tokenizer,
    prompt_dataset,
    prove_start,
    reward_pool,
    validation_dataset,
)
from burnish.runs.signals import Stopper, StopRequested, catch_signals
from burnish.runs.trainer_state import require_same_adapter
from burnish.runs.verify_inputs import Intact
from burnish.tracking.progress import Progress
from burnish.tracking.rollouts import chosen, texts_of_tokens, write_rollouts
from burnish.tracking.rundir import TRAINER, RunDirectory, environment, write_atomically
from burnish.tracking.stats import Mean, Stats
from burnish.tracking.trackers import JsonlTracker

_LENGTHS = ("response_length/mean", "response_length/clip_ratio")

log = logging.getLogger("burnish")


def prompt_validation(
    foundation: TextFoundation,
    collector: Collector,
    dataset: ItemSequence[Prompt],
    before: Callable[[], None] = lambda: None,
) -> Validation:
    """Return a function that calls `before`, completes held-out prompts and scores the completions."""
    config = foundation.config
    collector = replace(collector, stragglers=None)
    prompts = [dataset[index] for index in _measured_rows(dataset, config.evaluation.prompts)]
    judged_by = next(iter(config.reward.part_names), None)
    seed = derive_seed(config.seed, "validation")
    how = sampling(config.rollout, config.evaluation, seed % 2**63, step=0)

    def validate() -> tuple[dict[str, float], RolloutTable]:
        before()
        with collector.offloaded():
            table = collector.collect(prompts, 0, config.evaluation.n, how)
        answers = _answers(table, collector.layout)
        return _by_source(table, answers, judged_by, config.evaluation), table

    return validate


def _measured_rows(dataset: Sized, wanted: int | None) -> list[int]:
    """Return evenly spaced rows, so that each file contributes."""
    count = len(dataset)
    wanted = min(wanted or count, count)
    return [place * count // wanted for place in range(wanted)]


Answers = Sequence[Sequence[Any]]
"""Digests of the answers in completions, by prompt; None for no answer."""


def _answers(table: RolloutTable, layout: Layout) -> Answers:
    """Return a digest of each answer; only None with one completion per prompt. Collective."""
    if len(table.owners) == len(table):
        return [[None] for _ in table.sizes]
    texts = (table.rollout(n).text for n in table.of_rank(layout.rank))
    answers = (extract_answer(text) for text in texts)
    mine = [a and xxhash.xxh3_128_digest(a.encode("utf-8", "surrogatepass")) for a in answers]
    shares = [iter(theirs) for theirs in gather_objects(mine, layout)]
    found = iter([next(shares[max(owner, 0)]) for owner in table.owners.tolist()])
    return [[next(found) for _ in range(size)] for size in table.sizes]


def _by_source(
    table: RolloutTable, answers: Answers, judged_by: str | None, how: EvaluationConfig
) -> dict[str, float]:
    sources: defaultdict[str, list[int]] = defaultdict(list)
    for number, source in enumerate(table.sources):
        sources[source].append(number)
    sources.pop("", None)
    by_name = {f"val/{name}": x for name, x in _numbers(table, answers, judged_by, how).items()}
    for source, theirs in sorted(sources.items()):
        some = table.take(theirs), [answers[i] for i in theirs]
        numbers = _numbers(*some, judged_by, how)
        by_name |= {f"val/{source}/{name}": x for name, x in numbers.items()}
    return by_name


def _numbers(
    table: RolloutTable, answers: Answers, judged_by: str | None, how: EvaluationConfig
) -> dict[str, float]:
    firsts = table.by_group(table.rows["branch"] == 0)
    answers = [[*compress(*each)] for each in zip(answers, firsts, strict=True)]
    table = table.without_branches()
    # If the first function fails or returns None (it does not apply), no other function's score replaces it. Without a
    # function the environment's whole reward counts.
    if judged_by is None:
        values = table.rewards
        there = table.is_scored
    else:
        values, there = table.part(judged_by)
    scored = table.by_group(there)
    scores = [[*compress(*each)] for each in zip(table.by_group(values), scored, strict=True)]
    answers = [[*compress(*each)] for each in zip(answers, scored, strict=True)]
    worth = evaluation_stats(scores, answers, how.n, how.solved).values_by_name()
    all_of_it = rollout_stats(table).values_by_name()
    parts = {
        name.replace("reward/", "reward_", 1): x
        for name, x in all_of_it.items()
        if name.startswith("reward/parts/")
    }
    return {
        **worth,
        "reward": all_of_it["reward/mean"],
        "dropped": all_of_it["reward/dropped"],
        **(parts if len(parts) > 1 else {}),
        **{name: all_of_it[name] for name in _LENGTHS},
        **{name: x for name, x in all_of_it.items() if name.startswith("environment/")},
    }


class HeldOut(NamedTuple):
    """Held-out examples."""

    items: ItemSequence[Any]
    rows: list[int]
    """Those that are measured."""
    subsets: list[str]
    """Of each, the subset that is measured by itself too; "" for none."""


def held_out_examples(method: OfflineMethod, foundation: Foundation, progress: Progress) -> HeldOut:
    """Read the held-out examples of a run. Collective."""
    config = foundation.config
    read = partial(method.dataset, foundation, progress=progress)
    dataset = validation_dataset(read, config.data)
    rows = _measured_rows(dataset, config.evaluation.prompts)
    return HeldOut(dataset, rows, method.subsets(dataset, rows))


def example_validation(
    method: OfflineMethod, models: Models, held_out: HeldOut, check: Callable[[], object]
) -> Validation:
    """Return a function that measures `val/...` of held-out examples, by default the mean loss per token.

    Every rank calls `check` between batches; it may raise.
    """
    foundation = models.foundation
    layout = models.policy.layout
    size = foundation.config.batch.examples
    subsets: defaultdict[str, list[int]] = defaultdict(list)
    for row, subset in zip(held_out.rows, held_out.subsets, strict=True):
        subsets[subset].append(row)

    def validate() -> tuple[dict[str, float], RolloutTable | None]:
        measured = Stats({})
        answers: list[tuple[int, int, float]] = []
        by_subset: dict[str, float] = {}
        for subset, own in sorted(subsets.items()):
            stats = Stats({})
            for start in range(0, len(own), size):
                check()
                here = own[start : start + size]
                batch = method.batch(held_out.items, here, foundation, layout)
                part, judged = method.judged(models, batch)
                stats = stats.merge(part)
                count = batch.num_sequences // len(here)
                answers += [(here[n // count], n % count, x) for n, x in judged.items()]
            stats = reduce_stats(stats, layout, foundation.device)
            measured = measured.merge(stats)
            if subset:
                by_subset |= stats.prefixed(f"val/{subset}/").values_by_name()
        values = {**measured.prefixed("val/").values_by_name(), **by_subset}
        return values, _judged_answers(held_out, answers, models)

    return validate


def _judged_answers(
    held_out: HeldOut, judged: Sequence[tuple[int, int, float]], models: Models
) -> RolloutTable | None:
    """Return held-out answers with the rewards of all ranks: row, side and reward. None if there are none. Collective."""
    shares = gather_objects(judged, models.policy.layout)
    rewards: defaultdict[int, list[float]] = defaultdict(list)
    for row, _, reward in sorted({*chain.from_iterable(shares)}):  # some ranks judge the same
        rewards[row].append(reward)
    if not rewards:
        return None
    from burnish.methods.parts.judged_answers import answers_as_rollouts

    subsets = dict(zip(held_out.rows, held_out.subsets, strict=True))
    tokenizer = models.foundation.tokenizer
    is_judged = has_value_head(models.foundation.hf_config)
    return answers_as_rollouts(held_out.items, rewards, subsets, tokenizer, is_judged=is_judged)


def negative_log_likelihood(engine: Engine, batch: Batch) -> Stats:
    """Return `loss`, this rank's part of the mean -log π per trained token. Collective."""
    stats = Stats({"loss": Mean(0.0, 0.0)})
    for output, micro in zip(engine.forward(batch), batch.microbatches, strict=True):
        # The log-probs of tokens outside the loss mask are 0.
        part = Mean(-output.logprobs.sum(), float(micro.loss_mask.sum()))
        stats = stats.merge(Stats({"loss": part}))
    return stats


class MethodOfExamples(Protocol):
    """Choose the method that measures held-out examples, for a reward model or a language model."""

    def __call__(self, *, judges: bool) -> OfflineMethod:
        """Return it."""


def evaluate(
    config: RunConfig,
    layout: Layout,
    device: torch.device,
    run_dir: Path | None,
    method: Method,
    of_examples: MethodOfExamples,
) -> dict[str, float]:
    """Validate a model, that of the newest step of `run_dir` if given. Collective.

    With reward functions, held-out data are prompts, else examples, which `of_examples` measures. Writes completions below the run's
    directory.
    """
    root = run_dir or config.directory
    step = None
    if run_dir is not None:
        model, step = newest_model(run_dir, config.model)
        config = config.model_copy(update={"model": model})
    config, local = local_inputs(config, device, layout, method=method)
    with catch_signals(layout) as stopper:
        try:
            progress = Progress(local.tracking.progress and layout.is_main)
            foundation: TextFoundation
            if local.rollout.engine == "openai":
                tokenizer = model_tokenizer(local.model, local.data.chat_template_name)
                foundation = TextFoundation(local, tokenizer, layout, device)
            else:
                foundation = _with_weights(
                    lay_foundation(
                        local,
                        layout,
                        device,
                        may_judge=not local.scores,
                        beside=method.frozen(local),
                    ),
                    step,
                    progress,
                )
            measured, table = _measure(foundation, stopper, progress, of_examples)
            if table is not None and local.tracking.rollouts_every:
                number = 0 if step is None else step.step
                _write_evaluation(root, dump_yaml(config), foundation, number, measured, table)
            return measured
        except StopRequested as request:
            raise StoppedError(
                f"{request}; nothing was written", signal_number=request.signal_number
            ) from None


def _with_weights(
    foundation: Foundation, step: CommittedStep | None, progress: Progress
) -> Foundation:
    layout = foundation.layout
    Intact(layout, progress).require(*foundation.places(fresh=step is None))
    if step is None:
        return foundation
    same_on_all_ranks(str(step.path), "the step to evaluate", layout)
    record = step.state.get(ADAPTER_STATE)
    if isinstance(record, Mapping) and record.get("task"):
        raise IncompatibleError(
            f"{step.path} holds a reward model as an adapter",
            have=f"an adapter for the task {record['task']}",
            want="a whole model",
            do="merge it with PEFT (AutoPeftModelForSequenceClassification, merge_and_unload), and evaluate that",
        )
    require_same_adapter(record, foundation.adapter, step.path)
    if layout.is_main:
        log.info("evaluating %s", _weights_of(step, foundation.config.engine.precision))
    return replace(foundation, source=CheckpointSource(step, layout))


def _weights_of(step: CommittedStep, precision: str) -> str:
    """Say which weights of a step are measured, where it holds two kinds."""
    if precision != "fp32" or RESIDUAL not in map(set_of, step.manifest.files):
        return f"{step.path}"
    return (
        f"{step.path} with its fp32 weights, as in training; its model/ has them in bf16, which may measure "
        f"otherwise: burnish eval {step.path}/{MODEL}"
    )


def _write_evaluation(
    root: Path,
    config: str,
    foundation: TextFoundation,
    step: int,
    measured: Mapping[str, float],
    table: RolloutTable,
) -> None:
    """Write `evaluations/N` below `root` as a run's directory. Collective."""
    layout = foundation.layout
    order = table.order
    rollouts = arriving(table, order, chosen(step, table), layout)
    settings = foundation.config
    texts = None
    if settings.rollout.engine != "openai":
        texts = partial(texts_of_tokens, decode=foundation.tokenizer.decode)
    with agree(layout), rollouts as incoming:
        try:
            if layout.is_main:
                directory = RunDirectory(_next_directory(root / "evaluations"))
                write_rollouts(directory.rollouts, step, table, None, texts, arriving=incoming)
                write_atomically(directory.config, config)
                with closing(JsonlTracker(directory.metrics)) as metrics:
                    metrics.log(step, measured)
                directory.write_status(step, "finished")
                facts = environment(device_name(foundation.device), layout.world)
                directory.write_environment({TRAINER: "eval", **facts})
                log.info("the completions are in %s", directory.rollouts)
        except OSError as error:  # another user's run directory, or a full disk
            log.warning("the completions are not saved: %s", error)


def _next_directory(parent: Path) -> Path:
    """Make the first free numbered directory, safe from races."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        number += 1
        with suppress(FileExistsError):
            (parent / str(number)).mkdir()
            return parent / str(number)


def _load(foundation: Foundation) -> Engine:
    engine = load_frozen(foundation)
    if foundation.adapter is None:
        prove_start(engine, foundation)
    return engine


def _measure(
    foundation: TextFoundation, stopper: Stopper, progress: Progress, of_examples: MethodOfExamples
) -> tuple[dict[str, float], RolloutTable | None]:
    config = foundation.config
    with progress.phase("evaluate"):
        if isinstance(foundation, Foundation) and not config.scores:
            method = of_examples(judges=has_value_head(foundation.hf_config))
            examples = held_out_examples(method, foundation, progress)
            models = Models(foundation, _load(foundation))
            return example_validation(method, models, examples, stopper.check_all)()
        with reward_pool(config.reward, config.rollout.environment) as pool:
            read = partial(prompt_dataset, foundation, pool=pool, progress=progress)
            held_out = validation_dataset(read, config.data)
            pool.require_answer(held_out[0], held_out.first_row)
            model: Engine | None = None
            judge: Judge | None = None
            if isinstance(foundation, Foundation):
                model = _load(foundation)
                judge = load_judge(foundation, load_beside(foundation, model))
            collector = make_collector(foundation, pool, stopper.check, progress, judge)
            with closing(collector.generator) as generator:
                if model is not None:
                    generator.load_weights(model.published(), version=0)
                measured = prompt_validation(foundation, collector, held_out)()
            with agree(foundation.layout):
                collector.failures.require_answer()
            return measured

"""Set up a run without weights, on the first rows of its data, in this process alone.

A dry run does not find errors in later rows, or errors that only several processes find. It skips unstreamed data, critics, reward models
and weight headers behind URLs and ids of the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from burnish.config.schema import RunConfig
from burnish.data.tasks import Mixture, PromptDataset, RowDataset
from burnish.distributed.device import pick_device
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, UsageError, together
from burnish.extend import GENERATORS
from burnish.files.hub import is_elsewhere
from burnish.method import Method
from burnish.rewards.pool import RewardPool
from burnish.runs.download_inputs import local_inputs
from burnish.runs.models_of_runs import newest_model
from burnish.runs.setup import (
    Foundation,
    TextFoundation,
    ends_of,
    lay_foundation,
    model_tokenizer,
    reward_pool,
    train_dataset,
)
from burnish.tracking.progress import Progress
from burnish.tracking.trackers import load_tracker

_ROWS = 512
"""Rows of each data set that are tokenized."""


def set_up(
    config: RunConfig, method: Method, run_dir: Path | None = None
) -> tuple[RunConfig, list[int], int]:
    """Set `method` up without weights.

    Return the configuration that a run would record, the tokens of its first rows, and the numbers that an adapter trains.

    Raises the errors that the run would raise, joined into one.
    """
    errors: list[BurnishError] = []
    lengths: list[int] = []
    adapted = 0
    if run_dir is not None:
        model, _ = newest_model(run_dir, config.model)
        config = config.model_copy(update={"model": model})
    device = pick_device(local_rank=0)
    config, local = local_inputs(config, device, method=method, only_small=True)
    with ExitStack() as stack:
        pool = None
        if method.generates and config.scores:
            with _collecting(errors):
                reward = local.reward.model_copy(update={"workers": 1})
                pool = stack.enter_context(reward_pool(reward, local.rollout.environment))
        trackers = config.tracking.trackers if method.trains else ()
        loads: list[Callable[[], object]] = [*method.dry_runs(config)]
        loads += [partial(load_tracker, each) for each in trackers]
        for load in loads:
            with _collecting(errors):
                load()
        with _collecting(errors):
            foundation: TextFoundation
            if not method.trains and local.rollout.engine == "openai":
                tokenizer = model_tokenizer(local.model, local.data.chat_template_name)
                foundation = TextFoundation(local, tokenizer, Layout(), torch.device("cpu"))
            else:
                foundation = laid = lay_foundation(
                    local,
                    given=config.model,
                    may_judge=not (method.trains or config.scores),
                    beside=method.frozen(local),
                )
                adapted = laid.adapted
                with _collecting(errors):
                    _require_generator(laid, device)
                loads = [*_reads(laid), *method.dry_runs_of_models(laid)]
                places = config.data.train
                is_here = local.data.train == places and not any(map(_is_far, places))
                loads += method.dry_runs_of_rows(laid) if is_here else ()
                for load in loads:
                    with _collecting(errors):
                        load()
            if pool is not None and pool.environments is not None:
                from burnish.data.bridge_proof import proven_bridge

                with _collecting(errors):
                    proven_bridge(
                        foundation.tokenizer,
                        local.data,
                        local.rollout,
                        ends_of(foundation),
                        pool.environments,
                    )
            names = ["train"] if method.trains else []
            names += ["validation"] if local.data.validation else []
            for name in names:
                with _collecting(errors):
                    dataset = _first_rows(foundation, name, method, pool)
                    first = dataset if name == names[0] else None
                    if name == "train" and isinstance(dataset, RowDataset):
                        lengths = dataset.lengths.tolist()
                    if pool is not None and isinstance(first, PromptDataset | Mixture):
                        pool.require_answer(first[0], first.first_row)
                        if pool.environments is not None:
                            from burnish.data.turn_bridge import require_messages

                            require_messages(first[0])
    if errors:
        raise together(errors, "the setup of this run")
    return config, lengths, adapted


def _is_far(entry: str) -> bool:
    return is_elsewhere(entry, "dataset")


def _reads(foundation: Foundation) -> Iterator[Callable[[], object]]:
    """Yield what reads the frozen models that lie on this machine."""
    from burnish.runs.frozen_engines import read_frozen

    for model in foundation.beside:
        if model.gives != "weights" and not is_elsewhere(model.path):
            yield partial(read_frozen, model, foundation)


def _require_generator(foundation: Foundation, device: torch.device) -> None:
    """Raise `UsageError` if `rollout.engine` cannot be a generator, and `IncompatibleError` if it would refuse the model here."""
    config = foundation.config
    if config.rollout.place != "servers":
        name = config.rollout.engine
        options = config.generator_options
        kind = GENERATORS.load(name, "rollout.engine", options)
        kind.require_supported(foundation.hf_config, device)


@contextmanager
def _collecting(errors: list[BurnishError]) -> Iterator[None]:
    try:
        yield
    except BurnishError as error:
        errors.append(error)


def _first_rows(
    foundation: TextFoundation, name: str, method: Method, pool: RewardPool | None
) -> Any:
    config = foundation.config
    setting = f"data.{name}"
    is_streamed = name == "train" and config.data.streaming > 0
    entries = config.data.train if config.data.held_out else getattr(config.data, name)
    paths = [path for path in entries if not is_elsewhere(path, "dataset")]
    if not paths and not is_streamed:
        return None
    progress = Progress(config.tracking.progress)
    read = partial(method.dataset, foundation, progress=progress, pool=pool)
    if is_streamed:
        return train_dataset(read, config.data)
    try:
        return read(paths, setting, first=_ROWS)
    except UsageError:  # perhaps only later rows can be used
        return read(paths, setting)

"""The Python API: the commands `sft`, `rl` and `eval` for a script or a notebook.

Keywords are further settings: `burnish.sft("sft.yaml", steps=10, optim={"lr": 1e-5})`. They may replace the file:
`burnish.rl(model="DIR", data="x.jsonl", reward=correct)`. Under torchrun every process makes the same call.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from burnish.checkpoint.steps import newest
from burnish.config.load import load_settings
from burnish.config.resume import RunIdentity
from burnish.config.schema import RunConfig
from burnish.distributed.environment import die_with_agent, place_of
from burnish.distributed.layout import Layout
from burnish.errors import MissingError, StoppedError, UsageError
from burnish.files.hub import HubPlace
from burnish.files.lease import LEASE, require_free
from burnish.files.safetensors import ADAPTER_CONFIG
from burnish.functions import name_of
from burnish.launch.failures import forget_failures, note_failure, refuse_failing_alike
from burnish.method import Method
from burnish.methods.table import METHODS, load_method
from burnish.runs.hub_revisions import at_newest_steps, beginning, hub_entries, pin
from burnish.runs.preflight import require_inputs
from burnish.runs.run_directory import (
    make_way,
    require_own_directory,
)
from burnish.runs.summary import summary
from burnish.tracking.logs import spans as latest_spans
from burnish.tracking.progress import Progress
from burnish.tracking.rundir import RunDirectory
from burnish.tracking.trackers import read_metrics

if TYPE_CHECKING:
    import torch


Config: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | RunConfig
"""A YAML file, the same settings as nested mappings, or a loaded configuration."""
Rewards: TypeAlias = Callable[..., Any] | str | Sequence[Any] | Mapping[str, Any] | None
"""One or several functions with TRL's or verl's signature, or the section `reward` as a mapping."""

_log = logging.getLogger("burnish")
_ONE_RUN = Lock()


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The result of a run. A notebook shows it with its curves."""

    directory: Path

    def __fspath__(self) -> str:
        return str(self.directory)

    def __repr__(self) -> str:
        from burnish.tracking.notebook import run_in_words

        return f"Result({run_in_words(self.directory, self.model)})"

    def _repr_html_(self) -> str:
        from burnish.tracking.notebook import html_of_run

        return html_of_run(self.directory, self.model)

    @property
    def model(self) -> Path | None:
        """The newest committed model; None if only on a mirror."""
        step = newest(RunDirectory(self.directory).checkpoints)
        return None if step is None else Path(step.path) / "model"

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One row per step, with its numbers by name."""
        return read_metrics(RunDirectory(self.directory).metrics)


def load_config(config: Config | None = None, **settings: Any) -> RunConfig:
    """Return the whole configuration, with `settings` in place of its own.

    Raises `UsageError` for settings that do not exist or do not fit, `MissingError` for a missing file.
    """
    return _loaded(config, settings)


def _loaded(
    config: Config | None, settings: Mapping[str, Any], own: Collection[str] = ()
) -> RunConfig:
    """Load settings, in which `data` may hold rows: a list, or an object of the `datasets` library."""
    if any(name.partition(".")[0] == "data" for name in settings):
        settings = _with_stored_rows(settings)
    if isinstance(config, Mapping) and "data" in config:
        config = _with_stored_rows(config)
    return load_settings(config, settings, own)


def _with_stored_rows(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    from burnish.data.in_memory import with_stored

    return with_stored(settings)


def sft(config: Config | None = None, **settings: Any) -> Result:
    """Fine-tune on examples. An interrupted run continues from its newest checkpoint."""
    from burnish.methods.sft import SFT

    return run(SFT.name, config, **settings)


def dpo(config: Config | None = None, **settings: Any) -> Result:
    """Learn from answers of which some were preferred. An interrupted run continues from its newest checkpoint.

    The loss and its settings are those of the section `method`: `method={"loss": {"kto": 1.0}, "beta": 0.2}`.
    """
    from burnish.methods.dpo import DPO

    return run(DPO.name, config, **settings)


def rm(config: Config | None = None, **settings: Any) -> Result:
    """Train a reward model on answers of which some were preferred. An interrupted run continues from its newest checkpoint."""
    from burnish.methods.reward_modeling import RewardModeling

    return run(RewardModeling.name, config, **settings)


def rl(config: Config | None = None, reward: Rewards = None, **settings: Any) -> Result:
    """Learn from a reward. An interrupted run continues from its newest checkpoint.

    `reward` is a Python function, its name such as "rewards.py:correct", or several, in place of `reward.functions`; a
    mapping sets the section `reward`.
    """
    from burnish.methods.rl import RL

    return run(RL.name, config, **_with_reward(settings, reward))


def run(method: str | type[Method], /, config: Config | None = None, **settings: Any) -> Result:
    """Train with a method: a built-in one's name, `file.py:Class`, or your own subclass of `burnish.Method`."""
    chosen = load_method(method if isinstance(method, str) else name_of(method))
    if not chosen.trains:
        raise UsageError(
            f"{chosen.name} trains nothing", do="call burnish.evaluate, which returns its numbers"
        )
    loaded = named_run(chosen, _loaded(config, settings, chosen.Settings.model_fields))
    with _freeing():
        run_method(chosen, loaded)
    return Result(loaded.directory.absolute())


def evaluate(
    config: Config | None = None, reward: Rewards = None, **settings: Any
) -> dict[str, float]:
    """Measure a model on held-out data and return the numbers by name.

    `config` may be a run, or a model: a directory or a hub's id.
    """
    from burnish.methods.evaluation import Evaluation

    run_dir = None
    if isinstance(config, str | os.PathLike):
        place = os.fspath(config)
        file, run_dir = config_at(place)
        config = file or {"model": {"path": place}}
    method = METHODS[Evaluation.name]
    loaded = method.named(_loaded(config, _with_reward(settings, reward)))
    with _freeing():
        return dict(run_method(method, loaded, run_dir))


@contextmanager
def _freeing() -> Iterator[None]:
    """Free the weights and the process group's descriptors of the block, which FSDP's modules hold in cycles.

    An error holds them too, as long as somebody holds it: the next block frees them.
    """
    gc.collect()
    yield
    gc.collect()


def config_at(place: str) -> tuple[RunConfig | Path | None, Path | None]:
    """Return the run's configuration or a file (None for a model), and the run's directory, if any."""
    from burnish.runs.models_of_runs import is_model

    if is_model(place):
        return None, None
    path = Path(place)
    if (path / ADAPTER_CONFIG).is_file():
        raise UsageError(
            f"{place} is an adapter, which needs its base model",
            do=f"give the base model, and set model.lora.path={place}",
        )
    if path.is_dir():
        from burnish.runs.run_places import placed_config

        return placed_config(path), path
    if path.exists():
        return path, None
    raise MissingError(
        f"there is no run, no model and no configuration file {place}",
        have=f"nothing at {path.absolute()}",
        want="a run's directory, a model's directory or id, or a YAML file",
        do="correct the path or the id",
    )


@contextmanager
def _one_run() -> Iterator[None]:
    """Refuse a second run in this process, such as one of another thread."""
    if not _ONE_RUN.acquire(blocking=False):
        problem = "this process has a run already"
        do = "wait until that run has ended"
        raise UsageError(problem, want="one run at a time", do=do)
    try:
        _refuse_process_group()
        _refuse_within_rewards()
        yield
    finally:
        _ONE_RUN.release()


def named_run(method: Method, config: RunConfig) -> RunConfig:
    """Return the configuration with the run's name: the chosen one, or a free one (`with_free_name`)."""
    named = method.named(config)
    if config.name is not None or not method.trains:
        return named
    from burnish.runs.run_places import with_free_name

    return with_free_name(RunIdentity(method.name, named), method)


@_one_run()
def run_method(
    method: Method, config: RunConfig, run_dir: Path | None = None
) -> Mapping[str, float]:
    """Check a configuration, then run it. Return the numbers of a measurement."""
    die_with_agent(os.environ)
    place = place_of(os.environ)
    layout = place.layout
    directory = RunDirectory(config.directory)
    if method.trains and config.distributed.min_processes is not None:
        from burnish.launch.elastic import fitted_engine, planner_of

        planner = partial(planner_of, config, method)
        engine = fitted_engine(planner, config.engine, layout)
        config = config.model_copy(update={"engine": engine})
    config, remarks = prepare(config, method, layout.world, run_dir)
    if layout.is_main and method.trains:
        remarks += _begin(directory, RunIdentity(method.name, config), place.attempt)
    if layout.is_main:
        text = summary(config, method, layout.world, run_dir, brief=True)
        title = f"{method.name}, run {config.run_name}" if method.trains else method.name
        _log.info("%s\n%s", title, text)
        for remark in remarks:
            _log.warning("%s", remark)
        _log.info("loading torch and transformers")
    with Progress(layout.is_main and config.tracking.progress).phase("loading", lines=False):
        from burnish.distributed.processes import launch

    def start(layout: Layout, device: torch.device) -> Mapping[str, float]:
        chosen = method.with_tokens(config)
        if device.type != "cpu" and method.trains and not config.batch.is_decided:
            from burnish.launch import accelerated, elastic

            plans = partial(elastic.planner_of, config, method)
            run = None if config.resume == "fresh" else directory
            place = (layout, device)
            chosen = accelerated.decided(partial(method.with_tokens, config), plans, run, *place)
        return method.run(chosen, layout, device, run_dir)

    # A run that this process begins opens a log. An error before that is not of the run.
    earlier = latest_spans()
    try:
        return launch(start, config.distributed, config.engine)
    except (Exception, KeyboardInterrupt) as error:
        if method.trains and not isinstance(error, StoppedError):
            if latest_spans() is not earlier:
                from burnish.runs.ending import record_failure

                record_failure(directory, config.mirror_url, layout, error)
            if layout.is_main and isinstance(error, Exception):
                note_failure(directory.logs, error)
        raise


def _begin(directory: RunDirectory, identity: RunIdentity, attempt: int) -> list[str]:
    """Make way for a start of a run in its directory. Return what there is to say of earlier ones."""
    if attempt:
        refuse_failing_alike(directory.logs)
        return []
    failure = None
    if directory.status.exists():
        from burnish.runs.ending import last_failure

        failure = last_failure(directory)
    require_free(directory.checkpoints / LEASE)
    make_way(directory, identity)
    forget_failures(directory.logs)
    return [failure] if failure else []


def prepare(
    config: RunConfig, method: Method, world: int, run_dir: Path | None = None
) -> tuple[RunConfig, list[str]]:
    """Check that a method can run on `world` processes, without torch.

    Return the configuration, with runs replaced by their newest steps and, if `world` is 1, ids by commits of the hub, and remarks.
    """
    method.check(config, world)
    remarks = list(method.notices(config))
    frozen = method.frozen
    values = at_newest_steps(config.model_dump(), config.directory, frozen).model_dump()
    entries = [(section[key], kind) for section, key, kind, _ in hub_entries(values, frozen)]
    if ids := [text for text, kind in dict.fromkeys(entries) if HubPlace.of(text, kind)]:
        _log.info("looking for %s on the Hugging Face Hub", ", ".join(ids))
    before = beginning(values, config.directory, config.mirror_url, frozen)
    is_open = values["optim"]["lr"] == "auto"
    pin(values, before, frozen, ask=False)
    config = method.with_defaults(RunConfig.model_validate(values))
    if is_open and method.trains and config.optim.lr != method.default_lr(config):
        _log.info("optim.lr stays at %g, with which the run began", config.optim.lr)
    values = config.model_dump()
    require_inputs(config, method, run_dir)
    pin(values, before, frozen, ask=place_of(os.environ).layout.world == 1)
    config = RunConfig.model_validate(values)
    if method.trains:
        if config.mirror_url is not None:
            from burnish.files.remote import Remote

            Remote(config.mirror_url).connect(writes=True)
        require_own_directory(RunDirectory(config.directory), RunIdentity(method.name, config))
    return config, remarks


def _with_reward(settings: Mapping[str, Any], reward: Rewards) -> Mapping[str, Any]:
    if reward is None:
        return settings
    if isinstance(reward, Mapping):
        return {**settings, "reward": reward}
    functions: Sequence[Any] = reward if isinstance(reward, list | tuple) else [reward]
    return {**settings, "reward": {"functions": [_named(each) for each in functions]}}


def _named(function: Any) -> Any:
    if isinstance(function, partial) and not function.args:
        return {"function": name_of(function.func), "kwargs": function.keywords}
    return name_of(function) if callable(function) else function


def _refuse_process_group() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        raise UsageError(
            "this process has a process group already",
            have="torch.distributed.init_process_group in the program",
            want="no process group: a run makes its own",
            do="call torch.distributed.destroy_process_group() before",
        )


def _refuse_within_rewards() -> None:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == "burnish.rewards.worker":
        raise UsageError(
            "a process that computes rewards cannot train or evaluate",
            have="a call of burnish in the reward, or at the top level of its script",
            want="a script that can be imported",
            do='put the call below `if __name__ == "__main__":`',
        )

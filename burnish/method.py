"""The seam of a method: what the command line, the Python API, the planner and a dry run ask of it.

`burnish.methods` has the built-in methods. This module loads no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from burnish.config.algorithm import FormulaConfig
from burnish.config.constraints import (
    generator_problems,
    missing_files,
    refuse,
    setting_problems,
    settings_among,
)
from burnish.config.schema import DataConfig, RunConfig
from burnish.config.section import Section
from burnish.errors import BurnishError, UsageError

if TYPE_CHECKING:
    import torch

    from burnish.config.frozen_models import FrozenModel
    from burnish.distributed.layout import Layout
    from burnish.plan.model import Workload
    from burnish.tracking.progress import Progress


class Method(ABC):
    """A way to train or to measure a model.

    `burnish NAME CONFIG` runs a built-in method, and `burnish run FILE.py:CLASS CONFIG` one of your own. A method is made without
    arguments and keeps no state: the configuration is passed to each call. Importing a built-in method's module loads no torch, so
    that a wrong setting is named at once.
    """

    name: ClassVar[str]
    """The command, as a run's directory records it."""
    title: ClassVar[str]
    """What it does, for model cards and plans: "supervised fine-tuning"."""
    help: ClassVar[str] = ""
    """One or two sentences for `--help`."""
    source: str = ""
    """FILE.py:CLASS of a method of your own; "" for a built-in one."""
    trains: ClassVar[bool] = True
    """Whether it writes a run, with steps that it resumes from."""
    generates: ClassVar[bool] = False
    """Whether it draws completions, and so reads `rollout` and `reward`."""
    Settings: ClassVar[type[Section]] = Section
    """The settings of its own, which stand under `method` in a configuration."""
    unread: ClassVar[Sequence[str]] = ()
    """Sections and settings that it does not read; a run that sets them says so."""
    card: ClassVar[Sequence[str]] = ()
    """Settings that the README.md of a trained model shows."""
    lr: ClassVar[float] = 1e-6
    """What `optim.lr: auto` is where a whole model is trained."""
    lora_lr: ClassVar[float] = 1e-5
    """What `optim.lr: auto` is where an adapter is trained."""

    @property
    def command(self) -> list[str]:
        """The words of the command line that run it."""
        return ["run", self.source] if self.source else [self.name]

    def settings(self, config: RunConfig) -> Any:
        """Return its own settings. Raises `UsageError` for unknown keys and wrong values."""
        from burnish.algorithms.own_settings import own_settings

        if "name" in config.method:
            raise UsageError(
                "the section method holds settings, and the command names the method",
                have=f"method.name: {config.method['name']}",
                want="settings of the method's class",
                do="remove method.name, and start burnish run FILE.py:CLASS",
            )
        if config.method and not self.Settings.model_fields:
            raise UsageError(
                f"burnish {' '.join(self.command)} has no settings of its own",
                have=", ".join(f"method.{name}" for name in config.method),
                want="no section method, or the method that declares these settings",
                do="remove them, or start burnish run FILE.py:CLASS",
            )
        named = FormulaConfig.model_construct(name=self.source or self.name, **config.method)
        return own_settings(named, self.Settings, "method")

    def named(self, config: RunConfig) -> RunConfig:
        """Return the configuration with the name of the run and all settings of the method's own."""
        settings = self.settings(config).model_dump()
        return config.model_copy(update={"name": self.run_name(config), "method": settings})

    def run_name(self, config: RunConfig) -> str:
        """Return the name of a run, by default the model's and this method's."""
        return f"{config.run_name}-{self.name}" if config.name is None else config.name

    def default_lr(self, config: RunConfig) -> float:
        """Return what `optim.lr: auto` is for a configuration: `lr` or `lora_lr`."""
        return self.lora_lr if config.model.adapter else self.lr

    def with_defaults(self, config: RunConfig) -> RunConfig:
        """Return the configuration with numbers for `optim.lr: auto` and `model.lora.alpha: auto`."""
        optim = config.optim
        model = config.model
        if self.trains and optim.lr == "auto":
            optim = optim.model_copy(update={"lr": self.default_lr(config)})
        if model.lora.rank:
            lora = model.lora.model_copy(update={"alpha": model.lora.scale_alpha})
            model = model.model_copy(update={"lora": lora})
        return config.model_copy(update={"optim": optim, "model": model})

    def longest(self, config: RunConfig) -> int:
        """Return the most tokens, by the settings, of sequences that share a micro-batch; 0 without a limit."""
        return config.longest_completed if self.generates else config.data.max_length or 0

    def with_tokens(self, config: RunConfig, tokens: int = 0) -> RunConfig:
        """Return the configuration with `batch.tokens_per_device: auto` decided: as `tokens`, or as many as sequences need if that is more."""
        if not config.batch.is_auto:
            return config
        needed = -(-self.longest(config) // config.engine.sequence_parallel)
        decided = f"auto:{max(config.batch.tokens, needed, tokens)}"
        batch = config.batch.model_copy(update={"tokens_per_device": decided})
        return config.model_copy(update={"batch": batch})

    # Before a run, without torch.

    def check(self, config: RunConfig, world: int | None = 1) -> None:
        """Raise `UsageError` with every problem on `world` processes (None: on any number)."""
        # All problems are collected before one error is raised: who corrects a file wants to know all of them at once.
        problems = [*setting_problems(config, world)]
        if self.generates and world is not None:
            problems += generator_problems(config, world)
        problems += self.problems(config)
        if self.trains:
            problems += self.size_problems(
                config, 1 if world is None else world // config.engine.sharing
            )
        reads_train = self.trains or config.data.held_out
        files = "data.train" if reads_train else "data.validation"
        brings_rows = self.generates and config.rollout.environment.target
        if not brings_rows:  # otherwise the environment is asked for rows
            problems += missing_files(config, files, "train" if self.trains else "evaluate")
        refuse(problems)
        self.settings(config)

    @abstractmethod
    def problems(self, config: RunConfig) -> Iterator[BurnishError]:
        """Yield why these settings do not fit this method."""

    def size_problems(self, config: RunConfig, shares: int) -> Iterator[BurnishError]:
        """Yield why a step cannot be divided into `shares`: processes, or groups that share a micro-batch."""
        yield from ()

    def notices(self, config: RunConfig) -> Iterator[str]:
        """Yield remarks on a valid configuration, one line each."""
        if ignored := settings_among(config, self.unread):
            yield f"set, and not used by burnish {self.name}: {ignored}"

    def facts(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """Yield rows for the summary of a run: the size of a step, the formula."""
        yield from ()

    def rows_per_step(self, config: RunConfig) -> int:
        """Return how many rows of `data.train` a step takes."""
        return config.batch.examples

    def stays_in_epoch(self, config: RunConfig) -> bool:
        """Return whether all rows of a step are of one epoch, whose last step may be smaller."""
        return config.steps is None

    def workload(self, config: RunConfig) -> Workload:
        """Return the sequences of a step, for the planner. Raises `UsageError` if the method does not say."""
        raise UsageError(
            f"the method {self.name} does not say how much work a step is",
            want=f"a method workload of {type(self).__name__}, which returns a burnish.plan.model.Workload",
            do="add it, or run without a plan",
        )

    def frozen(self, config: RunConfig) -> Iterator[FrozenModel]:
        """Yield the models that it reads beside the trained one and does not train.

        Each is pinned, copied to this machine, looked for, verified, planned, read by a dry run and named in summary and card.
        """
        yield from ()

    def functions(self, config: RunConfig) -> Sequence[str]:
        """Return the functions of one's own that its settings name. A run goes on only with the files that it began with."""
        return ()

    def dry_runs(self, config: RunConfig) -> Iterator[Callable[[], object]]:
        """Yield what a dry run loads besides model, data and rewards, such as functions that settings name."""
        yield from ()

    def dry_runs_of_models(self, foundation: Any) -> Iterator[Callable[[], object]]:
        """Yield what a dry run reads of further models, given the `Foundation` of the trained one."""
        yield from ()

    def dry_runs_of_rows(self, foundation: Any) -> Iterator[Callable[[], object]]:
        """Yield what a dry run looks for in all rows of `data.train`, which lie on this machine."""
        yield from ()

    # The run.

    def prompt_of(self, rows: Any, config: DataConfig) -> Any:
        """Return the first row's prompt, None where it has none of its own. Raises an error for rows that the method cannot read."""
        from burnish.data.columns import prompt_at, prompt_column

        return prompt_at(rows[0], prompt_column(config, rows))

    @abstractmethod
    def dataset(
        self,
        foundation: Any,
        paths: Sequence[str],
        setting: str,
        *,
        first: int | None = None,
        progress: Progress | None = None,
        pool: Any = None,
    ) -> Any:
        """Read the rows in `paths`, or their `first` ones, as prompts or examples. Errors name `setting`. Collective.

        `foundation` is a `burnish.runs.setup.Foundation`, and `pool` the `RewardPool` of a run with rewards.
        """

    @abstractmethod
    def run(
        self, config: RunConfig, layout: Layout, device: torch.device, run_dir: Path | None = None
    ) -> Mapping[str, float]:
        """Train or measure, and return the numbers of a measurement. Collective.

        `run_dir` is the run whose newest step is measured, if any.
        """

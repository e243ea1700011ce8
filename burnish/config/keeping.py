"""The settings of what a run leaves: its checkpoints and its numbers. They change nothing of what is learned."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from burnish.config.section import FunctionName, Section


class KeepBestConfig(Section):
    """Checkpoints that are kept for how good they are."""

    metric: str | None = None
    """A number of the validation, as it is logged: val/loss, val/mean@1, val/reward, ...; none are kept when not given."""
    mode: Literal["min", "max"] | None = None
    """Whether less or more of it is better; to be given with `metric`."""
    count: int = Field(1, ge=1)
    """How many to keep. Steps that were saved without a validation do not count."""


class CheckpointConfig(Section):
    """When to save, and what to keep: a step goes when none of the settings keeps it and it is not pinned."""

    save_every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end and when stopped."""
    keep_last: int = Field(2, ge=1)
    """Newest committed steps to keep."""
    keep_every: int = Field(0, ge=0)
    """Keep every step that this divides; 0: none."""
    keep_best: KeepBestConfig = Field(default_factory=KeepBestConfig)
    """Keep the best by a metric."""
    background: bool = False
    """Save while training goes on: it waits only until weights and optimizer state are copied to host memory, which each process needs once more for that. The last save of a run is waited for."""
    model_dtype: Literal["bf16", "fp32"] = "bf16"
    """Of what lies in `model/`. bf16: what is missing to the fp32 weights lies beside the optimizer state, so that a step is as large either way."""
    fresh_optimizer: bool = False
    """Resume a step that holds no optimizer state, and begin with a fresh one; otherwise such a step is refused."""
    reserve_gb: float = Field(0.1, ge=0)
    """Disk space that must stay free after a save, in GB."""
    mirror: str | None = None
    """URL below which the run's directory is copied, as URL/NAME, after every save and while training goes on; resuming looks there as well, and no step goes from the disk before it is there. Machines that share no disk need it: their parts of a step meet there. hdfs://, s3://, gs:// or file://."""
    mirror_keep_last: int = Field(0, ge=0)
    """Newest steps to keep on the mirror, besides those that keep_every, keep_best and pins keep there too; 0: all steps."""
    mirror_patience_seconds: float = Field(1800.0, ge=0)
    """How long the end of a run waits for its mirror."""


class TrackingConfig(Section):
    """Where the numbers go."""

    tensorboard: bool = True
    """Write event files under `tensorboard/`."""
    rollouts_every: int = Field(10, ge=0)
    """Steps between files of rollouts; 0: none. Otherwise the completions of every validation are written beside them."""
    trackers: list[FunctionName] = Field(default_factory=list)
    """Trackers of your own: classes with the methods of `burnish.Tracker`, file.py:Class or module:Class. Each is called with the run's directory."""
    report: bool = True
    """Write report.html at the end and at every checkpoint."""
    progress: bool = True
    """Show progress bars where the terminal can."""
    allocations: bool = False
    """Record which lines of the program an accelerator's memory was allocated for, to be found in the snapshot that is left when it runs out. About 2 µs an allocation, and some hundred MB of host memory."""

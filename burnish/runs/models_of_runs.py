"""The model in a run's newest step, and whether a place is a model or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burnish.checkpoint.steps import CommittedStep, small_files, step_number, verify_files
from burnish.checkpoint.tools.listing import newest_step
from burnish.config.schema import LoraConfig, ModelConfig, RunConfig
from burnish.files.hub import HubPlace
from burnish.tracking.rundir import CHECKPOINTS, LATEST, RunDirectory


def is_model(place: str) -> bool:
    """Return whether a place is a model to evaluate, not a run: a Hugging Face directory, a step, or an id of the hub."""
    path = Path(place).expanduser()
    path = path.parent if path.name == LATEST else path
    if path.suffix == ".gguf":
        return True
    if not path.is_dir():
        is_run = path.parent.is_dir() or path.parent == Path(RunConfig().output_dir)
        return HubPlace.of(place, "model") is not None and not is_run
    is_steps = path.name == CHECKPOINTS or step_number(path.name) is not None
    is_run = RunDirectory(path).config.is_file()
    return not is_run and (is_steps or (path / "config.json").is_file())


def newest_model(run_directory: Path, model: ModelConfig) -> tuple[ModelConfig, CommittedStep]:
    """Return the settings of the model in a run's newest committed step, and that step.

    An adapter keeps its base model. Raises `MissingError` without a step.
    """
    step = newest_step(RunDirectory(run_directory).checkpoints)
    for damage in verify_files(step, small_files(step)):
        raise damage
    own = str(step.path / "model")
    replaced: dict[str, Any] = {"tokenizer": own, "chat_template": None}
    if not model.adapter:
        replaced = {"path": own, "fresh": None, "tokenizer": None, "chat_template": None}
    elif model.lora.path:
        replaced["lora"] = LoraConfig(path=own, publish=model.lora.publish)
    return model.model_copy(update=replaced), step

"""Write a trained model's README.md from the configuration alone, so that an interrupted run writes the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from burnish.config.document import write_yaml
from burnish.config.schema import DataConfig, ModelConfig
from burnish.files.hub import HubPlace, Kind
from burnish.version import __version__

_SETTINGS: Mapping[str, Sequence[str]] = {
    "sft": ("batch.examples",),
    "rl": (
        *("algorithm.advantage", "algorithm.policy_loss", "algorithm.kl.coef"),
        *("rollout.n", "rollout.temperature", "rollout.max_response_length"),
        *("batch.prompts", "batch.minibatches", "batch.epochs"),
    ),
    "": ("optim.kind", "optim.lr", "optim.schedule", "optim.warmup_steps", "optim.weight_decay"),
    "adapter": ("model.lora.rank", "model.lora.alpha"),
}
_TRAINERS = {"sft": "supervised fine-tuning", "rl": "reinforcement learning"}


def model_card(
    trainer: str, model: ModelConfig, data: DataConfig, settings: Mapping[str, Any]
) -> str:
    """Return the card, with only the last part of local paths."""
    base = HubPlace.of(model.path, "model")
    sets = [place for entry in data.train if (place := HubPlace.of(entry, "dataset"))]
    facts = {
        "base_model": base and base.repo,
        "datasets": sorted({place.repo for place in sets if place.kind == "dataset"}),
        "library_name": "peft" if model.adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["burnish", trainer],
    }
    origin = _shown(model.path, "model") if model.path else "new, random weights"
    rows = [
        ("model", origin),
        ("data", ", ".join(_shown(entry, "dataset") for entry in data.train)),
        *_rows(trainer, settings),
        *(_rows("adapter", settings) if model.adapter else ()),
        *_rows("", settings),
    ]
    table = "".join(f"| {name} | {value} |\n" for name, value in rows)
    return (
        f"---\n{write_yaml({name: fact for name, fact in facts.items() if fact})}---\n\n"
        f"# {PurePath(base.repo).name if base else 'A model'} after {_TRAINERS[trainer]}\n\n"
        f"Trained with Burnish {__version__}.\n\n| | |\n|---|---|\n{table}"
    )


def _rows(kind: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _SETTINGS[kind]:
        value: Any = settings
        for part in key.split("."):
            value = value[part]
        yield f"`{key}`", PurePath(value).name if isinstance(value, str) else value


def _shown(entry: str, kind: Kind) -> str:
    place = HubPlace.of(entry, kind)
    return str(place) if place else PurePath(entry).name

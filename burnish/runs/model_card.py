"""Write a trained model's README.md from the configuration alone, so that an interrupted run writes the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from burnish.config.algorithm import FORMULAS
from burnish.config.document import write_yaml
from burnish.config.schema import RunConfig
from burnish.files.hub import HubPlace, Kind
from burnish.method import Method
from burnish.version import __version__

_ADAPTER = ("model.lora.rank", "model.lora.alpha")
_OPTIM = ("optim.kind", "optim.lr", "optim.schedule", "optim.warmup_steps", "optim.weight_decay")


def model_card(method: Method, config: RunConfig) -> str:
    """Return the card, with only the last part of local paths."""
    model = config.model
    data = config.data
    settings = config.model_dump()
    base = HubPlace.of(model.path, "model")
    sets = [place for entry in data.train if (place := HubPlace.of(entry, "dataset"))]
    facts = {
        "base_model": base and base.repo,
        "datasets": sorted({place.repo for place in sets if place.kind == "dataset"}),
        "library_name": "peft" if model.adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["burnish", method.name],
    }
    origin = _shown(model.path, "model") if model.path else "new, random weights"
    rows = [
        ("model", origin),
        ("data", ", ".join(_shown(entry, "dataset") for entry in data.train)),
        *((each.role, _shown(each.path, "model")) for each in method.frozen(config)),
        *_rows(method.card, settings),
        *(_rows(_ADAPTER, settings) if model.adapter else ()),
        *_rows(_OPTIM, settings),
    ]
    table = "".join(f"| {name} | {value} |\n" for name, value in rows)
    return (
        f"---\n{write_yaml({name: fact for name, fact in facts.items() if fact})}---\n\n"
        f"# {PurePath(base.repo).name if base else 'A model'} after {method.title}\n\n"
        f"Trained with Burnish {__version__}.\n\n| | |\n|---|---|\n{table}"
    )


def _rows(keys: Sequence[str], settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in keys:
        value: Any = settings
        for part in key.split("."):
            value = value[part]
        value = str(FORMULAS[key].model_validate(value)) if key in FORMULAS else value
        yield f"`{key}`", PurePath(value).name if isinstance(value, str) else value


def _shown(entry: str, kind: Kind) -> str:
    place = HubPlace.of(entry, kind)
    return str(place) if place else PurePath(entry).name

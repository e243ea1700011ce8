"""What goes into a step: the trained models by role, and the position of the run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.boxes.shards import Shard
from burnish.distributed.host_memory import Arena


@dataclass(frozen=True, slots=True, eq=False)
class ModelContents:
    """One trained model. Every rank gives its own shards; of the rest, rank 0's counts."""

    weights: Sequence[Shard]
    """This rank's pieces of the model, by canonical name."""
    training: Sequence[Shard]
    """This rank's pieces of the optimizer's slots, named `slot/weight`."""
    write_assets: Callable[[Path], None]
    """Writes what makes its directory a Hugging Face model's (config.json, tokenizer files) into the directory it is given."""
    whole: frozenset[str] = frozenset()
    """Names of fp32 weights that are never split, for their family keeps them in fp32 whatever the rest is in."""


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What goes into a step."""

    models: Mapping[str, ModelContents]
    """By role; `MAIN` is the run's own. The same roles on every rank."""
    state: Mapping[str, Any]
    """The position of the run, as plain JSON: what is needed to continue beside the tensors."""
    healthy: bool = True
    """False when losses or weights are not finite; one rank's False counts for all."""
    check_finite: bool = False
    """Look through the weights as well, and count the step as unhealthy where one is not finite."""
    split: bool = True
    """Store fp32 weights as a bf16 model and a residual. False: as an fp32 model."""
    arena: Arena | None = None
    """Host memory to put blocks together in; None: memory that is given back after the save."""

    @property
    def weights(self) -> list[Shard]:
        """The pieces of all models."""
        return [shard for model in self.models.values() for shard in model.weights]

    @property
    def training(self) -> list[Shard]:
        """The pieces of all models' slots."""
        return [shard for model in self.models.values() for shard in model.training]


@dataclass(frozen=True, slots=True)
class Assets:
    """The small files of a Hugging Face directory, in memory; a `ModelContents.write_assets`."""

    files: Mapping[str, bytes]
    """By path below the directory, with forward slashes."""

    @classmethod
    def written_by(cls, write_assets: Callable[[Path], None]) -> Assets:
        """What the function writes into a directory."""
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            write_assets(directory)
            paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
            files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
        return cls(files)

    def __call__(self, directory: Path) -> None:
        """Write them."""
        for name, data in self.files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

"""An installed package that extends Burnish: one class of each kind, which its entry points name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from burnish.boxes.shards import Publication, TensorSpec
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.files.backends import Backend
from burnish.methods.sft import SFT
from burnish.records import Completion, Request
from burnish.rollout.base import Generator, RunningRequest, Sampling, Watch
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.tracking.stats import Stats


def note(text: object) -> None:
    """Add a line to notes.txt."""
    with open("notes.txt", "a") as file:
        file.write(f"{text}\n")


class Prudent(SFT):
    """Fine-tuning that notes where its loss is made."""

    name = "prudent"
    title = "prudent fine-tuning"

    def loss(self, config: Any) -> Any:
        note("loss")
        return super().loss(config)


class NotingEngine(TorchEngine):
    """Inherits from a built-in engine."""

    def optim_step(self, lr: float) -> Stats:
        note("step")
        return super().optim_step(lr)


class GeneratorAround(Generator):
    """Holds a built-in generator."""

    def __init__(self, hf_config: Any, **options: Any) -> None:
        self.inner = BuiltinGenerator(hf_config, **options)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watch: Watch | None = None
    ) -> list[list[Completion]]:
        note("generate")
        return self.inner.generate(requests, sampling, watch)

    def load_weights(self, weights: Publication, version: int) -> None:
        self.inner.load_weights(weights, version)

    def so_far(self) -> list[RunningRequest]:
        return self.inner.so_far()

    def checksums(self) -> Iterator[tuple[TensorSpec, str]]:
        return self.inner.checksums()


class Lines:
    """A tracker that inherits from nothing."""

    def __init__(self, directory: Path) -> None:
        self.file = open(directory / "lines.jsonl", "a")  # noqa: SIM115 - closed by `close`

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.file.write(json.dumps([step, values.get("reward/mean")]) + "\n")

    def sync(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class Half:
    """No tracker: it cannot log."""

    def __init__(self, directory: Path) -> None:
        pass


class Shelf(Backend):
    """`shelf://NAME/PATH` is shelves/NAME/PATH."""

    def __init__(self, host: str) -> None:
        folder = Path("shelves", host).absolute()
        super().__init__(DirFileSystem(str(folder), LocalFileSystem(auto_mkdir=True)))

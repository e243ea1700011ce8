"""Generators that serve a run while it trains."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from support.runs.training_files import Command


class Servers:
    """Processes of `burnish serve` for one run."""

    def __init__(
        self, work: Path, config: str, count: int, environ: Mapping[str, str] | None = None
    ) -> None:
        argv = ["serve", config, "--port", "0"]
        self.commands = [Command(work, argv, environ) for _ in range(count)]

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exception: object) -> None:
        for command in self.commands:
            command.send(signal.SIGTERM)
            command.wait()

"""Generators that serve a run while it trains."""

from __future__ import annotations

import signal
from pathlib import Path

from training_files import Command


class Servers:
    """Processes of `burnish serve` for one run."""

    def __init__(self, work: Path, config: str, count: int) -> None:
        self.commands = [Command(work, ["serve", config, "--port", "0"]) for _ in range(count)]

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *exception: object) -> None:
        for command in self.commands:
            command.send(signal.SIGTERM)
            command.wait()

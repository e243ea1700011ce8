"""Every device that this machine has, one after the other, and this process alone on it. Failures show at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.ranks.devices import DEVICES

from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group


class AtOnce:
    """Shows a failure when it happens: a GPU is lent for minutes, and what is killed prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:  # a worker of xdist has none
            reporter.ensure_newline()
            reporter.write_line(f"{report.nodeid}\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(AtOnce(config))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return request.param


@pytest.fixture
def alone(device: torch.device) -> Iterator[Layout]:
    with process_group(device, 60.0) as layout:
        yield layout

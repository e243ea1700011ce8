"""`burnish doctor` finds what is missing on a machine, and which rank is slow."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from support.ranks.processes import run_ranks
from support.runs.training_files import burnish
from support.services.s3 import S3Server

from burnish.check import links, machine
from burnish.check.links import measure
from burnish.check.machine import Finding, look
from burnish.distributed.layout import Layout

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask no hub, which is far away or not there at all."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def by_part(*places: str) -> dict[str, Finding]:
    return {finding.part: finding for finding in look(places, Layout(), CPU)}


def test_a_disk_and_a_store_that_work(tmp_path: Path, s3_server: S3Server) -> None:
    store = s3_server.make_bucket("doctor")
    found = by_part(str(tmp_path / "new/runs"), store)
    assert found[f"disk {tmp_path / 'new/runs'}"].verdict != "error"
    assert found[f"store {store}"].verdict == "ok"
    assert not any(tmp_path.iterdir())
    assert torch.__version__.partition("+")[0] in found["versions"].found


def test_places_that_do_not_work(tmp_path: Path, s3_server: S3Server) -> None:
    missing = "s3://no-such-bucket-anywhere/runs"
    found = by_part("/proc/runs", missing)
    assert found["disk /proc/runs"].verdict == found[f"store {missing}"].verdict == "error"
    assert found["disk /proc/runs"].do


def test_cores_are_compared_with_the_device_that_the_rank_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one visible device for each task of Slurm, rank 3 uses number 0."""
    asked: list[torch.device] = []
    monkeypatch.setattr(machine, "_numa_node", asked.append)
    assert not [*look([], Layout(3, 4, 3, 4), torch.device("cuda", 0))]
    assert asked == [torch.device("cuda", 0)]


def test_devices_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.accelerator.is_available():
        pytest.skip("torch can use a device here")
    monkeypatch.setattr(machine, "_NODES", {"cuda": "/dev/null"})
    assert by_part()["devices"].verdict == "error"


def test_a_disk_that_reads_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: (tmp_path / "x").touch())
    monkeypatch.setattr(machine, "open", _forgetful, raising=False)
    assert by_part(str(tmp_path))[f"disk {tmp_path}"].verdict == "error"


def _forgetful(path: Path, mode: str, buffering: int) -> object:
    if mode == "rb":
        path.write_bytes(b"0" * path.stat().st_size)
    return open(path, mode, buffering=buffering)


def test_cores_of_the_kernels_lists() -> None:
    assert machine._cores("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert machine._cores("") == set()


def with_a_slow_rank(layout: Layout) -> list[Finding]:
    """Rank 2 computes slowly and is late at every exchange; its clock is wrong."""
    if layout.rank == 2:
        now = time.time
        links.measured_matmul_peak = lambda device, dtype: 1e9  # type: ignore[assignment]
        links.synchronize = lambda device: time.sleep(0.1)  # type: ignore[assignment]
        time.time = lambda: now() + 5.0
    else:
        links.measured_matmul_peak = lambda device, dtype: 1e10  # type: ignore[assignment]
    return measure(layout, CPU)


@pytest.mark.nightly
def test_a_slow_rank_is_named() -> None:
    found = run_ranks(with_a_slow_rank, 4)
    assert found[0] == found[3]
    parts = {finding.part: finding for finding in found[0]}
    for part in ("matrix products", "pairs"):
        assert parts[part].verdict == "warning"
        assert "rank 2 " in parts[part].found
    assert parts["clocks"].verdict == "warning"
    assert {"latency", "all-reduce", "all-gather", "reduce-scatter"} <= set(parts)


def test_the_command_says_all_in_json_and_ends_with_1(tmp_path: Path) -> None:
    environ = {"HF_HUB_OFFLINE": "1"}
    code, output = burnish(tmp_path, "doctor", "--json", ".", "/proc/x", environ=environ)
    found = json.JSONDecoder().raw_decode(output)[0]
    assert code == 1
    verdicts = {finding["part"]: finding["verdict"] for finding in found}
    assert verdicts["disk /proc/x"] == "error"
    assert {"versions", "disk .", "ports"} <= set(verdicts)


@pytest.mark.nightly
def test_the_command_measures_processes_that_it_starts(tmp_path: Path) -> None:
    code, output = burnish(tmp_path, "doctor", "--processes", "2", environ={"HF_HUB_OFFLINE": "1"})
    assert code == 0, output
    assert "all-reduce" in output

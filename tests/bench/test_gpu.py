"""The benchmark for accelerators in small shapes, where there is none: all that it would do there, and no figure that means anything."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import gpu

ROOT = Path(__file__).parents[2]
CASES = ("sft-0.6b-4k", "grpo", "generate", "offload", "megatron")


@pytest.mark.nightly
def test_every_case_runs_and_gives_its_lines(tmp_path: Path) -> None:
    arguments = [
        "--tiny",
        "--rounds",
        "1",
        "--profile",
        str(tmp_path),
        "--peers",
        "--cases",
        *CASES,
    ]
    command = [sys.executable, "-m", "bench.gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.strip("| ").split("|") for line in done.stdout.splitlines() if line[:1] == "|"]
    rows = [[cell.strip() for cell in cells] for cells in lines[2:]]
    assert lines[0][0].strip() == "case"
    assert [(row[0], row[1]) for row in rows] == [
        ("sft-0.6b-4k", "GB at the most, update"),
        ("sft-0.6b-4k", "tokens/s"),
        ("sft-0.6b-4k", "MFU"),
        ("grpo", "GB at the most, rollout"),
        ("grpo", "GB at the most, update"),
        ("grpo", "GB at the most, publish"),
        ("grpo", "generated tokens/s of a step"),
        ("grpo", "MFU"),
        ("generate", "tokens/s"),
        ("offload", "s per step"),
        ("offload", "GB at the most"),
        ("megatron-64", "tokens/s"),
        ("megatron-64", "MFU"),
    ]
    assert all(float(row[2]) > 0 for row in rows)
    for case in ("sft-0.6b-4k", "generate"):
        tables = [(tmp_path / f"{case}.{clock}.txt").read_text() for clock in ("device", "cpu")]
        assert all("aten::mm" in table for table in tables)
        assert (tmp_path / f"{case}.json.gz").stat().st_size > 0


def fails(case: str, settings: gpu.Settings) -> Iterator[gpu.Row]:
    yield gpu.Row(case, "tokens/s", 3.0)
    raise TypeError(case)


def runs(case: str, settings: gpu.Settings) -> Iterator[gpu.Row]:
    yield gpu.Row(case, "tokens/s", 4.0, "a peer", 2.0)


def test_a_case_that_fails_leaves_the_others_their_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "CASES", {"first": fails, "second": runs})
    monkeypatch.setattr(sys, "argv", ["bench.gpu"])
    assert gpu.main() == 1
    output = capsys.readouterr()
    assert "| first | tokens/s | 3 |" in output.out
    assert "| second | tokens/s | 4 | a peer | 2 | 2.00 |" in output.out
    assert "TypeError" in output.err


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("CUDA out of memory"), "out of memory"),
        (RuntimeError("no such function"), "failed"),
        (subprocess.CalledProcessError(1, "pip"), "not installed"),
    ],
)
def test_a_peer_that_has_no_figure_says_why(error: Exception, reason: str) -> None:
    def start() -> gpu.Peer:
        raise error

    assert gpu._fastest({"fp32": start}, {}, 1) == reason

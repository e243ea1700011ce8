"""One rank of `bench.checkpoint` on verl's side: its FSDP checkpoint manager, under verl's own Python.

The same model as ours, sharded by FSDP2 on the CPU, with AdamW. verl does not sync its files. They are
synced here, within the measured time, so that both sides give the same guarantee.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from bench.checkpoint_state import model_settings
from bench.peers import Turns


class Rank:
    """Saves and loads together with the other ranks, and returns the seconds."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        rank = settings["rank"]
        world = settings["world"]
        address = f"tcp://127.0.0.1:{settings['port']}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
        config = Qwen3Config(**model_settings(settings["gigabytes"]))
        config.architectures = ["Qwen3ForCausalLM"]
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (world,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.manager = FSDPCheckpointManager(self.model, self.optimizer)
        self.directory = Path(settings["directory"]) / "verl"
        self.step = 0

    def save(self) -> dict[str, float]:
        if dist.get_rank() == 0:
            shutil.rmtree(self.directory, ignore_errors=True)
        dist.barrier()
        self.step += 1
        start = time.perf_counter()
        self.manager.save_checkpoint(str(self.directory), global_step=self.step)
        for path in self.directory.glob(f"*_rank_{dist.get_rank()}.pt"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return {"seconds": time.perf_counter() - start}

    def load(self) -> dict[str, float]:
        dist.barrier()
        start = time.perf_counter()
        self.manager.load_checkpoint(str(self.directory))
        return {"seconds": time.perf_counter() - start}


def main() -> None:
    warnings.simplefilter("ignore")
    turns = Turns()
    rank = Rank(turns.next())
    turns.answer(ready=True)
    while True:
        turns.answer(**getattr(rank, turns.next()["do"])())


if __name__ == "__main__":
    main()

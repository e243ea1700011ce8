"""`burnish check`: start the layout's processes on this machine's CPU, or join those of torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence

from burnish.config.constraints import Command, check
from burnish.config.load import load_config
from burnish.distributed.environment import place_of
from burnish.errors import BurnishError, UsageError
from burnish.train.preflight import require_inputs

_HIDE_ACCELERATORS = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ZE_AFFINITY_MASK": "",
    "ASCEND_RT_VISIBLE_DEVICES": "",
}


def run_check(arguments: Namespace) -> None:
    """Check a configuration for SFT or, where it has rewards, for RL. Raises `BurnishError` where something differs."""
    if arguments.processes is not None and arguments.processes < 1:
        raise UsageError(
            "--processes is not a number of processes",
            have=arguments.processes,
            want="1 or more",
            do="set it to the processes of the layout, or leave it out",
        )
    config = load_config(arguments.config, arguments.overrides).config
    command: Command = "rl" if config.reward.given else "sft"
    world = arguments.processes or place_of(os.environ).layout.world
    check(config, command, world)
    require_inputs(config, command, None)
    if arguments.processes is None:
        from burnish.check import check as comparison

        comparison.run_check(config)
    else:
        _start(world, [arguments.config, *arguments.overrides])


def _start(processes: int, arguments: Sequence[str]) -> None:
    """The same command under torchrun, where every process has a CPU's share."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, "-m", *torchrun, "-m", "burnish", "check", *arguments]
    status = subprocess.run(command, env=os.environ | _HIDE_ACCELERATORS, check=False).returncode
    if status != 0:
        raise BurnishError(
            f"the check on {processes} processes did not pass",
            have=f"exit status {status}; the reason is above",
        )

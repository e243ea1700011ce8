"""`burnish check`: start the layout's processes on this machine's CPU, or join those of torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import Namespace

from burnish.config.constraints import Command, check
from burnish.config.load import load_config
from burnish.distributed.environment import place_of
from burnish.errors import BurnishError, UsageError
from burnish.train.pins import at_newest_steps
from burnish.train.preflight import require_inputs

_LAUNCHERS = re.compile(r"[EW]\d{4} .*torch/distributed/elastic")
_HIDE_ACCELERATORS = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ZE_AFFINITY_MASK": "",
    "ASCEND_RT_VISIBLE_DEVICES": "",
}


def run_check(given: Namespace) -> None:
    """Check a configuration. Raises `BurnishError` where something differs."""
    processes: int | None = given.processes
    if processes is not None and processes < 1:
        raise UsageError(
            "--processes is not a number of processes",
            have=processes,
            want="1 or more",
            do="set it to the processes of the layout, or leave it out",
        )
    config = load_config(given.config, given.overrides).config
    config = at_newest_steps(config.model_dump(), config.directory)
    command: Command = "rl" if config.reward.given else "sft"
    check(config, command, processes or place_of(os.environ).layout.world)
    require_inputs(config, command, None)
    if processes is None:
        from burnish.train.layout_check import check_layout

        check_layout(config)
        return
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    own = ["burnish", "check", *filter(None, [given.config]), *given.overrides]
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    with subprocess.Popen(
        [sys.executable, "-m", *torchrun, "-m", *own],
        env={"OMP_NUM_THREADS": threads} | os.environ | _HIDE_ACCELERATORS,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        for line in started.stderr or ():
            if _LAUNCHERS.match(line):
                break  # torchrun says once more what a rank said, with its own traceback
            sys.stderr.write(line)
        started.communicate()
    if started.returncode != 0:
        raise BurnishError(
            f"the check on {processes} processes did not pass",
            have=f"exit status {started.returncode}; the reason is above",
        )

"""`burnish check`: start the layout's processes on this machine's CPU, or join those of torchrun."""

from __future__ import annotations

import os
from argparse import Namespace

from burnish.config.load import read_config
from burnish.distributed.environment import place_of
from burnish.launch.local import LocalLauncher
from burnish.launch.supervisor import run_once
from burnish.methods.table import method_meant_by
from burnish.runs.hub_revisions import at_newest_steps
from burnish.runs.preflight import require_inputs

_HIDE_ACCELERATORS = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ZE_AFFINITY_MASK": "",
    "ASCEND_RT_VISIBLE_DEVICES": "",
}


def run_check(args: Namespace) -> None:
    """Compare the layout with one plain process. Raises `BurnishError` if something differs."""
    config = read_config(args.config, args.overrides)
    method = method_meant_by(config)
    config = method.named(config)
    config = at_newest_steps(config.model_dump(), config.directory, method.frozen)
    method.check(config, args.processes or place_of(os.environ).layout.world)
    require_inputs(config, method)
    if args.processes is None:
        from burnish.methods.layout_check import check_layout

        check_layout(config, method)
        return
    os.environ.update(_HIDE_ACCELERATORS)
    argv = ["check", *filter(None, [args.config]), *args.overrides]
    raise SystemExit(run_once(LocalLauncher(argv), args.processes))

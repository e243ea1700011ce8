"""`burnish serve`: generate completions for a run in other processes."""

from __future__ import annotations

from argparse import Namespace

from burnish.config.constraints import check
from burnish.config.load import load_config


def serve_run(given: Namespace) -> None:
    """Serve the run that a configuration names until ctrl-C."""
    config = load_config(given.config, given.overrides).config
    check(config, "rl", None)
    from burnish.distributed.device import pick_device
    from burnish.distributed.layout import Layout
    from burnish.train.localize import local_inputs
    from burnish.train.serve import serve
    from burnish.train.setup import lay_foundation

    device = pick_device(local_rank=0)
    _, local = local_inputs(config, device, trains=False)
    serve(lay_foundation(local, Layout(), device), given.host, given.port or 0)

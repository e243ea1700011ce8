"""`burnish sft`, `rl` and `eval`: call `burnish.api`."""

from __future__ import annotations

import json
import os
from argparse import Namespace

from burnish.api import config_at, named_run, run_method
from burnish.cli.output import print_text
from burnish.config.load import read_config
from burnish.distributed.environment import place_of
from burnish.errors import UsageError, table
from burnish.methods.table import load_method
from burnish.tracking.trackers import json_numbers


def run_given(args: Namespace) -> None:
    """Run a command with a configuration; with `dry_run` only print what it would do on `devices`."""
    method = load_method(args.method)
    file = args.config
    overrides = args.overrides
    run_dir = None
    if file and not method.trains:
        file, run_dir = config_at(file)
        overrides = overrides if file else [f"model.path={json.dumps(args.config)}", *overrides]
    config = read_config(file, overrides, method.Settings.model_fields)
    layout = place_of(os.environ).layout
    devices = getattr(args, "devices", None)
    as_json = getattr(args, "json", False)
    if devices is not None and not args.dry_run:
        raise UsageError("--devices is for --dry-run", do="leave it out, or add --dry-run")
    if as_json and args.dry_run:
        raise UsageError("a dry run measures nothing that --json could print", do="leave one out")
    if getattr(args, "processes", None) is not None or getattr(args, "ray", None) is not None:
        from burnish.cli.launch import supervise

        supervise(args, method)
        return
    config = named_run(method, config)
    if args.dry_run:
        from burnish.cli.dry_run import dry_run

        dry_run(args, method, config, run_dir)
        return
    numbers = run_method(method, config, run_dir)
    if numbers and layout.is_main:
        lines = table([(name, f"{value:.6g}") for name, value in sorted(numbers.items())])
        print_text(json.dumps(json_numbers(numbers)) if as_json else "\n".join(lines))

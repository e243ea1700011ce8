"""`burnish ckpt`: looking at checkpoints, checking and keeping them. The arguments and what becomes of them.

Every command says what it did in lines for people, or with `--json` in one object on standard
output; what it ends with is in that too, as `error`. Exit codes are those of `burnish.errors`; a check that finds damage ends with 3, one
that finds nothing but steps of another format with 4, and a comparison that finds a difference with 6, which no error has. torch is loaded only by commands that
look into tensors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from burnish.cli import ckpt_inspect, ckpt_keep, ckpt_verify
from burnish.cli.ckpt_outcome import Outcome, Say
from burnish.cli.ckpt_paths import one_step, place
from burnish.cli.output import print_text
from burnish.errors import BurnishError
from burnish.files.durable import naming_failures

Arguments = argparse.Namespace
DIFFERS = 6
"""Exit code of a comparison that finds a difference."""
_Place = Callable[[str], PurePath]

_WHERE = "RUN or RUN/checkpoints/step-N, here or as a URL"
_STEP = "RUN/checkpoints/step-N"
_FOREIGN = "a directory or URL of Hugging Face, torch's DCP (Megatron's torch_dist too), or verl's FSDP (global_step_N/actor)"
_EITHER = f"{_WHERE} or a Hugging Face directory"


def add_ckpt(commands: Any) -> None:
    """Add `ckpt` and its own commands to the subparsers of the command line."""
    ckpt = commands.add_parser("ckpt", description="Look at checkpoints, check and keep them.")
    added = ckpt.add_subparsers(
        dest="ckpt_command", metavar="ls|show|verify|diff|export|import|pin|unpin|gc", required=True
    )

    def add(
        name: str, description: str, metavar: str, help_: str, kind: type[Path] | _Place = place
    ) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = added.add_parser(
            name, description=description, help=description
        )
        parser.add_argument("path", type=kind, metavar=metavar, help=help_)
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        return parser

    add("ls", "List the steps of a run.", "RUN", "as runs/my-run or s3://bucket/my-run")
    show = add("show", "Say what is in a step.", "STEP", f"{_WHERE}; a run: its newest")
    show.add_argument("--tensors", action="store_true", help="list every tensor")
    verify = add(
        "verify", "Check steps against their hashes.", "STEP", f"{_WHERE}; a run: all steps"
    )
    depth = verify.add_mutually_exclusive_group()
    depth.add_argument("--full", action="store_true", help="read every byte (the default)")
    depth.add_argument(
        "--fast", action="store_true", help="names, sizes, small files and headers only"
    )
    diff = add(
        "diff",
        f"Compare two steps tensor by tensor; exit code {DIFFERS} where they differ.",
        "A",
        _EITHER,
    )
    diff.add_argument("other", type=place, metavar="B", help="the same")
    export = add(
        "export", "Write a plain Hugging Face directory.", "STEP", f"{_WHERE}; a run: its newest"
    )
    _add_export_options(export)
    imported = add("import", "Make a step of weights alone.", "SOURCE", _FOREIGN)
    _add_import_options(imported)
    pin = add("pin", "Keep a step whatever retention says.", "STEP", _STEP, Path)
    pin.add_argument("--reason", default="by hand", metavar="TEXT", help="shown by ls")
    add("unpin", "Let retention decide on a step again.", "STEP", _STEP, Path)
    gc = add(
        "gc", "Remove what the run's configuration does not keep.", "RUN", "as runs/my-run", Path
    )
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _add_export_options(export: argparse.ArgumentParser) -> None:
    export.add_argument("target", type=Path, metavar="DIRECTORY", help="is made")
    export.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    export.add_argument("--shard-gb", type=float, default=5.0, metavar="GB", help="size of a file")
    export.add_argument(
        "--role",
        default="",
        help="a further model of the run, as critic; the run's own if not given",
    )
    export.add_argument(
        "--merged",
        action="store_true",
        help="of a run with model.lora: the model with the adapter merged in; without, the adapter",
    )
    export.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="where the model that was trained on is, if it moved",
    )


def _add_import_options(imported: argparse.ArgumentParser) -> None:
    imported.add_argument("run", type=Path, metavar="RUN", help="gets the step in its checkpoints/")
    imported.add_argument(
        "--step", type=int, default=0, metavar="N", help="its number; 0 if not given"
    )
    imported.add_argument(
        "--assets",
        type=Path,
        metavar="DIR",
        help="config.json and tokenizer, where SOURCE has none",
    )
    imported.add_argument(
        "--unsafe-pickle",
        action="store_true",
        help="unpickle (DCP, Megatron, verl), in a process of its own",
    )
    imported.add_argument(
        "--without-sandbox",
        action="store_true",
        help="unpickle where the kernel has no Landlock as well",
    )


def run_ckpt(arguments: Arguments) -> int:
    """Run the command that was parsed; returns the exit code. Raises `BurnishError`s for all that is wrong."""

    def say(line: str) -> None:
        if not arguments.json:
            print_text(line)

    try:
        with naming_failures(f"{arguments.path} cannot be used"):
            outcome = _COMMANDS[arguments.ckpt_command](arguments, say)
    except BurnishError as error:
        outcome = Outcome({}, error)
    if arguments.json:
        print_text(json.dumps(outcome.as_json(), ensure_ascii=False, indent=1))
    if outcome.error is not None:
        raise outcome.error
    return 0 if outcome.report.get("same", True) else DIFFERS


def _diff(given: Arguments, say: Say) -> Outcome:
    from burnish.cli import ckpt_tensors

    return Outcome(ckpt_tensors.diff(given.path, given.other, say))


def _export(given: Arguments, say: Say) -> Outcome:
    from burnish.cli import ckpt_tensors

    step = one_step(given.path)
    model = ckpt_tensors.exportable(step, given.role, given.base, merged=given.merged)
    target, size = given.target, given.shard_gb
    return Outcome(ckpt_tensors.export_step(step, model, target, given.dtype, size, say))


def _import(given: Arguments, say: Say) -> Outcome:
    from burnish.cli import ckpt_tensors

    unpickling: ckpt_tensors.Unpickling = "never"
    if given.unsafe_pickle:
        unpickling = "anyhow" if given.without_sandbox else "sandboxed"
    step, assets = given.step, given.assets
    return Outcome(
        ckpt_tensors.import_weights(given.path, given.run, step, assets, say, unpickling=unpickling)
    )


_Command = Callable[[Arguments, Say], Outcome]

_COMMANDS: dict[str, _Command] = {
    "ls": lambda given, say: ckpt_inspect.list_steps(given.path, say),
    "show": lambda given, say: Outcome(
        ckpt_inspect.show_step(given.path, say, tensors=given.tensors)
    ),
    "verify": lambda given, say: ckpt_verify.verify_steps(given.path, say, fast=given.fast),
    "diff": _diff,
    "export": _export,
    "import": _import,
    "pin": lambda given, say: Outcome(ckpt_keep.pin(given.path, given.reason, say)),
    "unpin": lambda given, say: Outcome(ckpt_keep.unpin(given.path, say)),
    "gc": lambda given, say: ckpt_keep.collect_garbage(given.path, say, dry_run=given.dry_run),
}

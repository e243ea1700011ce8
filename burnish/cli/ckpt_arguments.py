"""The arguments of `burnish ckpt`. Left out: what becomes of them (`burnish.cli.ckpt`)."""

from __future__ import annotations

from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

DIFFERS = 6
"""Exit code of a comparison that finds a difference."""

_WHERE = "RUN or RUN/checkpoints/step-N, here or as a URL"
_STEP = "RUN/checkpoints/step-N"
_FOREIGN = "a directory or URL of Hugging Face, torch's DCP (Megatron's torch_dist too), or verl's FSDP (global_step_N/actor)"
_EITHER = f"{_WHERE} or a Hugging Face directory"


def _place(text: str) -> PurePath:
    from burnish.cli.ckpt_paths import place

    return place(text)


def add_ckpt(commands: _SubParsersAction[Any]) -> None:
    """Add `ckpt` and its own commands to the subparsers of the command line."""
    ckpt = commands.add_parser("ckpt", description="Look at checkpoints, check and keep them.")
    added = ckpt.add_subparsers(
        dest="ckpt_command", metavar="ls|show|verify|diff|export|import|pin|unpin|gc", required=True
    )

    def add(
        name: str,
        description: str,
        metavar: str,
        help_: str,
        kind: Callable[[str], PurePath] = _place,
    ) -> ArgumentParser:
        parser: ArgumentParser = added.add_parser(name, description=description, help=description)
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
    diff.add_argument("other", type=_place, metavar="B", help="the same")
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


def _add_export_options(export: ArgumentParser) -> None:
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


def _add_import_options(imported: ArgumentParser) -> None:
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

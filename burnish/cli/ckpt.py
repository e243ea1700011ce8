"""`burnish ckpt`: look at checkpoints, check and keep them.

Commands print lines for people, or with `--json` one object on standard output, with any `error` in it. Exit codes are those of
`burnish.errors`: 3 for damage, 4 if all steps have another format, 6 for a difference. Only commands that look into tensors load
torch.
"""

from __future__ import annotations

import json
from argparse import Namespace as Arguments
from collections.abc import Callable

from burnish.cli import ckpt_inspect, ckpt_keep, ckpt_verify
from burnish.cli.ckpt_arguments import DIFFERS
from burnish.cli.ckpt_outcome import Outcome, Say
from burnish.cli.ckpt_paths import one_step
from burnish.cli.output import print_text
from burnish.errors import BurnishError
from burnish.files.durable import naming_failures


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

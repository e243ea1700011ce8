"""The `burnish` command: its arguments, its exit codes, its log level.

Exit codes: 0 done, 2 usage or configuration, 3 corrupt checkpoint, 4 incompatible, 5 missing, 128 +
the signal's number for a run that was stopped, 6 a comparison that found a difference, 1 anything else. An error that Burnish raises on
purpose is printed without a traceback; any other keeps it.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence

from burnish import __version__
from burnish.cli import settings
from burnish.cli.check import add_check, run_check
from burnish.cli.ckpt import add_ckpt, run_ckpt
from burnish.cli.plan import DEVICES_HELP, add_plan, run_plan
from burnish.cli.run import run
from burnish.config.keys import known_keys
from burnish.config.unknown import answer_unknown
from burnish.errors import BurnishError, UsageError
from burnish.parallel.environment import place_of
from burnish.parallel.layout import Layout

HELP = """\
Burnish post-trains language models: supervised fine-tuning and reinforcement learning.

  burnish sft   CONFIG [key=value ...]            learn from examples
  burnish rl    CONFIG [key=value ...]            learn from a reward
  burnish eval  CONFIG|RUN_DIR [key=value ...]    measure on held-out data
  burnish plan  CONFIG [--devices 64xH100-80G]    memory and time, and which layouts fit
  burnish check CONFIG [--processes N]            compare a layout with one plain process
  burnish config show CONFIG [key=value ...]      every setting, and where its value came from
  burnish config explain [KEY]                    what a setting means
  burnish ckpt  ls|show|verify|diff|export|...    look at checkpoints, check and keep them

CONFIG is a YAML file; key=value overrides one setting, as optim.lr=1e-6 or rollout.n=8.
--dry-run checks settings and inputs and says what a run would do, without loading or writing anything:

  burnish rl CONFIG --dry-run

It looks at the columns of data, the headers of weights and the names in the source of reward functions.
It does not see what lies behind URLs, rows further on, whether weights are those of config.json, how
data are tokenized, and what reward functions do.

On several processes: torchrun --nproc-per-node 8 -m burnish rl CONFIG
--version prints the version. BURNISH_LOG_LEVEL (debug, info, warning, error) sets how much is logged;
without it rank 0 logs from info on, and other ranks errors only.
"""

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
"""Values of BURNISH_LOG_LEVEL, in either case."""

_TALKATIVE = ("torchao", "torch.utils._pytree")
# Loggers that warn of what nobody asked for: transformers imports torchao wherever it is installed.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        _set_up_logging()
        return _dispatch(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except BurnishError as error:
        if _layout().is_main or not error.told_elsewhere:
            print(f"{_rank()}error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{_rank()}interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception:  # noqa: BLE001 - the last frame: print the traceback and set the exit code
        traceback.print_exc()
        return 1


class _Parser(argparse.ArgumentParser):
    """The top-level parser, whose help is written for a newcomer."""

    def format_help(self) -> str:
        """One sentence, then the commands as they are typed."""
        return HELP


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="burnish")
    parser.add_argument("--version", action="version", version=f"burnish {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    for name, what, config in (
        ("sft", "Learn from examples.", "CONFIG"),
        ("rl", "Learn from a reward.", "CONFIG"),
        ("eval", "Measure on held-out data.", "CONFIG|RUN_DIR"),
    ):
        command = commands.add_parser(name, description=what)
        _add_configuration(command, config)
        command.add_argument(
            "--dry-run", action="store_true", help="check, say what would be done, and stop"
        )
        if name != "eval":
            command.add_argument("--devices", help=f"with --dry-run: on which, {DEVICES_HELP}")
        else:
            command.add_argument("--json", action="store_true", help="print one JSON object")
    config_commands = commands.add_parser(
        "config", description="Show or explain settings."
    ).add_subparsers(dest="config_command", metavar="show|explain", required=True)
    _add_configuration(
        config_commands.add_parser(
            "show", description="Print every setting and where its value came from."
        ),
        "CONFIG",
    )
    explain = config_commands.add_parser("explain", description="Say what a setting means.")
    explain.add_argument("key", nargs="?", metavar="KEY", help="as rollout.n; none: the sections")
    add_plan(commands)
    add_check(commands)
    add_ckpt(commands)
    return parser


def _add_configuration(parser: argparse.ArgumentParser, metavar: str) -> None:
    parser.add_argument("config", metavar=metavar, help="a YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings that replace the file's",
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse; overrides may stand before and after options."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if options := [each for each in rest if each.startswith("-")]:
        raise _unknown_option(options[0], arguments)
    if arguments.command is None:
        parser.print_help()
        raise SystemExit(UsageError.exit_code if argv else 0)
    if rest and not hasattr(arguments, "overrides"):
        raise UsageError(f"unexpected {rest[0]}", have=shlex.join(argv), do="leave it out")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _unknown_option(option: str, arguments: argparse.Namespace) -> UsageError:
    name, _, value = option.lstrip("-").partition("=")
    key = name.replace("-", "_")
    if not hasattr(arguments, "overrides"):
        do = f"see burnish {arguments.command or ''} --help".replace("  ", " ")
        return UsageError(f"there is no option {option}", have=option, do=do)
    if key in (keys := known_keys()):
        want, do = "--dry-run", f"settings have no dashes: write {key}={value or 'VALUE'}"
    else:
        want, do = answer_unknown(key, keys)
    return UsageError(f"there is no option {option}", have=option, want=want, do=do)


def _dispatch(arguments: argparse.Namespace) -> int:
    if arguments.command == "ckpt":
        return run_ckpt(arguments)
    if arguments.command in ("check", "plan"):
        (run_check if arguments.command == "check" else run_plan)(arguments)
        return 0
    if arguments.command != "config":
        run(
            arguments.command,
            arguments.config,
            arguments.overrides,
            dry_run=arguments.dry_run,
            devices=getattr(arguments, "devices", None),
            as_json=getattr(arguments, "json", False),
        )
    elif arguments.config_command == "show":
        settings.show(arguments.config, arguments.overrides)
    else:
        settings.explain(arguments.key)
    return 0


def _set_up_logging() -> None:
    # Ranks find the same things to say; one of them says it.
    level = os.environ.get("BURNISH_LOG_LEVEL", "info" if _layout().is_main else "error")
    if level.lower() not in LOG_LEVELS:
        raise UsageError(
            "BURNISH_LOG_LEVEL is not a log level",
            have=repr(level),
            want=f"one of {', '.join(LOG_LEVELS)}",
            do="set it to one of them, or unset it",
        )
    logging.basicConfig(
        format=f"%(asctime)s {_rank()}%(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("burnish").setLevel(level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)


def _rank() -> str:
    """Names this process in a message, where there are several."""
    layout = _layout()
    return f"rank {layout.rank}: " if layout.world > 1 else ""


def _layout() -> Layout:
    """This process's place; that of a lone process where the environment is wrong, which is said later."""
    try:
        return place_of(os.environ).layout
    except UsageError:
        return Layout()

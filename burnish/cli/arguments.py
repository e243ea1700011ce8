"""Arguments of the `burnish` command. Loads nothing that a command needs, so help and mistakes show at once."""

from __future__ import annotations

import shlex
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Sequence
from typing import Any

from burnish import __version__
from burnish.cli.ckpt_arguments import add_ckpt
from burnish.errors import UsageError

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

_DEVICES_HELP = "as 64xH100-80G or 2xCPU-24G; this machine's when not given"


class _Parser(ArgumentParser):
    """The top-level parser, whose help is written for a newcomer."""

    def format_help(self) -> str:
        """One sentence, then the commands as they are typed."""
        return HELP


def make_parser() -> ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(prog="burnish")
    parser.add_argument("--version", action="version", version=f"burnish {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=ArgumentParser)
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
            command.add_argument("--devices", help=f"with --dry-run: on which, {_DEVICES_HELP}")
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
    _add_plan(commands)
    _add_check(commands)
    add_ckpt(commands)
    return parser


def _add_configuration(parser: ArgumentParser, metavar: str) -> None:
    parser.add_argument("config", metavar=metavar, help="a YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings that replace the file's",
    )


def _add_plan(commands: _SubParsersAction[Any]) -> None:
    parser = commands.add_parser(
        "plan",
        description="Say what a run needs of memory and time, which layouts fit, and whether that of the settings as they are can run. "
        "Loads no weights. The exit code is 0 where any layout fits; --dry-run refuses settings that cannot run.",
    )
    _add_configuration(parser, "CONFIG")
    parser.add_argument("--devices", metavar="COUNTxNAME-MEMORY", help=_DEVICES_HELP)
    parser.add_argument(
        "--device-memory", type=float, metavar="GIB", help="memory of a device that is not known"
    )
    parser.add_argument(
        "--device-tflops", type=float, metavar="N", help="its bf16 speed in 10¹² operations/s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_check(commands: _SubParsersAction[Any]) -> None:
    parser = commands.add_parser(
        "check",
        description="Compare one step at a layout with one plain process, on a small model of the same family.",
    )
    _add_configuration(parser, "CONFIG")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="start so many on this machine's CPU; without it the command is one of torchrun's, or alone",
    )


def parse(argv: Sequence[str]) -> Namespace:
    """What was typed; overrides may stand before and after options. Raises `UsageError` for what is not known."""
    parser = make_parser()
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


def _unknown_option(option: str, arguments: Namespace) -> UsageError:
    from burnish.config.keys import known_keys
    from burnish.config.suggestions import suggestion

    name, _, value = option.lstrip("-").partition("=")
    key = name.replace("-", "_")
    if not hasattr(arguments, "overrides"):
        do = f"see burnish {arguments.command or ''} --help".replace("  ", " ")
        return UsageError(f"there is no option {option}", have=option, do=do)
    if key in known_keys():
        want, do = "--dry-run", f"settings have no dashes: write {key}={value or 'VALUE'}"
    else:
        want, do = suggestion(key)
    return UsageError(f"there is no option {option}", have=option, want=want, do=do)

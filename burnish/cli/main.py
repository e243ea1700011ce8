"""The `burnish` command: its arguments, exit codes and log level. Errors that Burnish raises print without a traceback."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from burnish.cli.arguments import parse
from burnish.distributed.environment import die_with_agent, place_of
from burnish.distributed.layout import Layout
from burnish.errors import BurnishError, UsageError
from burnish.redaction import presentable

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
"""Values of BURNISH_LOG_LEVEL, in either case."""

_RANK_PREFIX = re.compile(r"^rank \d+: ")
_PATH_ERRORS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EINVAL,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENXIO,
)
"""Errors of the operating system that are about a file that the user named."""
_LONGEST_NAME = 200
# Loggers with warnings that do not concern a run. Transformers imports torchao wherever it is installed.
_NOISY_LOGGERS = ("bitsandbytes", "torchao", "torch.utils._pytree")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    die_with_agent(os.environ)
    if isinstance(sys.stdout, io.TextIOWrapper):  # print \\uXXXX for other characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        _set_up_logging()
        function = function_of(arguments)
        if arguments.command == "ckpt":
            from burnish.cli.ckpt import run_ckpt

            return run_ckpt(arguments, function)
        function(arguments)
        return 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except BurnishError as error:
        if _must_print(error):
            print(presentable(f"{_rank()}error: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{_rank()}interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001 - the last frame: say what happened and set the exit code
        if isinstance(error, OSError) and error.errno in _PATH_ERRORS and error.filename:
            refused = BurnishError(
                f"{str(error.filename)[:_LONGEST_NAME]} cannot be used",
                have=error.strerror,
                do="give another place, or change who may use this one",
            )
            print(presentable(f"{_rank()}error: {refused}"), file=sys.stderr)
        else:
            print(presentable(traceback.format_exc()), end="", file=sys.stderr)
        return 1


def function_of(arguments: Namespace) -> Callable[..., Any]:
    """Import the function of a command that was parsed, and nothing of the other commands."""
    module, _, name = arguments.function.partition(":")
    return getattr(_module(module), name)


def _module(name: str) -> ModuleType:  # noqa: C901 - a table of import statements
    # Statements, unlike names in strings, are seen by type checkers, linters and editors.
    match name:
        case "chat":
            from burnish.cli import chat

            return chat
        case "check":
            from burnish.cli import check

            return check
        case "ckpt":
            from burnish.cli import ckpt

            return ckpt
        case "ckpt_push":
            from burnish.cli import ckpt_push

            return ckpt_push
        case "ckpt_tensors":
            from burnish.cli import ckpt_tensors

            return ckpt_tensors
        case "completion":
            from burnish.cli import completion

            return completion
        case "doctor":
            from burnish.cli import doctor

            return doctor
        case "init":
            from burnish.cli import init

            return init
        case "launch":
            from burnish.cli import launch

            return launch
        case "plan":
            from burnish.cli import plan

            return plan
        case "run":
            from burnish.cli import run

            return run
        case "runs":
            from burnish.cli import runs

            return runs
        case "settings":
            from burnish.cli import settings

            return settings
        case "translate":
            from burnish.cli import translate

            return translate
        case "view":
            from burnish.cli import view

            return view
    raise ValueError(f"there is no module of commands {name}")


def _set_up_logging() -> None:
    # All ranks would log the same lines. Only rank 0 logs more than errors.
    level = os.environ.get("BURNISH_LOG_LEVEL", "info" if _layout().is_main else "error")
    if level.lower() not in _LOG_LEVELS:
        raise UsageError(
            "BURNISH_LOG_LEVEL is not a log level",
            have=repr(level),
            want=f"one of {', '.join(_LOG_LEVELS)}",
            do="set it to one of them, or unset it",
        )
    form = logging.Formatter(f"%(asctime)s {_rank()}%(levelname)s %(message)s", "%H:%M:%S")
    handler = _StandardErrorHandler()
    handler.setFormatter(form)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("burnish").setLevel(level.upper())
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def _must_print(error: BurnishError) -> bool:
    """Return whether this rank prints the error: under torchrun, only the first rank that raises it does."""
    layout = _layout()
    if layout.world == 1:
        return True
    if error.printed_by_main and not layout.is_main:
        return False
    from burnish.distributed.meeting import is_first

    return is_first(_RANK_PREFIX.sub("", str(error)))


class _StandardErrorHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which may be a wrapper that keeps progress bars below."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(presentable(self.format(record)), file=sys.stderr, flush=True)
        except OSError:  # the terminal may be gone
            self.handleError(record)


def _rank() -> str:
    layout = _layout()
    return f"rank {layout.rank}: " if layout.world > 1 else ""


def _layout() -> Layout:
    """Return this process's layout, or a single process's if the environment is wrong, which is reported later."""
    try:
        return place_of(os.environ).layout
    except UsageError:
        return Layout()

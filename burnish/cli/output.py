"""Text on standard output, whose reader may stop early."""

from __future__ import annotations

import os
import sys

from burnish.redaction import printable


def print_text(text: str, end: str = "\n") -> None:
    """Print to standard output, without characters that control a terminal. Ends the command if its reader, such as `head`, has stopped."""
    try:
        print(printable(text), end=end, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None

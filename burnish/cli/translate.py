"""`burnish config translate`: print the arguments of another framework as a configuration."""

from __future__ import annotations

from argparse import Namespace

from burnish.cli.output import print_text
from burnish.translate.translation import translate_arguments


def run_translate(args: Namespace) -> None:
    """Print a configuration with the meaning of another framework's arguments."""
    print_text(translate_arguments(args.words).rstrip())

"""``python -m burnish``: the command line, for torchrun and for machines without the script."""

from burnish.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

"""`burnish init`: write a first configuration, and for RL a reward function that fits the data."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from string import Template

from burnish.cli.output import print_text
from burnish.config.document import one_line
from burnish.config.schema import DataConfig
from burnish.data.columns import answer_column, example_format, is_data, prompt_column
from burnish.errors import UsageError
from burnish.method import Method
from burnish.methods.table import METHODS

_MODEL = "Qwen/Qwen3-0.6B"
_DATA = "data.jsonl"
_STARTERS = Path(__file__).with_name("starters")


def init(args: Namespace) -> None:
    """Write the files into the working directory. Raises `UsageError` if one is there."""
    method = METHODS[args.kind]
    data = args.data or _DATA
    files = {} if args.data else {data: _sums("answer" if method.generates else "completion")}
    is_here = args.data and (os.path.exists(data) or is_data(data))
    column = _answers(method, data) if is_here else "answer"
    values = {"model": one_line(args.model or _MODEL), "data": one_line(data)}
    if method.generates:
        values["function"] = "correct" if column else "brief"
        first, _, below = (column or "").partition(".")
        right = f'each["{below}"]' if below else "each"
        reward = Template((_STARTERS / f"{values['function']}.txt").read_text())
        files["rewards.py"] = reward.substitute(column=first, right=right)
    text = Template((_STARTERS / f"{method.name}.yaml").read_text())
    files[f"{method.name}.yaml"] = text.substitute(values)
    if there := [name for name in files if os.path.lexists(name)]:
        raise UsageError(
            "init does not overwrite files",
            have=", ".join(there),
            want="a directory without them",
            do="remove or rename them, or work in another directory",
        )
    for name, content in files.items():
        Path(name).write_text(content)
    print_text(f"wrote {', '.join(files)}\n\n  burnish {method.name} {method.name}.yaml --dry-run")


def _answers(method: Method, data: str) -> str | None:
    from burnish.data.sources import load_rows

    rows = load_rows([data])
    usual = DataConfig()
    if not method.generates:
        example_format(usual, rows)
        return None
    prompt_column(usual, rows)
    return answer_column(usual, rows)


def _sums(column: str) -> str:
    pairs = [(first, second) for first in range(8) for second in range(8)]
    rows = [{"prompt": f"{a}+{b}=", column: str(a + b)} for a, b in pairs]
    return "".join(f"{json.dumps(row)}\n" for row in rows)

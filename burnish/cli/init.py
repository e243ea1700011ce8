"""`burnish init`: look at the data, and write a first configuration that fits them, for RL with a reward function."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from burnish.cli.output import print_text
from burnish.config.document import one_line
from burnish.config.schema import DataConfig
from burnish.data.columns import answer_column, is_data
from burnish.data.preference_columns import answer_columns
from burnish.errors import refusing
from burnish.method import Method
from burnish.methods.pairs import PairMethod
from burnish.methods.table import METHODS
from burnish.runs.preflight import require_model

_MODEL = "Qwen/Qwen3-0.6B"
_DATA = "data.jsonl"
_STARTERS = Path(__file__).with_name("starters")
_LOSS = "# loss: {sigmoid: 1.0}  # DPO's; also ipo, hinge, simpo, orpo, apo_zero, apo_down, robust, nll, or a sum of them"
_LOSS_OF_ANSWERS = "loss: {kto: 1.0}        # of single answers with labels"
_BATCH = 16
_STEPS = 10
"""Least steps in an epoch of the proposed batch, where the rows allow it."""
_SPLIT_ROWS = 100
"""Least rows of which some are held out."""
_MANY_ROWS = 2_000
"""From here on one pass over the data is proposed, else three."""


def init(args: Namespace) -> None:
    """Write the files into the working directory, or none if anything is refused.

    A file of the same name and other content stays; the new one gets a number.
    """
    with ExitStack() as undo:
        said = _write_all(args, undo)
        undo.pop_all()
    print_text("\n".join(said))


def _write_all(args: Namespace, undo: ExitStack) -> list[str]:
    """Write the files, and return what there is to say. `undo` removes them."""
    method = METHODS[args.kind]
    if args.model and Path(args.model).expanduser().exists():
        require_model(args.model, "MODEL")
    data = args.data or _DATA
    said: list[str] = []
    write = partial(_write, said=said, undo=undo)
    if not args.data:
        write(_DATA, _sums(method))
    is_here = os.path.exists(data) or is_data(data)
    rows = _rows(method, data) if is_here else None
    values = {"model": one_line(args.model or _MODEL), "data": one_line(data), **_proposed(rows)}
    values["lora"] = "  lora: {rank: 16}\n" if args.lora else ""
    values["lr"] = f"{method.lora_lr if args.lora else method.lr:.1e}".replace("e-0", "e-")
    if method.generates:
        column = answer_column(DataConfig(), rows) if rows is not None else "answer"
        name = "correct" if column else "brief"
        first, _, below = (column or "").partition(".")
        right = f'each["{below}"]' if below else "each"
        reward = Template((_STARTERS / f"{name}.txt").read_text())
        path = write("rewards.py", reward.substitute(column=first, right=right))
        values["function"] = f"{path}:{name}"
    values["loss"] = _LOSS
    if rows is not None and isinstance(method, PairMethod):
        is_single = answer_columns(DataConfig(), rows, method.Settings()) == ("completion",)
        values["loss"] = _LOSS_OF_ANSWERS if is_single else _LOSS
    starter = f"{method.name}.yaml"
    text = Template((_STARTERS / starter).read_text())
    looked = _look(method, text.substitute(values, lengths="")) if is_here else None
    values["lengths"] = "" if looked is None else looked.proposed
    path = write(starter, text.substitute(values))
    if looked is not None:
        said.append(f"{looked.text}\n")
    elif is_here:
        said.append("The model is not on this machine yet, so no row is tokenized.\n")
    said.append(
        f"burnish {method.name} {path} --dry-run    checks it, and estimates memory and time"
    )
    said.append(f"burnish {method.name} {path}")
    return said


def _write(wanted: str, content: str, said: list[str], undo: ExitStack) -> str:
    """Write a file, and return its name. A file with the same content stays."""
    path = Path(wanted)
    number = 2
    while os.path.lexists(path) and not _holds(path, content):
        path = Path(wanted).with_stem(f"{Path(wanted).stem}-{number}")
        number += 1
    if os.path.lexists(path):
        said.append(f"{path} is there already, and stays")
        return str(path)
    undo.callback(path.unlink, missing_ok=True)
    with refusing(f"{path} cannot be written", do="change to a directory that you may write to"):
        path.write_text(content)
    said.append(f"wrote {path}")
    return str(path)


def _holds(path: Path, content: str) -> bool:
    try:
        return path.read_text() == content
    except (OSError, UnicodeDecodeError):
        return False


def _rows(method: Method, data: str) -> Any:
    """Return the rows. Raises `MissingError` if the method cannot read them."""
    from burnish.data.sources import load_rows

    rows = load_rows([data])
    method.prompt_of(rows, DataConfig())
    return rows


def _proposed(rows: Any) -> dict[str, Any]:
    """Return a batch, passes over the data and a share to hold out, which suit the number of rows."""
    count = _MANY_ROWS if rows is None else len(rows)
    split = rows is not None and count >= _SPLIT_ROWS
    return {
        "batch": max(1, min(_BATCH, count // _STEPS)),
        "epochs": 1 if count >= _MANY_ROWS else 3,
        "validation": f"validation: {'5%' if count >= _MANY_ROWS else '10%'}"
        if split
        else "# validation: FILE",
        "evaluation": "evaluation: {every: 20}\n"
        if split
        else "# evaluation: {every: 20}  # steps between validations, with a file\n",
    }


def _look(method: Method, text: str) -> Any:
    """Tokenize rows as the run will. None if the model is not on this machine."""
    import yaml

    settings = yaml.safe_load(text)
    if not Path(settings["model"]["path"]).is_dir():
        return None
    from burnish.cli.first_look import first_look

    return first_look(method, settings)


def _sums(method: Method) -> str:
    """Return rows for a method: a prompt, and a completion to train on with an answer to compare with, or two answers."""
    pairs = [(first, second) for first in range(8) for second in range(8)]
    rows = [
        {"prompt": f"{a}+{b}=", "completion": str(a + b), "answer": str(a + b)} for a, b in pairs
    ]
    if isinstance(method, PairMethod):
        rows = [
            {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
            for a, b in pairs
        ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)

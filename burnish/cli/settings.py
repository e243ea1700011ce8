"""`burnish config check`, `show`, `explain` and `schema`, which need no run."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from burnish.cli.output import print_text
from burnish.config.algorithm import FORMULAS
from burnish.config.document import dump_yaml, one_line, recorded
from burnish.config.keys import Key, keys_of, known_keys
from burnish.config.load import DEFAULT, load_with_origins, read_config
from burnish.config.schema import RunConfig
from burnish.config.short_names import meant_by
from burnish.errors import UsageError
from burnish.methods.table import METHODS, method_meant_by
from burnish.runs.run_directory import recorded_config


def check_file(args: Namespace) -> None:
    """Check a configuration against the schema and the constraints between settings. Raises `UsageError` with all problems."""
    config = read_config(args.config, args.overrides)
    method = method_meant_by(config)
    method.check(config, world=None)
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"the settings fit together for burnish {method.name}"))
    for notice in method.notices(config):
        console.print(Text(f"note: {notice}"))


def show(args: Namespace) -> None:
    """Print the whole resolved configuration: YAML with each value's origin as a comment, or JSON."""
    file = args.config
    if file and os.path.isdir(file):
        file = recorded(recorded_config(Path(file)))
    config, origins = load_with_origins(file, args.overrides)
    if args.json:
        print_text(json.dumps(config.model_dump(mode="json")))
        return
    console = Console(highlight=False, soft_wrap=True)
    for line in dump_yaml(config, origins).splitlines():
        setting, mark, origin = line.rpartition("  # ")
        if not mark:
            console.print(Text(line))
        elif origin == DEFAULT:
            console.print(Text(line, style="dim"))
        else:
            console.print(Text.assemble((setting, "bold"), (mark + origin, "cyan")))


def explain(args: Namespace) -> None:
    """Print a setting's meaning, values and default; or the keys of a section; or all sections.

    A short name stands for all settings that end in it, or else for those of methods.
    """
    console = Console(highlight=False)
    keys = known_keys()
    name = args.key
    if name is None:
        console.print(Text((RunConfig.__doc__ or "").strip()), end="\n\n")
        _list(console, [key for key in keys.values() if "." not in key.name])
        return
    names = meant_by(name)
    own = [] if names else _of_methods(name.removeprefix("method."))
    for key, commands in own:
        _explain_one(console, key)
        console.print(Text(f"  of burnish {', '.join(commands)}\n"))
    if not names and not own:
        from burnish.config.suggestions import suggestion

        want, do = suggestion(name)
        raise UsageError(f"there is no setting {name}", have=name, want=want, do=do)
    for each in names:
        _explain_one(console, keys[each])


def _of_methods(name: str) -> list[tuple[Key, list[str]]]:
    """Return the settings of methods' own with this name, each with the methods that have it."""
    owners: list[tuple[Key, list[str]]] = []
    for method in METHODS.values():
        for key in keys_of(method.Settings, "method."):
            if key.name != f"method.{name}":
                continue
            equal = [commands for known, commands in owners if known == key]
            if equal:
                equal[0].append(method.name)
            else:
                owners.append((key, [method.name]))
    return owners


def _explain_one(console: Console, key: Key) -> None:
    console.print(Text(key.name, style="bold"))
    console.print(Text(key.doc), end="\n\n")
    parents = (key.name, f"{key.name}[]")
    below = [each for each in known_keys().values() if each.name.rpartition(".")[0] in parents]
    if not key.section or key.name in FORMULAS:
        _facts(console, key)
        console.print()
    if below:
        _list(console, below)


def schema(args: Namespace) -> None:
    """Print the JSON Schema of a configuration; one item may stand for a list."""
    print_text(json.dumps(_with_short_forms(RunConfig.model_json_schema()), indent=2))


def _with_short_forms(part: Any) -> Any:
    if isinstance(part, list):
        return [_with_short_forms(value) for value in part]
    if not isinstance(part, dict):
        return part
    expanded = {name: _with_short_forms(value) for name, value in part.items()}
    if expanded.get("type") != "array" or "prefixItems" in expanded:
        return expanded
    item = expanded["items"]
    item = {"anyOf": [item, {"type": "string"}]} if "$ref" in item else item
    texts = {name: expanded.pop(name) for name in ("description", "default") if name in expanded}
    return {**texts, "anyOf": [{**expanded, "items": item}, item]}


def _facts(console: Console, key: Key) -> None:
    table = Table.grid(padding=(0, 2))
    default = "none: it has to be given" if key.required else one_line(key.default)
    table.add_row("  values", Text(key.values))
    table.add_row("  default", Text(default))
    table.add_row("  on resume", "may change" if key.may_change else "has to stay as it is")
    if "[" not in key.name:
        table.add_row("  set it", Text(f"{key.name}=VALUE on the command line"))
        table.add_row("", Text("or in the file"))
        *sections, last = key.name.split(".")
        for depth, section in enumerate(sections):
            table.add_row("", Text("  " * (depth + 1) + f"{section}:"))
        table.add_row("", Text("  " * (len(sections) + 1) + f"{last}: VALUE"))
    console.print(table)


def _list(console: Console, keys: Sequence[Key]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("key", style="bold", no_wrap=True)
    table.add_column("meaning")
    for key in keys:
        lines = [key.doc]
        lines += [key.values] if key.values.startswith("one of ") else []
        lines += [] if key.default in (None, [], {}) else [f"default: {one_line(key.default)}"]
        table.add_row(Text(key.name), Text("\n".join(lines)))
    console.print(table)

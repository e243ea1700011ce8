"""Write docs/reference/settings.md and docs/reference/cli.md, from the schema and the argument parser.

`make docs` calls this before it builds the site, so these pages cannot differ from the code.
"""

from __future__ import annotations

from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path

from burnish.cli.arguments import make_parser
from burnish.config.document import write_yaml
from burnish.config.keys import Key, known_keys

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def settings_page() -> str:
    """Return the page of settings: one table per section, in the schema's order."""
    sections: dict[str, list[Key]] = {"": []}
    docs: dict[str, str] = {}
    for key in known_keys().values():
        if key.section:
            sections[key.name] = []
            docs[key.name] = key.doc
        else:
            parent = key.name.rpartition(".")[0].removesuffix("[]")
            sections.setdefault(parent, []).append(key)
    lines = [
        "# Settings",
        "",
        "Every setting, its values and its default. `burnish config explain KEY` prints the same.",
        "On the command line write `key=value`, for example `optim.lr=1e-6`.",
        "One value may stand for a list of one (`data.train=x.jsonl`), and for a mapping with its main key alone (`reward.functions=numeric`).",
        "A setting marked ↻ may change when a run is resumed. The others decide what a run computes, and have to stay.",
    ]
    for name, keys in sections.items():
        lines += ["", f"## {f'`{name}`' if name else 'The run'}", "", docs.get(name, "")]
        if keys:
            lines += ["", "| setting | values | default | meaning |", "|---|---|---|---|"]
            lines += [_row(key) for key in keys]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    default = "required" if key.required else f"`{write_yaml(key.default).split(chr(10))[0]}`"
    name = f"`{key.name}`{' ↻' if key.may_change else ''}"
    cells = [name, key.values, default, key.doc]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def cli_page() -> str:
    """Return the page of commands: the help of each, as the command prints it."""
    lines = ["# Command line", "", "What `--help` prints for each command."]
    for parser in _parsers(make_parser()):
        lines += ["", f"## `{parser.prog}`", "", "```text", parser.format_help().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _parsers(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


if __name__ == "__main__":
    (REFERENCE / "settings.md").write_text(settings_page())
    (REFERENCE / "cli.md").write_text(cli_page())

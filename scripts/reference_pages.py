"""Write docs/reference/settings.md and docs/reference/cli.md, from the schema and the argument parser, and a table of models.md.

`make docs` calls this before it builds the site, so these pages cannot differ from the code.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoConfig

from burnish.cli.arguments import make_parser
from burnish.config.document import write_yaml
from burnish.config.keys import Key, known_keys
from burnish.families import FAMILIES

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


def megatron_table() -> str:
    """Return the table of the model types that the Megatron engine computes, by what `families.py` says of them.

    A nightly test trains each of them (tests/engines/megatron/test_trained_families.py).
    """
    kinds: dict[str, list[str]] = {}
    for kind, family in FAMILIES.items():
        if family.on_megatron:
            kinds.setdefault("; ".join(_differences(kind)), []).append(kind)
    shortest_first = sorted(kinds, key=lambda what: (bool(what), what.count(";"), what))
    rows = [
        f"| {what or 'nothing'} | {', '.join(f'`{kind}`' for kind in sorted(kinds[what]))} |"
        for what in shortest_first
    ]
    return "\n".join(["| what differs from Llama | model types |", "|---|---|", *rows])


def _differences(kind: str) -> Iterator[str]:
    family = FAMILIES[kind]
    before, behind, *_ = family.block_norms
    is_latent = "q_a_layernorm" in family.query_norm_names
    gate, up, _ = family.projections
    scores = "sigmoids" if family.scores_by_sigmoid else "softmax"
    choice = f"{scores} and a bias" if family.router_bias else scores
    words = {
        "norms before and behind": before and behind,
        "norms behind attention and MLP": behind and not before,
        "norms times 1 + weight": family.norm_offset,
        "norms of queries and keys": family.query_norms != "none" and not is_latent,
        "bounds of scores": family.caps_scores,
        "neighbouring dims rotated": family.rotates_neighbours,
        "rotated in windows alone": family.rotates_in_windows,
        "matrices in one tensor": gate == up or "{part}" not in family.qkv_name,
        "latent attention": is_latent,
        "Gated DeltaNet and gates of attention": hasattr(
            AutoConfig.for_model(kind), "linear_num_key_heads"
        ),
        "sinks and biases": family.stacks_experts,
        f"experts by {choice}": family.has_router,
        "shared experts": family.shared_expert,
    }
    yield from (word for word, is_so in words.items() if is_so)


def models_page(page: str) -> str:
    """Return the page of models with today's table."""
    table = re.compile(r"^\| what differs from Llama(?:.*\n)(?:^\|.*\n)+", re.MULTILINE)
    return table.sub(lambda _: megatron_table() + "\n", page)


def _parsers(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


if __name__ == "__main__":
    (REFERENCE / "settings.md").write_text(settings_page())
    (REFERENCE / "cli.md").write_text(cli_page())
    models = REFERENCE / "models.md"
    models.write_text(models_page(models.read_text()))

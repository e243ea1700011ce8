"""`burnish completion`: let a shell complete commands, options and settings."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Iterator

from burnish.cli.arguments import make_parser
from burnish.cli.output import print_text
from burnish.config.algorithm import FORMULAS
from burnish.config.keys import known_keys

_BASH = """\
_burnish() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} typed words
    typed="${{COMP_WORDS[*]:1:COMP_CWORD-1}}"
    case "$typed " in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
}}
complete -o default -F _burnish burnish"""


def completion(args: Namespace) -> None:
    """Print the completion script that a shell evaluates at its start."""
    commands = dict(_commands(make_parser(), ""))
    if args.shell == "fish":
        lines = ["complete -c burnish -f -n __fish_use_subcommand -a '{}'".format(commands.pop(""))]
        for name, words in commands.items():
            seen = " ; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
            lines.append(f"complete -c burnish -n '{seen}' -a '{words}'")
        print_text("\n".join(lines))
        return
    longest_first = sorted(commands.items(), key=lambda item: -len(item[0]))
    cases = [
        f'        "{name}{name and " "}"*) words="{words}" ;;' for name, words in longest_first
    ]
    zsh = "autoload -U +X bashcompinit && bashcompinit\n" if args.shell == "zsh" else ""
    print_text(zsh + _BASH.format(cases="\n".join(cases)))


def _commands(parser: ArgumentParser, name: str) -> Iterator[tuple[str, str]]:
    options = [word for action in parser._actions for word in action.option_strings]
    words = [word for word in options if word.startswith("--")]
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            words += action.choices
            for each, child in action.choices.items():
                yield from _commands(child, f"{name} {each}".strip())
        elif action.dest == "overrides":
            words += [
                f"{key.name}="
                for key in known_keys().values()
                if (not key.section or key.name in FORMULAS) and "[" not in key.name
            ]
        elif action.choices:
            words += action.choices
    yield name, " ".join(words)

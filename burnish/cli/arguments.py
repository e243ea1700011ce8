"""Arguments of the `burnish` command. Loads nothing that a command needs, so help and mistakes show at once."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

from burnish import __version__
from burnish.errors import UsageError, together
from burnish.functions import did_you_mean

HELP = """\
Burnish post-trains language models: supervised fine-tuning and reinforcement learning.

  burnish init  sft|rl [MODEL] [DATA]             write a configuration to begin with
  burnish sft   [CONFIG] [key=value ...]          learn from examples
  burnish rl    [CONFIG] [key=value ...]          learn from a reward
  burnish submit sft|rl [CONFIG] [key=value ...]  the same as a job of a Ray cluster
  burnish eval  RUN|MODEL|CONFIG [key=value ...]  measure on held-out data
  burnish chat  MODEL|RUN [key=value ...]         ask a model in the terminal
  burnish runs  [DIR] | compare A B               list runs, or show two beside each other
  burnish view  [DIR]                             look at runs and rollouts in a browser
  burnish serve [CONFIG] [key=value ...]          generate completions for a run elsewhere
  burnish plan  [CONFIG] [--devices 64xH100-80G]  memory and time, and which layouts fit
  burnish check [CONFIG] [--processes N]          compare a layout with one plain process
  burnish doctor [PLACE ...]                      what this machine has and lacks for training
  burnish config check [CONFIG] [key=value ...]   whether settings fit together, at once
  burnish config show [CONFIG] [key=value ...]    every setting, and where its value came from
  burnish config explain [KEY]                    what a setting means
  burnish config translate FILE|ARGUMENTS         verl's or TRL's arguments as a configuration
  burnish ckpt  ls|show|verify|diff|export|...    look at checkpoints, check and keep them

CONFIG is a YAML file; key=value sets one setting, as optim.lr=1e-6 or rollout.n=8. Either is enough:

  burnish rl model.path=DIR data.train=x.jsonl reward.functions=rewards.py:correct

--dry-run does the run's setup without weights and says what the run would do.
It reads the tokenizer and the headers of weights, tokenizes the first rows of the data, calls the reward
functions once and plans memory. It does not see later rows, and only small files that are elsewhere.

On several processes: burnish rl CONFIG --processes 8, or on a Ray cluster: burnish rl CONFIG --ray auto
or torchrun --nproc-per-node 8 -m burnish rl CONFIG
--version prints the version; eval "$(burnish completion bash)" completes commands, also in zsh or fish.
BURNISH_LOG_LEVEL (debug, info, warning, error) sets how much is logged; without it rank 0 logs from info
on, and other ranks errors only.
"""
_MOST_OPTIONS = 5
"""Unknown options that are told of."""
DIFFERS = 6
"""Exit code of a comparison that finds a difference."""

_COMMANDS = {
    "init": (
        "init:init",
        "sft|rl MODEL DATA",
        "Write a configuration into the working directory, for RL also a reward function, without DATA also some rows.",
    ),
    "sft": (
        "run:run",
        "CONFIG key=value --dry-run --devices --processes --ray",
        "Learn from examples.",
    ),
    "rl": (
        "run:run",
        "CONFIG key=value --dry-run --devices --processes --ray",
        "Learn from a reward.",
    ),
    "submit": (
        "run:submit",
        "sft|rl CONFIG key=value --address --processes",
        "Submit a run to a Ray cluster as a job, and follow its output. The cluster has to see this directory.",
    ),
    "eval": (
        "run:run",
        "CONFIG|RUN_DIR|MODEL key=value --dry-run --json",
        "Measure on held-out data: a configuration's model, the newest of a run, or a model by itself.",
    ),
    "chat": (
        "chat:chat",
        "MODEL|RUN key=value",
        "Ask a model in the terminal; /reset begins a new conversation. Answers each line of standard input.",
    ),
    "runs": (
        "runs:runs",
        "RUNS --json",
        "List the runs in a directory, or with compare A B show the settings and curves of two beside each other.",
    ),
    "view": (
        "view:view",
        "RUNS_DIR --port --host --no-open",
        "Serve a page that shows runs and rollouts, also while they grow. It changes no run.",
    ),
    "serve": (
        "serve:serve_run",
        "CONFIG key=value --port --host",
        "Generate completions for the run of a configuration with rollout.place=servers, until ctrl-C. Start one for each "
        "server, on any machine that sees the run's directory.",
    ),
    "plan": (
        "plan:run_plan",
        "CONFIG key=value --devices --device-memory --device-tflops --json",
        "Say what a run needs of memory and time, which layouts fit, and whether that of the settings as they are can run. "
        "Loads no weights. The exit code is 0 where any layout fits; --dry-run refuses settings that cannot run.",
    ),
    "check": (
        "check:run_check",
        "CONFIG key=value --processes",
        "Compare one step at a layout with one plain process, on a small model of the same family.",
    ),
    "doctor": (
        "doctor:doctor",
        "PLACE --processes --ray --json",
        "Look at devices, versions, limits, disks, clock, ports and the hub, and say what to type where something is missing. Under "
        "torchrun, Slurm or Ray: all machines, the speed of collectives, and which rank is slow.",
    ),
    "completion": (
        "completion:completion",
        "SHELL",
        'Print the completion script of a shell: eval "$(burnish completion bash)" in ~/.bashrc.',
    ),
    "config": ("", "", "Check, show, explain or translate settings."),
    "config check": (
        "settings:check_file",
        "CONFIG key=value",
        "Check that settings exist and fit together. Reads no inputs.",
    ),
    "config show": (
        "settings:show",
        "CONFIG|RUN_DIR key=value",
        "Print every setting and where its value came from.",
    ),
    "config explain": ("settings:explain", "KEY", "Say what a setting means."),
    "config translate": (
        "settings:translate",
        "FILE|ARGUMENTS",
        "Turn arguments of verl, TRL or OpenRLHF into a configuration, on standard output. What has no counterpart is a comment.",
    ),
    "config schema": (
        "settings:schema",
        "",
        "Print the JSON Schema of a configuration, for editors.",
    ),
    "ckpt": ("", "", "Look at checkpoints, check and keep them."),
    "ckpt ls": ("ckpt:list_steps", "RUN --json", "List the steps of a run."),
    "ckpt show": ("ckpt:show_step", "STEP --json --tensors", "Say what is in a step."),
    "ckpt verify": (
        "ckpt:verify_steps",
        "STEP --json --fast|--full",
        "Check a step, or every step of a run, against their hashes.",
    ),
    "ckpt diff": (
        "ckpt_tensors:diff",
        "A B --json --tensors",
        f"Compare two steps; exit code {DIFFERS} where they differ.",
    ),
    "ckpt export": (
        "ckpt_tensors:export_step",
        "STEP DIRECTORY --json --dtype --shard-gb --role --merged --base",
        "Write a plain Hugging Face directory.",
    ),
    "ckpt push": (
        "ckpt_push:push_step",
        "STEP ORG/NAME --json --role --public --branch --merged --base",
        "Send a step's model to the Hugging Face Hub.",
    ),
    "ckpt import": (
        "ckpt_tensors:import_weights",
        "SOURCE RUN_DIR --json --step --assets --unsafe-pickle --without-sandbox",
        "Make a step of weights alone.",
    ),
    "ckpt pin": ("ckpt:pin", "STEP_DIR --json --reason", "Keep a step whatever retention says."),
    "ckpt unpin": ("ckpt:unpin", "STEP_DIR --json", "Let retention decide on a step again."),
    "ckpt gc": (
        "ckpt:collect_garbage",
        "RUN_DIR --json --dry-run",
        "Remove what the run's configuration does not keep.",
    ),
}
# Every command: the function of `burnish.cli` that runs it ("" for a group), its arguments, what it does.


def _place(text: str) -> PurePath:
    from burnish.cli.ckpt import place

    return place(text)


def _argument(help_: str, **how: Any) -> dict[str, Any]:
    return {"help": help_, **how}


def _flag(help_: str) -> dict[str, Any]:
    return {"help": help_, "action": "store_true"}


_STEP = "RUN or RUN/checkpoints/step-N, here or as a URL"
_POSITIONAL = {
    "CONFIG": ("config", _argument("a YAML file; none: all settings are given here", nargs="?")),
    "CONFIG|RUN_DIR": (
        "config",
        _argument("a YAML file, or the directory of a run; none: as above", nargs="?"),
    ),
    "CONFIG|RUN_DIR|MODEL": (
        "config",
        _argument("a YAML file, or the directory of a run or model, or a model's id", nargs="?"),
    ),
    "key=value": (
        "overrides",
        _argument("settings, in place of the file's", nargs="*", default=[]),
    ),
    "FILE|ARGUMENTS": (
        "words",
        _argument("a YAML file, a shell script, or key=value and --flag value", nargs="*"),
    ),
    "sft|rl": (
        "kind",
        _argument("what is trained: from examples, or from a reward", choices=("sft", "rl")),
    ),
    "MODEL": ("model", _argument("a directory, or an id of the Hugging Face Hub", nargs="?")),
    "DATA": ("data", _argument("a file, a directory, or an id of the Hugging Face Hub", nargs="?")),
    "PLACE": (
        "places",
        _argument("directories and URLs where runs will write; none: this one", nargs="*"),
    ),
    "SHELL": ("shell", _argument("bash, zsh or fish", choices=("bash", "zsh", "fish"))),
    "MODEL|RUN": (
        "config",
        _argument(
            "a Hugging Face directory or id, or the directory of a run, or of a step", nargs="?"
        ),
    ),
    "RUNS": ("given", _argument("[DIR], by default runs, or compare A B", nargs="*")),
    "RUNS_DIR": (
        "root",
        _argument(
            "a run, or a directory or URL of runs; by default runs", nargs="?", default="runs"
        ),
    ),
    "KEY": ("key", _argument("as rollout.n; none: the sections", nargs="?")),
    "RUN": ("path", _argument("as runs/my-run or s3://bucket/my-run", type=_place)),
    "RUN_DIR": ("run", _argument("as runs/my-run", type=Path)),
    "STEP": ("path", _argument(f"{_STEP}; without a step, the newest", type=_place)),
    "STEP_DIR": ("path", _argument("RUN/checkpoints/step-N", type=Path)),
    "A": ("path", _argument(f"{_STEP}, or a Hugging Face directory", type=_place)),
    "B": ("other", _argument("the same", type=_place)),
    "ORG/NAME": ("repo", _argument("a model on the Hugging Face Hub; is made if needed")),
    "DIRECTORY": ("target", _argument("is made", type=Path)),
    "SOURCE": (
        "path",
        _argument(
            "an id of the hub, a directory or URL of Hugging Face, torch's DCP (Megatron's torch_dist too), or verl's FSDP (global_step_N/actor)",
            type=_place,
        ),
    ),
}
# Destination and meaning of each positional argument, by what the help calls it.
_OPTIONS = {
    "--dry-run": _flag("check, say what would be done, and stop"),
    "--json": _flag("print one JSON object"),
    "--devices": _argument(
        "as 64xH100-80G or 2xCPU-24G; this machine's when not given; sft, rl: with --dry-run"
    ),
    "--device-memory": _argument("GiB of a device that is not known", type=float, metavar="GIB"),
    "--device-tflops": _argument(
        "its bf16 speed in 10¹² operations/s", type=float, metavar="TFLOPS"
    ),
    "--processes": _argument(
        "start so many on this machine (check: on its CPU; sft, rl: again when one dies); without it the command is one of "
        "torchrun's, or alone, or with --ray one on each GPU",
        type=int,
    ),
    "--ray": _argument(
        "start the processes on a Ray cluster: auto for that of this machine, or HOST:PORT",
        metavar="ADDRESS",
    ),
    "--address": _argument("of Ray's dashboard, as http://head:8265; by default this machine's"),
    "--tensors": _flag("list every tensor"),
    "--full": _argument("read every byte (the default)", action="store_false", dest="fast"),
    "--fast": _flag("names, sizes, small files and headers only"),
    "--dtype": _argument("of the weights", choices=("bf16", "fp16", "fp32"), default="bf16"),
    "--shard-gb": _argument("size of a file", type=float, default=5.0, metavar="GB"),
    "--role": _argument("a further model of the run, as critic; its own if not given", default=""),
    "--public": _flag("let everybody see a repository that is made; without, only its owner"),
    "--branch": _argument("of the repository; is made if needed; by default main"),
    "--merged": _flag(
        "of a run with model.lora: the model with the adapter merged in; without, the adapter"
    ),
    "--base": _argument("where the model that was trained on is, if it moved", type=Path),
    "--step": _argument("its number; 0 if not given", type=int, default=0),
    "--assets": _argument("directory of config.json and tokenizer, if SOURCE has none", type=Path),
    "--unsafe-pickle": _flag("unpickle (DCP, Megatron, verl), in a process of its own"),
    "--without-sandbox": _flag("unpickle where the kernel has no Landlock as well"),
    "--port": _argument("where it listens; 0: any that is free; view: 7007 if not given", type=int),
    "--host": _argument(
        "an address of this machine; others than itself reach it with the token in the address that is printed",
        default="127.0.0.1",
    ),
    "--no-open": _argument("open no browser", action="store_false", dest="open"),
    "--reason": _argument("shown by ls", default="by hand"),
}


class _Parser(ArgumentParser):
    """The top-level parser, whose help is written for a newcomer."""

    def format_help(self) -> str:
        """One sentence, then the commands as they are typed."""
        return HELP


def make_parser() -> ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(prog="burnish")
    parser.add_argument("--version", action="version", version=f"burnish {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=ArgumentParser)
    parsers = {"": commands}
    for full_name, (function, arguments, description) in _COMMANDS.items():
        group, _, name = full_name.rpartition(" ")
        command = parsers[group].add_parser(name, description=description, help=description)
        if function:
            command.set_defaults(function=function)
        else:
            names = [each.split()[1] for each in _COMMANDS if each.startswith(f"{name} ")]
            parsers[name] = command.add_subparsers(
                dest="subcommand", metavar="|".join(names), required=True
            )
        for argument in arguments.split():
            if argument in _POSITIONAL:
                destination, how = _POSITIONAL[argument]
                command.add_argument(destination, metavar=argument, **how)
                continue
            options = argument.split("|")
            exclusive = command.add_mutually_exclusive_group() if len(options) > 1 else command
            for option in options:
                exclusive.add_argument(option, **_OPTIONS[option])
    return parser


def function_of(arguments: Namespace) -> Callable[..., Any]:
    """Import the function of a command that was parsed."""
    module, _, name = arguments.function.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"burnish.cli.{module}"), name)
    return function


def parse(argv: Sequence[str]) -> Namespace:
    """Return what was typed; overrides may stand before and after options. Raises `UsageError` for what is not known."""
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    if hasattr(arguments, "words"):  # which may look like options
        arguments.words = list(argv)[2:]
        return arguments
    if options := [each for each in rest if each.startswith("-")]:
        unknown = [_unknown_option(option, arguments) for option in options[:_MOST_OPTIONS]]
        raise together(unknown, "the command line")
    if arguments.command is None:
        parser.print_help()
        raise SystemExit(UsageError.exit_code if argv else 0)
    if rest and not hasattr(arguments, "overrides"):
        raise UsageError(f"unexpected {rest[0]}", have=shlex.join(argv), do="leave it out")
    if hasattr(arguments, "overrides"):
        typed = [*([arguments.config] if arguments.config else []), *arguments.overrides, *rest]
        if not typed:
            raise UsageError(
                f"{parser.prog} {arguments.command} is given nothing",
                want="CONFIG, key=value, or both",
                do=f"see burnish {arguments.command} --help; burnish init writes a configuration",
            )
        first = typed[0]
        has_file = "=" not in first or os.path.exists(first)
        arguments.config = first if has_file else None
        arguments.overrides = typed[1:] if has_file else typed
    return arguments


def _unknown_option(option: str, arguments: Namespace) -> UsageError:
    from burnish.config.keys import known_keys
    from burnish.config.suggestions import suggestion

    name, _, value = option.lstrip("-").partition("=")
    key = name.replace("-", "_")
    if not hasattr(arguments, "overrides"):
        do = f"see burnish {arguments.command or ''} --help".replace("  ", " ")
        return UsageError(f"there is no option {option}", have=option, do=do)
    if key in known_keys():
        want, do = "--dry-run", f"settings have no dashes: write {key}={value or 'VALUE'}"
    else:
        want, do = suggestion(key)
        known = [each for each in _OPTIONS if hasattr(arguments, each[2:].replace("-", "_"))]
        do = (do.startswith("see") and did_you_mean(option.partition("=")[0], known)) or do
    return UsageError(f"there is no option {option}", have=option, want=want, do=do)

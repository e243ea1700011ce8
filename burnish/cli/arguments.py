"""Arguments of the `burnish` command. This module imports no command, so help and mistakes show at once."""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, NoReturn

from burnish.errors import UsageError, together
from burnish.files.strict_json import clipped
from burnish.functions import did_you_mean
from burnish.version import __version__

# More are a slip of the finger.
_MOST_PROCESSES = 1_000_000
_HELP = """\
Burnish post-trains language models: supervised fine-tuning and reinforcement learning.

  burnish init sft|rl [MODEL] [DATA]         write a first configuration
  burnish sft CONFIG                         fine-tune a model on examples
  burnish rl CONFIG                          train a model with a reward: GRPO, PPO, ...
  burnish run FILE.py:CLASS CONFIG           train with a method of your own
  burnish submit sft|rl CONFIG               run a method as a job of a Ray cluster
  burnish serve CONFIG                       generate completions for a run elsewhere
  burnish eval RUN|MODEL|CONFIG              measure a model on held-out data
  burnish chat RUN|MODEL                     talk to a model in the terminal

  burnish runs [DIR]                         list runs
  burnish runs compare A B                   compare two runs
  burnish view [DIR]                         show runs and completions in a browser
  burnish ckpt ls|show|export|verify|...     inspect, export and check checkpoints

  burnish plan CONFIG --devices 64xH100-80G  estimate memory and time before a run
  burnish check CONFIG --processes N         compare your layout with one plain process
  burnish doctor [PLACE ...]                 check that this machine is ready

  burnish config check CONFIG                check that settings exist and fit together
  burnish config show CONFIG                 print every setting and its origin
  burnish config explain [KEY]               explain a setting
  burnish config translate FILE|ARGUMENTS    translate another framework's settings

CONFIG is a YAML file. Settings may follow it, such as optim.lr=1e-6 rollout.n=8, or
replace it:

  burnish rl model.path=DIR data.train=x.jsonl reward.functions=rewards.py:correct

A run is written to runs/NAME. The same command again resumes it. On several processes:

  burnish rl CONFIG --processes 8            on this machine; restarts when one dies
  burnish rl CONFIG --ray auto               on a Ray cluster
  torchrun --nproc-per-node 8 -m burnish rl CONFIG

--dry-run does the run's setup without weights and prints what the run would do. It
takes seconds: it tokenizes the first rows, calls each reward once and plans memory.

burnish COMMAND --help lists a command's options. --version prints the version.
eval "$(burnish completion bash)" completes commands and settings; also zsh and fish.
BURNISH_LOG_LEVEL is debug, info, warning or error. Default: info on rank 0, else error.
"""
_SETTINGS = "burnish config explain lists the sections of settings; burnish config explain KEY explains one."
_MOST_OPTIONS = 5
"""Most unknown options in one error."""
_GGUF_TYPES = ("q8_0", "bf16", "f16", "f32")
DIFFERS = 6
"""Exit code of a comparison that finds a difference."""

_METHOD = "CONFIG key=value --dry-run --devices --processes --ray"
_MEASURE = "CONFIG|RUN_DIR|MODEL key=value --dry-run --json"
# Beside the methods: each command's function in `burnish.cli` ("" for a group), its arguments, and its description.
_COMMANDS = {
    "init": (
        "init:init",
        "KIND MODEL DATA --lora",
        "Look at the data, show a row as the model will see it, and write a configuration that fits. For rl, write a reward function "
        "too. Without DATA, write sample rows as well. No file is overwritten.",
    ),
    "run": (
        "run:run_given",
        f"METHOD {_METHOD}",
        "Train with a method of your own, a class that derives from burnish.Method. The same command again resumes the run.",
    ),
    "submit": (
        "launch:submit_run",
        "TRAINER CONFIG key=value --address --processes",
        "Submit a run to a Ray cluster as a job, and follow its output. All nodes must see this directory.",
    ),
    "chat": (
        "chat:chat",
        "MODEL|RUN key=value --temperature --max-tokens --system --compare --save",
        "Talk to a model in the terminal. It answers each line that you type. It samples as its generation_config.json recommends, "
        "else it takes the most probable tokens. It calls the tools of its run's environment, or of environment=FILE:CLASS. /help lists the "
        "commands.",
    ),
    "runs": (
        "runs:runs",
        "RUNS --json",
        "List the runs in a directory. With compare A B, show how the settings and curves of two runs differ.",
    ),
    "view": (
        "view:view",
        "RUNS_DIR --port --host --no-open",
        "Serve a web page that shows runs and rollouts, also while they grow. It changes no run.",
    ),
    "serve": (
        "launch:serve_run",
        "CONFIG key=value --port --host",
        "Generate completions for a run with rollout.place=servers, until ctrl-C. Start this command once for each server, on "
        "any machine that sees the run's directory.",
    ),
    "plan": (
        "plan:run_plan",
        "CONFIG key=value --devices --device-memory --device-tflops --json",
        "Estimate the memory and time of a run, list the layouts that fit, and say whether the configured layout fits. Loads no "
        "weights. The exit code is 0 if any layout fits; --dry-run of sft and rl refuses a configuration that does not fit.",
    ),
    "check": (
        "check:run_check",
        "CONFIG key=value --processes",
        "Compare one training step at your layout with one plain process, on a small model of the same family.",
    ),
    "doctor": (
        "doctor:doctor",
        "PLACE --count --processes --ray --json",
        "Check devices, versions, limits, disks, clock, ports and the hub, and print a command for each thing that is missing. "
        "Under torchrun, Slurm or Ray it checks all machines, measures collectives and names slow ranks. With --count it counts what a run asks of its devices.",
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
        "Check that settings exist and fit together. It reads no model and no data.",
    ),
    "config show": (
        "settings:show",
        "CONFIG|RUN_DIR key=value --json",
        "Print every setting and where its value comes from.",
    ),
    "config explain": ("settings:explain", "KEY", "Explain a setting and list its values."),
    "config translate": (
        "translate:run_translate",
        "FILE|ARGUMENTS",
        "Print a configuration from a script, file or arguments of verl, TRL, OpenRLHF, axolotl, LLaMA-Factory, open-r1 or prime-rl. Settings without a counterpart become comments.",
    ),
    "config schema": ("settings:schema", "", "Print the JSON Schema of settings, for editors."),
    "ckpt": ("", "", "Inspect, check, export, import and keep checkpoints."),
    "ckpt ls": ("ckpt:list_steps", "RUN --json", "List the steps of a run, or of many runs."),
    "ckpt show": ("ckpt:show_step", "STEP --json --tensors", "Show the content of a step."),
    "ckpt verify": (
        "ckpt:verify_steps",
        "STEP --json --fast|--full",
        "Check the hashes of a step, or of every step of a run.",
    ),
    "ckpt diff": (
        "ckpt_tensors:diff",
        "A B --json --tensors",
        f"Compare two steps. The exit code is {DIFFERS} if they differ.",
    ),
    "ckpt export": (
        "ckpt_tensors:export_step",
        "STEP DIRECTORY --json --dtype --shard-gb --role --merged --base --gguf",
        "Write a step's model as a plain Hugging Face directory.",
    ),
    "ckpt push": (
        "ckpt_push:push_step",
        "STEP ORG/NAME --json --role --public --branch --merged --base",
        "Send a step's model to the Hugging Face Hub.",
    ),
    "ckpt import": (
        "ckpt_tensors:import_weights",
        "SOURCE RUN_DIR --json --step --assets --unsafe-pickle --without-sandbox",
        "Make a step from another program's weights, without optimizer state. Of a GGUF file, make a model's directory instead.",
    ),
    "ckpt pin": ("ckpt:pin_step", "STEP_DIR --json --reason", "Protect a step from removal."),
    "ckpt unpin": ("ckpt:unpin_step", "STEP_DIR --json", "Let a pinned step be removed again."),
    "ckpt gc": (
        "ckpt:collect_garbage",
        "RUN_DIR --json --dry-run",
        "Remove the steps that the run's configuration does not keep, and remains of killed saves.",
    ),
}


def _place(text: str) -> PurePath:
    from burnish.cli.places import place

    return place(text)


def _processes(text: str) -> int:
    if text.isdecimal() and len(text) <= len(str(_MOST_PROCESSES)):
        count = int(text)
        if 0 < count <= _MOST_PROCESSES:
            return count
    raise UsageError(
        "--processes is not a number of processes",
        have=clipped(text),
        want=f"1 to {_MOST_PROCESSES:,}",
        do="correct it, or leave it out",
    )


def _argument(help_: str, **how: Any) -> dict[str, Any]:
    return {"help": help_, **how}


def _flag(help_: str) -> dict[str, Any]:
    return {"help": help_, "action": "store_true"}


_STEP = "RUN or RUN/checkpoints/step-N, here or as a URL"
# Destination and description of each positional argument, by its name in the help, or by "COMMAND NAME" if it means something else there.
_POSITIONAL = {
    "CONFIG": ("config", _argument("a YAML file; optional if key=value says all", nargs="?")),
    "CONFIG|RUN_DIR": ("config", _argument("a YAML file or a run's directory", nargs="?")),
    "CONFIG|RUN_DIR|MODEL": (
        "config",
        _argument("a YAML file, the directory of a run or model, or a model's id", nargs="?"),
    ),
    "key=value": (
        "overrides",
        _argument("settings, such as seed=1; they override the file", nargs="*", default=[]),
    ),
    "FILE|ARGUMENTS": ("words", _argument("a file, or key=value and --flag value", nargs="*")),
    "KIND": ("kind", _argument("the method that the configuration is for")),
    "TRAINER": ("kind", _argument("a method's name, or file.py:Class")),
    "METHOD": ("method", _argument("file.py:Class or module:Class")),
    "MODEL": ("model", _argument("a directory, or an id of the Hugging Face Hub", nargs="?")),
    "DATA": ("data", _argument("a file, a directory, or an id of the Hugging Face Hub", nargs="?")),
    "PLACE": (
        "places",
        _argument("directories and URLs to write to; default: this directory", nargs="*"),
    ),
    "SHELL": ("shell", _argument("bash, zsh or fish", choices=("bash", "zsh", "fish"))),
    "MODEL|RUN": (
        "config",
        _argument("a model's directory or id, or the directory of a run or step", nargs="?"),
    ),
    "RUNS": ("runs", _argument("a directory of runs (default: runs), or compare A B", nargs="*")),
    "RUNS_DIR": (
        "root",
        _argument("a run, or a directory or URL of runs; default: runs", nargs="?", default="runs"),
    ),
    "KEY": (
        "key",
        _argument("a setting or section, such as rollout.n; default: all sections", nargs="?"),
    ),
    "RUN": ("path", _argument("such as runs/my-run or s3://bucket/my-run", type=_place)),
    "RUN_DIR": ("run", _argument("such as runs/my-run", type=Path)),
    "STEP": ("path", _argument(f"{_STEP}; a run stands for its newest step", type=_place)),
    "verify STEP": ("path", _argument(f"{_STEP}; a run stands for all its steps", type=_place)),
    "STEP_DIR": ("path", _argument("RUN/checkpoints/step-N", type=Path)),
    "A": ("path", _argument(f"{_STEP}, or a Hugging Face directory", type=_place)),
    "B": ("other", _argument("the same", type=_place)),
    "ORG/NAME": ("repo", _argument("a model repository on the hub; created if needed")),
    "DIRECTORY": ("target", _argument("a new directory to write to", type=Path)),
    "SOURCE": (
        "path",
        _argument(
            "a Hugging Face id, directory or URL; a checkpoint of torch's DCP or Megatron's torch_dist; or verl's FSDP (global_step_N/actor)",
            type=_place,
        ),
    ),
}
# An option with another meaning in one command has a second entry, "COMMAND --option".
_OPTIONS = {
    "--temperature": _argument("draw answers at this temperature; 0: the most probable token"),
    "--max-tokens": _argument("most tokens of an answer; default: 1024", metavar="N"),
    "--system": _argument("the system prompt", metavar="TEXT"),
    "--compare": _argument("answer with this model or run as well, side by side", metavar="BASE"),
    "--save": _argument(
        "append the conversations to this file, as messages that burnish sft trains on",
        metavar="FILE",
    ),
    "--dry-run": _flag("do the setup without weights, print what the run would do, and stop"),
    "--json": _flag("print one JSON object"),
    "--devices": _argument(
        "with --dry-run: plan for these devices, such as 64xH100-80G; default: this machine's"
    ),
    "--device-memory": _argument(
        "memory of each device, for a device that is not in the table", type=float, metavar="GIB"
    ),
    "--device-tflops": _argument(
        "bf16 speed of each device, in 10¹² operations per second", type=float, metavar="TFLOPS"
    ),
    "--processes": _argument(
        "start this many processes, and start the run again when one dies; default: one process, or with --ray one per GPU",
        type=_processes,
    ),
    "check --processes": _argument("start this many processes on the CPU", type=_processes),
    "--count": _argument(
        "count calls, copies and collectives of a micro-batch of this configuration instead; key=value may follow",
        metavar="CONFIG",
    ),
    "doctor --processes": _argument("check from this many processes here", type=_processes),
    "view --port": _argument(
        "port to listen on; default: 7007; 0: any free port", type=int, default=7007
    ),
    "plan --devices": _argument("such as 64xH100-80G or 2xCPU-24G; default: this machine's"),
    "submit --processes": _argument("number of processes; default: one per GPU", type=_processes),
    "gc --dry-run": _flag("print what would be removed, and stop"),
    "--ray": _argument(
        "start the processes on a Ray cluster: HOST:PORT, or auto for this machine's cluster",
        metavar="ADDRESS",
    ),
    "--address": _argument("Ray's dashboard, such as http://head:8265; default: this machine's"),
    "--tensors": _flag("list every tensor"),
    "--full": _argument("read every byte (the default)", action="store_false", dest="fast"),
    "--fast": _flag("check names, sizes, small files and headers only"),
    "--dtype": _argument(
        "type of the weights; default: bf16", choices=("bf16", "fp16", "fp32"), default="bf16"
    ),
    "--shard-gb": _argument("largest file; default: 5", type=float, default=5.0, metavar="GB"),
    "--role": _argument("another model, such as critic; default: the policy", default=""),
    "--public": _flag("make a new repository public; default: private"),
    "--branch": _argument("branch of the repository; created if needed; default: main"),
    "--lora": _flag("configure a LoRA adapter of rank 16 instead of training all weights"),
    "--merged": _flag("for a run with model.lora: merge the adapter into the model"),
    "--gguf": _argument(
        "also say how llama.cpp makes GGUF of it", nargs="?", const="q8_0", choices=_GGUF_TYPES
    ),
    "--base": _argument("for --merged: where the base model is now, if it moved", type=Path),
    "--step": _argument("number of the new step; default: 0", type=int, default=0),
    "--assets": _argument("where config.json and tokenizer are, if SOURCE has none", type=Path),
    "--unsafe-pickle": _flag("allow pickles (DCP, Megatron, verl), read in a sandboxed process"),
    "--without-sandbox": _flag("allow pickles even if the kernel has no Landlock for the sandbox"),
    "--port": _argument("port to listen on; default: any free port", type=int, default=0),
    "--host": _argument(
        "address to listen on, such as 0.0.0.0; default: 127.0.0.1. Clients need a token: view prints it with its address, and serve "
        "writes it to servers/ in the run's directory, which only you can read",
        default="127.0.0.1",
    ),
    "--no-open": _argument("do not open a browser", action="store_false", dest="open"),
    "--reason": _argument("why; burnish ckpt ls shows it", default="by hand"),
}


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, do=f"see {self.prog} --help")


def make_parser(method: str | None = None) -> ArgumentParser:
    """Return the parser of the whole command line, or of a built-in method's command alone."""
    parser = _Parser(prog="burnish")
    parser.add_argument("--version", action="version", version=f"burnish {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    parsers = {"": commands}
    # Imported here, so that the help of all commands loads no configuration.
    from burnish.methods.table import METHODS

    of_methods = {
        name: ("run:run_given", _METHOD if method.trains else _MEASURE, method.help)
        for name, method in ((name, METHODS[name]) for name in ([method] if method else METHODS))
    }
    others = {} if method else _COMMANDS
    for full_name, (function, arguments, description) in {**of_methods, **others}.items():
        group, _, name = full_name.rpartition(" ")
        more = _SETTINGS if "key=value" in arguments else None
        command = parsers[group].add_parser(
            name, description=description, help=description, epilog=more
        )
        if full_name in of_methods:
            command.set_defaults(method=full_name)
        if function:
            command.set_defaults(function=function)
        else:
            names = [each.split()[1] for each in _COMMANDS if each.startswith(f"{name} ")]
            parsers[name] = command.add_subparsers(
                dest="subcommand", metavar="|".join(names), required=True
            )
        for argument in arguments.split():
            if argument in _POSITIONAL:
                destination, how = _POSITIONAL.get(f"{name} {argument}", _POSITIONAL[argument])
                shown = argument
                if argument == "KIND":
                    trainers = [name for name, method in METHODS.items() if method.trains]
                    how = {**how, "choices": trainers}
                    shown = "|".join(trainers)
                command.add_argument(destination, metavar=shown, **how)
                continue
            options = argument.split("|")
            exclusive = command.add_mutually_exclusive_group() if len(options) > 1 else command
            for option in options:
                how = _OPTIONS.get(f"{name} {option}", _OPTIONS[option])
                exclusive.add_argument(option, **how)
    return parser


def parse(argv: Sequence[str]) -> Namespace:
    """Return the parsed arguments; overrides may stand anywhere. Raises `UsageError` for unknown ones."""
    if list(argv) in ([], ["-h"], ["--help"]):
        print(_HELP, end="")
        raise SystemExit(0)
    if list(argv) == ["--version"]:
        print(f"burnish {__version__}")
        raise SystemExit(0)
    _require_command(argv)
    from burnish.methods.table import METHODS

    parser = make_parser(argv[0] if argv[0] in METHODS else None)
    arguments, rest = parser.parse_known_args(argv)
    if hasattr(arguments, "words"):  # words may look like options
        arguments.words = list(argv)[2:]
        return arguments
    if options := [each for each in rest if each.startswith("-")]:
        unknown = [_unknown_option(option, arguments) for option in options[:_MOST_OPTIONS]]
        raise together(unknown, "the command line")
    if arguments.command is None:
        raise UsageError("no command is given", have=shlex.join(argv), do="see burnish --help")
    if hasattr(arguments, "runs"):  # an option may stand between names
        arguments.runs += rest
    elif hasattr(arguments, "places"):
        arguments.places += rest
    elif rest and not hasattr(arguments, "overrides"):
        raise UsageError(f"unexpected {rest[0]}", have=shlex.join(argv), do="leave it out")
    if hasattr(arguments, "overrides"):
        typed = [*([arguments.config] if arguments.config else []), *arguments.overrides, *rest]
        if not typed and arguments.command == "chat":
            return arguments  # which says what it needs
        if not typed:
            raise UsageError(
                f"{parser.prog} {arguments.command} needs a configuration",
                want="CONFIG, key=value, or both",
                do=f"see burnish {arguments.command} --help; burnish init writes a configuration",
            )
        first = typed[0]
        has_file = "=" not in first or os.path.exists(first)
        arguments.config = first if has_file else None
        arguments.overrides = typed[1:] if has_file else typed
    return arguments


def _require_command(argv: Sequence[str]) -> None:
    """Raise `UsageError` if the first words are no command."""
    from burnish.methods.table import METHODS

    names = [*METHODS, *_COMMANDS]
    first = argv[0]
    groups = {name.split()[0] for name in names if " " in name}
    words = 2 if first in groups and len(argv) > 1 else 1
    typed = " ".join(argv[:words])
    if typed in names or argv[words - 1].startswith("-"):
        return
    among = [
        name for name in names if (name.startswith(f"{first} ") if words > 1 else " " not in name)
    ]
    from burnish.config.suggestions import METHODS_ELSEWHERE

    in_groups = [name for name in names if name.endswith(f" {first}")]
    do = (
        METHODS_ELSEWHERE.get(first)
        or (in_groups and f"did you mean burnish {in_groups[0]}?")
        or (os.path.isfile(first) and f"name the method first, such as burnish sft {first}")
        or did_you_mean(typed.lower(), among)
        or "see burnish --help; burnish run FILE.py:CLASS trains with a method of your own"
    )
    raise UsageError(
        f"there is no command {clipped(typed)}",
        have=f"burnish {clipped(typed)}",
        want=f"one of {', '.join(among)}",
        do=do,
    )


def _unknown_option(option: str, arguments: Namespace) -> UsageError:
    from burnish.config.keys import known_keys
    from burnish.config.short_names import full_name
    from burnish.config.suggestions import suggestion
    from burnish.methods.table import METHODS

    name, _, value = option.lstrip("-").partition("=")
    key = name.replace("-", "_")
    if not hasattr(arguments, "overrides"):
        do = f"see burnish {arguments.command or ''} --help".replace("  ", " ")
        return UsageError(f"there is no option {option}", have=option, do=do)
    if full_name(key) in known_keys():
        want = "--dry-run"
        do = f"settings have no dashes: write {key}={value or 'VALUE'}"
    else:
        method = METHODS.get(getattr(arguments, "method", ""))
        want, do = suggestion(key, None, method.Settings.model_fields if method else ())
        known = [each for each in _OPTIONS if hasattr(arguments, each[2:].replace("-", "_"))]
        do = (do.startswith("see") and did_you_mean(option.partition("=")[0], known)) or do
    return UsageError(f"there is no option {option}", have=option, want=want, do=do)

"""`burnish chat`: talk to a model in the terminal, or to two side by side.

Standard output gets the answers alone. Remarks go to standard error.
"""

from __future__ import annotations

import json
import secrets
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from burnish.api import config_at
from burnish.checkpoint.steps import CommittedStep, step_number
from burnish.cli.output import print_text
from burnish.config.environment import EnvironmentConfig
from burnish.config.load import COMMAND_LINE, load_with_origins
from burnish.config.schema import DataConfig, RewardConfig, RolloutConfig, RunConfig, SamplingConfig
from burnish.errors import BurnishError, MissingError, UsageError, count_text, refusing
from burnish.files.strict_json import parse_object
from burnish.redaction import presentable, printable
from burnish.runs.hub_revisions import at_newest_steps
from burnish.runs.models_of_runs import newest_model
from burnish.runs.preflight import require_model, small_file
from burnish.runs.summary import parameter_count, sampling_text

if TYPE_CHECKING:
    import torch

    from burnish.cli.chat_environment import ChatEnvironment
    from burnish.cli.chat_model import ChatModel, Reply
    from burnish.data.messages import Message
    from burnish.distributed.layout import Layout

_RENDERING = ("chat_template_kwargs", "chat_template_name", "system_prompt")
_USED = {
    "seed",
    "engine.precision",
    *(f"data.{name}" for name in _RENDERING),
    *(f"rollout.{name}" for name in SamplingConfig.model_fields),
    "rollout.max_response_length",
    "rollout.stop",
    "rollout.stop_token_ids",
}
_ENVIRONMENT = "rollout.environment"
"""Settings that decide how a conversation goes, besides those of `model`."""
_OPTIONS = {
    "temperature": "rollout.temperature",
    "max_tokens": "rollout.max_response_length",
    "system": "data.system_prompt",
}
"""Options that are settings by another name."""
_MOST_TOKENS = 1024
_NEUTRAL: Mapping[str, float] = {
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "typical_p": 1,
    "num_beams": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
}
"""What a model may recommend and the generator does not do, with the values that do nothing."""
_COLUMNS_FROM = 80
"""Least width of a terminal for two columns."""
_VALUES = {
    "temperature": ("temperature", "a number, 0 or more"),
    "max_response_length": ("most tokens of an answer", "a whole number, 1 or more"),
}
"""Settings that a command changes: their names in a sentence, and what they may be."""
_QUOTES = '"""'
_HELP = f"""\
  /help              list these commands
  /reset             begin a new conversation
  /system [TEXT]     show or set the system prompt, and begin anew
  /temperature [X]   show or set the temperature; 0: the most probable token
  /max-tokens [N]    show or set the most tokens of an answer
  /save FILE         append the conversation to FILE, and go on saving there
  /exit              end, as /quit and ctrl-D do
{_QUOTES} begins and ends a text of several lines. Ctrl-C stops an answer.
A line that begins with a space is sent as it is."""


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model to talk to, before it is loaded."""

    name: str
    config: RunConfig
    step: CommittedStep | None
    environment: EnvironmentConfig
    """What it talks with beside the person."""


def chat(args: Namespace) -> None:
    """Answer each line of standard input with a model, or a run's newest step."""
    typed = [
        f"{setting}={json.dumps(value)}" if name == "system" else f"{setting}={value}"
        for name, setting in _OPTIONS.items()
        if (value := getattr(args, name)) is not None
    ]
    overrides = [*args.overrides, *typed]
    places = [args.config, *filter(None, [args.compare])]
    choices = [_choice(place, overrides) for place in places]
    if len(places) > len(set(places)):
        raise UsageError(
            "there is nothing to compare",
            have=f"{args.config} twice",
            want="another model or run",
            do="give --compare the base model, or a step of the run",
        )
    if len({choice.name for choice in choices}) < len(choices):
        choices = [replace(c, name=place) for place, c in zip(places, choices, strict=True)]
    settings = choices[0].config
    file = None if args.save is None else _writable(args.save)
    for choice in choices:
        count = parameter_count(choice.config.model)
        size = f"{_short(count)} parameters, " if count else ""
        _note(f"{choice.name}, {size}{_how(settings.rollout)}; /help")

    def talk(layout: Layout, device: torch.device) -> None:
        from burnish.cli.chat_model import ChatModel

        with _environment(choices[0].environment) as environment:
            models = {c.name: ChatModel(c, layout, device) for c in choices}
            if environment is not None:
                for name, model in models.items():
                    environment.add(name, model.bridge(environment.tools))
            how = (settings.rollout, settings.seed, settings.data.system_prompt, file, environment)
            _Dialogue(models, *how).hold()

    from burnish.distributed.processes import launch

    launch(talk, settings.distributed.model_copy(update={"stall_seconds": 0.0}))


@contextmanager
def _environment(config: EnvironmentConfig) -> Iterator[ChatEnvironment | None]:
    """Open what models talk with beside the person, if anything."""
    if config.target is None:
        yield None
        return
    from burnish.cli.chat_environment import ChatEnvironment

    with closing(ChatEnvironment(config)) as environment:
        tools = f", tools {environment.tool_names}" if environment.tools else ""
        named = ", ".join(map(str, config.named.values()))
        _note(f"with {named}{tools}; environment=null leaves it out")
        yield environment


def _choice(place: str | None, overrides: Sequence[str]) -> ChosenModel:
    """Return a place's model with the settings of the command line. Raises `UsageError` for settings without effect."""
    file, run = config_at(place) if place else (None, None)
    named = [f"model.path={json.dumps(place)}"] if place and file is None else []
    config, origins = load_with_origins(file, [*named, *overrides])
    given = [name for name, origin in origins.items() if COMMAND_LINE in origin]
    whole = ("model.", _ENVIRONMENT)
    if idle := [name for name in given if name not in _USED and not name.startswith(whole)]:
        raise UsageError(
            f"{', '.join(idle)}: burnish chat does not use {'this setting' if len(idle) == 1 else 'these settings'}",
            want=f"a setting of model or {_ENVIRONMENT}, or {', '.join(sorted(_USED))}",
            do="leave it out; --temperature X sets how answers are drawn",
        )
    if not (config.model.path or config.model.fresh):
        raise UsageError(
            "burnish chat needs a model to talk to",
            want="a run, a step, a model's directory, or a model's id on the hub",
            do="write burnish chat runs/NAME; burnish runs lists the runs",
        )
    name = config.run_name
    step = None
    if run is None:
        model = at_newest_steps(config.model_dump()).model
        if model.path:
            require_model(model.path, "model.path")
            number = step_number(Path(model.path).parent.name)
            name = name if number is None else f"{name} step {number}"
    else:
        model, step = newest_model(run, config.model)
        name = f"{name} step {step.step}"
    rollout = {each: getattr(config.rollout, each) for each in ("stop", "stop_token_ids")}
    rollout |= {"max_response_length": _MOST_TOKENS, **recommended(model.path)}
    environment = config.rollout.environment
    if environment.has_agents:
        _note("the run's agent is not asked: you speak in its place")
        environment = EnvironmentConfig()
    drawn = ["max_response_length", *SamplingConfig.model_fields]
    rollout |= {each: getattr(config.rollout, each) for each in drawn if f"rollout.{each}" in given}
    changed: dict[str, Any] = {
        "model": model,
        "data": DataConfig(**config.data.model_dump(include=set(_RENDERING))),
        "reward": RewardConfig(),
        "rollout": RolloutConfig(**rollout),
        "seed": config.seed if "seed" in given else secrets.randbits(63),
    }
    return ChosenModel(name, config.model_copy(update=changed), step, environment)


def recommended(place: str | None) -> dict[str, Any]:
    """Return how the model at a place wants to be drawn from, as transformers reads its generation_config.json."""
    fields: Mapping[str, Any] = {}
    if place is not None:
        with suppress(MissingError):
            name = "generation_config.json"
            fields = parse_object(small_file(place, name), f"{place}/{name}")
    # transformers' own defaults stand for what is missing.
    drawn = SamplingConfig(top_k=50).model_dump()
    drawn |= {each: fields[each] for each in drawn if fields.get(each) is not None}
    if fields.get("do_sample") is not True:
        drawn["temperature"] = 0.0
    with refusing(
        f"the generation_config.json of {place} cannot be followed",
        want="numbers, as transformers writes them",
        do="correct the file, or remove it",
    ):
        SamplingConfig(**drawn)
    for processor, neutral in _NEUTRAL.items():
        if fields.get(processor) not in (None, neutral):
            wanted = f"{processor} {fields[processor]!r}"
            _note(f"{wanted}, which {place} recommends, is not applied")
    return drawn


def _how(rollout: RolloutConfig) -> str:
    return sampling_text(rollout) if rollout.temperature else "greedy"


def _short(count: int) -> str:
    size, unit = (count / 1e9, "B") if count >= 1e9 else (count / 1e6, "M")
    return f"{size:.1f} {unit}"


def _note(text: str) -> None:
    print(presentable(text), file=sys.stderr, flush=True)


@dataclass(slots=True)
class _Dialogue:
    """One conversation after another, with each of `models`, by name."""

    models: Mapping[str, ChatModel]
    rollout: RolloutConfig
    seed: int
    system: str | None
    file: Path | None
    """Where conversations are saved, if anywhere."""
    environment: ChatEnvironment | None = None
    turn: int = 0
    messages: dict[str, list[Message]] = field(default_factory=dict)
    """The conversation with each model."""
    start: int = 0
    """Size of the file before this conversation."""
    is_live: bool = field(default_factory=lambda: sys.stdin.isatty() and sys.stdout.isatty())
    """Whether a person watches, and not a pipe."""

    def hold(self) -> None:
        """Answer texts and follow commands until /exit or the end of the input."""
        if not all(model.has_template for model in self.models.values()):
            _note("there is no chat template: the model continues your text")
        if sys.stdin.isatty():
            # Lines can then be edited, and arrows bring earlier ones.
            with suppress(ImportError):
                import readline  # noqa: F401
        self._begin()
        for text, is_command in _typed():
            try:
                if not is_command:
                    self._answer(text)
                elif self._follow(*text.partition(" ")[::2]):
                    return
            except BurnishError as error:
                if not (self.is_live or is_command):
                    raise
                _note(str(error))

    def _begin(self) -> None:
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.messages = {name: [*opening] for name in self.models}
        if self.environment is not None:
            self.environment.begin_anew()
        self.start = self.file.stat().st_size if self.file is not None else 0

    def _follow(self, command: str, rest: str) -> bool:
        """Follow a command; return whether it ends the dialogue. Raises `UsageError` for an unknown one."""
        value = rest.strip()
        match command:
            case "/exit" | "/quit":
                return True
            case "/help":
                _note(_HELP)
            case "/reset":
                self._begin()
            case "/system" if value:
                self.system = value
                self._begin()
            case "/system":
                _note(self.system or "there is no system prompt")
            case "/temperature":
                self._set("temperature", value)
                _note(_how(self.rollout))
            case "/max-tokens":
                self._set("max_response_length", value)
                _note(f"at most {self.rollout.max_response_length} tokens")
            case "/save":
                self.file = _writable(value)
                self.start = self.file.stat().st_size
                self._save()
            case _:
                raise UsageError(
                    f"there is no command {command}",
                    do="see /help; begin the line with a space to send it to the model",
                )
        return False

    def _set(self, name: str, value: str) -> None:
        if value:
            shown, want = _VALUES[name]
            try:
                changed = {**self.rollout.model_dump(), name: json.loads(value)}
                self.rollout = RolloutConfig(**changed)
            except ValueError as error:
                raise UsageError(
                    f"the {shown} cannot be {value}", want=want, do="correct it"
                ) from error

    def _answer(self, text: str) -> None:
        asked = {
            name: [*said, {"role": "user", "content": text}] for name, said in self.messages.items()
        }
        self.turn += 1
        if self.environment is not None:
            for name, messages in asked.items():
                self._take_turns(self.environment, name, messages)
        else:
            answers = self._side_by_side(asked) if self._has_columns() else self._in_turn(asked)
            for name, said in answers.items():
                asked[name].append({"role": "assistant", "content": said})
        self.messages = asked
        self._save()

    def _has_columns(self) -> bool:
        from rich.console import Console

        return len(self.models) > 1 and self.is_live and Console().width >= _COLUMNS_FROM

    def _take_turns(self, environment: ChatEnvironment, name: str, messages: list[Message]) -> None:
        """Let a model and the environment take turns, and print them."""
        said = ""
        model = self.models[name]
        if len(self.models) > 1:
            print_text(f"[{name}]")

        def show(text: str) -> None:
            nonlocal said
            print_text(text.removeprefix(said), end="")
            said = text

        def draw(ids: Sequence[int], within: int) -> Reply:
            nonlocal said
            said = ""
            began = monotonic()
            reply = model.go_on(ids, self.rollout, self.seed, self.turn, show, within=within)
            show(reply.text)
            print_text("")
            if remark := self._remark(reply, began):
                _note(remark)
            return reply

        try:
            environment.answer(name, messages, (self.seed, self.turn), draw, _note)
        except KeyboardInterrupt:
            if not self.is_live:
                raise
            environment.begin_anew()
            if messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": said})
            _note("\n(stopped; the environment begins anew)")

    def _in_turn(self, asked: Mapping[str, list[Message]]) -> dict[str, str]:
        """Print each model's answer while it grows."""
        said = {}
        for name in self.models:
            if len(self.models) > 1:
                print_text(f"[{name}]")
            said[name] = ""

            def show(text: str, name: str = name) -> None:
                print_text(text.removeprefix(said[name]), end="")
                said[name] = text

            remark = self._draw(name, asked[name], show)
            print_text("")
            if remark:
                _note(remark)
        return said

    def _side_by_side(self, asked: Mapping[str, list[Message]]) -> dict[str, str]:
        """Show the answers in columns while they grow."""
        from rich.console import Console
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text

        said = dict.fromkeys(self.models, "")

        def columns() -> Table:
            table = Table(expand=True)
            for name in said:
                table.add_column(Text(name), ratio=1)
            table.add_row(*(Text(printable(text)) for text in said.values()))
            return table

        console = Console(highlight=False)
        # The live picture ends at the height of the terminal. The whole is printed once it is there.
        with Live(get_renderable=columns, console=console, transient=True):
            remarks = []
            for name in self.models:

                def show(text: str, name: str = name) -> None:
                    said[name] = text

                remarks.append(f"{name}: {self._draw(name, asked[name], show)}")
        console.print(columns())
        _note("\n".join(remarks))
        return said

    def _draw(self, name: str, messages: Sequence[Message], show: Callable[[str], None]) -> str:
        """Show a model's answer while it grows, until its end or ctrl-C. Return a remark for the person who watches."""
        began = monotonic()
        try:
            answer = self.models[name].answer(messages, self.rollout, self.seed, self.turn, show)
        except KeyboardInterrupt:
            if not self.is_live:
                raise
            return "(stopped)"
        show(answer.text)
        return self._remark(answer, began)

    def _remark(self, answer: Reply, began: float) -> str:
        """Return what a person who watches may want to know of an answer."""
        count = len(answer.ids)
        cut = "; cut off, /max-tokens N allows more" if answer.is_cut else ""
        speed = f", {count / (monotonic() - began):.1f} a second" if self.is_live else ""
        return f"({count_text(count, 'token')}{speed}{cut})" if speed or cut else ""

    def _save(self) -> None:
        """Write this conversation in place of its beginning."""
        rows = [said for said in self.messages.values() if said and said[-1]["role"] == "assistant"]
        if self.file is None or not rows:
            return
        tools = {} if self.environment is None else self.environment.columns
        lines = [json.dumps({"messages": said, **tools}, ensure_ascii=False) for said in rows]
        with self.file.open("r+b") as file:
            file.truncate(self.start)
            file.seek(self.start)
            file.write("".join(f"{line}\n" for line in lines).encode())


def _writable(place: str) -> Path:
    path = Path(place).expanduser()
    with refusing(
        f"conversations cannot be saved in {place or 'a file without a name'}",
        want="a file that may be written",
        do="give another one, such as chats.jsonl",
    ):
        path.open("ab").close()
    return path


def _typed() -> Iterator[tuple[str, bool]]:
    """Yield each text, and whether it is a command."""
    prompts = ("> ", ". ") if sys.stdin.isatty() else ("", "")
    with suppress(EOFError):
        while True:
            line = input(prompts[0])
            text = line.strip()
            if text.startswith(_QUOTES):
                text = text.removeprefix(_QUOTES)
                while not text.endswith(_QUOTES):
                    text = f"{text}\n{input(prompts[1])}"
                yield text.removesuffix(_QUOTES).strip(), False
            elif text:
                yield text, line.startswith("/")

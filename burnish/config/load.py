"""Make a `RunConfig` from a YAML file and overrides, with the origin of each value.

Mistakes are reported together, with file and line or "command line". Relative paths count from the working directory. The command
line and Python's keywords may shorten a name to an ending that only one setting has (`lora.rank`, `precision`).
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from burnish.config.algorithm import FORMULAS
from burnish.config.credentials import refused_credentials, without_credentials
from burnish.config.keys import Key, known_keys, plain_name
from burnish.config.parsing import (
    MOST_CHARACTERS,
    Document,
    NotYAMLError,
    parse_document,
    parse_value,
)
from burnish.config.schema import RunConfig
from burnish.errors import BurnishError, MissingError, UsageError, refusing, together
from burnish.functions import did_you_mean, name_of
from burnish.redaction import redacted

DEFAULT = "default"
"""The origin of a value that nothing set."""
COMMAND_LINE = "command line"
"""The origin of a value that the command line set."""
_ARGUMENT = "argument"
"""The origin of a value from the Python API."""
_RECORDED = "recorded"
"""The origin of a value of a run's recorded configuration."""
_MAIN = {"model": "path", "data": "train", "reward": "functions", "rollout.environment": "function"}
"""Main keys of sections: one value in place of the section stands for them, as in `model=DIR data=x.jsonl`."""
_LONGEST_SHOWN = 80
_MOST_PROBLEMS = 20
"""Most problems in one error; nobody mends more at a time."""


def read_config(
    path: str | Path | RunConfig | None, overrides: Sequence[str] = (), own: Collection[str] = ()
) -> RunConfig:
    """Read `path` (None: only defaults; or a loaded configuration), then apply overrides `a.b=c` in order.

    A value is YAML (`optim.lr=1e-6`, `data.train=[a.jsonl]`, `steps=null`). One value stands for a list of one, or for a mapping
    with its main key (`reward.functions=numeric`, `model=DIR`). An override of a section (`rollout={n: 4}`) changes the keys it
    names; a list is replaced. `own` are the settings of the method's own, which an error may name.

    Raises `MissingError` for an absent file, and `UsageError` for broken YAML, unknown keys and wrong values.
    """
    return load_with_origins(path, overrides, own)[0]


def load_with_origins(
    path: str | Path | RunConfig | None, overrides: Sequence[str] = (), own: Collection[str] = ()
) -> tuple[RunConfig, Mapping[str, str]]:
    """Return the configuration and the origin of each setting: FILE:LINE, "command line" or "default"."""
    draft = _Draft(own)
    subject = "the command line"
    if isinstance(path, RunConfig):
        draft.set_all(_plain(path.model_dump(exclude_unset=True)), _RECORDED)
    elif path is not None:
        draft.take(read_document(path), str(path))
        subject = f"{path} and the command line" if overrides else str(path)
    typed = [_in_full(override) for override in overrides]
    for override in sorted(typed, key=lambda each: not _names_a_formula(each.partition("=")[0])):
        draft.override(override)
    config = draft.config(subject)
    names = [key.name for key in known_keys().values() if not key.section and "[" not in key.name]
    for formula in FORMULAS:
        names += [f"{formula}.{own}" for own in attrgetter(formula)(config).settings]
    return config, {name: _origin(draft.origins, name) for name in names}


def load_settings(
    source: str | os.PathLike[str] | Mapping[str, Any] | RunConfig | None,
    settings: Mapping[str, Any],
    own: Collection[str] = (),
) -> RunConfig:
    """Return the configuration of a file, mappings or another configuration (None: only defaults), with `settings` applied.

    `settings` has sections as mappings (`optim={"lr": 1e-5}`), dotted keys or short names. Raises as `read_config` does.
    """
    draft = _Draft(own)
    if isinstance(source, str | os.PathLike):
        draft.take(read_document(source), str(source))
    elif source is not None:
        values = source.model_dump(exclude_unset=True) if isinstance(source, RunConfig) else source
        if not isinstance(values, Mapping):
            raise UsageError(
                "this is not a configuration",
                have=f"an object of the type {type(values).__name__}",
                want="a YAML file, or settings as a mapping",
                do="give one of the two",
            )
        draft.set_all(_plain(values), _ARGUMENT)
    draft.set_all({_in_full(name): each for name, each in _plain(settings).items()}, _ARGUMENT)
    return draft.config("the settings")


def _in_full(override: str) -> str:
    """Return `name=value`, or a name alone, with the full name of its setting."""
    written, equals, value = override.partition("=")
    name = written.strip()
    if plain_name(name) in known_keys():
        return override
    from burnish.config.short_names import full_name

    return f"{full_name(name)}{equals}{value}"


def _plain(value: Any) -> Any:
    """Return a plain copy. A function becomes its name."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, type) or inspect.isroutine(value):
        return name_of(value)
    if hasattr(value, "tolist"):  # an array, or a number of numpy
        return value.tolist()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@dataclass(slots=True)
class _Draft:
    """Values of a future `RunConfig`, with origins and problems."""

    own: Collection[str]
    """The settings of the method's own."""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """By path; a path inside a value that was set as a whole has none."""
    problems: list[BurnishError] = field(default_factory=list)

    def take(self, document: Document, source: str) -> None:
        self.values = _fitted("", _plain(document.values), document.written)
        self.origins = {name: f"{source}:{line}" for name, line in document.lines.items()}
        for name in FORMULAS:
            if name in self.origins:  # perhaps of a name alone
                self.origins.setdefault(f"{name}.name", self.origins[name])

    def override(self, text: str) -> None:
        name, equals, written = text.partition("=")
        name = name.strip()
        if not equals or not name.isprintable() or not name:
            self.problems.append(
                UsageError(
                    f"{redacted(text)!r} is not an override",
                    have=redacted(text),
                    want="key=value",
                    do=_meant(text) if os.path.exists(text) else "write it like optim.lr=1e-6",
                )
            )
            return
        try:
            parsed = parse_value(written, name, name)
            self.set(name, _fitted(name, parsed.values, parsed.written), COMMAND_LINE)
        except UsageError as error:
            reason = error.reason if isinstance(error, NotYAMLError) else error.problem
            self.problems.append(
                UsageError(
                    f"the value of {name} on the command line is not YAML",
                    have=f"{_shown(written)}: {reason}",
                    want="a YAML value",
                    do="quote it: once for YAML and once for the shell",
                )
            )

    def set_all(self, values: Mapping[Any, Any], origin: str) -> None:
        for name, value in sorted(
            values.items(), key=lambda each: not _names_a_formula(str(each[0]))
        ):
            self.set(str(name), _fitted(str(name), value, {}), origin)

    def set(self, name: str, value: Any, origin: str) -> None:
        """Set a key, or in a section the keys of `value`."""
        if isinstance(value, Mapping) and value and _is_section(name):
            self.set_all({f"{name}.{key}": each for key, each in value.items()}, origin)
            return
        if name in _MAIN and not isinstance(value, Mapping | None):
            self.set_all({f"{name}.{_MAIN[name]}": value}, origin)
            return
        if name.removesuffix(".name") in FORMULAS:
            self._forget_another_formula(name.removesuffix(".name"), value)
        *above, last = name.split(".")
        target = self.values
        for depth, part in enumerate(above, start=1):
            if target.get(part) is None:
                target[part] = {}
            target = target[part]
            if not isinstance(target, dict):
                self._note_no_mapping(".".join(above[:depth]), target, name, value)
                return
        for part in [part for part in self.origins if part.startswith((f"{name}.", f"{name}["))]:
            del self.origins[part]  # it belongs to a part of the replaced value
        self.origins[name] = origin
        target[last] = value

    def _forget_another_formula(self, name: str, formula: Any) -> None:
        """Remove the settings of the formula that was named before, unless it is the same."""
        section, _, last = name.partition(".")
        above = self.values.get(section)
        before = above.get(last) if isinstance(above, dict) else None
        if isinstance(before, dict) and before.get("name", known_keys()[name].default) != formula:
            before.clear()
            for own in [own for own in self.origins if own.startswith(f"{name}.")]:
                del self.origins[own]

    def config(self, subject: str) -> RunConfig:
        """Return the configuration, or raise `UsageError` with all problems."""
        try:
            config = RunConfig.model_validate(self.values)
            self.problems += refused_credentials(config, partial(_origin, self.origins))
        except ValidationError as error:
            self._note_findings(error)
        if self.problems:
            raise together(self.problems, subject)
        return config

    def _note_findings(self, error: ValidationError) -> None:
        noted = set()
        for finding in error.errors(include_url=False, include_context=False):
            name = _name_of(finding["loc"])
            if finding["type"] == "extra_forbidden" and name.rpartition(".")[0] in FORMULAS:
                self._note_another_formulas(name, finding["input"])
            elif finding["type"] == "extra_forbidden":
                self._note_unknown(name, finding["input"])
            elif name in noted:
                continue
            elif finding["type"] == "missing" and isinstance(finding["loc"][-1], str):
                self._note_misfit(name, "is not set", "nothing")
            else:
                self._note_misfit(name, "has a value that does not fit", self._value_of(name))
            noted.add(name)
            if len(self.problems) >= _MOST_PROBLEMS:
                return

    def _note_no_mapping(self, above: str, whole: Any, name: str, value: Any) -> None:
        key = known_keys().get(above)
        if key is not None and "a mapping" in key.values:
            fault = "has a value that does not fit"
            self._note_misfit(above, fault, whole, f"give {above} as a mapping to set {name}")
        elif key is None or not key.section:  # pydantic reports a wrong section
            self._note_unknown(name, value)

    def _note_misfit(self, name: str, fault: str, value: Any, do: str | None = None) -> None:
        plain = plain_name(name)
        origin = _origin(self.origins, name)
        key = known_keys().get(plain) or known_keys()[plain.removesuffix("[]")]
        self.problems.append(
            UsageError(
                f"{name} {fault} ({origin})",
                have=value if fault == "is not set" else _shown(value),
                want=key.values if key.name == plain else f"each item in {key.values}",
                do=do or _advice(name, key, origin),
            )
        )

    def _note_unknown(self, name: str, value: Any) -> None:
        from burnish.config.foreign_names import foreign_names
        from burnish.config.suggestions import suggestion

        written = name in self.origins and name.partition(".")[0] not in foreign_names().sections
        if isinstance(value, Mapping) and value and not written:
            for part, inner in value.items():
                self._note_unknown(f"{name}.{part}", inner)
            return
        want, do = suggestion(name, value, self.own)
        origin = _origin(self.origins, name)
        have = redacted(f"{name}: {_shown(value)}")
        self.problems.append(
            UsageError(f"there is no setting {name} ({origin})", have=have, want=want, do=do)
        )

    def _note_another_formulas(self, name: str, value: Any) -> None:
        """Note a setting that the built-in formula does not have."""
        formula, _, last = name.rpartition(".")
        kind = FORMULAS[formula]
        named = self._value_of(formula).get("name", known_keys()[formula].default)
        own = kind.own_settings[named].model_fields if named in kind.own_settings else ()
        owners = [f"{formula}={each}" for each in kind.formulas_with(last)]
        do = f"set {' or '.join(owners)}, or remove it" if owners else did_you_mean(last, own)
        self.problems.append(
            UsageError(
                f"{formula} {named} has no setting {last} ({_origin(self.origins, name)})",
                have=redacted(f"{name}: {_shown(value)}"),
                want=f"one of {', '.join(own)}" if own else "no setting of its own",
                do=do or f"remove it; `burnish config explain {formula}` lists all",
            )
        )

    def _value_of(self, name: str) -> Any:
        value: Any = self.values
        for part in re.findall(r"[^.\[\]]+", name):
            value = value[int(part)] if isinstance(value, list) else value[part]
        return value


def _fitted(name: str, value: Any, written: Mapping[str, str]) -> Any:
    """Return a value in its setting's form: one item as a list, a main value as a mapping, a number as its text.

    `written` has numbers and truth values as typed, by path.
    """
    key = known_keys().get(plain_name(name))
    if name in FORMULAS and not isinstance(value, dict | None):
        return {"name": written.get(name, value)}
    if isinstance(value, dict) and (key is None or key.section):
        paths = {part: f"{name}.{part}" if name else str(part) for part in value}
        return {part: _fitted(paths[part], each, written) for part, each in value.items()}
    if key is None or value is None:
        return value
    if not key.is_list:
        return written.get(name, value) if key.is_text else value
    if not isinstance(value, list):
        written = {path.replace(name, f"{name}[0]", 1): text for path, text in written.items()}
        value = [value]
    items = [(f"{name}[{index}]", each) for index, each in enumerate(value)]
    if key.item:
        main = key.item[0]
        items = [(path, {main: each} if isinstance(each, str) else each) for path, each in items]
        return [_fitted(path, each, written) for path, each in items]
    return [written.get(path, each) if key.is_text else each for path, each in items]


def _names_a_formula(name: str) -> bool:
    """Return whether a key is a formula's name. It comes first, because the settings of another formula go with it."""
    return name.strip().removesuffix(".name") in FORMULAS


def _is_section(name: str) -> bool:
    return name in known_keys() and bool(known_keys()[name].section)


def _origin(origins: Mapping[str, str], name: str) -> str:
    """Return the origin of a value, or of the whole that contains it."""
    whole = name
    while whole and whole not in origins:
        whole = whole[: max(whole.rfind("."), whole.rfind("["), 0)]
        whole = "" if _is_section(whole) else whole
    sources = [origins[whole]] if whole else []
    sources += {
        origin
        for part, origin in origins.items()
        if part.startswith(f"{name}.") and origin in (COMMAND_LINE, _ARGUMENT)
    }
    return ", ".join(sources) or DEFAULT


def _name_of(location: Sequence[int | str]) -> str:
    """Return pydantic's location as a dotted key, down to a setting."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
        key = known_keys().get(plain_name(name))
        if key is not None and not key.section and not key.item:
            break
    return name


def _shown(value: Any) -> str:
    text = redacted(json.dumps(without_credentials(value), ensure_ascii=False, default=str))
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


def _advice(name: str, key: Key, origin: str) -> str:
    if key.section and origin == COMMAND_LINE:
        return f"set its keys: {name}.KEY=value"
    return f"see `burnish config explain {key.name}`"


def read_document(path: str | os.PathLike[str]) -> Document:
    """Return a file's YAML mapping, with the line of every key. Raises `MissingError` or `UsageError`."""
    if str(path).endswith((".jsonl", ".parquet", ".csv", ".arrow")) and Path(path).is_file():
        raise UsageError(
            f"{path} holds rows, not settings", want="a YAML file, or key=value", do=_meant(path)
        )
    return parse_document(read_text(path), str(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """Return a file's text. Raises `MissingError`, or `UsageError` for anything unreadable, a directory or a pipe."""
    with refusing(
        f"{path} cannot be read",
        want="a text in UTF-8",
        do="give another file, or change who may read it",
    ):
        if Path(path).is_dir():
            raise UsageError(f"{path} is a directory", want="a text file", do=_meant(path))
        if Path(path).exists() and not Path(path).is_file():
            do = "write its content to a file"
            raise UsageError(f"{path} is a pipe or a device", want="a text file", do=do)
        try:
            with Path(path).open(encoding="utf-8") as file:
                return file.read(MOST_CHARACTERS + 1)
        except FileNotFoundError:
            raise MissingError(
                f"there is no configuration file {path}",
                have=f"nothing at {Path(path).absolute()}",
                want="a YAML file",
                do=_meant(path),
            ) from None


def _meant(path: str | os.PathLike[str]) -> str:
    from burnish.config.suggestions import meant_by_path

    return meant_by_path(str(path))

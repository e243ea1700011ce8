"""Turn arguments of verl, TRL and OpenRLHF into a configuration, by `burnish.config.foreign_names`.

Arguments are `key=value`, `--flag value`, YAML, or lines of a shell script. Unknown ones become comments.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from string import Template
from typing import Any

from burnish.config.constraints import Command, check
from burnish.config.document import dotted, one_line, write_yaml
from burnish.config.foreign_names import translate_setting
from burnish.config.keys import is_default, known_keys
from burnish.config.load import load_settings, read_document, read_text
from burnish.config.parsing import parse_value
from burnish.config.suggestions import suggestion
from burnish.errors import UsageError, count_text

_NAME = re.compile(r"\+{0,2}[A-Za-z_][\w.]*")
_ENDS_OF_A_COMMAND = ("&&", "||", "|", ";", "&")
_OF_RL = ("algorithm.", "critic.", "reward.", "rollout.")
_YAML = (".yaml", ".yml")
_LARGEST = 1e15
_NUMBERS = (
    "train_batch_size", "ppo_mini_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps",
    "num_generations", "generation_batch_size", "steps_per_generation", "num_processes", "nproc_per_node",
    "adam_beta1", "adam_beta2", "warmup_ratio", "max_steps", "epsilon_high",
)  # fmt: skip
Names = dict[str, Any]
"""Values by name, as another framework calls it."""


def translated(words: Sequence[str]) -> str:
    """Return YAML with comments for a file's name or arguments. Raises `UsageError` if they set nothing."""
    is_file = len(words) == 1 and "=" not in words[0] and not words[0].startswith("-")
    given = _of_file(words[0]) if is_file else _of_words(words)
    if not given:
        raise UsageError(
            "there is nothing to translate",
            have=shlex.join(words),
            want="key=value, --flag value, a YAML file or a shell script",
            do="give the arguments of verl or TRL as they are typed",
        )
    names, remarks = dict(given), list[str]()
    _require_numbers(names)
    settings = _of_several(names)
    for name, value in names.items():
        want, do = suggestion(name)
        is_known = want != "a known key" and not want.startswith("one of ")
        found = translate_setting(name, value)
        if found is None and not is_known and (key := _same_last_part(name)):
            found = {key: value}
        refused = "" if found is None else _refusal(found)
        if found is None or refused:
            remark = want if is_known else do if do.startswith("did you mean") else "not known here"
            remarks.append(f"{name}={one_line(value)}: {refused or remark}")
            continue
        for key, each in found.items():
            if settings.setdefault(key, each) != each:
                remarks.append(
                    f"{name}={one_line(value)}: {key} is {one_line(settings[key])} already"
                )
    command: Command = "rl" if any(key.startswith(_OF_RL) for key in settings) else "sft"
    if command == "sft" and "batch.prompts" in settings:
        settings["batch.examples"] = settings.pop("batch.prompts")
    lines, tree, order = [f"# for burnish {command}"], dict[str, Any](), list(known_keys())
    for key in sorted(
        settings, key=lambda each: order.index(each) if each in order else len(order)
    ):
        if not is_default(key, settings[key]):
            *sections, last = key.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = settings[key]
    lines += write_yaml(tree).splitlines() if tree else []
    lines += ["", "# Left out:", *(f"#   {remark}" for remark in remarks)] if remarks else []
    try:
        check(load_settings(tree, {}), command, None)
    except UsageError as error:
        lines += ["", "# Still to do:", *(f"#   {line}" for line in str(error).splitlines())]
    return "\n".join(lines) + "\n"


def _of_file(name: str) -> Names:
    if name.endswith(_YAML):
        return dict(dotted(read_document(name).values))
    text = re.sub(r"`#.*?`", "", read_text(name)).replace("\\\n", " ")
    assigned = re.findall(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S*)\s*$", text, re.M)
    for variable, value in reversed(assigned):
        text = Template(text).safe_substitute({variable: value.strip("\"'")})
    text = os.path.expandvars(text)
    text = re.sub(r"^\s*(?:export\s+)?[A-Za-z_]\w*=\S*\s*$", "", text, flags=re.M)
    try:
        return _of_words(shlex.split(text, comments=True))
    except ValueError as error:
        raise UsageError(
            f"{name} is not a shell script", have=error, do="give the arguments themselves"
        ) from None


def _of_words(words: Sequence[str]) -> Names:
    """Read `key=value` and `--flag value`; leave out anything else."""
    given: Names = {}
    flag = ""
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            name = name.replace("-", "_")
        if equals and _NAME.fullmatch(name):
            given[name.lstrip("+")], flag = _value(text), ""
        elif word.startswith("--"):
            flag = name
            given[flag] = True
        elif word in _ENDS_OF_A_COMMAND or word.endswith(".py"):
            flag = ""
        elif flag:
            before = [] if given[flag] is True else [given[flag]]
            before = before[0] if before and isinstance(before[0], list) else before
            given[flag] = [*before, _value(word)] if before else _value(word)
    if str(given.get("config", "")).endswith(_YAML):
        given = {**_of_file(given.pop("config")), **given}
    return given


def _value(text: str) -> Any:
    try:
        return parse_value(text, "value").values
    except UsageError:
        return text


def _require_numbers(names: Names) -> None:
    for name, value in names.items():
        is_number = isinstance(value, int | float) and abs(value) < _LARGEST
        if name.rpartition(".")[2] in _NUMBERS and not is_number and value is not None:
            raise UsageError(
                f"{name} is no number", have=one_line(value), want="a number", do=f"correct {name}"
            )


def _take(names: Names, *ends: str) -> list[Any]:
    """Remove the first name that ends in each of `ends`; return their values, or None."""
    found = [next((name for name in names if f".{name}".endswith(f".{end}")), "") for end in ends]
    return [names.pop(name, None) for name in found]


def _of_several(names: Names) -> Names:
    """Translate settings that depend on several arguments, and remove these."""
    settings: Names = {}
    path, function = _take(names, "custom_reward_function.path", "custom_reward_function.name")
    if path:
        settings["reward.functions"] = f"{path}:{function or 'compute_score'}"
    functions, weights = _take(names, "reward_funcs", "reward_weights")
    if functions:
        listed = functions if isinstance(functions, list) else [functions]
        given = weights if isinstance(weights, list) else [weights or 1.0] * len(listed)
        if len(given) != len(listed):
            raise UsageError(
                "reward_weights does not fit reward_funcs",
                have=f"{count_text(len(given), 'weight')}, {count_text(len(listed), 'function')}",
                want="a weight for each function",
                do="correct reward_weights, or leave it out",
            )
        settings["reward.functions"] = [
            {"function": _function(str(each)), "weight": weight}
            for each, weight in zip(listed, given, strict=True)
        ]
    for switch, coefficient in (("use_kl_loss", "kl_loss_coef"), ("use_kl_in_reward", "kl_coef")):
        if not any(name.endswith(switch) and value for name, value in names.items()):
            _take(names, switch, coefficient)
    betas = _take(names, "adam_beta1", "adam_beta2")
    if betas != [None, None]:
        usual = zip(betas, (0.9, 0.999), strict=True)
        settings["optim.betas"] = [each if beta is None else beta for beta, each in usual]
    for key, main, parts in (
        ("model.path", ("model_name_or_path", "model.path"), ("model_revision",)),
        ("data.train", ("dataset_name",), ("dataset_config", "dataset_train_split")),
    ):
        suffixes = [part for part in _take(names, *parts) if part]
        place = next((each for each in _take(names, *main) if each), None)
        if place:
            mark = "@" if key == "model.path" else ":"
            settings[key] = f"{place}{mark if suffixes else ''}{'/'.join(map(str, suffixes))}"
    settings |= _batch(names)
    ratio, steps = _take(names, "warmup_ratio", "max_steps")
    settings |= {} if steps in (None, -1) else {"steps": steps}
    if ratio and "steps" in settings:
        settings["optim.warmup_steps"] = round(ratio * steps)
    elif ratio:
        names["warmup_ratio"] = ratio
    if names.get("epsilon_high"):  # with cispo, TRL caps the whole ratio at it
        high = names.pop("epsilon_high")
        settings["algorithm.clip_high"] = high - 1 if names.get("loss_type") == "cispo" else high
    return settings


def _batch(names: Names) -> Names:
    whole = next(
        (value for name, value in names.items() if name.endswith("train_batch_size")), None
    )
    (mini,) = _take(names, "ppo_mini_batch_size")
    if mini and whole and whole % mini == 0:
        return {"batch.minibatches": whole // mini}
    if mini:  # the table says how to choose
        names["ppo_mini_batch_size"] = mini
    each, pieces, generations, generated, ratio, *processes = _take(
        names, "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations",
        "generation_batch_size", "steps_per_generation", "num_processes", "nproc_per_node",
    )  # fmt: skip
    settings: Names = {"rollout.n": generations} if generations else {}
    if each or generated:
        devices = next((count for count in processes if count), 1)
        pieces = pieces or 1
        sequences = generated or each * devices * (ratio or pieces)
        settings["batch.prompts"] = max(1, sequences // (generations or 1))
        settings |= {"batch.minibatches": max(1, ratio // pieces)} if ratio else {}
    return settings


def _function(name: str) -> str:
    """Return a function's name here; only TRL's own have no module."""
    if ":" in name:
        return name
    module, _, function = name.rpartition(".")
    return f"{module or 'trl.rewards'}:{function}"


def _same_last_part(name: str) -> str | None:
    """Return the only key, or the only one of rollout, with a name's last part."""
    keys = [key for key in known_keys() if key.rpartition(".")[2] == name.rpartition(".")[2]]
    keys = [key for key in keys if not known_keys()[key].section and "[" not in key]
    if len(keys) > 1:
        keys = [key for key in keys if key.startswith("rollout.")]
    return keys[0] if len(keys) == 1 else None


def _refusal(settings: Names) -> str:
    """Return why values do not fit, or ""."""
    try:
        load_settings({}, settings)
    except UsageError as error:
        return f"{', '.join(settings)} is {error.want}"
    return ""

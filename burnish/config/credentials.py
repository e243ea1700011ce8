"""Keep credentials out of configurations, which are written into a run's directory, its report and its trackers.

A text `$NAME` under a key for credentials in a reward function's `kwargs` stands for an environment variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from burnish.config.schema import RewardConfig, RunConfig
from burnish.errors import UsageError
from burnish.redaction import redacted

_KEY = re.compile(
    r"(?:\w*_)?(?:password|passwd|passphrase|pwd|secrets?|credentials?|authorization|cookie"
    r"|(?:api|access|account|auth|private|secret|signing)_?key)"
    r"|(?:(?:\w*_)?(?:access|api|auth|bearer|github|hf|hub|id|oauth|openai|refresh|security|service|session|user|wandb)_?)?token"
)
"""Keys of credentials. `eos_token` and `max_tokens` are none."""
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_URL = re.compile(r"(?!hf:)[A-Za-z][\w+.-]*://")
_KWARGS = re.compile(r"reward\.functions\[\d+\]\.kwargs\.")


def refused_credentials(config: RunConfig, origin_of: Callable[[str], str]) -> Iterator[UsageError]:
    """Yield an error for every credential in a configuration. None repeats the credential."""
    for name, key, text in _texts(config.model_dump(), "", ""):
        is_url = _URL.match(text) and redacted(text) != text
        if not (is_url or redacted(text) == "***" or _is_credential(key, text)):
            continue
        do = "remove it"
        if _KWARGS.match(name) and not is_url:
            variable = re.sub(r"\W", "_", key).upper()
            do = f"put it into an environment variable such as {variable}, and give ${variable} instead"
        elif name == "tracking.traces.endpoint":
            do = f"set {name}=env, with OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_HEADERS"
        elif is_url:
            do = "give credentials in the environment or the files where the service's tools look for them"
        yield UsageError(
            f"{name} holds a credential ({origin_of(name)})",
            have="a URL with a user, password or key" if is_url else f"{len(text)} characters",
            want="no credentials, because the configuration is written into the run's directory and its report",
            do=do,
        )


def with_environment(rewards: RewardConfig) -> tuple[RewardConfig, frozenset[str]]:
    """Return rewards with values of environment variables in `kwargs`, and these values.

    Raises `UsageError` for a variable that is not set.
    """
    functions = []
    values = set[str]()
    for function in rewards.functions:
        kwargs = _resolved(function.kwargs, "", f"{function.function}: kwargs", values)
        functions.append(function.model_copy(update={"kwargs": kwargs}))
    return rewards.model_copy(update={"functions": functions}), frozenset(values - {""})


def without_credentials(value: Any, key: str = "") -> Any:
    """Return a copy in which `***` stands for each credential, or the variable that holds it."""
    if isinstance(value, Mapping):
        return {name: without_credentials(each, str(name)) for name, each in value.items()}
    if isinstance(value, list):
        return [without_credentials(each, key) for each in value]
    return "***" if isinstance(value, str) and value and _is_key(key) else value


def _texts(value: Any, name: str, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, nearest key and text of every text."""
    if isinstance(value, Mapping):
        for part, inner in value.items():
            yield from _texts(inner, f"{name}.{part}" if name else str(part), str(part))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _texts(inner, f"{name}[{index}]", key)
    elif isinstance(value, str):
        yield name, key, value


def _is_key(key: str) -> bool:
    plain = re.sub(r"\W", "_", _CAMEL.sub("_", key)).lower()
    return _KEY.fullmatch(plain) is not None


def _is_credential(key: str, text: str) -> bool:
    return bool(text) and _is_key(key) and not _VARIABLE.fullmatch(text)


def _resolved(value: Any, key: str, name: str, values: set[str]) -> Any:
    if isinstance(value, Mapping):
        return {n: _resolved(item, str(n), f"{name}.{n}", values) for n, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, key, name, values) for item in value]
    match = _VARIABLE.fullmatch(value) if isinstance(value, str) and _is_key(key) else None
    if match is None:
        return value
    variable = match[1] or match[2]
    if variable not in os.environ:
        raise UsageError(
            f"{name} names an environment variable that is not set",
            have=f"no {variable}",
            want="the credential",
            do=f"export {variable}",
        )
    values.add(os.environ[variable])
    return os.environ[variable]

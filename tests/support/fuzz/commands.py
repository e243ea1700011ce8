"""Hostile inputs of a command: each ends with a documented exit code, in time, without a traceback, and leaves nothing behind.

A generator writes files into an empty directory and returns the words of a command. All that is random comes from its seed, so
`PYTHONPATH=tests:. python -m support.fuzz.commands GENERATOR SEED` shows one input again. Add a generator to `GENERATORS`, with how many inputs are quick.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from burnish.cli.main import main
from burnish.config.foreign_names import foreign_names
from burnish.config.keys import known_keys
from support.fuzz.directories import model_directory, run_directory, tokenizer
from support.fuzz.mutations import WORDS, displace, mutated, nasty
from support.fuzz.training_inputs import rewards, rows, template

DEADLINE_SECONDS, PATIENCE_SECONDS = 60, 300
"""Of the processor's time, and of waiting. Only what hangs takes that long, whatever else the machine does."""
CODES = range(7)
"""Exit codes of a command that no signal stops."""
MOST_CHARACTERS = 20_000
"""Of a message: a hostile file must not fill the screen."""
_READERS = [
    *(["config", name] for name in ("check", "show", "explain", "translate")),
    *(["ckpt", name] for name in ("ls", "show", "verify", "diff")),
    *([name] for name in ("plan", "eval", "chat", "runs")),
]
"""Commands that write nothing."""
_PARTIAL = re.compile(r"(^|/)\.inflight-|\.[0-9a-f]{32}$")
"""Names of what is being written."""


class Hung(BaseException):
    """The deadline has passed; no handler of errors takes it for one."""


def complaint(make: Callable[[random.Random], list[str]], seed: int) -> str | None:
    """Try one input in a directory of its own; return what is wrong with how the command ended, or None."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            argv = make(random.Random(seed))
            before = _listing()
            code, said = _ended(argv)
            wrong = [f"exit code {code}"] if code not in CODES else []
            wrong += ["a traceback"] if "Traceback" in said else []
            wrong += [f"{len(said)} characters"] if len(said) > MOST_CHARACTERS and code else []
            wrong += [f"left: {name}" for name in _left(argv, code, before)]
        finally:
            os.chdir(here)
    shown = " ".join(word[:200] for word in argv)
    start = said.find("Traceback")
    told = f"{', '.join(wrong)}: seed {seed}: {shown}\n{said[start:][:3000] if start >= 0 else said[-3000:]}"
    return told.encode("utf-8", "backslashreplace").decode() if wrong else None


def _left(argv: list[str], code: int | None, before: set[tuple[str, int]]) -> list[str]:
    """What a command has changed that it should not have.

    A run that goes on and the removal of steps may end halfway, with whole files alone. Every other command writes all or nothing.
    """
    changed = [name for name, _ in before ^ _listing()]
    if "--dry-run" in argv or argv[:2] in _READERS or argv[:1] in _READERS:
        return sorted(changed)
    if argv[0] in ("sft", "rl") or argv[:2] == ["ckpt", "gc"]:
        return sorted(name for name in changed if _PARTIAL.search(name) and Path(name).exists())
    return sorted(changed) if code else []


def _listing() -> set[tuple[str, int]]:
    """Every file and directory below this one, a file with its size.

    Left out: bytecode, which importing a reward function leaves.
    """
    found = (path for path in Path().rglob("*") if "__pycache__" not in path.parts)
    return {(str(path), 0 if path.is_dir() else path.lstat().st_size) for path in found}


def _ended(argv: list[str]) -> tuple[int | None, str]:
    """The exit code of a command, None if it hung, and what it wrote."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hung

    output = io.TextIOWrapper(io.BytesIO(), "utf-8")
    errors = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    code, level = None, logging.getLogger("burnish").level
    handlers = [signal.signal(each, stop) for each in (signal.SIGALRM, signal.SIGPROF)]
    others = signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, DEADLINE_SECONDS)
    given = sys.stdin
    try:
        with (
            contextlib.suppress(Hung),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
        ):
            code = main(argv)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        for each, handler in zip((signal.SIGALRM, signal.SIGPROF), handlers, strict=True):
            signal.signal(each, handler)
        signal.setitimer(signal.ITIMER_REAL, *others)  # pytest-timeout's
        logging.getLogger("burnish").setLevel(level)
        sys.stdin = given
    said = []
    for stream in (output, errors):
        stream.flush()
        said.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return code, "".join(said)


# Configurations.

_MODEL = {
    "model_type": "qwen3", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
}  # fmt: skip
_SOUND: dict[str, Any] = {
    "name": "fuzz",
    "steps": 3,
    "model": {"path": "nowhere"},
    "data": {"train": ["none.jsonl"], "validation": ["none.jsonl"]},
    "batch": {"prompts": 4, "examples": 4, "minibatches": 2, "tokens_per_device": 64},
    "rollout": {"n": 2, "max_response_length": 8, "stop": ["x"]},
    "reward": {
        "functions": [{"function": "numeric", "weight": 2.0, "kwargs": {"a": [1, {"b": 2}]}}]
    },
    "optim": {"lr": 1e-4, "schedule": "cosine", "betas": [0.9, 0.99]},
    "algorithm": {"kl": {"coef": 0.1}, "policy_loss": "gspo"},
    "evaluation": {"every": 2},
    "checkpoint": {"save_every": 1, "keep_every": 2},
}
_TEXTS = [
    "[" * 3000, "{a: " * 3000, "- " * 3000, "? " * 2000, "a: &a [*a]", "a: &a {<<: *a}", "\t", "\x00", "\ufeffa: 1", "%YAML 9.9\n---\n",
    "---\n---\n", "a: |\n" + " x\n" * 9000, "a: '" + "x" * 150_000, "#" * 190_000, "x" * 300_000, ": ", "? ", "!!map", "...", "a: 1\na: 2",
    "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"k{n}: &{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)),
    "".join(f"k{n}: {n}\n" for n in range(4000)),
]  # fmt: skip


def _name(rng: random.Random) -> str:
    """The name of a setting here or elsewhere, misspelt now and then."""
    foreign = foreign_names()
    names = [
        *known_keys(),
        "reward_weights",
        "warmup_ratio",
        *foreign.renamed,
        *foreign.different,
        *foreign.absent,
        *WORDS,
    ]
    name = rng.choice(names)
    return name + rng.choice(["", "", "", "s", ".x", "[0]", ".", "="])


def _fitting(rng: random.Random) -> str:
    """An override whose value has the type of its setting, as large and as small as can be."""
    key = rng.choice(
        [key for key in known_keys().values() if not key.section and "[" not in key.name]
    )
    if "one of " in key.values:
        value = rng.choice(key.values.partition("one of ")[2].split(", or ")[0].split(", "))
    elif key.values.startswith("a whole number"):
        value = str(rng.choice([0, 1, 2, 3, 7, 64, 1000, 2**31, 10**15, 2**62, 2**63 - 1]))
    elif key.values.startswith("a number"):
        value = rng.choice(["0", "0.5", "1", "1.0", "5e-324", "1e-9", "0.999", "1e308", "3", "-1"])
    elif key.values.startswith("true"):
        value = rng.choice(["true", "false"])
    else:
        value = rng.choice(
            [
                "x",
                "none.jsonl",
                "numeric",
                "null",
                "[0.9, 0.95]",
                "s3://b/c",
                "x.py:f",
                "model",
                "{a: 1}",
            ]
        )
    return f"{key.name}={value}"


def _text(rng: random.Random) -> str:
    """A configuration in YAML, with one or more things in it that nobody should write."""
    kind = rng.random()
    if kind < 0.12:
        return rng.choice(_TEXTS)
    settings = _SOUND
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 5])):
        settings = mutated(rng, settings, _name)
    lines = (
        [f"{key}: {json.dumps(value)}" for key, value in settings.items()]
        if isinstance(settings, dict)
        else [str(settings)]
    )
    text = "\n".join(lines)
    if kind < 0.3:  # something in the place of something else
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice(WORDS + _TEXTS[:9]) + text[place + rng.randrange(9) :]
    return text


def _file(rng: random.Random) -> str:
    """Make something in the place of a configuration, and return its name."""
    kind = rng.randrange(20)
    path = Path("c.yaml")
    if kind < 2:
        displace(rng, path)
    elif kind == 2:
        path.mkdir()
        (path / "config.yaml").write_text(_text(rng), encoding="utf-8", errors="surrogatepass")
    elif kind == 3:
        path.write_bytes(rng.randbytes(rng.randrange(2000)))
    elif kind == 4:
        return rng.choice(
            ["none.yaml", "x" * 300, "a/b/c", "c.yaml/x", "/dev/null", "/dev/zero", ".", "", "-"]
        )
    else:
        path.write_text(_text(rng), encoding="utf-8", errors="surrogatepass")
    return path.name


def configuration(rng: random.Random) -> list[str]:
    """A command about settings, or one whose model and data are nowhere."""
    command = rng.choice(
        ["config check"] * 4
        + [
            "config show",
            "config show",
            "config translate",
            "config explain",
            "plan",
            "sft",
            "rl",
            "eval",
        ]
    ).split()
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(_MODEL))
    if command[-1] == "explain":
        return [*command, _name(rng)]
    words = [_file(rng)] if rng.random() < 0.6 else []
    words += [_fitting(rng) for _ in range(rng.choice([0, 0, 1, 2, 5]))]
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        name = _name(rng) if rng.random() < 0.8 else f"--{_name(rng)}"
        value = nasty(rng)
        words.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    if command == ["plan"]:
        words += [
            "model.path=model",
            "--devices",
            rng.choice(
                [
                    "8xH100-80G",
                    "64xH100-80G",
                    "1xCPU-8G",
                    "0xH100",
                    "1000000xH100",
                    "x",
                    "2xCPU-1G",
                    "1xCPU-0G",
                ]
            ),
        ]
    elif command[-1] in ("sft", "rl", "eval"):
        words += ["model.path=./nowhere", "model.fresh=null"]  # however sound the rest is
    return [*command, *(word.replace("\0", "").replace("\ud800", "\udc80") for word in words)]


@dataclass(frozen=True)
class Generator:
    """Makes inputs of one kind."""

    make: Callable[[random.Random], list[str]]
    """Writes files into the working directory, and returns the words of a command."""
    inputs: int
    """How many are tried in `make test`."""
    nightly: int
    """How many are tried by night."""


GENERATORS: dict[str, Generator] = {
    "configuration": Generator(configuration, 75, 2000),
    "rows": Generator(rows, 15, 400),
    "template": Generator(template, 8, 150),
    "rewards": Generator(rewards, 5, 80),
    "model_directory": Generator(model_directory, 8, 300),
    "tokenizer": Generator(tokenizer, 5, 150),
    "run_directory": Generator(run_directory, 12, 600),
}


def complaints(name: str, seeds: range) -> Iterator[str]:
    """Try the inputs of a generator; yield what is wrong."""
    for seed in seeds:
        if (wrong := complaint(GENERATORS[name].make, seed)) is not None:
            yield f"{name}: {wrong}"


if __name__ == "__main__":
    name, first, *end = sys.argv[1:]
    for found in complaints(name, range(int(first), int(end[0]) if end else int(first) + 1)):
        print(found, end="\n\n", flush=True)

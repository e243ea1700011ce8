"""Check that inputs exist, before torch is loaded.

URLs are listed and not copied. A dry run also looks into the files (`burnish.train.dry_run`).
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path

from burnish.config.constraints import Command
from burnish.config.schema import (
    CriticConfig,
    EngineConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
)
from burnish.data.columns import READERS, is_data
from burnish.errors import BurnishError, MissingError, few, install, together
from burnish.files.cache import select
from burnish.files.remote import Remote, RetryPolicy
from burnish.files.safetensors import ADAPTER_CONFIG
from burnish.files.urls import is_url

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""One of these makes a directory a tokenizer's."""

# A service that is down, or a host that does not exist, should show before somebody looks elsewhere.
_PATIENCE = RetryPolicy(seconds=20)


def require_inputs(config: RunConfig, command: Command, run_dir: Path | None = None) -> None:
    """Raise `MissingError` naming every input of `command` that does not exist.

    With `run_dir` the model and tokenizer come from that run's checkpoint and are not looked for.
    """
    problems = [] if run_dir else list(_models(config.model, config.critic, config.engine))
    names = ("validation",) if command == "eval" else ("train", "validation")
    for name in names:
        for path in getattr(config.data, name):
            problems += _data(path, f"data.{name}")
    if command != "sft":
        problems += _rewards(config.reward)
    if problems:
        raise together(problems, "the inputs of this run")


def data_sizes(path: str) -> list[int]:
    """Return the sizes of the files of an entry of `data.train`: a file, a directory or a pattern."""
    if is_url(path):
        return [file.size for file in select(Remote(path, _PATIENCE), is_data).files]
    return [file.stat().st_size for file in data_files(path)]


def data_files(path: str) -> list[Path]:
    """Return the local files of an entry of `data.train`, in no order."""
    plain = Path(path).expanduser()
    if plain.is_dir():
        return [each for each in plain.iterdir() if is_data(each.name)]
    if plain.exists():
        return [plain]
    return [Path(each) for each in glob.glob(str(plain), recursive=True)]


def _models(
    model: ModelConfig, critic: CriticConfig, engine: EngineConfig
) -> Iterator[BurnishError]:
    if model.path is not None:
        yield from _directory(model.path, "model.path", ["config.json"])
    if critic.path is not None:
        yield from _directory(critic.path, "critic.path", ["config.json"])
    if model.lora.path is not None:
        yield from _directory(model.lora.path, "model.lora.path", [ADAPTER_CONFIG])
    if model.adapter is not None and not _importable("peft"):
        yield MissingError(
            "model.lora needs a package that is not installed",
            have="no package peft",
            want="peft, which has the adapter's modules",
            do=f"{install('lora')}, or remove model.lora",
        )
    if engine.kind == "megatron" and not _importable("megatron"):
        yield MissingError(
            "engine.kind megatron needs a package that is not installed",
            have="no package megatron",
            want="megatron-core 0.16",
            do=f"{install('megatron')}, or set engine.kind=torch",
        )
    if model.tokenizer is not None:
        yield from _directory(model.tokenizer, "model.tokenizer", TOKENIZER_FILES)
    if isinstance(model.fresh, str):
        yield from _file(model.fresh, "model.fresh")
    if model.chat_template is not None:
        yield from _file(model.chat_template, "model.chat_template")


def _directory(path: str, setting: str, members: Sequence[str]) -> Iterator[BurnishError]:
    if is_url(path):
        yield from _remote_directory(path, setting, members)
        return
    folder, wanted = Path(path).expanduser(), " or ".join(members)
    if not folder.is_dir():
        yield MissingError(
            f"{setting}: there is no directory {path}",
            have=_neighbours(folder),
            want=f"a directory on this machine that holds {wanted}",
            do=f"correct {setting}; a model on a hub has to be downloaded first",
        )
    elif not any((folder / each).is_file() for each in members):
        adapter = (folder / ADAPTER_CONFIG).is_file()
        merge = f"merge it into its model with burnish ckpt export {folder.parent} DIRECTORY --merged, and set {setting}=DIRECTORY"
        yield MissingError(
            f"{setting}: {path} holds no {wanted}",
            have=few(sorted(each.name for each in folder.iterdir())) or "nothing",
            want=f"a Hugging Face directory with {wanted}",
            do=merge if adapter else f"correct {setting}",
        )


def _remote_directory(url: str, setting: str, members: Sequence[str]) -> Iterator[BurnishError]:
    remote, wanted = Remote(url, _PATIENCE), " or ".join(members)
    if not any(remote.stat(each) for each in members):
        names = remote.names()
        yield MissingError(
            f"{setting}: {url} holds no {wanted}",
            have=few(names) or "nothing",
            want=f"a Hugging Face directory with {wanted}",
            do=f"correct {setting}",
        )


def _file(path: str, setting: str) -> Iterator[BurnishError]:
    if is_url(path):
        yield from _remote_file(path, setting)
        return
    file = Path(path).expanduser()
    if not file.is_file():
        yield MissingError(
            f"{setting}: there is no file {path}",
            have=_neighbours(file),
            want="a file",
            do=f"correct {setting}",
        )


def _remote_file(url: str, setting: str) -> Iterator[BurnishError]:
    remote = Remote(url, _PATIENCE)
    if remote.stat() is None:
        folder = remote.parent()
        yield MissingError(
            f"{setting}: there is no file {url}",
            have=f"{folder} with {few(folder.names()) or 'nothing'}",
            want="a file",
            do=f"correct {setting}",
        )


def _data(path: str, setting: str) -> Iterator[BurnishError]:
    have = _instead_of_data(path)
    if have is not None:
        yield MissingError(
            f"{setting}: nothing to read at {path}",
            have=have,
            want=f"a {', '.join(sorted(READERS))} file, a directory of such, or a pattern that matches",
            do=f"correct {setting}",
        )


def _instead_of_data(path: str) -> str | None:
    """What lies where data should be; None where there are data."""
    try:
        if data_sizes(path):
            return None
    except MissingError as error:  # of a URL
        return str(error.have)
    return _neighbours(Path(path).expanduser())


def _rewards(rewards: RewardConfig) -> Iterator[BurnishError]:
    for index, model in enumerate(rewards.models):
        for members in (["config.json"], TOKENIZER_FILES):
            yield from _directory(model.path, f"reward.models[{index}].path", members)
    for index, reward in enumerate(rewards.functions):
        setting = f"reward.functions[{index}].function"
        module, colon, _ = reward.function.rpartition(":")
        if reward.function == "math_verify" and not _importable("math_verify"):
            yield MissingError(
                f"{setting} needs a package that is not installed",
                have="no package math_verify",
                want="math-verify, which compares expressions",
                do=f"{install('math')}, or name another function",
            )
        if colon and module.endswith(".py"):
            yield from _file(module, setting)
        elif colon and not _importable(module.partition(".")[0]):
            yield MissingError(
                f"{setting}: there is no module {module}",
                have=reward.function,
                want="module:function that Python can import, or file.py:function",
                do=f"correct {setting}, or install the module",
            )


def _importable(package: str) -> bool:
    """Return whether a top-level module is installed or in the working directory, without importing it."""
    try:
        found = importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])
    except ValueError:
        return False
    return found is not None


def _neighbours(path: Path) -> str:
    """Return the names beside a missing path, so that a typing error shows itself."""
    if path.exists():
        return "a directory without data" if path.is_dir() else "a file"
    if not path.parent.is_dir():
        return f"no directory {path.parent}"
    names = sorted(each.name for each in path.parent.iterdir())
    near = names if len(names) <= 5 else get_close_matches(path.name, names, n=3)
    return f"{path.parent} with {', '.join(near) if near else f'{len(names)} other entries'}"

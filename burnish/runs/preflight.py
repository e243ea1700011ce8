"""Check that inputs exist, before torch is loaded.

URLs and places of the hub are listed, not copied. With several processes, rank 0 asks the hub later (`burnish.runs.download_inputs`).
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.schema import (
    CriticConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
)
from burnish.data.columns import READERS
from burnish.data.entries import entry_files
from burnish.distributed.environment import place_of
from burnish.errors import (
    BurnishError,
    MissingError,
    UsageError,
    few,
    install,
    neighbours,
    of_setting,
    together,
)
from burnish.extend import REWARDS
from burnish.files.hub import FORMS, HubPlace, Kind, is_elsewhere
from burnish.files.safetensors import ADAPTER_CONFIG
from burnish.files.urls import is_url
from burnish.functions import no_function
from burnish.method import Method

if TYPE_CHECKING:
    from burnish.config.frozen_models import FrozenModel

_CONFIG = "config.json"
_QUANTIZATION = "quantization_config"
_GGUF = ".gguf"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""A tokenizer's directory holds at least one of these."""

_SERVICES = frozenset({"wandb", "mlflow", "trackio", "swanlab"})
"""Trackers that need the package of the same name."""
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
"""Inference engines that need their own package, by package."""


def require_inputs(config: RunConfig, method: Method, run_dir: Path | None = None) -> None:
    """Raise `MissingError` naming every input of `method` that does not exist.

    With `run_dir`, model and tokenizer come from that run's checkpoint.
    """
    problems = [] if run_dir else list(_models(config.model, config.critic, config.engine))
    for each in method.frozen(config):
        problems += _frozen(each)
    for name in data_entries(config.data, trains=method.trains):
        for path in getattr(config.data, name):
            if is_asked_here(path, "dataset"):
                problems += _caught(_data(path, f"data.{name}"))
    if method.generates:
        problems += _rewards(config.reward)
        engine = config.rollout.engine
        problems += _code(engine, "rollout.engine")
        if engine in _ENGINES and config.rollout.place == "child":
            do = f"{install(engine)}, or set rollout.engine=builtin"
            problems += _package(engine, f"rollout.engine: {engine}", _ENGINES[engine], do)
    if method.trains:
        problems += _trackers(config.tracking.trackers)
        if config.checkpoint.push_to_hub and place_of(os.environ).layout.is_main:
            problems += _caught(_hub(config.checkpoint.push_to_hub))
    if problems:
        raise together(problems, "the inputs of this run")


def data_entries(data: DataConfig, *, trains: bool) -> list[str]:
    """Return which of `data.train` and `data.validation` name data that a method reads."""
    wanted = {"train": trains or bool(data.held_out), "validation": not data.held_out}
    return [name for name, is_read in wanted.items() if is_read]


def _caught(problems: Iterator[BurnishError]) -> Iterator[BurnishError]:
    try:
        yield from problems
    except BurnishError as error:
        yield error


def is_asked_here(place: str, kind: Kind) -> bool:
    """Return whether this process may look at a place before torch is loaded."""
    return place_of(os.environ).layout.world == 1 or HubPlace.of(place, kind) is None


def data_sizes(path: str, setting: str) -> list[int]:
    """Return the sizes of an entry's files, local or remote."""
    if is_elsewhere(path, "dataset"):
        from burnish.runs.remote_inputs import remote_data_sizes

        return remote_data_sizes(path, setting)
    return [file.stat().st_size for file in entry_files(path, setting).files]


def model_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the model's config.json. Raises `MissingError` or `UsageError` without one."""
    if isinstance(model.fresh, dict):
        return model.fresh
    place = model.fresh or model.path
    if not place:
        raise UsageError("no model is given", do="set model.path or model.fresh")
    try:
        fields = json.loads(small_file(place, "" if model.fresh else "config.json"))
    except ValueError as error:
        raise UsageError(f"{place} is not JSON", have=error, do="correct the file") from error
    if not isinstance(fields, dict):
        have = type(fields).__name__
        raise UsageError(f"{place} is not a JSON object", have=have, do="correct the file")
    return fields


def small_file(place: str, name: str) -> bytes:
    """Return a small file of a directory, local or remote; for "" the place itself."""
    if is_elsewhere(place):
        from burnish.runs.remote_inputs import remote_small_file

        return remote_small_file(place, name)
    path = Path(place, name).expanduser() if name else Path(place).expanduser()
    if not path.is_file():
        raise MissingError(
            f"there is no file {path}",
            want=f"a file {path.name}; weights are not needed",
            do="set model.path, model.lora.path and the paths of frozen models to directories with this file or to ids of the hub, or model.fresh to the file",
        )
    return path.read_bytes()


def _models(
    model: ModelConfig, critic: CriticConfig, engine: EngineConfig
) -> Iterator[BurnishError]:
    directories = (
        (model.path, "model.path", (_CONFIG,)),
        (model.lora.path, "model.lora.path", (ADAPTER_CONFIG,)),
        (model.tokenizer, "model.tokenizer", _TOKENIZER_FILES),
    )
    for path, setting, members in directories:
        if path is not None and is_asked_here(path, "model"):
            yield from _caught(_directory(path, setting, members))
    for value, setting in (
        (model.fresh, "model.fresh"),
        (model.chat_template, "model.chat_template"),
    ):
        if isinstance(value, str):
            yield from _file(value, setting)
    if model.adapter is not None or critic.lora_rank:
        want = "peft, which has the adapter's modules"
        do = f"{install('lora')}, or remove model.lora and critic.lora_rank"
        yield from _package("peft", "an adapter", want, do)
        if model.lora.quantize_base != "none":
            want = "bitsandbytes, which quantizes"
            do = f"{install('qlora')}, or set model.lora.quantize_base=none"
            yield from _package("bitsandbytes", "model.lora.quantize_base", want, do)
    yield from _code(engine.kind, "engine.kind")
    if engine.kind == "megatron":
        do = f"{install('megatron')}, or set engine.kind=torch"
        yield from _package("megatron", "engine.kind megatron", "megatron-core", do)


def _directory(path: str, setting: str, members: Sequence[str]) -> Iterator[BurnishError]:
    folder = Path(path).expanduser()
    wanted = " or ".join(members)
    hub = HubPlace.of(path, "model")
    if is_elsewhere(path):
        from burnish.runs.remote_inputs import remote_names

        names = remote_names(path, setting)
    elif folder.is_dir():
        names = sorted(each.name for each in folder.iterdir())
    elif path.endswith(_GGUF) and folder.is_file():
        yield from _gguf(path, setting, ())
        return
    else:
        yield MissingError(
            f"{setting}: there is no directory {path}",
            have=neighbours(folder),
            want=f"a directory on this machine that holds {wanted}, or {FORMS['model']} of the hub",
            do=f"correct {setting}",
        )
        return
    is_model = members == (_CONFIG,)
    if is_model and (llama_cpp := [*_gguf(path, setting, names)]):
        yield from llama_cpp
    elif hub and is_model and not any(n.endswith(".safetensors") for n in names):
        yield MissingError(
            f"{setting}: {path} holds no weights that Burnish reads",
            have=few([name for name in names if not name.endswith(".json")]) or "no weights",
            want="*.safetensors",
            do=f"name a revision that has them: {hub.repo}@REVISION",
        )
    elif not set(names).intersection(members):
        step = path.rstrip("/").rpartition("/")[0] or "."
        merge = f"merge it into its model with burnish ckpt export {step} DIRECTORY --merged, and set {setting}=DIRECTORY"
        yield MissingError(
            f"{setting}: {path} holds no {wanted}",
            have=few(names) or "nothing",
            want=f"a Hugging Face directory with {wanted}",
            do=merge if ADAPTER_CONFIG in names else f"correct {setting}",
        )
    elif is_model:
        require_unquantized(path, setting)


def require_model(place: str, setting: str) -> None:
    """Raise why a place holds no model that can be loaded; of a place on the hub, if this process may ask there."""
    if is_asked_here(place, "model"):
        problems = [*_caught(_directory(place, setting, (_CONFIG,)))]
        if problems:
            raise together(problems, place)


def require_unquantized(place: str, setting: str) -> str:
    """Raise `IncompatibleError` for a quantized model; return a remark on a key of config.json that is left out, or ""."""
    try:
        fields = json.loads(small_file(place, _CONFIG))
    except ValueError:  # the run's own error says more
        return ""
    if not isinstance(fields, dict) or _QUANTIZATION not in fields:
        return ""
    from burnish.files.quantized import require_plain_weights

    return require_plain_weights(place, setting, fields, small_file)


def _gguf(path: str, setting: str, names: Sequence[str]) -> Iterator[BurnishError]:
    if not any(name.endswith(_GGUF) for name in (path, *names)):
        return
    from burnish.files.quantized import gguf_problem

    if problem := gguf_problem(path, setting, names):
        yield problem


def _file(path: str, setting: str) -> Iterator[BurnishError]:
    if is_url(path):
        from burnish.runs.remote_inputs import beside_missing_file

        have = beside_missing_file(path)
    else:
        file = Path(path).expanduser()
        have = "" if file.is_file() else neighbours(file)
    if have:
        yield MissingError(
            f"{setting}: there is no file {path}", have=have, want="a file", do=f"correct {setting}"
        )


def _data(path: str, setting: str) -> Iterator[BurnishError]:
    with of_setting(setting):
        sizes = data_sizes(path, setting)
    if not sizes:
        yield MissingError(
            f"{setting}: nothing to read at {path}",
            have=neighbours(Path(path).expanduser()),
            want=f"a {', '.join(sorted(READERS))} file, a directory of such, a pattern that matches, or a data set of the hub, {FORMS['dataset']}",
            do=f"correct {setting}",
        )


def _rewards(rewards: RewardConfig) -> Iterator[BurnishError]:
    for index, reward in enumerate(rewards.functions):
        setting = f"reward.functions[{index}].function"
        if reward.function == "math_verify":
            want = "math-verify, which compares expressions"
            do = install("math")
            yield from _package("math_verify", setting, want, f"{do}, or name another function")
        if ":" not in reward.function and reward.function not in REWARDS:
            yield no_function(reward.function, setting, REWARDS)
        yield from _code(reward.function, setting)


def _frozen(model: FrozenModel) -> Iterator[BurnishError]:
    """Yield an error if a frozen model lacks a configuration or, where it is more than weights, a tokenizer."""
    for members in ((_CONFIG,), *([] if model.gives == "weights" else [_TOKENIZER_FILES])):
        if is_asked_here(model.path, "model"):
            yield from _caught(_directory(model.path, model.setting, members))


def _code(name: str, setting: str) -> Iterator[BurnishError]:
    """Yield an error if the file or module of `file.py:name` or `module:name` does not exist."""
    module, colon, _ = name.rpartition(":")
    if colon and module.endswith(".py"):
        yield from _file(module, setting)
    elif colon and not _importable(module.partition(".")[0]):
        yield MissingError(
            f"{setting}: there is no module {module}",
            have=name,
            want="module:name that Python can import, or file.py:name",
            do=f"correct {setting}, or install the module",
        )


def _trackers(names: Sequence[str]) -> Iterator[BurnishError]:
    for name in names:
        yield from _code(name, "tracking.trackers")
    for name in _SERVICES.intersection(names):
        do = f"{install(name)}, or take {name} out of tracking.trackers"
        yield from _package(name, f"tracking.trackers {name}", f"{name}'s own client", do)


def _hub(repo: str) -> Iterator[BurnishError]:
    from burnish.files.hub_files import require_writable

    with of_setting("checkpoint.push_to_hub"):
        require_writable(repo)
    yield from ()


def _package(name: str, setting: str, want: str, do: str) -> Iterator[BurnishError]:
    if not _importable(name):
        problem = f"{setting} needs a package that is not installed"
        yield MissingError(problem, have=f"no package {name}", want=want, do=do)


def _importable(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])
    except (ValueError, ImportError):
        return False
    return spec is not None

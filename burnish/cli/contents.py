"""Look into a run's inputs for a dry run: columns, weight headers, tokenizers, the sources of functions.

It takes about a second: without torch, unless a formula is the user's, and without `datasets`. Left out: URLs, later rows, and
everything that only a run finds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from burnish.config.constraints import Command
from burnish.config.schema import AlgorithmConfig, DataConfig, ModelConfig, RunConfig
from burnish.data.columns import MissingColumn, answer_column, example_format, prompt_column
from burnish.data.peek import Columns, columns_of, has_column
from burnish.errors import BurnishError, CorruptError, MissingError, UsageError, few, together
from burnish.files.safetensors import read_header, weight_files
from burnish.files.urls import is_url
from burnish.functions import require_function
from burnish.rewards.signature import BUILTINS
from burnish.train.preflight import TOKENIZER_FILES, data_files

_Look = Callable[[], object]


def require_contents(config: RunConfig, command: Command, run_dir: Path | None = None) -> None:
    """Raise a `BurnishError` with everything in the inputs of `command` that would stop it.

    `burnish.train.preflight` has checked that the inputs exist. With `run_dir` model and tokenizer are that run's.
    """
    found = []
    for look in _looks(config, command, run_dir):
        try:
            look()
        except BurnishError as error:
            found.append(error)
    if found:
        raise together(found, "what the inputs of this run hold")


def _looks(config: RunConfig, command: Command, run_dir: Path | None) -> Iterator[_Look]:
    prompts = command == "rl" or (command == "eval" and config.reward.given)
    model, critic = config.model, config.critic.path if command == "rl" else None
    judges = [judge.path for judge in config.reward.models] if command != "sft" else []
    if run_dir is None:
        yield from _looks_at_models(model, critic, judges)
        if prompts and model.path is not None and not is_url(model.path):
            positions = partial(_positions, model.path)
            yield lambda: config.prompt_limits(positions())
    for setting in ("validation",) if command == "eval" else ("train", "validation"):
        for path in getattr(config.data, setting):
            if not is_url(path):
                yield partial(_columns, path, config.data, prompts=prompts)
    if command != "sft":
        for reward in config.reward.functions:
            yield partial(require_function, reward.function, "reward.functions", BUILTINS)
    if command == "rl":
        yield partial(_formula, config.algorithm)
    for tracker in config.tracking.trackers if command != "eval" else ():
        yield partial(require_function, tracker, "tracking.trackers")


def _looks_at_models(
    model: ModelConfig, critic: str | None, judges: Sequence[str]
) -> Iterator[_Look]:
    for path in [model.path, critic, *judges]:
        if path is not None and not is_url(path):
            yield partial(_config, path)
            yield partial(_weights, path)
    if model.lora.path is not None and not is_url(model.lora.path):
        yield partial(_weights, model.lora.path)
    for path in [model.tokenizer or model.path, *judges]:
        if path is not None and not is_url(path):
            yield partial(_tokenizer, path)
    if isinstance(model.fresh, str) and not is_url(model.fresh):
        yield partial(_json_object, Path(model.fresh).expanduser())


def _formula(algorithm: AlgorithmConfig) -> None:
    """Functions of the user's exist, and run on made-up data."""
    advantage, loss = algorithm.advantage, algorithm.policy_loss
    if ":" in advantage:
        require_function(advantage, "algorithm.advantage")
        from burnish.algorithms.advantages import load_advantage

        load_advantage(advantage)
    if ":" in loss:
        require_function(loss, "algorithm.policy_loss")
        from burnish.algorithms.policy_loss import load_policy_loss

        load_policy_loss(algorithm)


def _config(path: str) -> None:
    _json_object(Path(path).expanduser() / "config.json")


def _positions(path: str) -> int | None:
    """Return the number of positions that a model's config.json names."""
    found = _json_object(Path(path).expanduser() / "config.json").get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _weights(path: str) -> None:
    """Every file of the directory has the size and the tensors that its header says."""
    for file in weight_files(Path(path).expanduser()):
        read_header(file)


def _tokenizer(path: str) -> None:
    folder = Path(path).expanduser()
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise MissingError(
            f"{path} holds no tokenizer",
            have=few(sorted(each.name for each in folder.iterdir())) or "nothing",
            want=" or ".join(TOKENIZER_FILES),
            do="set model.tokenizer to the directory of one",
        )
    for file in present:
        fields = _json_object(file)
        if file.name == "tokenizer.json" and not isinstance(fields.get("model"), dict):
            raise CorruptError(
                f"{file} is no tokenizer",
                have=f"the keys {few(sorted(fields))}" if fields else "an empty object",
                want="a key model, as save_pretrained writes it",
                do="get the file again",
            )


def _json_object(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise CorruptError(
            f"{file} is not JSON", have=error, want="a JSON object", do="get the file again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptError(
            f"{file} is not a JSON object",
            have=type(value).__name__,
            want="a JSON object",
            do="get the file again",
        )
    return value


def _columns(path: str, data: DataConfig, *, prompts: bool) -> None:
    """Require the columns of prompts or examples in an entry's first file."""
    files = sorted(data_files(path))
    file = next((each for each in files if each.stat().st_size), files[0])
    columns = columns_of(file, lambda columns: _lack(columns, data, prompts=prompts) is None)
    if columns is None or (lack := _lack(columns, data, prompts=prompts)) is None:
        return
    if not columns:
        raise UsageError(
            f"{file} has no rows", have="no columns", want="at least one row", do="correct the file"
        )
    near = [close for name in lack.names for close in get_close_matches(name, columns, n=1)]
    raise MissingError(
        f"no usable columns in {file}",
        have=f"columns {', '.join(columns)}",
        want=lack.want,
        do=f"did you mean {near[0]}? Name the column in {lack.setting}"
        if near
        else f"name the column in {lack.setting}",
    )


def _lack(columns: Columns, data: DataConfig, *, prompts: bool) -> MissingColumn | None:
    """The column that a run would not find."""
    has = partial(has_column, columns)
    found = (
        [prompt_column(data, has), answer_column(data, has)]
        if prompts
        else [example_format(data, has)]
    )
    return next((each for each in found if isinstance(each, MissingColumn)), None)

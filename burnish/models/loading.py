"""From a configuration or a directory to a model in memory: the names that other packages use.

`read_model_config` → `build_on_meta` → (sharding) → `materialize` → `Source.fill(model_shards(model))`.
No rank ever holds more than its own part and a buffer. `save_model_assets` writes what a directory
needs beside the weights to be a Hugging Face model.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from burnish.boxes.shards import Shard, ShardSource, TensorSpec
from burnish.boxes.tensor_reader import DirectoryReader
from burnish.config.schema import ModelConfig
from burnish.errors import IncompatibleError, MissingError, UsageError, few
from burnish.models.meta_init import (
    build_on_meta,
    fill_buffers,
    initialized_copy,
    materialize,
    owned_modules,
)
from burnish.models.names import Region, regions, tensor_specs, tied_names
from burnish.models.value_head import has_value_head
from burnish.records.seeds import derive_seed

__all__ = [
    "FreshSource",
    "SafetensorsSource",
    "build_on_meta",
    "fill_buffers",
    "generation_config",
    "materialize",
    "read_model_config",
    "require_embeddings",
    "save_model_assets",
    "value_source",
    "weights_source",
]


def read_model_config(config: ModelConfig) -> PretrainedConfig:
    """The configuration of the model directory `config.path`, or of the new model `config.fresh`.

    Raises `MissingError` for a directory or file that is not there and `UsageError` for a
    configuration that is not JSON or names no known `model_type`.
    """
    if config.fresh is not None:
        return _fresh_config(config.fresh)
    if config.path is None:
        raise UsageError("no model is given", do="set model.path or model.fresh")
    directory = Path(config.path).expanduser()
    if not (directory / "config.json").is_file():
        raise MissingError(
            f"{directory} is not a Hugging Face model directory",
            have="no config.json" if directory.is_dir() else "no such directory",
            want="a directory with config.json and *.safetensors",
            do="set model.path to one",
        )
    _json_object(directory / "config.json", "model.path")
    try:
        return AutoConfig.from_pretrained(
            directory, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError) as error:  # an unknown model_type; code without consent
        raise UsageError(
            f"{directory / 'config.json'} is not a configuration that transformers takes",
            have=" ".join(str(error).split())[:300],
            want="JSON with a model_type that the installed transformers knows",
            do="correct model.path or the file; for a model with code of its own, read that code and "
            "set model.trust_remote_code=true",
        ) from error


def weights_source(
    config: ModelConfig, hf_config: PretrainedConfig, seed: int
) -> FreshSource | SafetensorsSource:
    """Where the model's first weights come from, checked against the model before any is read.

    Raises `MissingError`, `IncompatibleError` or `CorruptError` for a directory whose weights are
    not all there, not of this model's shapes, or not whole. Tensors that the model has no use for
    are logged.
    """
    if config.path is None:
        return FreshSource(hf_config, seed)
    model = build_on_meta(hf_config)
    source = SafetensorsSource(Path(config.path).expanduser(), tied_names(model))
    source.check(tensor_specs(model))
    return source


def require_embeddings(hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `IncompatibleError` where the tokenizer has tokens that the model has no embedding for."""
    vocabulary = hf_config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise IncompatibleError(
            "the tokenizer has more tokens than the model has embeddings",
            have=f"{len(tokenizer)} tokens, {vocabulary} embeddings",
            want="no more tokens than embeddings",
            do="use the model's own tokenizer, or a fresh model with a larger vocab_size",
        )


def value_source(config: ModelConfig, hf_config: PretrainedConfig, seed: int) -> ShardSource:
    """Where the first weights of a model with a value head come from; `hf_config` is its configuration.

    A directory of such a model gives all of them; one of a language model its backbone, beside a
    fresh head. Raises as `weights_source` does.
    """
    if config.path is None or has_value_head(backbone := read_model_config(config)):
        return weights_source(config, hf_config, seed)
    has = {spec.name for spec in tensor_specs(build_on_meta(backbone))}
    head = {spec.name for spec in tensor_specs(build_on_meta(hf_config))} - has
    return PartlyFresh(
        weights_source(config, backbone, seed), FreshSource(hf_config, seed), frozenset(head)
    )


def _fresh_config(fresh: str | dict[str, Any]) -> PretrainedConfig:
    if isinstance(fresh, str):
        path = Path(fresh).expanduser()
        if not path.is_file():
            raise MissingError(f"there is no file {path}", do="set model.fresh to a config.json")
        values = _json_object(path, "model.fresh")
    else:
        values = fresh
    values = dict(values)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise UsageError("model.fresh names no model_type", do="add one, such as qwen3 or llama")
    try:
        return AutoConfig.for_model(model_type, **values)
    except ValueError as error:
        raise UsageError(
            f"transformers knows no model_type {model_type!r}",
            have=" ".join(str(error).split())[:300],
            do="correct model.fresh.model_type, or install a later transformers",
        ) from error


def generation_config(hf_config: PretrainedConfig) -> GenerationConfig:
    """How the model is meant to be sampled from: its directory's generation_config.json, or what its configuration implies."""
    origin = Path(hf_config.name_or_path) if hf_config.name_or_path else None
    if origin is not None and (origin / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(origin)
    return GenerationConfig.from_model_config(hf_config)


def save_model_assets(
    hf_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: str | os.PathLike[str],
    dtype: torch.dtype,
) -> None:
    """Write all that a Hugging Face directory needs beside its weights, which are in `dtype`.

    config.json, generation_config.json (the original model's where there is one; none beside a value head), the tokenizer's
    files, and the Python files of a model that brings its own code.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(hf_config)
    config.dtype = dtype
    if not has_value_head(config):
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if architecture is not None:
            config.architectures = [architecture]
        generation_config(config).save_pretrained(directory)
    config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    if hf_config.name_or_path and getattr(hf_config, "auto_map", None):
        origin = Path(hf_config.name_or_path)
        for source in sorted(origin.glob("*.py")):
            shutil.copyfile(source, directory / source.name)


def _json_object(path: Path, setting: str) -> dict[str, Any]:
    """What the JSON file holds, which the setting named; raises `UsageError` where that is no object."""
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(
            f"{path} is not JSON", have=error, do=f"correct the file that {setting} names"
        ) from error
    if not isinstance(values, dict):
        raise UsageError(
            f"{path} is not a model's configuration",
            have=f"JSON of type {type(values).__name__}",
            want="an object with model_type",
            do=f"correct the file that {setting} names",
        )
    return values


_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})
# What weights and buffers are read from: all others are quantized.

_log = logging.getLogger(__name__)


class SafetensorsSource:
    """The weights of a Hugging Face model directory; a `ShardSource`.

    `tied` gives, for names that a checkpoint may also use, the canonical one (`tied_names(model)`),
    so that a checkpoint may hold a tied weight under either name or both. Opening reads headers
    only. Raises `MissingError` for a directory without safetensors or with one of them missing, and
    `CorruptError` for a file that is not what it says.
    """

    def __init__(
        self, directory: str | os.PathLike[str], tied: Mapping[str, str] | None = None
    ) -> None:
        self.directory = Path(directory)
        self._tied = dict(tied or {})
        self._reader = DirectoryReader(self.directory)

    def check(self, specs: Iterable[TensorSpec]) -> list[str]:
        """Compare with the whole list of a model's tensors, before any of them is read.

        Returns the names that the model has no use for, and logs them. Raises as `fill` does.
        """
        wanted = {spec.name for spec in map(self._checked, specs)}
        extra = [
            name
            for name in self._reader.tensors
            if name not in wanted and self._tied.get(name) not in wanted
        ]
        if extra:
            _log.warning(
                "%s holds %d tensors that the model has no use for: %s",
                self.directory,
                len(extra),
                few(extra),
            )
        return extra

    def fill(self, shards: Iterable[Shard]) -> None:
        """Read each shard's own bytes; see `ShardSource.fill`. Holds a buffer of 1 MiB."""
        with self._reader:
            for shard in shards:
                self._checked(shard.spec)
                self._reader.read(self._find(shard.spec.name), shard.box, shard.tensor)

    def _find(self, name: str) -> str:
        """The name that the directory has for a tensor."""
        names = [name, *(alias for alias, kept in self._tied.items() if kept == name)]
        for candidate in names:
            if candidate in self._reader.tensors:
                return candidate
        raise MissingError(
            f"{self.directory} has no tensor {name}",
            have=few(list(self._reader.tensors)),
            want=" or ".join(names),
            do="check that the directory belongs to this model type",
        )

    def _checked(self, spec: TensorSpec) -> TensorSpec:
        location = self._reader.locations[self._find(spec.name)]
        entry, path = location.entry, self.directory / location.file
        if entry.shape != spec.shape:
            raise IncompatibleError(
                f"tensor {entry.name} in {path} has another shape than the model's",
                have=entry.shape,
                want=spec.shape,
                do="use the config.json that belongs to these weights",
            )
        if entry.dtype not in _DTYPES:
            raise IncompatibleError(
                f"tensor {entry.name} in {path} has a dtype that Burnish does not train from",
                have=entry.dtype,
                want=", ".join(sorted(_DTYPES)),
                do="dequantize the model first",
            )
        return spec


class FreshSource:
    """Random first weights, as the model family itself draws them; a `ShardSource`.

    Each module's values come from a generator of its own, seeded with the run's seed and the
    module's name, so they do not depend on the number of ranks. One module is held at a time.
    """

    def __init__(self, hf_config: PretrainedConfig, seed: int) -> None:
        self._model = build_on_meta(hf_config)
        self._seed = seed
        self._regions = {region.name: region for region in regions(self._model)}
        self._modules = {
            name: (module, owner) for name, module, owner in owned_modules(self._model)
        }

    def fill(self, shards: Iterable[Shard]) -> None:
        """Draw each shard's values; see `ShardSource.fill`. Shards of one module should come together."""
        current: str | None = None
        values: dict[str, Tensor] = {}
        for shard in shards:
            region = self._region(shard.spec)
            module_name = region.parameter.rpartition(".")[0]
            if module_name != current:
                values.clear()
                current, values = module_name, self._draw(module_name)
            whole = values[region.parameter][region.box.slices].view(region.shape)
            shard.tensor.detach().copy_(whole[shard.box.slices])

    def _region(self, spec: TensorSpec) -> Region:
        region = self._regions.get(spec.name)
        if region is None:
            raise MissingError(
                f"the model has no tensor {spec.name}", have=few(list(self._regions))
            )
        if region.shape != spec.shape:
            raise IncompatibleError(
                f"tensor {spec.name} has another shape than the model's",
                have=region.shape,
                want=spec.shape,
            )
        return region

    def _draw(self, module_name: str) -> dict[str, Tensor]:
        module, owner = self._modules[module_name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self._seed, "init", module_name))
            made = initialized_copy(module, owner)
        values: dict[str, Tensor] = {}
        for key, value in (*made.named_parameters(), *made.named_buffers()):
            name = f"{module_name}.{key}" if module_name else key
            if value.is_floating_point() and bool(value.isnan().any()):
                raise IncompatibleError(
                    f"{type(self._model).__name__} does not say how {name} is initialized",
                    want="a model whose _init_weights fills it",
                    do="start from a directory with weights: set model.path",
                )
            values[name] = value.detach()
        return values


@dataclass(frozen=True, slots=True)
class PartlyFresh:
    """A `ShardSource` of weights that are there, and of others that are drawn."""

    there: ShardSource
    """Gives all but the following."""
    fresh: FreshSource
    """Draws them."""
    names: frozenset[str]
    """Which tensors are drawn."""

    def fill(self, shards: Iterable[Shard]) -> None:
        """See `ShardSource.fill`."""
        shards = list(shards)
        self.there.fill(shard for shard in shards if shard.spec.name not in self.names)
        self.fresh.fill(shard for shard in shards if shard.spec.name in self.names)

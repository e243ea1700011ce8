"""Read a model's configuration and weights, draw fresh weights, and write other files.

`read_model_config` → `build_on_meta` → (sharding) → `materialize` → `Source.fill(model_shards(model))`.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from burnish.boxes.shards import Shard, TensorSpec
from burnish.boxes.tensor_reader import DirectoryReader
from burnish.config.schema import ModelConfig
from burnish.errors import IncompatibleError, MissingError, UsageError, few, refusing
from burnish.files.safetensors import code_files
from burnish.models.meta_init import (
    build_on_meta,
    has_own_code,
    has_value_head,
    initialized,
    owned_modules,
)
from burnish.models.names import regions, tensor_specs, tied_names
from burnish.records.seeds import derive_seed

# Dtypes of weights, and those of buffers beside them. All others are quantized.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_DTYPES = _FLOATS | {"I64", "I32", "I16", "I8", "U8", "BOOL"}

_MXFP4 = "burnish.models.mxfp4"
_LANGUAGE_MODEL = "model.language_model."

_log = logging.getLogger(__name__)


def read_model_config(config: ModelConfig) -> PretrainedConfig:
    """Return the configuration of the directory `config.path`, or of the new model `config.fresh`.

    Raises `MissingError` for a missing file, and `UsageError` for a wrong configuration.
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
    with refusing(  # no JSON, an unknown model_type, code without consent, and any wrong value
        f"{directory / 'config.json'} is not a configuration that transformers takes",
        want="JSON with a model_type that the installed transformers knows",
        do="correct model.path or the file; for a model with code of its own, read that code and "
        "set model.trust_remote_code=true",
    ):
        found = AutoConfig.from_pretrained(
            directory, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
        has_value_head(found)  # raises for architectures that are no names
    if has_own_code(found):
        code_files(directory)  # refused now, not when a checkpoint is written
    return _language_model(found)


def _language_model(config: PretrainedConfig) -> PretrainedConfig:
    """Return the text configuration if transformers' causal language model takes only that, as for Qwen3.5."""
    text = config.get_text_config()
    kind = None if has_value_head(config) else MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if text is config or getattr(kind, "config_class", None) is not type(text):
        return config
    text.name_or_path = config.name_or_path
    return text


def weights_source(
    config: ModelConfig, hf_config: PretrainedConfig, seed: int
) -> FreshSource | SafetensorsSource:
    """Return the source of the first weights, checked before any is read.

    Raises `MissingError`, `IncompatibleError` or `CorruptError`.
    """
    if config.path is None:
        return FreshSource(hf_config, seed)
    model = build_on_meta(hf_config)
    source = SafetensorsSource(Path(config.path).expanduser(), tied_names(model))
    source.check(tensor_specs(model))
    return source


def require_embeddings(hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `IncompatibleError` if the tokenizer has tokens without an embedding."""
    vocabulary = hf_config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise IncompatibleError(
            "the tokenizer has more tokens than the model has embeddings",
            have=f"{len(tokenizer)} tokens, {vocabulary} embeddings",
            want="no more tokens than embeddings",
            do="use the model's own tokenizer, or a fresh model with a larger vocab_size",
        )


def _fresh_config(fresh: str | dict[str, Any]) -> PretrainedConfig:
    if isinstance(fresh, str):
        path = Path(fresh).expanduser()
        if not path.is_file():
            raise MissingError(f"there is no file {path}", do="set model.fresh to a config.json")
        with refusing(
            f"{path} is not a model's configuration",
            want="a JSON object with model_type",
            do="correct the file that model.fresh names",
        ):
            values = dict(json.loads(path.read_text()))
    else:
        values = dict(fresh)
    model_type = values.pop("model_type", None)
    if model_type is None:
        problem = "model.fresh names no model_type"
        raise UsageError(problem, have=fresh, do="add one, such as qwen3 or llama")
    with refusing(
        f"model.fresh is not a configuration that transformers takes, of model_type {model_type!r}",
        do="correct model.fresh, or install a later transformers",
    ):
        return AutoConfig.for_model(model_type, **values)


def generation_config(hf_config: PretrainedConfig) -> GenerationConfig:
    """Return the sampling settings of the model's generation_config.json, or its configuration's defaults."""
    origin = hf_config.name_or_path
    if origin and (Path(origin) / "generation_config.json").is_file():
        with refusing(
            f"{origin}/generation_config.json is not one that transformers takes",
            want="a JSON object with settings of transformers' GenerationConfig",
            do="correct or remove the file",
        ):
            found = GenerationConfig.from_pretrained(origin)
            torch.tensor(found.eos_token_id or [], dtype=torch.int64)  # one number, or several
            return found
    return GenerationConfig.from_model_config(hf_config)


def save_model_assets(
    hf_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: str | os.PathLike[str],
    dtype: torch.dtype,
) -> None:
    """Write the files that a Hugging Face directory needs beside its weights in `dtype`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(hf_config)
    config.dtype = dtype
    if not has_value_head(config):
        if architecture := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type):
            config.architectures = [architecture]
        # `save_pretrained` refuses settings of many published models, such as a temperature without do_sample.
        generation_config(config).to_json_file(directory / "generation_config.json")
    for stale in ("quantization_config", *(() if has_own_code(hf_config) else ("auto_map",))):
        if hasattr(config, stale):
            delattr(config, stale)
    config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    if has_own_code(hf_config):
        for source in code_files(Path(hf_config.name_or_path)):
            shutil.copyfile(source, directory / source.name)


class SafetensorsSource:
    """A `ShardSource` of a Hugging Face model directory. Opening reads only headers.

    Raises `MissingError` for absent files, and `CorruptError` for a wrong header.
    """

    def __init__(
        self, directory: str | os.PathLike[str], tied: Mapping[str, str] | None = None
    ) -> None:
        """Also accept tensors under the names in `tied` (`tied_names(model)`)."""
        self.directory = Path(directory)
        self._reader = DirectoryReader(self.directory)
        # A model that also reads images has its language model below this name.
        within = [name for name in self._reader.tensors if name.startswith(_LANGUAGE_MODEL)]
        kept = {name: name.replace(_LANGUAGE_MODEL, "model.", 1) for name in within} | dict(
            tied or {}
        )
        self._aliases: dict[str, list[str]] = {}
        for alias, name in kept.items():
            self._aliases.setdefault(name, []).append(alias)

    def check(self, specs: Iterable[TensorSpec]) -> list[str]:
        """Compare with all tensors of a model; return the names of unused ones. Raises as `fill` does."""
        wanted = {spec.name for spec in map(self._checked, specs)}
        held = self._reader.tensors
        used = wanted | {f"{n}{s}" for n in wanted - held.keys() for s in ("_blocks", "_scales")}
        used.update(alias for name in wanted for alias in self._aliases.get(name, ()))
        extra = [name for name in held if name not in used]
        if extra:
            unused = "%s holds %d tensors that the model has no use for: %s"
            _log.warning(unused, self.directory, len(extra), few(extra))
        return extra

    def fill(self, shards: Iterable[Shard]) -> None:
        """Read each shard's own bytes. Holds a buffer of 1 MiB."""
        with self._reader:
            for shard in shards:
                self._checked(shard.spec)
                name = shard.spec.name
                if self._packed_shape(name) is None:
                    self._reader.read(self._find(name), shard.box, shard.tensor)
                else:
                    import_module(_MXFP4).fill(shard, name, self._reader)

    def _packed_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a weight that is stored in MXFP4 only."""
        held = self._reader.tensors
        if name in held or f"{name}_blocks" not in held:
            return None
        return import_module(_MXFP4).plain_shape(held, name)

    def _find(self, name: str) -> str:
        names = [name, *self._aliases.get(name, ())]
        if found := next((each for each in names if each in self._reader.tensors), None):
            return found
        raise MissingError(
            f"{self.directory} has no tensor {name}",
            have=few(list(self._reader.tensors)),
            want=" or ".join(names),
            do="check that the directory belongs to this model type",
        )

    def _checked(self, spec: TensorSpec) -> TensorSpec:
        packed = self._packed_shape(spec.name)
        found = self._find(spec.name) if packed is None else f"{spec.name}_blocks"
        location = self._reader.locations[found]
        entry, path = location.entry, self.directory / location.file
        shape = packed or entry.shape
        if shape != spec.shape:
            raise IncompatibleError(
                f"tensor {entry.name} in {path} has another shape than the model's",
                have=shape,
                want=spec.shape,
                do="use the config.json that belongs to these weights",
            )
        is_weight = packed is None and spec.dtype.is_floating_point
        known = _FLOATS if is_weight else _DTYPES
        if entry.dtype not in known:
            raise IncompatibleError(
                f"tensor {entry.name} in {path} has a dtype that Burnish does not train from",
                have=entry.dtype,
                want=", ".join(sorted(known)),
                do="dequantize the model first",
            )
        return spec


class FreshSource:
    """A `ShardSource` of random first weights, as the model family draws them.

    Values follow from the module's name and the run's seed, not from the number of ranks.
    """

    def __init__(self, hf_config: PretrainedConfig, seed: int) -> None:
        self._model = build_on_meta(hf_config)
        self._seed = seed
        self._regions = {region.name: region for region in regions(self._model)}
        self._modules = {
            name: (module, owner) for name, module, owner in owned_modules(self._model)
        }

    def fill(self, shards: Iterable[Shard]) -> None:
        """Draw each shard's values. Holds one module, so its shards should come together."""
        current: str | None = None
        values: dict[str, Tensor] = {}
        for shard in shards:
            spec, region = shard.spec, self._regions.get(shard.spec.name)
            if region is None:
                known = few(list(self._regions))
                raise MissingError(f"the model has no tensor {spec.name}", have=known)
            if region.shape != spec.shape:
                raise IncompatibleError(
                    f"tensor {spec.name} has another shape than the model's",
                    have=region.shape,
                    want=spec.shape,
                )
            module_name = region.parameter.rpartition(".")[0]
            if module_name != current:
                values.clear()
                current, values = module_name, self._draw(module_name)
            whole = values[region.parameter.rpartition(".")[2]][region.box.slices]
            shard.tensor.detach().copy_(whole.view(region.shape)[shard.box.slices])

    def _draw(self, module_name: str) -> dict[str, Tensor]:
        module, owner = self._modules[module_name]
        keys = [
            key
            for key, value in (module._parameters | module._buffers).items()
            if value is not None
        ]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self._seed, "init", module_name))
            return initialized(module_name, module, owner, keys)

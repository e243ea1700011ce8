"""Read a model's configuration and weights, draw fresh weights, and write other files.

`read_model_config` → `build_on_meta` → (sharding) → `materialize` → `Source.fill(model_shards(model))`.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from burnish.boxes.shards import Shard, TensorSpec
from burnish.boxes.tensor_reader import DirectoryReader
from burnish.config.schema import ModelConfig
from burnish.errors import IncompatibleError, MissingError, UsageError, few, refusing
from burnish.files.safetensors import (
    INDEX,
    SUFFIX,
    code_files,
    contradictions,
    unread_files,
)
from burnish.files.storage import Closing
from burnish.files.strict_json import parse_object
from burnish.models.heads import has_value_head
from burnish.models.language_model import MTP, Composite, language_config
from burnish.models.meta_init import (
    build_on_meta,
    has_own_code,
    initialized,
    owned_modules,
)
from burnish.models.names import regions, tensor_specs, tied_names
from burnish.records.seeds import derive_seed

# Dtypes of weights, and those of buffers beside them. All others are quantized.
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_DTYPES = _FLOATS | {"I64", "I32", "I16", "I8", "U8", "BOOL"}

GENERATION_CONFIG = "generation_config.json"
"""The file with a model's sampling settings, and the tokens that end its completions."""

_LANGUAGE_MODELS = ("model.language_model.", "language_model.model.")
# Buffers that older versions of transformers saved, and compute now.
_CONSTANTS = re.compile(r"(^|\.)(inv_freq|position_ids|masked_bias)$")

_log = logging.getLogger(__name__)


@contextmanager
def _without_advice() -> Iterator[None]:
    """Hide what transformers advises the author of a longrope model: whoever trains it keeps config.json as it is."""

    def is_for_users(record: logging.LogRecord) -> bool:
        return "to determine a scaling factor" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_rope_utils")
    logger.addFilter(is_for_users)
    try:
        yield
    finally:
        logger.removeFilter(is_for_users)


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
    with (
        _without_advice(),
        refusing(  # no JSON, an unknown model_type, code without consent, and any wrong value
            f"{directory / 'config.json'} is no configuration that transformers can read",
            want="JSON with a model_type that the installed transformers knows",
            do="correct model.path or the file; for a model with code of its own, read that code and "
            "set model.trust_remote_code=true",
        ),
    ):
        hf_config = AutoConfig.from_pretrained(
            directory, trust_remote_code=config.trust_remote_code, local_files_only=True
        )
        has_value_head(hf_config)  # raises for architectures that are no names
    if getattr(hf_config, "quantization_config", None):
        _require_plain_weights(directory)
    if has_own_code(hf_config):
        code_files(directory)  # refused now, not when a checkpoint is written
    return _with_own_head(language_config(hf_config), directory)


def _require_plain_weights(directory: Path) -> None:
    """Raise `IncompatibleError` for quantized weights, and warn of a `quantization_config` that is left over."""
    from burnish.files.quantized import require_plain_weights

    def small_file(place: str, name: str) -> bytes:
        return Path(place, name).read_bytes()

    fields = parse_object(small_file(str(directory), "config.json"), str(directory))
    if remark := require_plain_weights(str(directory), "model.path", fields, small_file):
        _log.warning("%s", remark)


def _with_own_head(config: PretrainedConfig, directory: Path) -> PretrainedConfig:
    """Untie the head if config.json ties it and the files hold another one, as transformers does."""
    is_tied = getattr(config, "tie_word_embeddings", False) and not has_value_head(config)
    if not is_tied or not any(directory.glob(f"*{SUFFIX}")):
        return config
    tied = tied_names(build_on_meta(config))
    composite = composite_of(str(directory), config)
    with SafetensorsSource(directory, tied, composite) as source:
        heads = source.untied()
    if heads:
        _log.warning(
            "%s ties %s, but its files hold another one, which is read as in transformers; "
            "what is saved says tie_word_embeddings: false",
            directory / "config.json",
            few(heads),
        )
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
    return config


def composite_of(path: str | None, hf_config: PretrainedConfig) -> Composite | None:
    """Return the checkpoint around `hf_config`'s language model; None if `path` holds no other tensors to keep. Reads only headers.

    Raises `IncompatibleError` for one that cannot be kept.
    """
    directory = Path(path or "").expanduser()
    if path is None:
        return None
    if hf_config.model_type == _model_type(directory):
        if not any(map(MTP.search, DirectoryReader(directory).tensors)):
            return None
        from burnish.models.composite import with_mtp_layers

        return with_mtp_layers(directory, hf_config)
    from burnish.models.composite import composite_at

    return composite_at(directory, hf_config)


def _model_type(directory: Path) -> object:
    file = directory / "config.json"
    return parse_object(file.read_bytes(), str(file)).get("model_type")


def weights_source(
    config: ModelConfig, hf_config: PretrainedConfig, seed: int
) -> FreshSource | SafetensorsSource:
    """Return the source of the first weights, checked before any is read.

    Raises `MissingError`, `IncompatibleError` or `CorruptError`.
    """
    if config.path is None:
        return FreshSource(hf_config, seed)
    model = build_on_meta(hf_config)
    composite = composite_of(config.path, hf_config)
    source = SafetensorsSource(Path(config.path).expanduser(), tied_names(model), composite)
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
        f"transformers cannot make a configuration of model_type {model_type!r} from model.fresh",
        do="correct model.fresh, or install a later transformers",
    ):
        return AutoConfig.for_model(model_type, **values)


def generation_config(hf_config: PretrainedConfig) -> GenerationConfig:
    """Return the sampling settings of the model's generation_config.json, or its configuration's defaults."""
    origin = hf_config.name_or_path
    if origin and (Path(origin) / GENERATION_CONFIG).is_file():
        with refusing(
            f"transformers cannot read {origin}/{GENERATION_CONFIG}",
            want="a JSON object with settings of transformers' GenerationConfig",
            do="correct or remove the file",
        ):
            generation = GenerationConfig.from_pretrained(origin)
            torch.tensor(generation.eos_token_id or [], dtype=torch.int64)  # one number, or several
            return generation
    return GenerationConfig.from_model_config(hf_config)


def aligned_generation_config(
    hf_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    ends: Iterable[int] = (),
) -> GenerationConfig:
    """Return `generation_config` with the tokenizer's special tokens; `ends` end completions, too."""
    generation = generation_config(hf_config)
    if tokenizer is not None:
        _align_special_tokens(generation, tokenizer)
        current = (
            generation.eos_token_id
            if isinstance(generation.eos_token_id, list)
            else [generation.eos_token_id]
        )
        every = [each for each in dict.fromkeys((*current, *ends)) if each is not None]
        generation.eos_token_id = every[0] if len(every) == 1 else every or None
    return generation


def _align_special_tokens(
    config: PretrainedConfig | GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Set the special tokens that the tokenizer has, as transformers' Trainer does. Further eos tokens stay."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(tokenizer, name)
        current = getattr(config, name, None)
        if token is None:
            continue
        # Any of several tokens ends a completion. In config.json only lists have several.
        if name == "eos_token_id" and (
            isinstance(current, list) or isinstance(config, GenerationConfig)
        ):
            others = current if isinstance(current, list) else [current]
            token = [token, *(each for each in others if each not in (token, None))]
        setattr(config, name, token)


def save_model_assets(
    hf_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: str | os.PathLike[str],
    dtype: torch.dtype,
    ends: Iterable[int] = (),
) -> None:
    """Write the files that a Hugging Face directory needs beside its weights in `dtype`.

    config.json and generation_config.json get the tokenizer's special tokens. `ends` end completions, too.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(hf_config)
    config.dtype = dtype
    if not has_value_head(config):
        if architecture := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type):
            config.architectures = [architecture]
        # `save_pretrained` refuses settings of many published models, such as a temperature without do_sample.
        generation = aligned_generation_config(config, tokenizer, ends)
        generation.to_json_file(directory / GENERATION_CONFIG)
    for stale in ("quantization_config", *(() if has_own_code(hf_config) else ("auto_map",))):
        if hasattr(config, stale):
            delattr(config, stale)
    if tokenizer is not None:
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            _align_special_tokens(part, tokenizer)
    config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    if has_own_code(hf_config):
        for source in code_files(Path(hf_config.name_or_path)):
            shutil.copyfile(source, directory / source.name)


class SafetensorsSource(Closing):
    """A `ShardSource` of a Hugging Face model directory. Opening reads only headers.

    Raises `MissingError` for absent files, `CorruptError` for a wrong header, and `IncompatibleError` for two sets of weights.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        tied: Mapping[str, str] | None = None,
        composite: Composite | None = None,
    ) -> None:
        """Also accept tensors under the names in `tied` (`tied_names(model)`), and those of `composite`."""
        self.directory = Path(directory)
        self._reader = DirectoryReader(self.directory)
        held = self._reader.tensors
        self._names = dict(composite.names if composite else {})
        self._tied = dict(tied or {})
        self._kept = composite.rest.keys() - composite.strays if composite else set()
        aliases = {outer: self._tied.get(n, n) for n, outer in self._names.items()} | self._tied
        for prefix in _LANGUAGE_MODELS:  # a second copy of a weight, under a composite's name
            inner = {n: n.replace(prefix, "model.", 1) for n in held if n.startswith(prefix)}
            aliases |= {n: name for n, name in inner.items() if name in held and n not in aliases}
        self._aliases: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            if alias != name:
                self._aliases.setdefault(name, []).append(alias)

    def check(self, specs: Iterable[TensorSpec]) -> list[str]:
        """Compare with all tensors of a model; return the unused ones. Raises as `fill` does.

        Warns of unused tensors and files, and of an index that contradicts its files. Raises `IncompatibleError` for several tensors of different values that stand for the same weight.
        """
        names = {spec.name for spec in map(self._checked, specs)}
        stored = self._reader.tensors
        used = names | {f"{n}{s}" for n in names - stored.keys() for s in ("_blocks", "_scales")}
        with self._reader:
            for name in names:
                used.update(self._alike(name))
        used |= self._kept
        extra = [name for name in stored if name not in used and not self._is_mask(name)]
        if extra:
            message = "%s holds %d tensors that the model has no use for: %s"
            _log.warning(message, self.directory, len(extra), _in_groups(extra, used))
        entries = ((each.file, each.entry) for each in self._reader.locations.values())
        if others := unread_files(self.directory):
            read = few(sorted({each.file for each in self._reader.locations.values()}))
            _log.warning("%s: %s is read, %s is not", self.directory, read, ", ".join(others))
        if wrong := contradictions(self.directory, entries):
            _log.warning("%s contradicts its files: %s", self.directory / INDEX, "; ".join(wrong))
        return extra

    def untied(self) -> list[str]:
        """Return the tied names if each has a tensor with other values than the one that stands for it."""
        stored = self._reader.tensors
        for alias, name in self._tied.items():
            own = self._names.get(alias, alias)
            other = next(
                (n for n in (name, *self._aliases[name]) if n in stored and n != own), None
            )
            if own not in stored or other is None or self._reader.same(own, other):
                return []
        return list(self._tied)

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self._reader.close()

    def _alike(self, name: str) -> list[str]:
        """Return the tensors that stand for a weight. Raises `IncompatibleError` if they differ."""
        stored = self._reader.tensors
        there = [each for each in (name, *self._aliases.get(name, ())) if each in stored]
        differing = [each for each in there[1:] if not self._reader.same(there[0], each)]
        if there and f"{name}_blocks" in stored:
            differing.append(f"{name}_blocks")
        if differing:
            raise IncompatibleError(
                f"{self.directory} holds different values for the same weight of the model",
                have=f"{there[0]} and {few(differing)}",
                want="one of them, or equal values",
                do="remove the tensor that is not the model's, or correct config.json (tie_word_embeddings)",
            )
        return there

    def _is_mask(self, name: str) -> bool:
        """Return whether a tensor is a constant of old files, which follows from config.json."""
        shape = self._reader.tensors[name].shape
        is_causal = name.endswith(".bias") and len(shape) == 4 and shape[:2] == (1, 1)
        return is_causal or _CONSTANTS.search(name) is not None

    def fill(self, shards: Iterable[Shard]) -> None:
        """Read each shard's own bytes. Holds a buffer of 1 MiB."""
        with self._reader:
            for shard in shards:
                self._checked(shard.spec)
                name = shard.spec.name
                if self._packed_shape(name) is None:
                    self._reader.read(self._find(name), shard.box, shard.tensor)
                else:
                    from burnish.models.mxfp4 import fill

                    fill(shard, name, self._reader)

    def _packed_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a weight that is stored in MXFP4 only."""
        stored = self._reader.tensors
        if name in stored or f"{name}_blocks" not in stored:
            return None
        from burnish.models.mxfp4 import plain_shape

        return plain_shape(stored, name)

    def _find(self, name: str) -> str:
        names = [name, *self._aliases.get(name, ())]
        if stored_name := next((each for each in names if each in self._reader.tensors), None):
            return stored_name
        raise MissingError(
            f"{self.directory} has no tensor {name}",
            have=few(list(self._reader.tensors)),
            want=" or ".join(names),
            do="check that the directory belongs to this model type",
        )

    def _checked(self, spec: TensorSpec) -> TensorSpec:
        packed = self._packed_shape(spec.name)
        stored_name = self._find(spec.name) if packed is None else f"{spec.name}_blocks"
        location = self._reader.locations[stored_name]
        entry = location.entry
        path = self.directory / location.file
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


def _in_groups(names: Iterable[str], used: Iterable[str]) -> str:
    """Return names, those of a module of which nothing is used as one: "mtp.* (15), lm_head.weight"."""
    known = {prefix for name in used for prefix in _prefixes(name)}
    groups = Counter(next((p for p in _prefixes(n) if p not in known), n) for n in names)
    return ", ".join(f"{g}* ({n})" if g.endswith(".") else g for g, n in groups.items())


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) + "." for n in range(1, len(parts))]


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
            spec = shard.spec
            region = self._regions.get(shard.spec.name)
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
                current = module_name
                values = self._draw(module_name)
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

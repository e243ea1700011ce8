"""Write a model as a plain Hugging Face directory, which appears whole."""

from __future__ import annotations

import logging
import math
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.boxes.tensor_reader import DirectoryReader, TensorInfo, bytes_of, chunks, dtype_name
from burnish.checkpoint.load import StepReader
from burnish.checkpoint.manifest import ADAPTER_STATE
from burnish.checkpoint.steps import CommittedStep, files_below, read_file, small_files
from burnish.checkpoint.tools.assets import CONFIG, read_assets, require_outside_steps, with_dtype
from burnish.checkpoint.write_plan import (
    MAIN,
    MODEL,
    StoredTensor,
    plan_files,
    prefix_of,
    roles_in,
)
from burnish.config.schema import LoraConfig, ModelConfig
from burnish.errors import IncompatibleError, MissingError, UsageError, few
from burnish.files.durable import Syncs, naming_failures
from burnish.files.lease import locked
from burnish.files.safetensors import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    INDEX,
    TensorEntry,
    model_digest,
)
from burnish.files.storage import LOCAL, Closing, LocalFile, LocalStorage
from burnish.files.strict_json import encode_json, parse_object
from burnish.models.composite import (
    composite_at,
    kept_beside,
    language_modules,
    language_within,
)
from burnish.models.loading import GENERATION_CONFIG, read_model_config
from burnish.models.lora.adapter import Adapter, LowRankDelta, moved
from burnish.models.lora.adapter_config import adapted_weights, are_parameters, factor_name
from burnish.models.lora.dora import magnitude_name, rescaled
from burnish.models.meta_init import build_on_meta

_log = logging.getLogger(__name__)

_CARD = "README.md"

# Elements per chunk. malloc keeps temporaries of this size. Larger ones cost ten times as much in page faults.
_CHUNK = 1 << 14


class StepModel(Closing):
    """A step's model or adapter; each block is checked. bf16 is `model/` bit for bit; other dtypes come from fp32 weights,
    if any.

    Raises `MissingError` for an absent role, `IncompatibleError` for a model without its configuration.
    """

    def __init__(self, step: CommittedStep, role: str = MAIN) -> None:
        self._step = step
        self._directory = _model_directory(step, role)
        is_adapter = f"{self._directory}{ADAPTER_CONFIG}" in step.manifest.files
        self.what = role or ("the adapter" if is_adapter else "the model")
        """Its description in messages."""
        self._tensors = StepReader(step)
        self.weights: Mapping[str, TensorInfo] = {
            key.removeprefix(self._directory): described
            for key, described in self._tensors.tensors.items()
            if key.startswith(self._directory)
        }
        """Its tensors by canonical name."""
        config = f"{self._directory}{CONFIG}"
        self.unconverted: frozenset[str] = frozenset()
        """Those beside a composite's language model that are not trained, which no dtype changes."""
        if config in step.manifest.files:
            stored = self._tensors.locations
            self.unconverted = frozenset(
                name
                for name in kept_beside(read_file(step, config), self.weights)
                if stored[f"{self._directory}{name}"].dtype == self.weights[name].dtype
            )

    def read(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return elements `start` to `stop` in C order, in `dtype` or a more exact one."""
        rounded = (
            torch.bfloat16 if dtype == torch.bfloat16 and name not in self.unconverted else None
        )
        return self._tensors.read_range(f"{self._directory}{name}", start, stop, rounded)

    def assets(self) -> dict[str, bytes]:
        """Return the small files by name."""
        return {
            path.removeprefix(self._directory): read_file(self._step, path)
            for path in small_files(self._step)
            if path.startswith(self._directory) and not path.endswith(INDEX)
        }

    def close(self) -> None:
        """Close the files."""
        self._tensors.close()


class MergedModel(Closing):
    """The model at `base` with a step's adapter merged in, W + s B A in fp32; used as a `StepModel`.

    Raises `IncompatibleError` for another model or a step without an adapter, `MissingError` for an absent model.
    """

    what = "the model, with the adapter merged in,"

    def __init__(self, step: CommittedStep, base: Path) -> None:
        record = adapter_of(step)
        _check_base(step, record, base)
        self._base = base
        root = math.sqrt(record["rank"]) if record["rslora"] else record["rank"]
        self._scale = record["alpha"] / root
        self._adapter = StepModel(step)
        self._tensors = DirectoryReader(base)
        self._changes = _changes(record, base, self._adapter.weights)
        self._factors = lru_cache(maxsize=1)(self._read_factors)
        plain = self._tensors.tensors
        saved = [name for name in self._adapter.weights if ".lora_" not in name]
        self._copies = {name.removeprefix(ADAPTER_PREFIX): name for name in saved}
        """By name: tensors that the adapter holds whole, and their names there."""
        if record.get("keeps_ties"):
            self._copies = {n: own for n, own in self._copies.items() if n in plain}
        changed = (*self._changes, *self._copies)
        if absent := [name for name in changed if name not in plain]:
            raise IncompatibleError(
                f"{base} lacks weights that the adapter in {step.path} belongs to",
                have=f"no {absent[0]}",
                want=few(list(self._changes)),
                do="say where the adapter's own model is with --base DIRECTORY",
            )
        self.weights: Mapping[str, TensorInfo] = {
            name: TensorInfo(torch.float32, info.shape) if name in changed else info
            for name, info in plain.items()
        }
        self.unconverted = kept_beside((base / CONFIG).read_bytes(), plain)
        """See `StepModel.unconverted`."""

    def read(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See `StepModel.read`."""
        if name in self._copies:
            return self._adapter.read(self._copies[name], start, stop, dtype)
        change = self._changes.get(name)
        if change is None:
            return self._tensors.read_range(name, start, stop)
        width = self.weights[name].shape[1]
        first = start // width
        last = -(-stop // width)
        a, b = change.factors(*self._factors(change.layer))
        rows = torch.mm(b[first:last], a[:, :width]).flatten()
        begin = first * width
        magnitude = magnitude_name(change.layer)
        if magnitude in self._adapter.weights:  # the norm is of whole rows
            own = self._tensors.read_range(name, begin, last * width).float()
            changed = own.add_(rows, alpha=self._scale).view(-1, width)
            lengths = self._adapter.read(magnitude, first, last, torch.float32)
            return rescaled(changed, lengths.float()).flatten()[start - begin : stop - begin]
        own = self._tensors.read_range(name, start, stop).float()
        return own.add_(rows[start - begin : stop - begin], alpha=self._scale)

    def _read_factors(self, layer: str) -> list[Tensor]:
        """Return A and B of a layer of PEFT's, in fp32."""
        factors = []
        for name in (factor_name(layer, letter) for letter in "AB"):
            described = self._adapter.weights[name]
            elements = self._adapter.read(name, 0, described.elements, torch.float32)
            factors.append(elements.float().view(described.shape))
        return factors

    def assets(self) -> dict[str, bytes]:
        """Return the model's files, with the adapter's tokenizer and its special tokens."""
        assets = read_assets(self._base) | self._adapter.assets()
        assets.pop(ADAPTER_CONFIG, None)
        config = parse_object(assets[CONFIG], f"{self._base / CONFIG}")
        if GENERATION_CONFIG in self._adapter.assets():
            ends = parse_object(assets[GENERATION_CONFIG], f"the adapter's {GENERATION_CONFIG}")
            _set_special_tokens(config, ends)
        if "auto_map" not in config:  # code of the model's own is not run
            read = read_model_config(ModelConfig(path=str(self._base)))
            if not getattr(read, "tie_word_embeddings", True):
                config["tie_word_embeddings"] = False
        assets[CONFIG] = encode_json(config)
        if card := assets.get(_CARD):
            assets[_CARD] = card.replace(b"library_name: peft", b"library_name: transformers", 1)
        return assets

    def close(self) -> None:
        """Close the files."""
        self._adapter.close()
        self._tensors.close()


Exportable = StepModel | MergedModel


def adapter_of(step: CommittedStep) -> Mapping[str, Any]:
    """Return a step's `adapter_record`. Raises `IncompatibleError` without one."""
    record = step.state.get(ADAPTER_STATE)
    if not isinstance(record, Mapping):
        raise IncompatibleError(
            f"{step.path} holds no adapter to merge",
            have="a whole model",
            want="a step of a run that trains an adapter (model.lora)",
            do="leave out --merged",
        )
    return record


def export(
    model: Exportable,
    target: Path,
    dtype: torch.dtype,
    max_file_bytes: int,
    storage: LocalStorage = LOCAL,
) -> dict[str, int]:
    """Write a model to a directory, its floating-point tensors in `dtype`; return the sizes of its files by name.

    Tensors that their family keeps in fp32, or that lie beside a composite's language model, stay as they are. Raises `UsageError` for a `target` that exists or is inside a step.
    Raises `IncompatibleError` for a tensor in 8 bits or a number too large for `dtype`, `CorruptError` for a damaged
    block.
    """
    target = target.absolute()
    require_new(target, storage)
    with (
        naming_failures(f"{target} could not be written"),
        partial_directory(target, storage) as partial,
    ):
        indices = _write_tensors(model, partial, dtype, max_file_bytes, storage)
        assets = {partial / name: data for name, data in model.assets().items()} | indices
        if (config := assets.get(partial / CONFIG)) is not None:
            assets[partial / CONFIG] = with_dtype(config, dtype, f"{CONFIG} of {model.what}")
        parents = {partial, *(parent for path in assets for parent in path.parents)}
        directories = sorted(path for path in parents if path.is_relative_to(partial))
        for directory in directories:
            storage.make_dirs(directory)
        with Syncs() as syncs:
            syncs.write_new(storage, assets, directories)
            syncs.finish()
        sizes = dict(files_below(partial, "", storage))
        storage.rename(partial, target)
        storage.sync_dir(target.parent)
    return sizes


def require_new(target: Path, storage: LocalStorage) -> None:
    """Raise `UsageError` for a directory that exists, or is inside a step."""
    kind = storage.kind(target)
    if kind is not None and (kind != "directory" or storage.entries(target)):
        raise UsageError(
            f"{target} exists already",
            want="a directory that does not exist yet",
            do="give another name, or remove it",
        )
    require_outside_steps(target, storage)


def _write_tensors(
    model: Exportable,
    directory: Path,
    dtype: torch.dtype,
    max_file_bytes: int,
    storage: LocalStorage,
) -> dict[Path, bytes]:
    """Write the tensor files, and return the index files that belong to them."""
    converted = {
        name: info for name, info in model.weights.items() if name not in model.unconverted
    }
    for name, info in converted.items():
        is_packed = name.endswith("_blocks") and name.replace("_blocks", "_scales") in model.weights
        if info.dtype.itemsize == 1 and (info.dtype.is_floating_point or is_packed):
            raise IncompatibleError(
                f"tensor {name} is quantized to 8 bits or fewer",
                have=info.dtype,
                want="weights of 16 bits or more; without their scales these mean nothing",
                do="take the directory as it is, or convert it with the program that quantized it",
            )
    targets = {name: info.dtype for name, info in model.weights.items()}
    targets |= {name: _target(info, dtype) for name, info in converted.items()}
    stored = [
        StoredTensor(MODEL, name, dtype_name(targets[name], name), info.shape)
        for name, info in model.weights.items()
    ]
    files, indices = plan_files(stored, max_file_bytes)
    for file in files:  # allocate all files first, so that a full disk shows at once
        with storage.create(directory / Path(file.path).name, file.size):
            pass
    for file in files:
        with storage.open(directory / Path(file.path).name, write=True) as out:
            out.pwrite(file.header_within(0, file.header_bytes), 0)
            for entry in file.entries:
                _write_tensor(model, entry, targets[entry.name], out)
            out.sync()
    return {directory / Path(path).name: data for path, data in indices.items()}


def _write_tensor(
    model: Exportable, entry: TensorEntry, dtype: torch.dtype, out: LocalFile
) -> None:
    for start, stop in chunks(model.weights[entry.name].elements, _CHUNK):
        elements = _converted(model.read(entry.name, start, stop, dtype), dtype, entry.name)
        out.pwrite(bytes_of(elements), entry.begin + start * dtype.itemsize)


def _target(described: TensorInfo, dtype: torch.dtype) -> torch.dtype:
    if not described.dtype.is_floating_point or described.stays_fp32:
        return described.dtype
    return dtype


def _converted(elements: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if elements.dtype == dtype:
        return elements
    result = elements.to(dtype)
    too_large = result.isinf() & elements.isfinite()
    if bool(too_large.any()):
        raise IncompatibleError(
            f"tensor {name} has numbers too large for {str(dtype).partition('.')[2]}",
            have=float(elements[too_large].abs().max()),
            want=f"at most {torch.finfo(dtype).max:g}",
            do="export bf16 or fp32",
        )
    return result


def _changes(
    record: Mapping[str, Any], base: Path, weights: Collection[str]
) -> Mapping[str, LowRankDelta]:
    """Return the changes of the model's tensors by the names in its files, with the layers' names in the adapter's."""
    names: Mapping[str, str] = {}
    inner = ""
    outer = ""
    language = language_within((base / CONFIG).read_bytes())
    if language is not None and (composite := composite_at(base, language)) is not None:
        names, (inner, outer) = composite.names, language_modules(composite, language)
    if not any(map(are_parameters, record["targets"])):
        is_transposed = record.get("fan_in_fan_out", False)
        changes = {}
        for name, layer in adapted_weights(weights).items():
            own = moved(name, outer, inner)
            changes[names.get(own, own)] = LowRankDelta(layer, transposed=is_transposed)
        return changes
    lora = LoraConfig(rank=record["rank"], targets=record["targets"])
    hf_config = read_model_config(ModelConfig(path=str(base)))
    changes = {}
    for name, change in Adapter(build_on_meta(hf_config), lora).changes.items():
        layer = moved(change.layer, inner, outer)
        is_there = factor_name(layer, "A") in weights
        changes[names.get(name, name)] = replace(change, layer=layer) if is_there else change
    return changes


def _set_special_tokens(config: dict[str, Any], generation: Mapping[str, Any]) -> None:
    """Give a config.json the tokens of a generation_config.json, whose first eos token is the tokenizer's."""
    parts = [config, *(part for n, part in config.items() if n == "text_config")]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (token := generation.get(name)) is None:
            continue
        first = token[0] if isinstance(token, list) else token
        for part in parts:
            part[name] = token if isinstance(part.get(name), list) else first


def _model_directory(step: CommittedStep, role: str) -> str:
    roles = roles_in(step.manifest.files)
    if role not in roles:
        raise MissingError(
            f"{step.path} holds no {role or 'model'}",
            have=f"further models: {', '.join(each for each in roles if each) or 'none'}",
            want=f"the name of one of them, or none for {MODEL}/",
            do="name one of the models that the step holds",
        )
    directory = f"{prefix_of(role)}{MODEL}/"
    if not {f"{directory}{CONFIG}", f"{directory}{ADAPTER_CONFIG}"} & step.manifest.files.keys():
        raise IncompatibleError(
            f"{step.path} holds no whole model",
            have=f"weights without {directory}{CONFIG}",
            want=f"{directory}{CONFIG}",
            do="put the model's configuration beside the weights, and import the directory",
        )
    return directory


def _check_base(step: CommittedStep, record: Mapping[str, Any], base: Path) -> None:
    if not (base / CONFIG).is_file():
        raise MissingError(
            f"the model that the adapter in {step.path} belongs to is not there",
            have=f"no {base / CONFIG}",
            want=f"the model that was at {record['base']}",
            do="say where it is with --base DIRECTORY",
        )
    digest = model_digest(base)
    if digest != record["base_digest"]:
        raise IncompatibleError(
            f"{base} is not the model that the adapter in {step.path} was trained on",
            have=f"digest {digest}",
            want=f"digest {record['base_digest']}, at {record['base']} then",
            do="say where that one is with --base DIRECTORY",
        )


@contextmanager
def partial_directory(target: Path, storage: LocalStorage) -> Iterator[Path]:
    """Make a directory beside `target`, which the block renames; remove those of killed processes. Raises `OSError`; errors remove it."""
    name = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{32}")
    for entry in storage.entries(target.parent):
        path = target.with_name(entry.name)
        if entry.kind == "directory" and name.fullmatch(entry.name):
            # The directory stays if another process holds it, or if the file system has no locks.
            with suppress(OSError), locked(path, wait=False):
                try:
                    storage.remove(path)
                except OSError as error:
                    _log.warning("what a killed process left could not be removed: %s", error)
    path = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    storage.make_dirs(path)
    try:
        with ExitStack() as stack:
            with suppress(OSError):  # a file system without locks
                stack.enter_context(locked(path))
            yield path
    except BaseException:
        with suppress(OSError):
            storage.remove(path)
        raise

"""Sources of an export: a step's model, an adapter, an adapter merged into its model.

Each yields its tensors in pieces, in order, and has the small files beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

import torch
from torch import Tensor

from burnish.boxes.tensor_reader import DirectoryReader, TensorInfo
from burnish.checkpoint.naming import MAIN, MODEL, prefix_of, roles_in
from burnish.checkpoint.reader import StepReader
from burnish.checkpoint.steps import Committed
from burnish.checkpoint.tools.assets import CONFIG, read_assets, with_dtype
from burnish.checkpoint.verify import read_file
from burnish.config.schema import LoraConfig, ModelConfig
from burnish.errors import IncompatibleError, MissingError, few
from burnish.files.safetensors import SUFFIX, model_digest
from burnish.files.storage import Closing, LocalStorage, Source
from burnish.models.loading import read_model_config
from burnish.models.lora.adapter import Adapter
from burnish.models.lora.adapter_config import (
    ADAPTER_CONFIG,
    ADAPTER_STATE,
    adapted_weights,
    are_parameters,
    factor_name,
)
from burnish.models.lora.merge import Change
from burnish.models.meta_init import build_on_meta


class Exportable(Closing, Protocol):
    """A model, as it can be written. A context manager."""

    what: str
    """What it is, for people."""
    weights: Mapping[str, TensorInfo]
    """Its tensors by canonical name."""

    def read(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return elements `start` to `stop` in C order, in `dtype` or a more exact one."""

    def assets(self, dtype: torch.dtype) -> Iterator[tuple[str, bytes]]:
        """The small files by name; config.json names the dtype."""


class StepModel(Closing):
    """A step's model or adapter; an `Exportable` that checks each block.

    bf16 is `model/` bit for bit; other dtypes come from the exact fp32 weights if the step has them. Raises `MissingError` for an
    absent role, `IncompatibleError` for a model without its configuration.
    """

    def __init__(self, step: Committed, role: str = MAIN, storage: Source | None = None) -> None:
        self._step, self._storage = step, storage or LocalStorage()
        self._directory = _model_directory(step, role)
        is_adapter = f"{self._directory}{ADAPTER_CONFIG}" in step.manifest.files
        self.what = role or ("the adapter" if is_adapter else "the model")
        self._tensors = StepReader(step, storage)
        self.weights: Mapping[str, TensorInfo] = {
            key.removeprefix(self._directory): described
            for key, described in self._tensors.tensors.items()
            if key.startswith(self._directory)
        }

    def read(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See `Exportable.read`."""
        rounded = torch.bfloat16 if dtype == torch.bfloat16 else None
        return self._tensors.read_range(f"{self._directory}{name}", start, stop, rounded)

    def assets(self, dtype: torch.dtype) -> Iterator[tuple[str, bytes]]:
        """See `Exportable.assets`."""
        for path in self._step.manifest.files:
            if not path.startswith(self._directory) or path.endswith(_WEIGHTS):
                continue
            name = path.removeprefix(self._directory)
            data = read_file(self._step, path, self._storage)
            yield name, _configured(name, data, dtype, self._step.path / path)

    def close(self) -> None:
        """Close the files."""
        self._tensors.close()


_WEIGHTS = (SUFFIX, f"{SUFFIX}.index.json")


class MergedModel(Closing):
    """A model with its adapter merged in, W + s B A in fp32; an `Exportable`.

    The model is at `base`. Holds A and B of one layer. Raises `IncompatibleError` for a step without an adapter or another model,
    `MissingError` for an absent model.
    """

    what = "the model, with the adapter merged in,"

    def __init__(self, step: Committed, base: Path, storage: Source | None = None) -> None:
        record = _adapter_of(step)
        self._base = base
        _check_base(step, record, base)
        root = math.sqrt(record["rank"]) if record["rslora"] else record["rank"]
        self._scale = record["alpha"] / root
        self._opened = ExitStack()
        self._adapter = self._opened.enter_context(StepModel(step, storage=storage))
        self._tensors = self._opened.enter_context(DirectoryReader(self._base))
        self._changes = _changes(record, base, self._adapter.weights)
        self._factors: _Factors | None = None
        plain = self._tensors.tensors
        absent = [name for name in self._changes if name not in plain]
        if absent:
            raise IncompatibleError(
                f"{self._base} has not the weights that the adapter in {step.path} belongs to",
                have=f"no {absent[0]}",
                want=few(list(self._changes)),
                do="say where the adapter's own model is with --base DIRECTORY",
            )
        self.weights: Mapping[str, TensorInfo] = {
            name: TensorInfo(torch.float32, each.shape) if name in self._changes else each
            for name, each in plain.items()
        }

    def read(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """See `Exportable.read`."""
        own = self._tensors.read_range(name, start, stop)
        change = self._changes.get(name)
        if change is None:
            return own
        width = self.weights[name].shape[1]
        first, last = start // width, -(-stop // width)
        factors = self._factors_of(change.layer)
        a, b = change.factors(factors.a, factors.b)
        rows = torch.mm(b[first:last], a[:, :width]).flatten()
        return own.float().add_(
            rows[start - first * width : stop - first * width], alpha=self._scale
        )

    def assets(self, dtype: torch.dtype) -> Iterator[tuple[str, bytes]]:
        """The model's, with the tokenizer that the adapter was trained with."""
        found = read_assets(self._base)
        found |= {n: data for n, data in self._adapter.assets(dtype) if n != ADAPTER_CONFIG}
        for name, data in found.items():
            yield name, _configured(name, data, dtype, self._base / name)

    def _factors_of(self, layer: str) -> _Factors:
        if self._factors is None or self._factors.layer != layer:
            a, b = (self._whole(factor_name(layer, letter)) for letter in "AB")
            self._factors = _Factors(layer, a, b)
        return self._factors

    def _whole(self, name: str) -> Tensor:
        described = self._adapter.weights[name]
        elements = self._adapter.read(name, 0, described.elements, torch.float32)
        return elements.float().view(described.shape)

    def close(self) -> None:
        """Close the files."""
        self._opened.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Factors:
    """A and B of a layer of PEFT's, fp32."""

    layer: str
    a: Tensor
    b: Tensor


def _changes(record: Mapping[str, Any], base: Path, weights: Iterable[str]) -> Mapping[str, Change]:
    """Return the model's tensors that an adapter changes."""
    if not any(map(are_parameters, record["targets"])):
        return {name: Change(layer) for name, layer in adapted_weights(weights).items()}
    lora = LoraConfig(rank=record["rank"], targets=record["targets"])
    hf_config = read_model_config(ModelConfig(path=str(base)))
    return Adapter(build_on_meta(hf_config), lora).changes


def _model_directory(step: Committed, role: str) -> str:
    """Where the model lies below the step, with a slash at the end."""
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


def _configured(name: str, data: bytes, dtype: torch.dtype, path: PurePath) -> bytes:
    return with_dtype(data, dtype, path) if name == CONFIG else data


def base_of(step: Committed) -> str:
    """Return the path or URL of the model that a step's adapter was trained on. Raises `IncompatibleError` without an adapter."""
    return str(_adapter_of(step)["base"])


def _adapter_of(step: Committed) -> Mapping[str, Any]:
    record = step.state.get(ADAPTER_STATE)
    if not isinstance(record, Mapping):
        raise IncompatibleError(
            f"{step.path} holds no adapter to merge",
            have="a whole model",
            want="a step of a run that trains an adapter (model.lora)",
            do="leave out --merged",
        )
    return record


def _check_base(step: Committed, record: Mapping[str, Any], base: Path) -> None:
    if not (base / CONFIG).is_file():
        raise MissingError(
            f"the model that the adapter in {step.path} belongs to is not there",
            have=f"no {base / CONFIG}",
            want=f"the model that was at {record['base']}",
            do="say where it is with --base DIRECTORY",
        )
    found = model_digest(base)
    if found != record["base_digest"]:
        raise IncompatibleError(
            f"{base} is not the model that the adapter in {step.path} was trained on",
            have=f"digest {found}",
            want=f"digest {record['base_digest']}, at {record['base']} then",
            do="say where that one is with --base DIRECTORY",
        )

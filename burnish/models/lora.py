"""Low-rank adapters on the linear layers of a model (LoRA, Hu et al., arXiv 2106.09685), as PEFT's own modules.

    y = W x + s B A x,    A [rank, in],  B [out, rank],  s = alpha / rank

(with rsLoRA, arXiv 2312.03732, s = alpha / √rank). W is frozen, A and B are trained. PEFT puts its
modules into a model that knows nothing of it; here is which tensors of PEFT's files their
parameters are, and the model with the adapter in it or off. Left out: dropout, because what is
computed here is a function of the tokens, so that it can be computed once for sequences that begin
alike and again in the backward pass; adapters on embeddings and output layers; on fused experts, whose
weights PEFT adapts by making all of W + s B A in every forward pass, in the place of the sharded W.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.config.schema import LoraConfig
from burnish.errors import IncompatibleError, UsageError
from burnish.models.cuts import Cut, cut_regions
from burnish.models.lora_names import PREFIX, factor_name, layer_kinds, plain_parameter
from burnish.models.names import Region, model_shards, regions
from burnish.parallel.boxes import Box, whole
from burnish.parallel.layout import Layout
from burnish.parallel.shards import Shard, TensorSpec
from burnish.parallel.transfer import Transfer
from burnish.records.seeds import derive_seed

_NAME = "default"
# What PEFT calls an adapter that was given no name.
_WRAPPED = ".base_layer.weight"
# Ends the name of the weight of a layer that has an adapter.
_BLOCK_ELEMENTS = 1 << 20
# Of a merged weight at a time in fp32.


class Adapter:
    """The adapter of one model, which making it puts there: the model's own weights are frozen from then on."""

    def __init__(
        self, model: PreTrainedModel, config: LoraConfig, base_dtype: torch.dtype | None = None
    ) -> None:
        """Where `model` is, adapters are made, in fp32 and undefined; its own weights get `base_dtype`.

        Raises `IncompatibleError` where the model has not the layers that `config` names, or PEFT
        would adapt others, and `UsageError` where PEFT is not installed.
        """
        plain, targets = regions(model), adapted_layers(model, config)
        self._rank = config.rank
        self._layers = _inject(model, peft_config(config, targets), targets)
        self._scale = float(next(iter(self._layers.values())).scaling[_NAME])
        self.base = _moved(plain, model)
        """The tensors of the model's own checkpoint."""
        self.weights = tuple(_regions_of_adapter(model))
        """The tensors of PEFT's file."""
        self._layer_of = {
            region.name: region.parameter.removesuffix(_WRAPPED)
            for region in self.base
            if region.parameter.endswith(_WRAPPED)
        }
        if base_dtype is not None:
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(base_dtype)
        self._model = model
        self._gathering: Transfer | None = None

    def cut(self, cuts: Mapping[str, Cut]) -> None:
        """From now on these parameters are parts of themselves; `base` and `weights` say of what."""
        self.base = cut_regions(self.base, cuts)
        self.weights = cut_regions(self.weights, cuts)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block the model computes what it does without an adapter."""
        # Not by PEFT's enable_adapters: that sets requires_grad, which FSDP2 reads once and keeps.
        self._set_scale(0.0)
        try:
            yield
        finally:
            self._set_scale(self._scale)

    def _set_scale(self, scale: float) -> None:
        for layer in self._layers.values():
            layer.scaling[_NAME] = scale

    def merged(self, layout: Layout) -> Iterator[Shard]:
        """This rank's pieces of the model's own checkpoint with W + s B A for W, computed as they are read. Collective.

        Holds, as long as they are in use, the rows of B and the columns of A that belong to this rank's pieces.
        """
        base = list(model_shards(self._model, parts=self.base))
        factors = {s.spec.name: self._factors(s) for s in base if s.spec.name in self._layer_of}
        have = list(model_shards(self._model, parts=self.weights))
        want = [factor for pair in factors.values() for factor in pair]
        if self._gathering is None:
            self._gathering = Transfer(have, want, layout)
        self._gathering.run(have, want)
        for shard in base:
            if shard.spec.name not in factors:
                yield shard
                continue
            a, b = (factor.tensor for factor in factors[shard.spec.name])
            yield MergedShard(shard.spec, shard.box, shard.tensor, a, b, self._scale)

    def _factors(self, shard: Shard) -> tuple[Shard, Shard]:
        """Places for the columns of A and the rows of B that belong to a piece of W."""
        (row, column), (rows, columns) = shard.box.offsets, shard.box.sizes
        out, into, rank = *shard.spec.shape, self._rank
        places = (
            ("A", (rank, into), Box((0, column), (rank, columns))),
            ("B", (out, rank), Box((row, 0), (rows, rank))),
        )
        layer, device = self._layer_of[shard.spec.name], shard.tensor.device
        a, b = (
            Shard(
                TensorSpec(factor_name(layer, letter), shape, torch.float32),
                box,
                torch.empty(box.sizes, device=device),
            )
            for letter, shape, box in places
        )
        return a, b


@dataclass(frozen=True, slots=True, eq=False)
class MergedShard(Shard):
    """A piece of W that reads as W + s B A; its own memory holds W."""

    a: Tensor
    """Its columns of A, fp32."""
    b: Tensor
    """Its rows of B, fp32."""
    scale: float
    """s."""

    def part(self, box: Box) -> Tensor:
        """See `Shard.part`: in memory of its own, computed in fp32 and rounded once."""
        rows, columns = box.relative_to(self.box).slices
        base, a, b = self.tensor[rows, columns], self.a[:, columns], self.b[rows]
        result = torch.empty_like(base)
        step = max(1, _BLOCK_ELEMENTS // max(1, base.shape[1]))
        for start in range(0, len(base), step):
            block = slice(start, start + step)
            result[block] = torch.addmm(base[block].float(), b[block], a, alpha=self.scale)
        return result


class FreshAdapter:
    """First values of an adapter, a `ShardSource`: A as PEFT draws it, B zero, so that the model begins as it is without.

    Each A comes from a generator of its own, seeded with the run's seed and its name, so that it
    does not depend on the number of ranks.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def fill(self, shards: Iterable[Shard]) -> None:
        """See `ShardSource.fill`. Holds one A."""
        for shard in shards:
            if shard.spec.name.endswith(".lora_B.weight"):
                shard.tensor.detach().zero_()
                continue
            generator = torch.Generator().manual_seed(
                derive_seed(self._seed, "lora", shard.spec.name)
            )
            drawn = torch.empty(shard.spec.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            shard.tensor.detach().copy_(drawn[shard.box.slices])


def adapted_layers(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Names of the linear layers that are adapted. Raises `IncompatibleError` where the model has none that is asked for."""
    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    kinds = layer_kinds(linear)
    unknown = [target for target in config.targets if target not in kinds]
    if unknown or not linear:
        fused = any(parameter.ndim > 2 for parameter in model.parameters())
        raise IncompatibleError(
            f"the model has no linear layers {', '.join(unknown)}",
            have=(", ".join(kinds) or "none")
            + ("; its experts are fused, and get no adapter" if fused else ""),
            want="names of linear layers, the output layer not among them",
            do="correct model.lora.targets, or leave it out for all of them",
        )
    wanted = config.targets or kinds
    return [name for name in linear if name.rpartition(".")[2] in wanted]


def peft_config(config: LoraConfig, layers: Iterable[str]) -> Any:
    """PEFT's description of an adapter on these layers. Raises `UsageError` where PEFT is not installed."""
    return _peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        target_modules=layer_kinds(layers),
        task_type="CAUSAL_LM",
    )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UsageError(
            "LoRA needs a package that is not installed",
            have=error,
            want="peft",
            do='pip install "burnish[lora]"',
        ) from error
    return peft


def _inject(model: PreTrainedModel, config: Any, layers: Iterable[str]) -> dict[str, Any]:
    """Let PEFT wrap the layers; its modules by name. Raises `IncompatibleError` where they are other layers."""
    peft = _peft()
    with model.device, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what is wrong is said below
        peft.inject_adapter_in_model(config, model, _NAME)
    kind = peft.tuners.lora.LoraLayer
    found = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    if found.keys() != set(layers) or config.target_parameters:
        raise IncompatibleError(
            "PEFT takes the names of some linear layers for experts, which are fused in this model",
            have=", ".join(layer_kinds(layers)),
            want="names of linear layers that no expert has",
            do="set model.lora.targets=[q_proj, k_proj, v_proj, o_proj]",
        )
    return found


def _moved(plain: Iterable[Region], model: PreTrainedModel) -> tuple[Region, ...]:
    """The regions of a model, whose parameters have new names now that PEFT has wrapped their layers."""
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    plainly = ((name, *plain_parameter(name)) for name in names)
    now = {plain_name: name for name, plain_name, factor in plainly if not factor}
    return tuple(replace(r, parameter=now.get(r.parameter, r.parameter)) for r in plain)


def _regions_of_adapter(model: PreTrainedModel) -> Iterator[Region]:
    for name, parameter in model.named_parameters():
        if f".{_NAME}." in name:
            shape = tuple(parameter.shape)
            saved = PREFIX + name.replace(f".{_NAME}.", ".")
            yield Region(saved, shape, name, whole(shape), tuple(range(len(shape))))

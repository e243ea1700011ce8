"""Low-rank adapters on linear layers (LoRA, Hu et al., arXiv 2106.09685), as PEFT's own modules.

    y = W x + s B A x,    A [rank, in],  B [out, rank],  s = alpha / rank

(rsLoRA, arXiv 2312.03732: s = alpha / √rank). W is frozen, A and B are trained. This module maps PEFT's parameters to tensors of its
files, and turns the adapter on and off. Left out: dropout, which would make outputs more than a function of the tokens; adapters
on embeddings and output layers. Fused experts are in `burnish.models.lora.experts`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from burnish.boxes.box import whole
from burnish.boxes.shards import Shard
from burnish.boxes.transfer import Transfer
from burnish.config.schema import LoraConfig
from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError, UsageError, install
from burnish.models.lora.adapter_config import (
    PREFIX,
    adapted_parameters,
    are_parameters,
    layer_kinds,
    parameter_kinds,
    plain_parameter,
    require_targets,
)
from burnish.models.lora.experts import AdaptedExperts, expert_parameters
from burnish.models.lora.merge import by_expert, changes, gathered
from burnish.models.names import Cut, Region, cut_regions, model_shards, regions
from burnish.records.seeds import derive_seed

_NAME = "default"
# What PEFT calls an adapter that was given no name.
_WITHIN = ".base_layer"
# Ends the name of what PEFT has wrapped; it wraps experts once for each of their parameters.


class Adapter:
    """The adapter of one model. Making it puts it there and freezes the model's own weights."""

    def __init__(
        self, model: PreTrainedModel, config: LoraConfig, base_dtype: torch.dtype | None = None
    ) -> None:
        """Add an undefined fp32 adapter on the model's device; the model's own weights get `base_dtype`.

        Raises `IncompatibleError` if the model lacks layers that `config` names or PEFT would adapt others, `UsageError` without PEFT.
        """
        plain, targets = regions(model), Targets.of(model, config)
        layers = _inject(model, peft_config(config, targets.kinds), targets)
        self._rank, self._layers = config.rank, _computing(model, layers)
        self._scale = float(next(iter(self._layers.values())).scaling[_NAME])
        self.base = _moved(plain, model)
        """The tensors of the model's own checkpoint."""
        self.weights = tuple(_regions_of_adapter(model))
        """The tensors of PEFT's file."""
        self.changes = changes(
            plain,
            {
                parameter: (layer, getattr(layers[layer], "num_experts", 1))
                for layer, parameter in adapted_parameters(layers.items()).items()
            },
        )
        """By name, the tensors of the checkpoint that are changed, and what of the adapter changes them."""
        self._shapes = {region.name: region.shape for region in self.weights}
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
        """Return this rank's pieces of the checkpoint with W + s B A for W, computed as they are read. Collective.

        Holds the rows of B and columns of A that these pieces need.
        """
        base = list(model_shards(self._model, parts=self.base))
        places = gathered(base, self.changes, self._shapes)
        have = [by_expert(s, self._rank) for s in model_shards(self._model, parts=self.weights)]
        want = [shard for each in dict.fromkeys(places.values()) for shard in each.shards]
        if self._gathering is None:
            self._gathering = Transfer(have, want, layout)
        self._gathering.run(have, want)
        for shard in base:
            name = shard.spec.name
            if name in places:
                yield places[name].merged(self.changes[name], shard, self._scale)
            else:
                yield shard


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a linear layer: s B A x."""

    a: nn.Linear
    """A, without a bias."""
    b: nn.Linear
    """B, without a bias."""
    scale: float
    """s."""


def linear_parts(layer: Any) -> tuple[nn.Linear, LowRank | None]:
    """Return a linear layer without its adapter, and the adapter, if any."""
    if not hasattr(layer, "lora_A"):
        return layer, None
    factors = layer.lora_A[_NAME], layer.lora_B[_NAME]
    return layer.base_layer, LowRank(*factors, layer.scaling[_NAME])


class FreshAdapter:
    """Initial values of an adapter, a `ShardSource`: A as PEFT draws it, B zero, so the model starts unchanged.

    Each A has its own generator, seeded with the run's seed and its name, so the number of ranks does not matter.
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


@dataclass(frozen=True, slots=True)
class Targets:
    """What of a model is adapted."""

    layers: tuple[str, ...]
    """Names of linear layers."""
    parameters: tuple[str, ...]
    """Names of parameters that hold the experts of a layer."""

    @classmethod
    def of(cls, model: PreTrainedModel, config: LoraConfig) -> Targets:
        """What `config` names in a model. Raises `IncompatibleError` where the model has not all of it."""
        head = model.get_output_embeddings()
        linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
        experts = list(expert_parameters(model))
        kinds, fused = layer_kinds(linear), parameter_kinds(experts)
        require_targets(config.targets, (*kinds, *fused))
        wanted = config.targets or kinds
        return cls(
            tuple(name for name in linear if layer_kinds([name])[0] in wanted),
            tuple(name for name in experts if parameter_kinds([name])[0] in wanted),
        )

    @property
    def kinds(self) -> list[str]:
        """What PEFT knows them by, each once."""
        return [*layer_kinds(self.layers), *parameter_kinds(self.parameters)]


def peft_config(config: LoraConfig, kinds: Iterable[str]) -> Any:
    """Return PEFT's description of an adapter of these layers and parameters. Raises `UsageError` without PEFT."""
    asked = list(kinds)
    return _peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        target_modules=[kind for kind in asked if not are_parameters(kind)],
        target_parameters=[kind for kind in asked if are_parameters(kind)] or None,
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
            do=install("lora"),
        ) from error
    return peft


def _inject(model: PreTrainedModel, config: Any, targets: Targets) -> dict[str, Any]:
    """Let PEFT wrap the targets, and return its modules by name. Raises `IncompatibleError` if they are for something else."""
    peft = _peft()
    with model.device, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what is wrong is said below
        peft.inject_adapter_in_model(config, model, _NAME)
    kind = peft.tuners.lora.LoraLayer
    found = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    wanted = {f"{name}.weight" for name in targets.layers} | set(targets.parameters)
    if set(adapted_parameters(found.items()).values()) != wanted:
        raise IncompatibleError(
            "PEFT takes the names of some linear layers for experts, which are fused in this model",
            have=", ".join(targets.kinds),
            want="names of linear layers that no expert has, and of experts' parameters",
            do="set model.lora.targets=[q_proj, k_proj, v_proj, o_proj], with experts.gate_up_proj and experts.down_proj for the experts",
        )
    return found


def _computing(model: PreTrainedModel, layers: Mapping[str, Any]) -> dict[str, Any]:
    """Those of PEFT's layers that compute, by name, with `AdaptedExperts` in the place of what wraps experts."""
    found = {}
    for name, layer in layers.items():
        if not hasattr(layer, "parameter_name"):
            found[name] = layer
        elif not name.endswith(_WITHIN):
            found[name] = AdaptedExperts(layer, _NAME)
            model.set_submodule(name, found[name])
    return found


def _moved(plain: Iterable[Region], model: PreTrainedModel) -> tuple[Region, ...]:
    """The regions of a model, whose parameters have new names now that PEFT has wrapped their layers."""
    adapted = adapted_parameters(model.named_modules())
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    plainly = ((name, *plain_parameter(name, adapted)) for name in names)
    now = {plain_name: name for name, plain_name, factor in plainly if not factor}
    return tuple(replace(r, parameter=now.get(r.parameter, r.parameter)) for r in plain)


def _regions_of_adapter(model: PreTrainedModel) -> Iterator[Region]:
    for name, parameter in model.named_parameters():
        if f".{_NAME}." in name:
            shape = tuple(parameter.shape)
            saved = PREFIX + name.replace(f".{_NAME}.", ".")
            yield Region(saved, shape, name, whole(shape), tuple(range(len(shape))))

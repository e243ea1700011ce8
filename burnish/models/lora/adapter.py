"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685), as PEFT's own modules.

    y = W x + s B A x,    A [rank, in],  B [out, rank],  s = alpha / rank

(rsLoRA, arXiv 2312.03732: s = alpha / √rank).
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.pytorch_utils import Conv1D

from burnish.boxes.box import Box, whole
from burnish.boxes.shards import Shard, ShardSource, TensorSpec, renamed
from burnish.boxes.transfer import Transfer
from burnish.config.schema import LoraConfig, ModelConfig
from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError, few
from burnish.families import family_of
from burnish.files.safetensors import ADAPTER_PREFIX, model_digest
from burnish.models.heads import has_value_head
from burnish.models.kernels.mixers import mixers
from burnish.models.language_model import Composite
from burnish.models.loading import SafetensorsSource
from burnish.models.lora.adapter_config import (
    ADAPTER_NAME,
    COPY,
    factor_name,
    import_peft,
    kinds_of,
    peft_config,
    plain_names,
    require_same_base,
    require_targets,
    require_tied,
)
from burnish.models.lora.experts import AdaptedExperts, expert_parameters
from burnish.models.lora.whole_modules import (
    keeps_ties,
    modules_trained_whole,
    set_copies,
    warn_of_ties,
)
from burnish.models.meta_init import build_on_meta
from burnish.models.names import Region, model_shards, regions
from burnish.models.packing import on_device
from burnish.models.parts import ShardRule, cut_regions
from burnish.records.seeds import derive_seed

if TYPE_CHECKING:
    from burnish.models.lora.dora import RowsOfTensors
    from burnish.models.lora.dropout import TokenDropout
    from burnish.models.scorer import ScoringPlan

# Elements of a weight that are merged in fp32 at a time.
_BLOCK_ELEMENTS = 1 << 20
_FACTORS = ("A", "B")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LowRankDelta:
    """The change of one tensor [rows, columns] of the checkpoint."""

    layer: str
    """The PEFT layer that has A and B, such as `model.layers.0.self_attn.q_proj`."""
    row: int = 0
    """The row of B for the tensor's first row."""
    column: int = 0
    """The column of A for the tensor's first column."""
    expert: int = 0
    """The number of the tensor's expert."""
    experts: int = 1
    """Number of experts that A and B serve."""
    transposed: bool = False
    """The tensor is Wᵀ, as GPT-2's `Conv1D` has it."""

    def factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's factors from this tensor's first column and row on: A [r, columns], B [rows, r]."""
        if self.transposed:
            a, b = b.T, a.T
        rank = len(a) // self.experts
        own = a[self.expert * rank : (self.expert + 1) * rank]
        return own[:, self.column :], b[self.row :, self.expert :: self.experts]


class Adapter:
    """An adapter on one model, whose own weights are frozen."""

    def __init__(
        self, model: PreTrainedModel, config: LoraConfig, base_dtype: torch.dtype | None = None
    ) -> None:
        """Add an uninitialized fp32 adapter; cast the model's own weights to `base_dtype`.

        Raises `IncompatibleError` if the model lacks layers of `config`, PEFT would adapt others, or merging is impossible, and
        `UsageError` without PEFT.
        """
        plain = regions(model)
        _inject(model, config)
        self._dropouts: list[TokenDropout] = []
        self.model = model
        """The model, with PEFT's modules."""
        self.rank = config.rank
        """Width of A and B."""
        self._layers = _computing_layers(model)
        self.scale = float(self._layers[0].scaling[ADAPTER_NAME])
        """s."""
        names = plain_names(model)
        now = {before: name for name, (before, factor) in names.items() if not factor}
        self.base = tuple(replace(r, parameter=now.get(r.parameter, r.parameter)) for r in plain)
        """The tensors of the model's own checkpoint."""
        held = list(model.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in reversed(held)}
        self.weights = tuple(
            Region(
                _saved_name(name), (*p.shape,), first[id(p)], whole((*p.shape,)), (*range(p.ndim),)
            )
            for name, p in held
            if names[name][1]
        )
        """The tensors of PEFT's file. Those of tied copies are the same parameter."""
        self.shapes = {region.name: region.shape for region in self.weights}
        """By name: shapes of the tensors of PEFT's file."""
        copies = {plain: name for name, (plain, factor) in names.items() if factor == "W"}
        self._copies = tuple(
            replace(r, parameter=copies[r.parameter]) for r in plain if r.parameter in copies
        )
        originals = {region.parameter: region.name for region in self._copies}
        self.originals = {
            r.name: originals[r.parameter] for r in self.weights if r.parameter in originals
        }
        """By name in PEFT's file: the tensor of the model's checkpoint that a copy takes the place of."""
        layers = {
            before: name.split(".lora_")[0]
            for name, (before, factor) in names.items()
            if factor in _FACTORS
        }
        self.changes: dict[str, LowRankDelta] = {}
        """By name: each checkpoint tensor that the adapter changes, and the part of the adapter that changes it."""
        for before, region in zip(plain, self.base, strict=True):
            if layer := layers.get(before.parameter):
                *expert, row, column = region.box.offsets
                if expert and region.box.sizes[0] > 1:
                    raise IncompatibleError(
                        f"an adapter of {before.parameter} could not be merged into the model",
                        have=f"a checkpoint with all experts of a layer in one tensor {region.shape}",
                        want="a tensor for each expert",
                        do="take the experts out of model.lora.targets",
                    )
                experts = model.get_parameter(region.parameter).shape[0] if expert else 1
                self.changes[region.name] = LowRankDelta(
                    layer,
                    row,
                    column,
                    sum(expert),
                    experts,
                    getattr(model.get_submodule(layer), "fan_in_fan_out", False),
                )
        if config.dropout:
            self._drop_inputs(config.dropout)
        if base_dtype is not None:
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(base_dtype)
        self._gathering: Transfer | None = None
        self._has_magnitudes = config.dora
        self.magnitudes = self._rows() if config.dora else {}
        """With DoRA: what magnitudes belong to (`burnish.models.lora.dora`)."""

    def _rows(self) -> RowsOfTensors:
        from burnish.models.lora.dora import magnitude_name

        rows: dict[str, list[tuple[int, TensorSpec]]] = {}
        for region in self.base:
            change = self.changes.get(region.name)
            if change is None:
                continue
            width = self.model.get_parameter(region.parameter).shape[-1]
            if change.transposed or change.column or region.shape[1:] != (width,):
                raise IncompatibleError(
                    f"DoRA is not computed for {region.name}",
                    have="a weight that does not hold whole rows, or holds them as columns",
                    want="linear layers with a row for each output",
                    do="set model.lora.dora=false, or take the layer out of model.lora.targets",
                )
            spec = TensorSpec(region.name, region.shape, torch.float32)
            rows.setdefault(magnitude_name(change.layer), []).append((change.row, spec))
        return rows

    def cut(self, cuts: Mapping[str, ShardRule], of_experts: Mapping[str, ShardRule]) -> None:
        """Make `base` and `weights` describe parameters that tensor and then expert parallelism cut."""
        self.base = cut_regions(cut_regions(self.base, cuts), of_experts)
        self.weights = cut_regions(cut_regions(self.weights, cuts), of_experts)
        if self._has_magnitudes and cuts:
            raise IncompatibleError(
                "tensor parallelism does not divide the layers of DoRA, which needs the norms of whole rows",
                want="engine.tensor_parallel: 1",
                do="set engine.tensor_parallel=1, or start from an adapter without use_dora",
            )
        modules = {name.rpartition(".")[0] for name in self.originals.values()}
        is_scorer = has_value_head(self.model.config)  # its head is whole in any case
        if len(modules) > is_scorer and cuts:
            raise IncompatibleError(
                "tensor parallelism does not divide modules that are trained beside an adapter",
                have=few(sorted(self.originals.values())),
                want="engine.tensor_parallel: 1",
                do="set engine.tensor_parallel=1, or start from an adapter without modules_to_save",
            )
        for dropout in self._dropouts:
            cut = cuts.get(f"{dropout.layer}.lora_A.{ADAPTER_NAME}.weight")
            if cut is not None and cut.dim == 1:
                dropout.features = cut.spans

    def _drop_inputs(self, share: float) -> None:
        from burnish.models.lora.dropout import TokenDropout

        for name, layer in self.model.named_modules():
            if hasattr(layer, "lora_A"):
                features = layer.lora_A[ADAPTER_NAME].in_features
                layer.lora_dropout[ADAPTER_NAME] = TokenDropout(share, name, features)
                self._dropouts.append(layer.lora_dropout[ADAPTER_NAME])

    def begin_pass(self, plan: ScoringPlan, token_ids: Tensor, seed: int) -> None:
        """Drop inputs in the next training pass by its tokens [T] and `seed`."""
        if not self._dropouts:
            return
        from burnish.models.lora.dropout import token_keys

        keys = token_keys(token_ids.numpy(), plan.lengths, seed)[plan.tree.computed]
        tokens = on_device(plan.deal.mine(keys), plan.input_ids.device).int()
        for dropout in self._dropouts:
            dropout.tokens = tokens

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute without the adapter inside the block."""
        # PEFT's enable_adapters is not used: it sets requires_grad, which FSDP2 reads only once.
        self._switch(on=False)
        try:
            yield
        finally:
            self._switch(on=True)

    def _switch(self, *, on: bool) -> None:
        for layer in self._layers:
            if self._has_magnitudes:  # these rescale what W gives, too
                layer._disable_adapters = not on
            else:
                layer.scaling[ADAPTER_NAME] = self.scale if on else 0.0
        set_copies(self.model, on=on)

    def merged(self, layout: Layout) -> Iterator[Shard]:
        """Yield this rank's pieces of the checkpoint with W + s B A for W, computed when read. Collective."""
        base = list(model_shards(self.model, parts=self.base))
        factors = [region for region in self.weights if region.name not in self.originals]
        copies = {s.spec.name: s for s in model_shards(self.model, parts=self._copies)}
        for piece in self.merge(base, list(model_shards(self.model, parts=factors)), layout):
            yield copies.get(piece.spec.name, piece)

    def merge(
        self, base: Sequence[Shard], weights: Sequence[Shard], layout: Layout
    ) -> Iterator[Shard]:
        """Yield these pieces of the model with W + s B A for W, computed when read; `weights` are pieces of A and B. Collective."""
        factors = [self._factors_of(piece) for piece in base]
        have = [_by_expert(shard, self.rank) for shard in weights]
        want = [shard for pair in factors for shard in pair]
        if self._gathering is None:
            self._gathering = Transfer(have, want, layout)
        self._gathering.run(have, want)
        for piece, pair in zip(base, factors, strict=True):
            if not pair:
                yield piece
                continue
            a = pair[0].tensor
            b = pair[1].tensor[:, :, 0]
            if self.changes[piece.spec.name].transposed:
                a, b = b.T, a.T
            magnitude = pair[2].tensor if self._has_magnitudes else None
            yield _MergedShard(piece.spec, piece.box, piece.tensor, a, b, self.scale, magnitude)

    def _factors_of(self, piece: Shard) -> tuple[Shard, ...]:
        """Allocate the columns of A [E r, in] and rows of B [out, r, E], and perhaps of m [out], that change a piece."""
        change = self.changes.get(piece.spec.name)
        if change is None:
            return ()
        places = list(zip(piece.box.offsets, piece.box.sizes, strict=True))
        (row, rows), (column, columns) = reversed(places) if change.transposed else places
        a, b = (factor_name(change.layer, letter) for letter in "AB")
        rank = self.rank
        first = change.expert * self.rank
        of_a = TensorSpec(a, self.shapes[a], torch.float32)
        of_b = TensorSpec(b, (self.shapes[b][0], rank, change.experts), torch.float32)
        boxes = {
            of_a: Box((first, change.column + column), (rank, columns)),
            of_b: Box((change.row + row, 0, change.expert), (rows, rank, 1)),
        }
        if self._has_magnitudes:
            from burnish.models.lora.dora import magnitude_name

            name = magnitude_name(change.layer)
            of_m = TensorSpec(name, self.shapes[name], torch.float32)
            boxes[of_m] = Box((change.row + row,), (rows,))
        empty = partial(torch.empty, device=piece.tensor.device)
        return tuple(Shard(spec, box, empty(box.sizes)) for spec, box in boxes.items())


def _by_expert(factor: Shard, rank: int) -> Shard:
    """View B [out, r E] as [out, r, E]; leave A and m unchanged. A piece has all experts, or one column of r."""
    if ".lora_B." not in factor.spec.name:
        return factor
    out, width = factor.spec.shape
    (row, column), (rows, columns) = factor.box.offsets, factor.box.sizes
    experts = width // rank
    number, expert = divmod(column, experts)
    has_all = column % experts == columns % experts == 0
    shape = (columns // experts, experts) if has_all else (1, columns)
    return Shard(
        TensorSpec(factor.spec.name, (out, rank, experts), factor.spec.dtype),
        Box((row, number, expert), (rows, *shape)),
        factor.tensor.view(rows, *shape),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _MergedShard(Shard):
    """A piece of W that reads as W + s B A; its own memory holds W."""

    a: Tensor
    """Its columns of A, fp32."""
    b: Tensor
    """Its rows of B, fp32."""
    scale: float
    """s."""
    magnitude: Tensor | None = None
    """With DoRA: its rows of m, fp32. It has whole rows of W then."""

    def part(self, box: Box) -> Tensor:
        """See `Shard.part`. Computed in fp32 and rounded once."""
        rows, columns = box.relative_to(self.box).slices
        if self.magnitude is not None:
            from burnish.models.lora.dora import rescaled

            changed = torch.addmm(self.tensor[rows].float(), self.b[rows], self.a, alpha=self.scale)
            return rescaled(changed, self.magnitude[rows])[:, columns].to(self.tensor.dtype)
        base = self.tensor[rows, columns]
        a = self.a[:, columns]
        b = self.b[rows]
        result = torch.empty_like(base)
        step = max(1, _BLOCK_ELEMENTS // max(1, base.shape[1]))
        for start in range(0, len(base), step):
            block = slice(start, start + step)
            result[block] = torch.addmm(base[block].float(), b[block], a, alpha=self.scale)
        return result


def target_weights(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the names of the weights that `config` adapts. Raises `IncompatibleError` if some are missing, or would be lost."""
    layers = _linear_weights(model)
    weights = [*layers, *expert_parameters(model)]
    require_targets(config.targets, kinds_of(weights))
    targets = config.targets or _default_targets(model, layers)
    copied = modules_trained_whole(model, config)
    adapted = [
        name
        for name in weights
        if kinds_of([name])[0] in targets and name.rpartition(".")[0] not in copied
    ]
    if lost := _renamed(model, adapted):
        raise IncompatibleError(
            "PEFT would not find a part of this adapter again: transformers renames its layers on reading",
            have=few(lost),
            want="layers that keep their names",
            do=f"take {few(kinds_of(lost))} out of model.lora.targets",
        )
    states = [f"{name}." for name in mixers(model)] if config.dropout else []
    if inside := [name for name in adapted if name.startswith(tuple(states))]:
        raise IncompatibleError(
            "layers with state compute sequences apart, where model.lora.dropout does not know their tokens",
            have=few(kinds_of(inside)),
            want="dropout in other layers",
            do="set model.lora.dropout=0, or name other layers in model.lora.targets",
        )
    return adapted


def count_trained(hf_config: PretrainedConfig, config: LoraConfig) -> int:
    """Return how many numbers an adapter trains, with those of whole modules beside it."""
    model = build_on_meta(hf_config)
    adapted = (model.get_parameter(name).shape for name in target_weights(model, config))
    factors = sum(math.prod(shape[:-2]) * sum(shape[-2:]) for shape in adapted)
    magnitudes = 0
    if config.dora:
        adapted_rows = (model.get_parameter(n).shape[0] for n in target_weights(model, config))
        magnitudes = sum(adapted_rows)
    modules = map(model.get_submodule, modules_trained_whole(model, config))
    whole_modules = {parameter for module in modules for parameter in module.parameters()}
    whole = sum(parameter.numel() for parameter in whole_modules)
    return config.rank * factors + magnitudes + whole


def warn_of_unadapted(config: LoraConfig, hf_config: PretrainedConfig) -> None:
    """Name linear layers that `config` would adapt by default, and cannot; tied tables that it trains unnamed; and layers with too large a rank."""
    warn_of_ties(config, hf_config)
    model = build_on_meta(hf_config)
    sides = {n: min(model.get_parameter(n).shape[-2:]) for n in target_weights(model, config)}
    if narrow := [name for name, side in sides.items() if side < config.rank]:
        _log.warning(
            "model.lora.rank %d is more than %s can use: a rank above the shorter side of a matrix, here %d, costs memory and adds nothing",
            config.rank,
            few(kinds_of(narrow)),
            min(sides[name] for name in narrow),
        )
    if config.targets:
        return
    layers = _linear_weights(model)
    adapted = _default_targets(model, layers)
    if left_out := [name for name in kinds_of(layers) if name not in adapted]:
        _log.warning(
            "the linear layers %s get no adapter: in models of type %s it would not be applied",
            few(left_out),
            hf_config.get_text_config().model_type,
        )


def _linear_weights(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    kinds = nn.Linear | Conv1D
    linear = [n for n, m in model.named_modules() if isinstance(m, kinds) and m is not head]
    # PEFT would mistake the number of a layer in a list for that of a decoder layer.
    return [f"{name}.weight" for name in linear if not name.rpartition(".")[2].isdigit()]


def _default_targets(model: PreTrainedModel, layers: Sequence[str]) -> list[str]:
    """Return the kinds of these linear layers that can have an adapter."""
    text = model.config.get_text_config()
    without = {*family_of(text.model_type).reads_directly, *kinds_of(_renamed(model, layers))}
    kinds = kinds_of(layers)
    return [kind for kind in kinds if kind not in without and _is_adaptable(model.config, kind)]


def adaptable_weights(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the weights of linear layers, and the kinds among them that can have an adapter."""
    weights = _linear_weights(model)
    return weights, _default_targets(model, weights)


def _renamed(model: PreTrainedModel, weights: Iterable[str]) -> list[str]:
    """Return the weights that transformers calls otherwise when PEFT reads an adapter, as Laguna's shared experts."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    return [
        name
        for name in weights
        if any(each.rename_source_key(name)[0] != name for each in renamings)
    ]


def _is_transposed(model: PreTrainedModel, weights: Iterable[str]) -> bool:
    """Return whether the weights are Wᵀ, as GPT-2's are."""
    owners = {name.rpartition(".")[0] for name in weights}
    return any(isinstance(model.get_submodule(owner), Conv1D) for owner in owners)


def _is_adaptable(config: PretrainedConfig, layer: str) -> bool:
    """Return whether PEFT adapts a linear layer of this name.

    In some types of models it refuses a name (Mamba's out_proj), or takes it for experts (a shared expert's up_proj).
    """
    probe = nn.Module()
    probe.config = config
    probe.add_module(layer, nn.Linear(1, 1, device="meta"))
    described = peft_config(LoraConfig(rank=1), [layer])
    with suppress(ValueError):
        import_peft().inject_adapter_in_model(described, probe, ADAPTER_NAME)
    adapted = probe.get_submodule(layer)
    return hasattr(adapted, "lora_A") and not hasattr(adapted, "parameter_name")


def _inject(model: PreTrainedModel, config: LoraConfig) -> None:
    peft = import_peft()
    targets = target_weights(model, config)
    with model.device, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the check below raises instead
        described = peft_config(
            config,
            kinds_of(targets),
            _is_transposed(model, targets),
            keeps_ties=keeps_ties(model, config),
        )
        peft.inject_adapter_in_model(described, model, ADAPTER_NAME)
    if {weight for weight, factor in plain_names(model).values() if factor in _FACTORS} != {
        *targets
    }:
        of_experts = ("gate_proj", "up_proj", "down_proj")
        others = [kind for kind in kinds_of(targets) if kind not in of_experts]
        raise IncompatibleError(
            "PEFT takes the names of some linear layers for experts, which are fused in this model",
            have=", ".join(kinds_of(targets)),
            want="names of linear layers that no expert has, and of experts' parameters",
            do=f"set model.lora.targets=[{', '.join(others)}], with experts.gate_up_proj and experts.down_proj for the experts",
        )


def _computing_layers(model: PreTrainedModel) -> list[Any]:
    layers: list[Any] = []
    for name, layer in list(model.named_modules()):
        if not hasattr(layer, "lora_A") or name.endswith(".base_layer"):
            continue  # PEFT wraps experts once for each of their parameters
        if hasattr(layer, "parameter_name"):
            layer = AdaptedExperts(layer)
            model.set_submodule(name, layer)
        layers.append(layer)
    return layers


def _saved_name(parameter: str) -> str:
    saved = ADAPTER_PREFIX + parameter.replace(COPY, "").replace(f".{ADAPTER_NAME}.", ".")
    return saved.removesuffix(".weight") if ".lora_magnitude_vector." in saved else saved


class FreshAdapter:
    """A `ShardSource` of initial values: A as PEFT draws it, B zero, so the model starts unchanged.

    Each A follows from its name and the run's seed. Copies of whole modules have the values of their `originals` in `base`, and
    `magnitudes` the norms of its rows.
    """

    def __init__(
        self,
        seed: int,
        base: ShardSource | None = None,
        originals: Mapping[str, str] | None = None,
        magnitudes: RowsOfTensors | None = None,
    ) -> None:
        self._seed = seed
        self._base = base
        self._originals = originals or {}
        self._magnitudes = magnitudes or {}

    def fill(self, shards: Iterable[Shard]) -> None:
        """Draw each shard's values. Holds one A at a time."""
        for shard in shards:
            if self._base is not None and shard.spec.name in self._originals:
                self._base.fill([renamed(shard, self._originals)])
                continue
            if self._base is not None and shard.spec.name in self._magnitudes:
                from burnish.models.lora.dora import fill_magnitude

                fill_magnitude(shard, self._base, self._magnitudes[shard.spec.name])
                continue
            if shard.spec.name.endswith(".lora_B.weight"):
                shard.tensor.detach().zero_()
                continue
            generator = torch.Generator().manual_seed(
                derive_seed(self._seed, "lora", shard.spec.name)
            )
            drawn = torch.empty(shard.spec.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            shard.tensor.detach().copy_(drawn[shard.box.slices])


def adapter_record(
    model: ModelConfig, hf_config: PretrainedConfig, url: str | None = None
) -> dict[str, Any]:
    """Return a checkpoint's record of `model.lora`. `model.path` may be a copy of `url`.

    Raises `IncompatibleError` for layers that the model lacks.
    """
    lora = model.lora
    base = Path(model.path or "").expanduser().absolute()
    built = build_on_meta(hf_config)
    weights = target_weights(built, lora)
    return {
        "base": url or str(base),
        "base_digest": model_digest(base),
        "rank": lora.rank,
        "alpha": lora.scale_alpha,
        "rslora": lora.rslora,
        "targets": kinds_of(weights),
        "fan_in_fan_out": _is_transposed(built, weights),
        # Steps of older versions lack these, and are the same.
        **({"dora": True} if lora.dora else {}),
        **({"dropout": lora.dropout} if lora.dropout else {}),
        **({"modules_to_save": lora.modules_to_save} if lora.modules_to_save else {}),
        **({"keeps_ties": True} if keeps_ties(built, lora) else {}),
        **({"task": "SEQ_CLS"} if has_value_head(hf_config) else {}),
    }


def within(
    composite: Composite | None, model: ModelConfig, hf_config: PretrainedConfig
) -> Composite | None:
    """Return the composite around `model.lora`: the names that PEFT gives the adapter's tensors in the composite's class.

    Raises `IncompatibleError` if that class has no place for them.
    """
    if composite is None or not composite.names:
        return None
    from burnish.models.composite import language_modules

    if model.lora.modules_to_save:
        raise IncompatibleError(
            "modules of a model that also reads images or sound are not trained whole beside an adapter",
            have=f"model.lora.modules_to_save: {', '.join(model.lora.modules_to_save)}",
            want="an adapter alone",
            do="remove model.lora.modules_to_save",
        )
    modules = language_modules(composite, hf_config)
    weights = Adapter(build_on_meta(hf_config), model.lora).weights
    names = {each.name: moved(each.name, *modules) for each in weights}
    return Composite(composite.directory, names, {})


def moved(name: str, inner: str, outer: str) -> str:
    """Return PEFT's name of an adapter's tensor, or of a layer, where the module `inner` is called `outer`."""
    if inner == outer:
        return name
    start = ADAPTER_PREFIX if name.startswith(ADAPTER_PREFIX) else ""
    tail = name.removeprefix(f"{start}{inner}.")
    return name if tail == name else f"{start}{outer}.{tail}"


def first_adapter(
    model: ModelConfig,
    hf_config: PretrainedConfig,
    record: Mapping[str, Any],
    seed: int,
    base: ShardSource,
    composite: Composite | None = None,
) -> ShardSource:
    """Return the checked initial values of `model.lora` on a model with the values of `base`.

    Its tensors may have the names of `composite`.

    Raises `IncompatibleError` for another model's adapter or other tensors, and as `SafetensorsSource.check` does.
    """
    if model.lora.path is None:
        if not (model.lora.modules_to_save or model.lora.dora):
            return FreshAdapter(seed)
        adapter = Adapter(build_on_meta(hf_config), model.lora)
        return FreshAdapter(seed, base, adapter.originals, adapter.magnitudes)
    directory = Path(model.lora.path).expanduser()
    require_same_base(directory, record)
    if record.get("keeps_ties"):
        require_tied(directory)
    source = SafetensorsSource(directory, composite=composite)
    weights = Adapter(build_on_meta(hf_config), model.lora).weights
    extra = source.check(TensorSpec(each.name, each.shape, torch.float32) for each in weights)
    if extra:
        raise IncompatibleError(
            f"{directory} adapts layers that Burnish does not train",
            have=few(extra),
            want=f"A and B of {', '.join(record['targets'])}",
            do="start from an adapter of linear layers, the output layer not among them",
        )
    return source

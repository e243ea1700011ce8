"""Keep the frozen weights under an adapter in 4 bits (QLoRA, Dettmers et al., arXiv 2305.14314), by bitsandbytes' kernels.

NF4: a weight is one of 16 numbers, times an fp32 scale that 64 neighbours in a row share. So it takes 4.5 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from burnish.boxes.box import Box
from burnish.boxes.shards import Shard, ShardSource
from burnish.config.schema import LoraConfig
from burnish.errors import IncompatibleError, few, install, refusing
from burnish.models.lora.adapter_config import NF4_BLOCK, kinds_of
from burnish.models.lora.whole_modules import modules_trained_whole
from burnish.models.meta_init import build_on_meta
from burnish.models.names import Region, local_box, model_shards


class NF4Linear(nn.Module):
    """A frozen linear layer [out, in] in NF4.

    FSDP2 would cast bytes to the dtype of products. So both parameters hold bytes as numbers of that dtype, row by row.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight
        size = weight.element_size()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.bias = layer.bias
        self.packed = _frozen(weight, self.in_features // 2 // size)
        self.scales = _frozen(weight, self.in_features // NF4_BLOCK * 4 // size)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs [..., in] times the weights [..., out], which are dequantized for this product alone."""
        result: Tensor = _Product.apply(inputs, self.packed, self.scales, self.bias)  # type: ignore[no-untyped-call]
        return result


def _frozen(like: Tensor, columns: int) -> nn.Parameter:
    return nn.Parameter(like.new_empty(len(like), columns), requires_grad=False)


class _Product(torch.autograd.Function):
    """A product that keeps the packed weights for its backward pass, and not the dequantized ones."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(packed, scales)
        return functional.linear(inputs, from_nf4(packed, scales), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        packed, scales = ctx.saved_tensors
        return gradients[0] @ from_nf4(packed, scales), None, None, None


def to_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed numbers and the scales of a weight [out, in], as `NF4Linear` holds them."""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4")
    rows = len(weight)
    return packed.view(rows, -1).view(weight.dtype), state.absmax.view(rows, -1).view(weight.dtype)


def from_nf4(packed: Tensor, scales: Tensor) -> Tensor:
    """Return the weight [out, in] of the parts of `to_nf4`."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    numbers = packed.view(torch.uint8)
    shape = torch.Size((len(numbers), 2 * numbers.shape[1]))
    state = QuantState(
        scales.view(torch.float32).flatten(),
        shape=shape,
        dtype=packed.dtype,
        blocksize=NF4_BLOCK,
        quant_type="nf4",
    )
    return dequantize_4bit(numbers.view(-1, 1), state)


def quantizable(hf_config: PretrainedConfig, config: LoraConfig) -> tuple[list[str], list[str]]:
    """Return the layers of a model that NF4 is for, and the other linear layers.

    The first are the layers that can have an adapter, whose rows have whole blocks, and that do not train whole.
    """
    from burnish.models.lora.adapter import adaptable_weights

    model = build_on_meta(hf_config)
    linear, adaptable = adaptable_weights(model)
    whole = modules_trained_whole(model, config)
    chosen = list[str]()
    others = list[str]()
    for weight in linear:
        name = weight.rpartition(".")[0]
        layer = model.get_submodule(name)
        fits = isinstance(layer, nn.Linear) and layer.in_features % NF4_BLOCK == 0
        is_frozen = name not in whole
        into = chosen if fits and is_frozen and kinds_of([weight])[0] in adaptable else others
        into.append(name)
    return chosen, others


def quantize_layers(
    model: PreTrainedModel, hf_config: PretrainedConfig, config: LoraConfig
) -> None:
    """Replace the frozen layers of a model that has its adapter by uninitialized ones in NF4."""
    for name in quantizable(hf_config, config)[0]:
        inner = f"{name}.base_layer"
        place = inner if hasattr(model.get_submodule(name), "base_layer") else name
        model.set_submodule(place, NF4Linear(model.get_submodule(place)))


def base_shards(model: PreTrainedModel, base: Iterable[Region]) -> Iterator[Shard]:
    """Yield this rank's pieces of the model's own weights; those in NF4 are dequantized copies."""
    plain, in_nf4 = _divided(model, base)
    yield from model_shards(model, parts=plain)
    for layer, own in in_nf4:
        yield from _pieces(layer, own, from_nf4(_local(layer.packed), _local(layer.scales)))


def fill_base(model: PreTrainedModel, base: Iterable[Region], source: ShardSource) -> None:
    """Read the model's own weights from `source`, and quantize one layer after the other."""
    plain, in_nf4 = _divided(model, base)
    source.fill(model_shards(model, parts=plain))
    for layer, own in in_nf4:
        packed = _local(layer.packed)
        weight = packed.new_empty(len(packed), layer.in_features)
        source.fill(_pieces(layer, own, weight))
        for held, values in zip((packed, _local(layer.scales)), to_nf4(weight), strict=True):
            held.copy_(values)


def _divided(
    model: PreTrainedModel, base: Iterable[Region]
) -> tuple[list[Region], list[tuple[NF4Linear, list[Region]]]]:
    """Return the plain tensors, and this rank's layers in NF4 with theirs."""
    layers = {f"{n}.weight": m for n, m in model.named_modules() if isinstance(m, NF4Linear)}
    by_layer: dict[str, list[Region]] = {name: [] for name in layers}
    plain = list[Region]()
    for region in base:
        by_layer.get(region.parameter, plain).append(region)
    in_nf4 = [(layer, by_layer[name]) for name, layer in layers.items()]
    return plain, [(layer, own) for layer, own in in_nf4 if len(_local(layer.packed))]


def _pieces(layer: NF4Linear, own: Iterable[Region], weight: Tensor) -> list[Shard]:
    """View this rank's rows of a plain weight as pieces of the checkpoint's tensors."""
    box = Box((local_box(layer.packed).offsets[0], 0), (*weight.shape,))
    pieces = (region.shard_of(weight, box) for region in own)
    return [piece for piece in pieces if piece is not None]


def _local(parameter: Tensor) -> Tensor:
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return held.detach()


def require_quantizable(
    config: LoraConfig, hf_config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Try bitsandbytes on the device, and return the kinds of linear layers that stay as they are.

    Raises `UsageError` without its kernels, and `IncompatibleError` for a model without layers for NF4.
    """
    with refusing(
        f"model.lora.quantize_base does not work on {device.type}",
        want="bitsandbytes, with kernels for this device",
        do=f"{install('qlora')}, or set model.lora.quantize_base=none",
    ):
        from_nf4(*to_nf4(torch.ones(1, NF4_BLOCK, dtype=dtype, device=device)))
    chosen, others = quantizable(hf_config, config)
    kinds = kinds_of(f"{name}.weight" for name in others)
    if not chosen:
        raise IncompatibleError(
            "model.lora.quantize_base finds nothing to quantize in this model",
            have=few(kinds) or "no linear layers",
            want=f"linear layers with a multiple of {NF4_BLOCK} inputs",
            do="set model.lora.quantize_base=none",
        )
    return kinds

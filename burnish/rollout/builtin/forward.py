"""Run the model for generation: token ids in, hidden states and logits out.

`FusedForward` runs Llama-shaped families with one product for queries, keys and values, and one for gate and up: small batches
spend their time between products. An adapter is not merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.functional import linear
from transformers import PretrainedConfig, PreTrainedModel

from burnish.boxes.box import intersect, whole
from burnish.boxes.shards import Publication, Shard, TensorSpec
from burnish.config.schema import LoraConfig
from burnish.distributed.device import has_bf16_products
from burnish.distributed.layout import Layout
from burnish.errors import IncompatibleError, MissingError
from burnish.models.kernels.attention import PackedAttention, Softmax
from burnish.models.kernels.fused import (
    FusedAttention,
    FusedRMSNorm,
    norm_rotate,
    rotate,
    rotation_of,
)
from burnish.models.meta_init import build_on_meta, longest_sequence, materialize
from burnish.models.names import Region, model_shards, regions, tied_names
from burnish.models.scorer import logit_transform

if TYPE_CHECKING:
    from burnish.boxes.gather import Gather


class InferenceModel:
    """A causal language model without gradients, uninitialized until `load`."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        lora: LoraConfig | None = None,
    ) -> None:
        """Build the model. Raises `IncompatibleError` if it cannot, or layers of `lora` are missing."""
        self.max_positions = longest_sequence(hf_config)
        """Most tokens of a sequence; None without a limit."""
        self.device = device
        self.module = build_on_meta(hf_config)
        """transformers' model, with packed attention."""
        tied = tied_names(self.module).values()
        self._fixed: tuple[Region, ...] = ()
        if lora is None:
            self._changing = regions(self.module)
        else:
            from burnish.models.lora.adapter import Adapter

            adapter = Adapter(self.module, lora)
            self._fixed = adapter.base
            self._changing = adapter.weights
        loaded = (*self._fixed, *self._changing)
        self._tied_head = next((region for region in loaded if region.name in tied), None)
        self.module.requires_grad_(False).eval()
        for parameter in self.module.parameters():
            parameter.data = parameter.data.to(dtype)
        materialize(self.module, device)
        kind = FusedForward if _is_plain(self.module) else ModuleForward
        self.forward: Callable[[Tensor, Tensor, PackedAttention, Any], Tensor] = kind(self.module)
        """Maps token ids [T] and positions [T] to hidden states [T, hidden]. A `burnish.models.routing.Routing` records the experts."""
        self._products: Sequence[FusedLinear] = getattr(self.forward, "products", ())
        self._transform = logit_transform(hf_config)
        self._gather: Gather | None = None
        self._loaded = False
        self._released: list[tuple[UntypedStorage, int]] = []

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits [n, V] of hidden states [n, hidden] as `Scorer` computes them, in new memory."""
        head = self.module.get_output_embeddings().weight
        return self._transform.apply_(linear(hidden.to(head.dtype), head).float())

    def shards(self) -> Iterator[Shard]:
        """Yield all weights as views; a tied head also as `logits` reads it."""
        yield from model_shards(self.module, parts=(*self._fixed, *self._changing))
        if self._tied_head is not None:
            head = self.module.get_output_embeddings().weight.detach()
            spec = TensorSpec(self._tied_head.name, self._tied_head.shape, head.dtype)
            yield Shard(spec, whole(spec.shape), head)

    def release(self) -> bool:
        """Free the weights until `load`, unless some are published only once; return whether they are free."""
        if self._fixed:
            return False
        storages = [parameter.untyped_storage() for parameter in self.module.parameters()]
        sizes = {storage.data_ptr(): (storage, storage.nbytes()) for storage in storages}
        self._released = [(storage, size) for storage, size in sizes.values() if size]
        for storage, _ in self._released:
            storage.resize_(0)
        return True

    def load(self, weights: Publication, layout: Layout) -> None:
        """See `Generator.load_weights`. Every call must bring the same shards; a lone process takes them one by one."""
        for storage, size in self._released:
            storage.resize_(size)
        self._released = []
        if self._fixed and (weights.anew or not self._loaded):
            self._load_parts(weights.fixed, self._fixed, layout, None)
        self._gather = self._load_parts(weights.changing, self._changing, layout, self._gather)
        for product in self._products:
            product.refresh()
        self._loaded = True

    def _load_parts(
        self,
        shards: Iterable[Shard],
        parts: Sequence[Region],
        layout: Layout,
        gather: Gather | None,
    ) -> Gather | None:
        """Fill parts of the model; return the `Gather` for the next call."""
        targets = list(model_shards(self.module, parts=parts))
        if layout.world > 1:
            from burnish.boxes.gather import Gather

            shards = list(shards)
            specs = list(dict.fromkeys(shard.spec for shard in targets))
            gather = gather or Gather(shards, specs, layout)
            shards = gather.run(shards)
        _fill(targets, shards)
        return gather


@torch.no_grad()
def _fill(targets: Sequence[Shard], pieces: Iterable[Shard]) -> None:
    """Copy pieces into tensors. Raises `IncompatibleError` for another shape, `MissingError` for a missing piece."""
    by_name: dict[str, list[Shard]] = {}
    for shard in targets:
        by_name.setdefault(shard.spec.name, []).append(shard)
    remaining = {
        name: sum(shard.box.elements for shard in shards) for name, shards in by_name.items()
    }
    for piece in pieces:
        name, shape, _ = piece.spec
        for shard in by_name.get(name, ()):
            if shard.spec.shape != shape:
                raise IncompatibleError(
                    f"the new weights have another shape of {name} than the generator's model",
                    have=list(shape),
                    want=list(shard.spec.shape),
                )
            common = intersect(piece.box, shard.box)
            if common is not None:
                shard.part(common).copy_(piece.part(common))
                remaining[name] -= common.elements
        del piece  # so that its memory is free while the next one comes
    missing = [name for name, elements in remaining.items() if elements]
    if missing:
        raise MissingError(
            f"the new weights lack all or a part of {missing[0]}",
            have=f"{len(missing)} tensors of {len(by_name)} are incomplete",
            want="every element of every tensor",
        )


def _is_plain(model: PreTrainedModel) -> bool:
    layers: Any = getattr(model.base_model, "layers", ())
    return len(layers) > 0 and all(
        isinstance(getattr(layer, "self_attn", None), FusedAttention)
        and hasattr(layer.mlp, "gate_proj")
        for layer in layers
    )


class ModuleForward:
    """Run any model through its own modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._whole = model
        self._model = model.base_model
        self._has_hooks = False  # of `burnish.models.routing`

    def __call__(
        self, token_ids: Tensor, positions: Tensor, packing: PackedAttention, routing: Any
    ) -> Tensor:
        """See `InferenceModel.forward`."""
        if routing is not None and not self._has_hooks:
            from burnish.models.routing import hook_routers

            hook_routers(self._whole)
            self._has_hooks = True
        return self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            packing=packing,
            routing=routing,
        ).last_hidden_state[0]


class FusedForward:
    """Run pre-norm blocks of grouped attention with rotary positions and a gated MLP.

    Some parameters become views, so take the model's shards afterwards.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.base_model
        self.embed = base.embed_tokens
        self.rotary = base.rotary_emb
        self.blocks = [FusedBlock(layer) for layer in base.layers]
        self.norm: FusedRMSNorm = base.norm
        self.products = [product for block in self.blocks for product in block.products]

    def __call__(
        self, token_ids: Tensor, positions: Tensor, packing: PackedAttention, routing: Any
    ) -> Tensor:
        """See `InferenceModel.forward`."""
        hidden: Tensor = self.embed(token_ids)
        rotation = rotation_of(*self.rotary(hidden[None], positions[None]))
        for block in self.blocks:
            hidden = block(hidden, rotation, packing)
        return self.norm(hidden)


class FusedBlock:
    """A block of `FusedForward`."""

    def __init__(self, layer: Any) -> None:
        attention: FusedAttention = layer.self_attn
        mlp = layer.mlp
        self.attention = attention
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._heads, self._kv_heads = (
            part.out_features // attention.head_dim for part in projections[:2]
        )
        self._head_dim: int = attention.head_dim
        self.qkv = FusedLinear(*projections)
        self.out = FusedLinear(attention.o_proj)
        self.gate_up = FusedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = FusedLinear(mlp.down_proj)
        self.act = mlp.act_fn
        self.products = (self.qkv, self.out, self.gate_up, self.down)
        self.norm = layer.input_layernorm
        self.mlp_norm = layer.post_attention_layernorm

    def __call__(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], packing: PackedAttention
    ) -> Tensor:
        """Return the hidden states [T, hidden] after the block."""
        attended = self._attend(self.norm(hidden), rotation, packing)
        hidden = hidden + self.out(attended)
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(self.act(gate).mul_(up))

    def _attend(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], packing: PackedAttention
    ) -> Tensor:
        """Return attention of [T, hidden] before its output projection, [T, heads · head_dim]."""
        qkv = self.qkv(hidden).view(len(hidden), -1, self._head_dim)
        rotating, value = torch.split(qkv, [self._heads + self._kv_heads, self._kv_heads], dim=1)
        rotating = self._rotate(rotating, rotation)
        parts = (rotating[:, : self._heads], rotating[:, self._heads :], value)
        query, key, value = (part.transpose(0, 1)[None] for part in parts)
        softmax = Softmax(self.attention.scaling, self.attention.sliding_window)
        output = packing.attend(self.attention.layer_idx, (query, key, value), softmax)
        return output[0].flatten(1)

    def _rotate(self, heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        query = self.attention.q_norm
        key = self.attention.k_norm
        if query is None or key is None:
            return rotate(heads, rotation)
        weights = torch.cat(
            (query.weight.expand(self._heads, -1), key.weight.expand(self._kv_heads, -1))
        )
        return norm_rotate(heads, weights, query.variance_epsilon, rotation)


class FusedLinear:
    """One product for linear layers that read the same rows, with adapters."""

    def __init__(self, *layers: Any) -> None:
        """Make the layers' weights, biases and A views of joined tensors."""
        plain: list[nn.Linear] = [getattr(layer, "base_layer", layer) for layer in layers]
        self._bias = None if plain[0].bias is None else _concatenate(plain, "bias")
        self.weight = _concatenate(plain, "weight")
        columns = _ranges([part.out_features for part in plain])
        adapted = [(c, x) for c, x in zip(columns, layers, strict=True) if hasattr(x, "lora_A")]
        factors: list[nn.Linear] = [layer.lora_A["default"] for _, layer in adapted]
        self._a = _concatenate(factors, "weight") if adapted else None
        ranks = _ranges([a.out_features for a in factors])
        self._adapters = [
            (columns, rows, layer.lora_B["default"].weight, float(layer.scaling["default"]))
            for (columns, layer), rows in zip(adapted, ranks, strict=True)
        ]
        self._reordered: Tensor | None = None
        self.is_plain = self._bias is None and self._a is None

    def refresh(self) -> None:
        """Reorder weights for a CPU's bf16 units, which each product would do otherwise."""
        weight = self.weight
        if weight.is_cpu and weight.dtype == torch.bfloat16 and has_bf16_products(weight.device):
            self._reordered = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return [n, sum of out], in new memory, W x + b + s B A x for `rows` [n, in]."""
        if self._reordered is None:
            result: Tensor = linear(rows, self.weight, self._bias)
        else:
            parts = (rows, self._reordered, self._bias)
            result = torch.ops.mkldnn._linear_pointwise(*parts, "none", [], "")
        if self._a is not None:
            narrow = linear(rows, self._a)
            for columns, ranks, b, scale in self._adapters:
                result[:, columns].addmm_(narrow[:, ranks], b.t(), alpha=scale)
        return result


def _concatenate(layers: Sequence[nn.Linear], name: str) -> Tensor:
    """Join the layers' weights (or biases); theirs become views."""
    tensors = [part.get_parameter(name).detach() for part in layers]
    whole = torch.cat(tensors)
    views = torch.split(whole, [len(tensor) for tensor in tensors])
    for part, view in zip(layers, views, strict=True):
        part.register_parameter(name, nn.Parameter(view, requires_grad=False))
    return whole


def _ranges(sizes: Sequence[int]) -> list[slice]:
    return [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]

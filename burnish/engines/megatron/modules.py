"""The modules of Megatron's layers: ours, Megatron's, or TransformerEngine's where it can be used.

Megatron's packed attention and router need TransformerEngine, its grouped experts other CUDA packages; ours replace them.
TransformerEngine's attention does not know shared prefixes, so attention is always ours. TransformerEngine multiplies fp32 in tf32, so it
serves bf16 only. Not supported: dropout, fp8, Apex's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers as linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from burnish.config.schema import EngineConfig
from burnish.engines.megatron.traits import LayerTraits
from burnish.errors import UsageError
from burnish.families import Family
from burnish.models.kernels.attention import PackedAttention, Softmax
from burnish.models.kernels.fused import rms_norm, rotate
from burnish.models.routing import Routing, sigmoid_weights

_ALIGNED_BYTES = 16
"""In grouped matrix products, every row and column must begin at a multiple of this many bytes."""
# Least sum of probabilities to divide by, as ERNIE 4.5 does.
_LEAST_SUM = 1e-12
Rotation = tuple[Tensor, Tensor]


@dataclass
class Packing(PackedSeqParams):
    """Metadata of a micro-batch that Megatron's layers pass on beside its hidden states."""

    attends: PackedAttention | None = None
    """Which tokens see each other."""
    rotations: Mapping[str, Rotation] = field(default_factory=dict)
    """Each token's rotation, as `burnish.models.kernels.fused.rotate` takes it, for each kind of layer."""
    routing: Routing | None = None
    """Instructions to the routers; None: they route as usual."""


class PackedCoreAttention(nn.Module):
    """Grouped-query attention with rotary positions, between the two linear layers of Megatron's self-attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        traits: LayerTraits,
        family: Family,
        norms: tuple[Callable[..., nn.Module], ...],
        pg_collection: ProcessGroupCollection,
        **others: Any,
    ) -> None:
        """`norms` make the norms of queries and keys, if Megatron's own layer has none."""
        super().__init__()
        self.layer_number = layer_number
        self._softmax = Softmax(traits.scaling, traits.window, traits.softcap)
        self.rotation = traits.rotation
        self.neighbours = family.rotates_neighbours
        self.norms_rotated = family.norms_rotated
        self.softmax_offset: nn.Parameter | None = None
        if traits.has_sinks:
            heads = config.num_attention_heads // pg_collection.tp.size()
            device = torch.cuda.current_device()
            sinks = torch.empty(heads, dtype=config.params_dtype, device=device)
            self.softmax_offset = nn.Parameter(sinks)
            self.softmax_offset.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if norms:
            self.q_layernorm, self.k_layernorm = (
                norm(config, config.kv_channels, config.layernorm_epsilon) for norm in norms
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: Packing,
        **others: Any,
    ) -> Tensor:
        """Attend: queries [T, 1, heads, d], keys and values [T, 1, key heads, d] to [T, 1, heads · d]."""
        packing = packed_seq_params.attends
        assert packing is not None
        query = query[:, 0]
        key = key[:, 0]
        if not self.norms_rotated:
            query, key = self._normed(query, key)
        if self.rotation is not None:
            rotation = packed_seq_params.rotations[self.rotation]
            query, key = (
                turned(part, rotation, neighbours=self.neighbours) for part in (query, key)
            )
        if self.norms_rotated:
            query, key = self._normed(query, key)
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value[:, 0]))
        softmax = self._softmax._replace(sinks=self.softmax_offset)
        output = packing.attend(self.layer_number - 1, (query, key, value), softmax)
        return output[0].flatten(1)[:, None]

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_layernorm is None or self.k_layernorm is None:
            return query, key
        return self.q_layernorm(query), self.k_layernorm(key)


def turned(heads: Tensor, rotation: Rotation, *, neighbours: bool) -> Tensor:
    """Rotate the first dims of `heads` [T, heads, d], as many as `rotation` has.

    With `neighbours`, each even dim turns with the next one, and even dims come first in the result: queries and keys in the same order
    have the same products.
    """
    size = rotation[0].shape[-1]
    turned = heads[..., :size]
    rest = heads[..., size:]
    if neighbours:
        turned = torch.cat((turned[..., ::2], turned[..., 1::2]), dim=-1)
    turned = rotate(turned, rotation)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def whole_linear(
    config: TransformerConfig, outputs: int, *, bias: bool = False, inputs: int = 0
) -> nn.Linear:
    """Make a matrix that every tensor rank holds, with undefined weights. Its gradient covers this rank's tokens, as a norm's does.

    By default its `inputs` are a hidden state.
    """
    layer: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear,
        inputs or config.hidden_size,
        outputs,
        bias=bias,
        device=torch.cuda.current_device(),
        dtype=config.params_dtype,
    )
    for parameter in layer.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return layer


class RMSNorm(nn.Module):
    """RMSNorm of this rank's tokens.

    Under sequence parallelism Megatron sums the marked weight's gradient over the tensor group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.epsilon = eps
        self.offset = float(config.layernorm_zero_centered_gamma)

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize `hidden` [..., hidden_size]."""
        if self.offset:
            weight = self.weight.float() + self.offset
            return rms_norm(hidden, weight, self.epsilon).to(hidden.dtype)
        return rms_norm(hidden, self.weight, self.epsilon)


class NormOfAllHeads(nn.Module):
    """RMSNorm of all heads of a token together, of which tensor ranks hold equal parts. Megatron's own norms one head by itself."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int, group: Any
    ) -> None:
        """`hidden_size` is that of a head, `heads` are those of all ranks of the tensor `group`."""
        super().__init__()
        self.width = heads * hidden_size
        device = torch.cuda.current_device()
        weight = torch.ones(self.width // group.size(), dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(weight)
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.epsilon = eps
        self._group = group

    def forward(self, heads: Tensor) -> Tensor:
        """Normalize `heads` [T, heads of this rank, hidden_size]."""
        flat = heads.flatten(1)
        if self._group.size() == 1:
            return rms_norm(flat, self.weight, self.epsilon).view(heads.shape)
        rows = flat.float()
        squares = rows.square().sum(dim=-1, keepdim=True)
        reduced = reduce_from_tensor_model_parallel_region(squares, group=self._group)
        # Each rank's queries depend on the sum, so its gradient is summed as well.
        total = copy_to_tensor_model_parallel_region(reduced, group=self._group)
        normed = rows * torch.rsqrt(total / self.width + self.epsilon) * self.weight.float()
        return normed.to(heads.dtype).view(heads.shape)


class NormedResidual(nn.Module):
    """Adds a block's output to the hidden state, after an RMSNorm, or times a factor."""

    def __init__(self, config: TransformerConfig, norm: Any | None, factor: float) -> None:
        """`norm` is the class of the RMSNorm."""
        super().__init__()
        self.norm: nn.Module | None = None
        if norm is not None:
            self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.factor = factor

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return what Megatron calls with the output and its bias, the hidden state and the probability of dropout."""
        return self._added

    def _added(self, outputs: tuple[Tensor, Tensor | None], hidden: Tensor, _: float) -> Tensor:
        output, bias = outputs
        output = output if bias is None else output + bias
        if self.norm is not None:
            output = self.norm(output)
        return hidden + (output if self.factor == 1 else output * self.factor)


class RoutedLayer(TransformerLayer):
    """A layer with experts, whose router obeys a micro-batch's `routing`, also when the layer is recomputed."""

    def __init__(self, *args: Any, router: int, **options: Any) -> None:
        """`router`: its number among all routers of the model."""
        super().__init__(*args, **options)
        self.mlp.router.number = router

    def forward(self, *args: Any, **options: Any) -> Any:
        """Pass instructions to the router, then run Megatron's layer."""
        self.mlp.router.instructions = options["packed_seq_params"].routing
        return super().forward(*args, **options)


class RecomputedMixture(MoELayer):
    """Experts and their router, computed again in the backward pass, by the same instructions."""

    def forward(self, hidden_states: Tensor, *others: Any, **options: Any) -> Any:
        """Run Megatron's layer, and keep its input only."""
        if not torch.is_grad_enabled():
            return super().forward(hidden_states, *others, **options)
        instructions = self.router.instructions

        def run(hidden: Tensor) -> Any:
            self.router.instructions = instructions  # other micro-batches came between
            return super(RecomputedMixture, self).forward(hidden, *others, **options)

        return checkpoint(run, False, hidden_states)


class PlainRouter(TopKRouter):
    """Chooses experts as the families' own code does, and obeys and records `Routing`.

    Scores are softmax in the compute dtype, DeepSeek-V2's in fp32, or sigmoid in fp32 (`Family.scores_by_sigmoid`). Its bias `expert_bias` is not trained.
    The load-balancing loss is that of the whole step, not Megatron's of a micro-batch.
    """

    def __init__(
        self,
        *args: Any,
        has_bias: bool = False,
        choice_bias: tuple[int, ...] | None = None,
        **options: Any,
    ) -> None:
        """`has_bias`: logits have a bias, which is trained. `choice_bias`: shape of the bias that chooses experts."""
        super().__init__(*args, **options)
        # Megatron makes the weight on the host and moves it at its first use. Move it now.
        self.weight = _on_device(self.get_parameter("weight"))
        if has_bias:
            self.bias = nn.Parameter(self.weight.detach()[:, 0].clone())
            marks = {"sequence_parallel": self.config.sequence_parallel}
            vars(self.bias).update(marks)
        self.by_sigmoid = self.config.moe_router_score_function == "sigmoid"
        self.in_fp32 = self.config.moe_router_dtype == "fp32"
        if choice_bias is not None:
            del self.expert_bias  # None, since Megatron would update its own
            device = torch.cuda.current_device()
            bias = torch.zeros(choice_bias, dtype=torch.float32, device=device)
            self.register_buffer("expert_bias", bias)
        self.register_module("lora", None)
        """An adapter of the weight (`burnish.engines.megatron.adapters`)."""
        self.number = 0
        self.instructions: Routing | None = None
        """Instructions for the next forward pass; their rows are those of this rank alone."""

    def gating(self, input: Tensor) -> Tensor:
        """Return logits [..., experts] of hidden states [..., H]."""
        if self.in_fp32:
            logits = functional.linear(input.float(), self.weight.float())
        else:
            logits = functional.linear(input, self.weight, self.bias)
        return logits if self.lora is None else self.lora.added(logits, input)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return probabilities and choices, both [R, experts], from logits [R, 1, experts].

        Softmax over the chosen experts is softmax over all, scaled to a sum of 1.
        """
        logits = logits.flatten(0, -2)
        routing = self.instructions
        softmax_first = self.config.moe_router_pre_softmax
        scores = logits
        if self.by_sigmoid:
            scores = logits.sigmoid()
        elif softmax_first or self.expert_bias is not None:
            scores = logits.softmax(dim=-1, dtype=torch.float32).type_as(logits)
        if routing is None or routing.prescribed is None:
            chosen = self._ranked(scores).topk(self.topk, dim=1).indices
        else:
            chosen = routing.prescribed[:, self.number].long()
        weights = scores.gather(1, chosen)
        if self.by_sigmoid:
            factor = self.config.moe_router_topk_scaling_factor
            weights = sigmoid_weights(weights, factor, normalizes=not softmax_first)
        elif softmax_first:
            weights = weights * (self.config.moe_router_topk_scaling_factor or 1.0)
        elif self.expert_bias is not None:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=_LEAST_SUM)
        else:
            weights = weights.softmax(dim=-1, dtype=torch.float32).type_as(logits)
        if routing is not None:
            weights = routing.settle(
                self.number, logits, chosen, weights, by_sigmoid=self.by_sigmoid
            )
        places = torch.zeros_like(logits)
        return places.scatter(1, chosen, weights), places.bool().scatter(1, chosen, True)

    def _ranked(self, scores: Tensor) -> Tensor:
        """Return scores [R, experts], plus the bias if there is one, -inf outside the best groups of experts.

        Those have the highest maximum of softmax, or the highest sum of two sigmoids.
        """
        ranked = scores if self.expert_bias is None else scores + self.expert_bias
        groups = self.config.moe_router_num_groups or 1
        if groups == 1:
            return ranked
        of_groups = ranked.unflatten(1, (groups, -1))
        best = of_groups.topk(2 if self.by_sigmoid else 1, dim=-1).values.sum(dim=-1)
        kept = best.topk(self.config.moe_router_group_topk, dim=-1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
        return of_groups.masked_fill(outside[..., None], -torch.inf).flatten(1)


class SharedExpert(SharedExpertMLP):
    """The expert that every token goes to. Its gate is a linear layer, which Megatron's is not, so that it can have an adapter."""

    def __init__(
        self, config: TransformerConfig, *args: Any, gate: bool = False, **options: Any
    ) -> None:
        super().__init__(config, *args, gate=False, **options)
        self.gate = whole_linear(config, 1) if gate else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the output of this rank's tokens, times the sigmoid of the gate if there is one."""
        output: Tensor = super().forward(hidden_states)
        return output if self.gate is None else output * self.gate(hidden_states).sigmoid()


def _on_device(made: nn.Parameter) -> nn.Parameter:
    """Move a parameter that Megatron makes on the host, with Megatron's attributes."""
    moved = nn.Parameter(made.detach().to(torch.cuda.current_device()))
    vars(moved).update(vars(made))
    return moved


class GroupedExperts(MegatronModule):
    """This rank's experts [E] of a layer, each a gated MLP or this rank's part of one.

    With `stacks`, parameters are laid out as `Family.stacks_experts` says. Each of the ranks that share an expert then adds a part of the
    last bias, so that their sum has all of it.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection,
        stacks: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(config=config)
        experts = num_local_experts
        hidden = config.hidden_size
        dtype = config.params_dtype
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        self._stacks = stacks
        ranks = pg_collection.expt_tp.size()
        own = hidden // ranks
        self._outputs = (own * pg_collection.expt_tp.rank(), own * (ranks - 1))
        biases = (2 * width, own) if stacks else (0, 0)
        self.linear_fc1 = GroupedLinear((experts, 2 * width, hidden), dtype, biases[0])
        self.linear_fc2 = GroupedLinear((experts, hidden, width), dtype, biases[1])

    def forward(self, rows: Tensor, counts: Tensor, probabilities: Tensor) -> tuple[Tensor, None]:
        """Return [R, H] of rows [R, H], sorted by expert and multiplied by the router's probabilities [R].

        `counts` [E] int64: rows of each expert.
        """
        config = self.config
        weights = probabilities[:, None]
        both = self.linear_fc1(rows, counts)
        if self._stacks:
            both = both + self.linear_fc1.biases(counts)
        gate, up = (both[..., ::2], both[..., 1::2]) if self._stacks else both.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate = gate.clamp(max=limit)
            up = up.clamp(-limit, limit)
        inner = config.activation_func(gate) * (up + config.glu_linear_offset) * weights
        outputs = self.linear_fc2(inner.to(rows.dtype), counts)
        if self._stacks:
            before, others = self._outputs
            biases = functional.pad(self.linear_fc2.biases(counts), (before, others - before))
            outputs = outputs + (biases * weights).to(rows.dtype)
        return outputs, None


class GroupedLinear(nn.Module):
    """A matrix [O, I] for each expert, in one uninitialized parameter [E, O, I]; [E, I, O] beside biases."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, biases: int = 0) -> None:
        """`biases`: how many each expert has."""
        super().__init__()
        device = torch.cuda.current_device()
        experts, outputs, inputs = shape
        if biases:
            shape = (experts, inputs, outputs)
            self.bias = nn.Parameter(torch.empty((experts, biases), dtype=dtype, device=device))
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self._is_transposed = biases > 0

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return [R, O] of rows [R, I], without biases; `counts` [E] are the rows of each expert."""
        return grouped_linear(rows, self.weight, counts, is_transposed=self._is_transposed)

    def biases(self, counts: Tensor) -> Tensor:
        """Return those of each row [R, ...]."""
        return self.bias.repeat_interleave(counts.to(self.bias.device), dim=0)


def grouped_linear(
    rows: Tensor, weight: Tensor, counts: Tensor, *, is_transposed: bool = False
) -> Tensor:
    """Return [R, O] of rows [R, I], sorted by expert, and weight [E, O, I], or [E, I, O] if that `is_transposed`; `counts` [E] are the rows of each expert."""
    how = counts, is_transposed
    return _GroupedProduct.apply(rows, weight, *how)  # type: ignore[no-untyped-call]


class _GroupedProduct(torch.autograd.Function):
    """rows · weightᵀ for each expert, or rows · weight if that `is_transposed`; adds the weight's gradient to Megatron's `main_grad` if there is one."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.main_grad = getattr(weight, "main_grad", None)
        ctx.is_transposed = is_transposed
        return _grouped_product(rows, weight if is_transposed else weight.transpose(1, 2), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, weight, counts = ctx.saved_tensors
        gradient = gradient.contiguous()
        matrices = weight.transpose(1, 2) if ctx.is_transposed else weight
        of_rows = _grouped_product(gradient, matrices, counts)
        if not ctx.needs_input_grad[1]:
            return of_rows, None, None, None
        left, right = (rows, gradient) if ctx.is_transposed else (gradient, rows)
        if ctx.main_grad is not None:
            _add_outer_products(ctx.main_grad, left, right, counts)
            # Megatron counts the gradients that have come, so an unused one goes on, as from its own linear layers.
            weight.grad_added_to_main_grad = True
            return of_rows, torch.empty_like(weight), None, None
        of_weight = torch.zeros_like(weight)
        _add_outer_products(of_weight, left, right, counts)
        return of_rows, of_weight, None, None


def _grouped_product(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Return [R, O] of rows [R, I], grouped by `counts`, and matrices [E, I, O]."""
    if _is_aligned(rows, matrices[0]):
        return functional.grouped_mm(rows, matrices, offs=_ends(counts, rows.device))
    each = zip(torch.split(rows, counts.tolist()), matrices, strict=True)
    return torch.cat([own @ matrix for own, matrix in each])


def _add_outer_products(sums: Tensor, left: Tensor, right: Tensor, counts: Tensor) -> None:
    """Add leftᵀ · right of each expert's rows, [R, O] and [R, I], to sums [E, O, I]."""
    if left.is_cuda and _is_aligned(left, right):
        sums.add_(functional.grouped_mm(left.t(), right, offs=_ends(counts, left.device)))
        return
    sizes = counts.tolist()
    pairs = zip(torch.split(left, sizes), torch.split(right, sizes), strict=True)
    for total, (left_rows, right_rows) in zip(sums, pairs, strict=True):
        total.add_(left_rows.t() @ right_rows)


def _ends(counts: Tensor, device: torch.device) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


def _is_aligned(*factors: Tensor) -> bool:
    return all(
        matrix.numel() > 0 and size * matrix.element_size() % _ALIGNED_BYTES == 0
        for matrix in factors
        for size in matrix.shape[1:]
    )


STACKED_EXPERTS = ModuleSpec(module=GroupedExperts, params={"stacks": True})
"""All experts of a layer, where `Family.stacks_experts`. TransformerEngine's do not have this layout."""


def biased(linear: Any) -> Any:
    """Return a subclass of a class of linear layers, with biases. Megatron's configuration has one answer for all layers."""

    class Biased(linear):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "bias": True})

    return Biased


@dataclass(frozen=True, slots=True)
class LayerModules:
    """Classes for a layer spec, with the signatures of Megatron's. The defaults need torch alone."""

    norm: Any = RMSNorm
    """RMSNorm."""
    block_norm: Any = RMSNorm
    """RMSNorm before a block that begins with `column`; the identity if `column` includes the norm."""
    column: Any = ColumnParallelLinear
    """The linear layer that a block begins with, whose outputs tensor ranks divide."""
    plain_column: Any = ColumnParallelLinear
    """Such a layer that never includes a norm."""
    row: Any = RowParallelLinear
    """The linear layer that a block ends with, whose inputs tensor ranks divide."""
    experts: ModuleSpec = field(default_factory=lambda: ModuleSpec(module=GroupedExperts))
    """All experts of a layer."""
    mixture: Any = MoELayer
    """A router and its experts."""
    recomputes_latents: bool = False
    """Whether the backward pass computes latent attention again, from its latents on."""
    adds_gradients: bool = False
    """Whether linear layers add the gradients of their weights to Megatron's buffers themselves, by Apex's kernel."""
    fuses_permutation: bool = False
    """Whether TransformerEngine's kernels sort tokens by expert."""


def layer_modules(config: EngineConfig, device: torch.device) -> LayerModules:
    """Return the modules of `engine.layers`. Raises `UsageError` if it wants TransformerEngine and that cannot be used."""
    is_installed = transformer_engine.TEGroupedLinear is not None
    if config.layers == "transformer_engine" and not (is_installed and device.type == "cuda"):
        raise UsageError(
            "engine.layers asks for TransformerEngine, which cannot be used",
            have=f"device {device}, transformer_engine {'installed' if is_installed else 'not installed, or too old'}",
            want="CUDA, and transformer_engine 1.9 or newer",
            do='pip install --no-build-isolation "transformer_engine[pytorch]", or set engine.layers=torch',
        )
    selects = config.activation_checkpointing == "selective"
    recomputed = config.megatron.recompute_modules if selects else ()
    modules = LayerModules(
        mixture=RecomputedMixture if "moe" in recomputed else MoELayer,
        recomputes_latents="mla_up_proj" in recomputed,
    )
    is_fast = config.layers != "torch" and config.precision == "bf16" and device.type == "cuda"
    has_fusion = transformer_engine.fused_permute_with_probs is not None
    fuses = is_fast and is_installed and has_fusion
    if config.megatron.moe_permute_fusion is True and not fuses:
        raise UsageError(
            "engine.megatron.moe_permute_fusion needs TransformerEngine's layers",
            have=f"device {device}, precision {config.precision}, transformer_engine {'with' if has_fusion else 'without'} fused permutation",
            want="CUDA, bf16, and transformer_engine 2.1 or newer",
            do="set engine.megatron.moe_permute_fusion=auto",
        )
    if not is_fast:
        return modules
    if is_installed:
        grouped = MLPSubmodules(
            linear_fc1=transformer_engine.TEColumnParallelGroupedLinear,
            linear_fc2=transformer_engine.TERowParallelGroupedLinear,
        )
        modules = replace(
            modules,
            norm=transformer_engine.TENorm,
            block_norm=IdentityOp,
            column=transformer_engine.TELayerNormColumnParallelLinear,
            plain_column=transformer_engine.TEColumnParallelLinear,
            row=transformer_engine.TERowParallelLinear,
            experts=ModuleSpec(module=TEGroupedMLP, submodules=grouped),
            fuses_permutation=fuses and config.megatron.moe_permute_fusion is not False,
        )
    return replace(modules, adds_gradients=linear._grad_accum_fusion_available)

"""Megatron's GPT model, from packed tokens to hidden states, log-probs and entropies, or values.

`burnish.models.logprobs` replaces Megatron's own loss. A value head, whole on every tensor rank, replaces the output layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from burnish.config.schema import EngineConfig
from burnish.engines.base import compute_dtype
from burnish.engines.megatron.mesh import MegatronMesh
from burnish.engines.megatron.modules import (
    LayerModules,
    PackedCoreAttention,
    Packing,
    PlainRouter,
    RoutedLayer,
    layer_modules,
)
from burnish.errors import UsageError
from burnish.families import ModelShape, family_of, names_of
from burnish.models.heads import has_value_head
from burnish.models.kernels.fused import rotation_of
from burnish.models.logprobs import LogprobOptions, token_logprobs
from burnish.models.parts import VocabularyPart
from burnish.models.routing import Routing
from burnish.models.scorer import ScoringPlan
from burnish.models.value_head import head_has_bias, state_values
from burnish.records import TokenOutputs

# Megatron's settings for each `engine.activation_checkpointing`.
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def llama_shape(hf_config: PretrainedConfig) -> ModelShape:
    """Return the model's sizes. Raises `UsageError` naming a feature that this engine lacks."""
    kind = hf_config.model_type
    if not family_of(kind).has_llama_layers:
        raise UsageError(
            f"the Megatron engine does not know models of type {kind}",
            have=f"model_type: {kind}",
            want=f"one of {names_of('has_llama_layers')}",
            do="set engine.kind=torch",
        )
    if problem := next(_uncomputed(hf_config), None):
        raise UsageError(
            f"the Megatron engine does not compute {problem}",
            have=f"a model of type {kind} that has it",
            want="a model without it",
            do="set engine.kind=torch",
        )
    return ModelShape.of(hf_config.to_dict())


def _uncomputed(hf_config: PretrainedConfig) -> Iterator[str]:
    if hf_config.hidden_act != "silu":
        yield f"the activation {hf_config.hidden_act}"
    if getattr(hf_config, "attention_bias", False):
        yield "a bias in attention (attention_bias)"
    if getattr(hf_config, "mlp_bias", False):
        yield "a bias in the MLP (mlp_bias)"
    rope = hf_config.rope_parameters
    if rope["rope_type"] in ("dynamic", "longrope"):
        yield f"rotary positions that depend on the length ({rope['rope_type']})"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "heads that are rotated in part (partial_rotary_factor)"
    if has_value_head(hf_config):
        if hf_config.num_labels != 1:
            yield f"a head with {hf_config.num_labels} values per token"
    elif any("ForCausalLM" not in name for name in hf_config.architectures or ()):
        yield "a head that is neither a language model's nor a value head"


class PackedGPT(GPTModel):
    """A pipeline stage of the model. A rank has several if stages are virtual."""

    def __init__(
        self,
        *args: Any,
        rotary: nn.Module,
        tokens: int,
        padding: int | None,
        chunk: int,
        value_bias: bool | None = None,
        **options: Any,
    ) -> None:
        """`rotary` is transformers' module, `tokens` the vocabulary's real size, `padding` the token whose embedding is not trained, `chunk` the
        tokens per chunk of logits. `value_bias` is None for a language model.
        """
        super().__init__(*args, position_embedding_type="none", **options)
        self.padding = padding
        self.chunk = chunk
        self._rotary = [rotary]  # in a list, so that it is not registered as a submodule
        group = self.pg_collection.tp
        rows = self.vocab_size // group.size()
        first = group.rank() * rows
        own = range(first, min(first + rows, tokens))
        self.part = VocabularyPart(own, group)
        """The tokens of this rank's rows of the embedding and the output layer; rows beyond them are padding."""
        self.score: nn.Linear | None = None
        """The value head, in the last stage of a model that has one."""
        if self.post_process and value_bias is not None:
            del self.output_layer
            self.score = _score_head(self.config, bias=value_bias)

    def forward(
        self, plan: ScoringPlan, temperature: float = 1.0, routing: Routing | None = None
    ) -> Tensor | TokenOutputs:
        """Return hidden states [C, 1, H]; the last stage returns the outputs of each token.

        Later stages take their input from `set_input_tensor`.
        """
        cos, sin = self._rotary[0](plan.positions.float(), plan.positions[None])
        packing = Packing(attends=plan.packing, rotation=rotation_of(cos, sin), routing=routing)
        hidden: Tensor = self.decoder(
            hidden_states=self._embedded(plan.input_ids) if self.pre_process else None,
            attention_mask=None,
            packed_seq_params=packing,
        )
        return self._scored(hidden, plan, temperature) if self.post_process else hidden

    def _embedded(self, ids: Tensor) -> Tensor:
        """Return hidden states [C, 1, H]; the padding token gets no gradient, as in transformers."""
        hidden: Tensor = self.embedding(ids[None], None)
        if self.padding is not None and hidden.requires_grad:
            own = len(hidden) * self.part.group.rank() if self.config.sequence_parallel else 0
            filler = (ids == self.padding).narrow(0, own, len(hidden))
            hidden.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: gradient.masked_fill(filler[:, None, None], 0)
            )
        return hidden

    def _scored(self, hidden: Tensor, plan: ScoringPlan, temperature: float) -> TokenOutputs:
        states = hidden[:, 0]
        part = self.part
        if self.score is not None:
            values = state_values(states, self.score)
            values = part.all_values(values) if self.config.sequence_parallel else values
            return TokenOutputs(values=plan.spread(plan.predictors.take(values)))
        if self.config.sequence_parallel:
            states = part.all_rows(states)
        elif part.group.size() > 1:
            states = copy_to_tensor_model_parallel_region(states, group=part.group)
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )
        logprobs, entropy = token_logprobs(
            plan.predictors.take(states),
            weight[: len(part.tokens)],
            plan.targets,
            LogprobOptions(self.chunk, temperature),
            None if part.group.size() == 1 else part,
        )
        return TokenOutputs(logprobs=plan.spread(logprobs), entropy=plan.spread(entropy))


def _score_head(config: TransformerConfig, *, bias: bool) -> nn.Linear:
    """Make a head with undefined weights. Its gradient covers this rank's tokens, as a norm's does."""
    head: nn.Linear = nn.utils.skip_init(  # type: ignore[no-untyped-call]
        nn.Linear,
        config.hidden_size,
        1,
        bias=bias,
        device=torch.cuda.current_device(),
        dtype=config.params_dtype,
    )
    for parameter in head.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return head


def build_stages(
    hf_config: PretrainedConfig, config: EngineConfig, mesh: MegatronMesh, device: torch.device
) -> list[PackedGPT]:
    """Build this rank's stages, in the compute dtype with undefined weights. Call inside `megatron_called`. Collective."""
    shape = llama_shape(hf_config)
    modules = layer_modules(config, device)
    transformer = _transformer_config(shape, hf_config, config, modules.adds_gradients)
    options = {
        "rotary": LlamaRotaryEmbedding(hf_config).to(device),
        "chunk": config.logprob_rows(shape.vocabulary),
        "padding": hf_config.pad_token_id,
        "value_bias": head_has_bias(hf_config) if has_value_head(hf_config) else None,
    }
    stages = range(config.virtual_stages)
    return [_stage(shape, transformer, modules, mesh, index, options) for index in stages]


def _transformer_config(
    shape: ModelShape, hf_config: PretrainedConfig, config: EngineConfig, adds_gradients: bool
) -> TransformerConfig:
    dtype = compute_dtype(config)
    return TransformerConfig(
        num_layers=shape.depth,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.key_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=hf_config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        qk_layernorm=shape.family.query_norms == "head",
        add_qkv_bias=shape.family.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,
        tensor_model_parallel_size=config.tensor_parallel,
        sequence_parallel=config.megatron_sequence_parallel and config.tensor_parallel > 1,
        context_parallel_size=config.sequence_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        pipeline_model_parallel_layout=pipeline_layout(shape.depth, config),
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        # With virtual stages, two ranks may each be both before and after the other. Exchanges in one batch would then
        # be confused. Single exchanges are still running when Megatron would free the sent tensors
        # (pipeline_parallel/schedules.py: `pp_pre_forward` frees tensors for which `pp_post_forward` waits later).
        overlap_p2p_comm=config.virtual_stages > 1,
        batch_p2p_comm=config.virtual_stages == 1,
        deallocate_pipeline_outputs=config.virtual_stages == 1,
        moe_token_dispatcher_type="alltoall",  # the default, allgather, refuses variable lengths, even for dense models
        cuda_graph_scope=[],
        # Losses are already divided by global counts, so gradients are summed over micro-batches and ranks.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=adds_gradients,
        **_RECOMPUTE[config.activation_checkpointing],
        **(_of_experts(shape, hf_config, config) if shape.experts else {}),
    )


def _of_experts(
    shape: ModelShape, hf_config: PretrainedConfig, config: EngineConfig
) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.expert_intermediate,
        "moe_layer_freq": [int(layer.experts > 0) for layer in shape.layers],
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": config.expert_tensor_parallel or config.tensor_parallel,
    }


def pipeline_layout(layers: int, config: EngineConfig) -> list[list[str]] | None:
    """Return the layers of each stage; None for a single stage.

    The last stages get fewer, since the very last computes the output layer.
    """
    stages = config.pipeline_parallel * config.virtual_stages
    if stages == 1:
        return None
    each, over = divmod(layers, stages)
    counts = [each + (stage < over) for stage in range(stages)]
    layout = [["decoder"] * count for count in counts]
    return [["embedding", *layout[0]], *layout[1:-1], [*layout[-1], "loss"]]


def _stage(
    shape: ModelShape,
    transformer: TransformerConfig,
    modules: LayerModules,
    mesh: MegatronMesh,
    index: int,
    options: dict[str, Any],
) -> PackedGPT:
    pipeline = mesh.groups.pp
    tensor = mesh.groups.tp.size()
    virtual = transformer.virtual_pipeline_model_parallel_size
    vp_stage = None if virtual is None else index
    last = pipeline.rank() == pipeline.size() - 1 and index == (virtual or 1) - 1
    first = get_transformer_layer_offset(transformer, vp_stage, pipeline.rank())
    count = get_num_layers_to_build(transformer, vp_stage, pipeline.rank())
    layers = [_layer(shape, layer, modules) for layer in range(first, first + count)]
    stage = PackedGPT(
        transformer,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=modules.norm),
        vocab_size=-(-shape.vocabulary // tensor) * tensor,
        max_sequence_length=0,  # only for learned positions, which the model lacks
        pre_process=pipeline.rank() == 0 and index == 0,
        post_process=last,
        share_embeddings_and_output_weights=shape.tied and options["value_bias"] is None,
        pg_collection=mesh.groups,
        vp_stage=vp_stage,
        tokens=shape.vocabulary,
        **options,
    )
    _mark_cut(stage)
    return stage


def _mark_cut(stage: PackedGPT) -> None:
    """Mark weights that differ between tensor ranks; Megatron's gradient norm counts others once."""
    linear = ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding
    for module in stage.modules():
        if isinstance(module, linear) and module.weight is not None:
            module.weight.tensor_model_parallel = True
        if isinstance(module, MoELayer):
            for weight in module.experts.parameters():
                weight.tensor_model_parallel = True
                weight.allreduce = False


def _layer(shape: ModelShape, layer: int, modules: LayerModules) -> ModuleSpec:
    qk_norm = modules.norm if shape.family.query_norms == "head" else IdentityOp
    mixture = shape.layers[layer].experts > 0
    router = sum(each.experts > 0 for each in shape.layers[:layer])
    attention = SelfAttentionSubmodules(
        linear_qkv=modules.column,
        core_attention=partial(PackedCoreAttention, sliding_window=shape.layers[layer].window),
        linear_proj=modules.row,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    linears = MLPSubmodules(linear_fc1=modules.column, linear_fc2=modules.row)
    mlp = ModuleSpec(module=MLP, submodules=linears)
    routed = MoESubmodules(experts=modules.experts, router=PlainRouter)
    experts = ModuleSpec(module=MoELayer, submodules=routed)
    return ModuleSpec(
        module=RoutedLayer if mixture else TransformerLayer,
        params={"router": router} if mixture else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.block_norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention,
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=modules.norm if mixture else modules.block_norm,
            mlp=experts if mixture else mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )

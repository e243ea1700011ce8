"""From a Hugging Face configuration to Megatron's model: its configuration, layers, and this rank's stages.

Layers are Megatron's, from a spec with our attention and router and the modules of `.layers`. Weights are undefined until loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
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
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from burnish.config.schema import EngineConfig
from burnish.engines.base import compute_dtype
from burnish.engines.megatron.attention import PackedAttention
from burnish.engines.megatron.layers import LayerModules, layer_modules
from burnish.engines.megatron.mesh import MegatronMesh
from burnish.engines.megatron.model import PackedGPT
from burnish.engines.megatron.replay import RoutedLayer
from burnish.engines.megatron.routers import PlainRouter
from burnish.errors import UsageError
from burnish.families import ModelShape, family_of, names_of
from burnish.models.meta_init import plain_model
from burnish.models.value_head import has_value_head, head_has_bias

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
# What `engine.activation_checkpointing` is to Megatron.

_IN_LAYER = re.compile(r".*\blayers\.\d+\.(.+)\.(?:weight|bias)")
_COMPUTED = {
    *("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
    *(f"self_attn.{letter}_proj" for letter in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}
# What layers have that Megatron computes, by transformers' names; experts aside.


def llama_shape(hf_config: PretrainedConfig) -> ModelShape:
    """Return the model's sizes. Raises `UsageError` that names what this engine does not compute."""
    kind = hf_config.model_type
    if not family_of(kind).has_llama_layers:
        raise UsageError(
            f"the Megatron engine does not know models of type {kind}",
            have=f"model_type: {kind}, {_missing(hf_config)}",
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


def _missing(hf_config: PretrainedConfig) -> str:
    """What there is no counterpart for in a model of another family, in words."""
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "which is no language model of transformers"
    with torch.device("meta"):
        names = [name for name, _ in plain_model(hf_config).named_parameters()]
    inside = {found[1] for name in names if (found := _IN_LAYER.fullmatch(name))}
    unknown = sorted(inside - _COMPUTED)
    if not unknown:
        return "whose layers have the parts of Llama's, but may compute something else"
    return f"whose layers have {', '.join(unknown)}"


def _uncomputed(hf_config: PretrainedConfig) -> Iterator[str]:
    """What of the model would be computed wrongly, in words."""
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
            yield f"a head that says {hf_config.num_labels} things of a token"
    elif any("ForCausalLM" not in name for name in hf_config.architectures or ()):
        yield "another head than a vocabulary or a value"


def build_stages(
    hf_config: PretrainedConfig, config: EngineConfig, mesh: MegatronMesh, device: torch.device
) -> list[PackedGPT]:
    """Build this rank's stages, one per virtual stage, in the compute dtype with undefined weights. Collective.

    Call it inside `burnish.engines.megatron.calls.megatron_called`.
    """
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
    """Return Megatron's configuration of a model, cut as the settings say; `adds_gradients` as in `LayerModules`."""
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
        # With virtual stages two stages may be both before and behind each other, and exchanges in one
        # batch would be taken for one another. One by one, what is sent is still under way when Megatron would free it
        # (pipeline_parallel/schedules.py: `pp_pre_forward` frees what `pp_post_forward` waits for later).
        overlap_p2p_comm=config.virtual_stages > 1,
        batch_p2p_comm=config.virtual_stages == 1,
        deallocate_pipeline_outputs=config.virtual_stages == 1,
        moe_token_dispatcher_type="alltoall",  # the one that knows variable lengths; asked of dense models too
        cuda_graph_scope=[],
        # Losses are sums that are divided already: gradients are added up, over micro-batches and ranks.
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
        "moe_router_topk": shape.routers[2],
        # Softmax over the chosen ones is softmax over all, scaled to a sum of 1.
        "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
        "moe_enable_routing_replay": True,  # makes it possible: `burnish.engines.megatron.replay`
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": config.expert_tensor_parallel or config.tensor_parallel,
    }


def pipeline_layout(layers: int, config: EngineConfig) -> list[list[str]] | None:
    """Return the layers of each stage, in the order of the model; None for a single stage.

    Layers are dealt out evenly; the last stages, which also compute the output layer, get fewer.
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
    """The stage of this rank with this number among its virtual ones."""
    pipeline, tensor = mesh.groups.pp, mesh.groups.tp.size()
    virtual = transformer.virtual_pipeline_model_parallel_size
    vp_stage = None if virtual is None else index
    last = pipeline.rank() == pipeline.size() - 1 and index == (virtual or 1) - 1
    stage = PackedGPT(
        transformer,
        block_spec(shape, transformer, modules, vp_stage, pipeline.rank()),
        vocab_size=-(-shape.vocabulary // tensor) * tensor,
        max_sequence_length=0,  # of learned positions, of which there are none
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
    """Mark the weights that differ between tensor ranks; Megatron counts the others once."""
    linear = ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding
    for module in stage.modules():
        if isinstance(module, linear) and module.weight is not None:
            module.weight.tensor_model_parallel = True
        if isinstance(module, MoELayer):
            for weight in module.experts.parameters():
                weight.tensor_model_parallel = True
                weight.allreduce = False


def block_spec(
    shape: ModelShape,
    transformer: TransformerConfig,
    modules: LayerModules,
    vp_stage: int | None,
    pp_rank: int,
) -> TransformerBlockSubmodules:
    """The layers of one stage."""
    first = get_transformer_layer_offset(transformer, vp_stage, pp_rank)
    count = get_num_layers_to_build(transformer, vp_stage, pp_rank)
    return TransformerBlockSubmodules(
        layer_specs=[_layer(shape, layer, modules) for layer in range(first, first + count)],
        layer_norm=modules.norm,
    )


def _layer(shape: ModelShape, layer: int, modules: LayerModules) -> ModuleSpec:
    qk_norm = modules.norm if shape.family.query_norms == "head" else IdentityOp
    mixture = shape.layers[layer].experts > 0
    attention = SelfAttentionSubmodules(
        linear_qkv=modules.column,
        core_attention=partial(PackedAttention, sliding_window=shape.layers[layer].window),
        linear_proj=modules.row,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    mlp = MLPSubmodules(linear_fc1=modules.column, linear_fc2=modules.row)
    experts = MoESubmodules(experts=modules.experts, router=PlainRouter)
    return ModuleSpec(
        module=RoutedLayer if mixture else TransformerLayer,
        params={"router": sum(each.experts > 0 for each in shape.layers[:layer])}
        if mixture
        else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=modules.block_norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention,
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=modules.norm if mixture else modules.block_norm,
            mlp=ModuleSpec(module=MoELayer, submodules=experts)
            if mixture
            else ModuleSpec(module=MLP, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )

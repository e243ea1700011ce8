"""A language model of Megatron's modules, from packed tokens to hidden states, log-probs and entropies, or values.

`burnish.models.logprobs` replaces Megatron's own loss. A value head, whole on every tensor rank, replaces the output layer. Megatron's own
`GPTModel` is deprecated in 0.19, and 0.16 lacks the `HybridModel` that follows it. This one needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
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
from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig
from burnish.engines.base import compute_dtype
from burnish.engines.megatron.gated_delta_net import GatedDeltaNet
from burnish.engines.megatron.latent_attention import LatentAttention
from burnish.engines.megatron.mesh import MegatronMesh
from burnish.engines.megatron.modules import (
    STACKED_EXPERTS,
    LayerModules,
    NormedResidual,
    NormOfAllHeads,
    PackedCoreAttention,
    Packing,
    PlainRouter,
    Rotation,
    RoutedLayer,
    SharedExpert,
    biased,
    layer_modules,
    whole_linear,
)
from burnish.engines.megatron.traits import ModelTraits, model_traits
from burnish.errors import UsageError, count_text
from burnish.models.heads import has_value_head
from burnish.models.kernels.fused import rotation_of
from burnish.models.logprobs import LogprobOptions, token_logprobs
from burnish.models.meta_init import router_sizes
from burnish.models.parts import VocabularyPart
from burnish.models.routing import Routing
from burnish.models.scorer import ScoringPlan, logit_transform
from burnish.models.value_head import head_has_bias, state_values
from burnish.records import TokenOutputs

if TYPE_CHECKING:
    from burnish.engines.megatron.multi_token import MultiTokenLayer
    from burnish.models.mtp_names import MTPNames

# Megatron's default dispatcher, allgather, refuses variable lengths, even for dense models.
_DENSE = {"moe_token_dispatcher_type": "alltoall"}
# Megatron's settings for each `engine.activation_checkpointing`.
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


class PackedGPT(LanguageModule):
    """A pipeline stage of the model. A rank has several if stages are virtual."""

    def __init__(  # noqa: PLR0913
        self,
        config: TransformerConfig,
        layers: TransformerBlockSubmodules,
        groups: ProcessGroupCollection,
        vp_stage: int | None,
        traits: ModelTraits,
        hf_config: PretrainedConfig,
        scoring: LogprobOptions,
        multi_token: MultiTokenLayer | None = None,
    ) -> None:
        """`vp_stage` is the number of a virtual stage. `scoring` lacks the temperature. `multi_token` predicts further tokens."""
        super().__init__(config=config, pg_collection=groups)
        self.vp_stage = vp_stage
        self.model_type = ModelType.encoder_or_decoder  # Megatron's schedules ask for it
        value_bias = head_has_bias(hf_config) if has_value_head(hf_config) else None
        virtual = config.virtual_pipeline_model_parallel_size or 1
        index = vp_stage or 0
        place = groups.pp.rank()
        self.pre_process = place == 0 and index == 0
        self.post_process = place == groups.pp.size() - 1 and index == virtual - 1
        self.share_embeddings_and_output_weights = traits.sizes.tied and value_bias is None
        self.padding = hf_config.pad_token_id
        """The token whose embedding is not trained."""
        self._scoring = scoring
        self._traits = traits
        device = torch.cuda.current_device()
        # In a list, so that it is not registered as a submodule.
        self._rotary = [traits.rotary(hf_config).to(device)]
        tokens = traits.sizes.vocabulary
        rows = -(-tokens // groups.tp.size())
        first = groups.tp.rank() * rows
        own = range(first, min(first + rows, tokens))
        self.part = VocabularyPart(own, groups.tp)
        """The tokens of this rank's rows of the embedding and the output layer; rows beyond them are padding."""
        self.score: nn.Linear | None = None
        """The value head, in the last stage of a model that has one."""
        padded = rows * groups.tp.size()
        if self.pre_process:
            # No learned positions, so no longest sequence.
            self.embedding = LanguageModelEmbedding(
                config, padded, 0, position_embedding_type="none", tp_group=groups.tp
            )
        self.decoder = TransformerBlock(
            config,
            layers,
            pre_process=self.pre_process,
            post_process=self.post_process,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        if self.post_process:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                padded,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_weight_param_allocation=self.pre_process
                and self.share_embeddings_and_output_weights,
                tp_group=groups.tp,
            )
        self.multi_token = multi_token
        if self.pre_process or self.post_process:
            self.setup_embeddings_and_output_layer()
        if self.post_process and value_bias is not None:
            del self.output_layer
            self.score = whole_linear(config, 1, bias=value_bias)
        for module in self.modules():
            if hasattr(module, "finish_init"):
                module.finish_init(None)  # TransformerEngine's, without quantization

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Take the hidden states of the stage before, as the schedules call it."""
        self.decoder.set_input_tensor(input_tensor[0])

    def forward(
        self,
        plan: ScoringPlan,
        temperature: float = 1.0,
        routing: Routing | None = None,
        ahead: ScoringPlan | None = None,
    ) -> Tensor | TokenOutputs | tuple[TokenOutputs, TokenOutputs]:
        """Return hidden states [C, 1, H]; the last stage returns the outputs of each token, and with a plan `ahead` those of `multi_token` as well.

        Later stages take their input from `set_input_tensor`.
        """
        packing = Packing(
            attends=plan.packing, rotations=dict(self._rotations(plan)), routing=routing
        )
        hidden: Tensor = self.decoder(
            hidden_states=self._embedded(plan.input_ids) if self.pre_process else None,
            attention_mask=None,
            packed_seq_params=packing,
        )
        if not self.post_process:
            return hidden
        outputs = self._scored(hidden, plan, temperature)
        if self.multi_token is None or ahead is None:
            return outputs
        # Its router has no number among those that a micro-batch instructs.
        later = self.multi_token(
            hidden, self._embedded(ahead.input_ids), replace(packing, routing=None)
        )
        return outputs, self._scored(later, ahead, temperature)

    def _rotations(self, plan: ScoringPlan) -> Iterator[tuple[str, Rotation]]:
        for kind in self._traits.rotations:
            of_kind = (kind,) if kind else ()
            angles = self._rotary[0](plan.positions.float(), plan.positions[None], *of_kind)
            if isinstance(angles, Tensor):  # DeepSeek-V2's are complex numbers
                angles = angles.real, angles.imag
            of_pairs = getattr(self._rotary[0], "inv_freq", None)
            if of_pairs is not None and angles[0].shape[-1] == len(of_pairs):
                angles = [part.repeat(1, 1, 2) for part in angles]  # there was one for two dims
            yield kind, rotation_of(*angles)

    def _embedded(self, ids: Tensor) -> Tensor:
        """Return hidden states [C, 1, H]; the padding token gets no gradient, as in transformers."""
        hidden: Tensor = self.embedding(ids[None], None)
        if self.padding is not None and hidden.requires_grad:
            own = len(hidden) * self.part.group.rank() if self.config.sequence_parallel else 0
            filler = (ids == self.padding).narrow(0, own, len(hidden))
            hidden.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: gradient.masked_fill(filler[:, None, None], 0)
            )
        if torch.is_grad_enabled():
            # Under an adapter it has no gradient. Megatron recomputes layers for inputs that have one.
            hidden.requires_grad_()
        factor = self._traits.embedding_factor(hidden.dtype)
        return hidden if factor == 1 else hidden * factor

    def _scored(self, hidden: Tensor, plan: ScoringPlan, temperature: float) -> TokenOutputs:
        states = hidden[:, 0]
        part = self.part
        head = self.output_layer if self.score is None else self.score
        for (
            hook
        ) in head._forward_pre_hooks.values():  # its weights wait here, since nothing calls it
            hook(head, ())
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
            replace(self._scoring, temperature=temperature),
            None if part.group.size() == 1 else part,
            plan.learned,
        )
        return TokenOutputs(logprobs=plan.spread(logprobs), entropy=plan.spread(entropy))


def build_stages(
    hf_config: PretrainedConfig,
    config: EngineConfig,
    mesh: MegatronMesh,
    device: torch.device,
    *,
    adapted: bool = False,
    mtp: MTPNames | None = None,
) -> list[PackedGPT]:
    """Build this rank's stages, in the compute dtype with undefined weights. Call inside `megatron_called`. Collective.

    If they are to be `adapted`, no layer includes the norm before it, whose output the adapter reads. `mtp` asks for a layer of that name
    behind a single stage.
    """
    traits = model_traits(hf_config)
    modules = layer_modules(config, device)
    if adapted:
        own = LayerModules()
        modules = replace(
            modules,
            block_norm=modules.norm,
            column=modules.plain_column,
            experts=own.experts,
        )
    transformer = _transformer_config(traits, hf_config, config, modules)
    scoring = LogprobOptions(
        config.logprob_rows(traits.sizes.vocabulary), transform=logit_transform(hf_config)
    )
    stages = []
    for index in range(config.virtual_stages):
        vp_stage = index if config.virtual_stages > 1 else None
        layers = _layers(traits, transformer, modules, mesh, vp_stage)
        further = None
        if mtp is not None:
            from burnish.engines.megatron.multi_token import MultiTokenLayer

            layer = _layer(traits, mtp.like, transformer, modules, mesh, is_numbered=False)
            further = MultiTokenLayer(transformer, layer, modules.norm, mesh.groups, mtp)
        given = (mesh.groups, vp_stage, traits, hf_config, scoring, further)
        stage = PackedGPT(transformer, layers, *given)
        _mark_cut(stage)
        stages.append(stage)
    return stages


def _transformer_config(
    traits: ModelTraits, hf_config: PretrainedConfig, config: EngineConfig, modules: LayerModules
) -> TransformerConfig:
    dtype = compute_dtype(config)
    sizes = traits.sizes
    return TransformerConfig(
        num_layers=sizes.depth,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.key_heads,
        kv_channels=sizes.head_dim if traits.latent is None else traits.latent.values,
        ffn_hidden_size=hf_config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=traits.epsilon,
        layernorm_zero_centered_gamma=sizes.family.norm_offset == 1,
        qk_layernorm=sizes.family.query_norms == "head",
        add_qkv_bias=traits.qkv_bias,
        attention_output_gate=traits.gates_attention,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=traits.activation,
        activation_func_clamp_value=traits.activation_limit,
        glu_linear_offset=1.0 if sizes.family.stacks_experts else 0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,
        tensor_model_parallel_size=config.tensor_parallel,
        sequence_parallel=config.megatron_sequence_parallel and config.tensor_parallel > 1,
        context_parallel_size=config.sequence_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        pipeline_model_parallel_layout=pipeline_layout(sizes.depth, config),
        pipeline_dtype=dtype,
        variable_seq_lengths=True,
        # With virtual stages, two ranks may each be both before and after the other. Exchanges in one batch would then
        # be confused. Single exchanges are still running when Megatron would free the sent tensors
        # (pipeline_parallel/schedules.py: `pp_pre_forward` frees tensors for which `pp_post_forward` waits later).
        overlap_p2p_comm=config.virtual_stages > 1,
        batch_p2p_comm=config.virtual_stages == 1,
        deallocate_pipeline_outputs=config.virtual_stages == 1,
        **(
            _of_experts(traits, hf_config, config, modules.fuses_permutation)
            if sizes.experts
            else _DENSE
        ),
        # Losses are already divided by global counts, so gradients are summed over micro-batches and ranks.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=modules.adds_gradients,
        **_RECOMPUTE[config.activation_checkpointing],
        # `RecomputedMixture` is ours, since a router needs the instructions of its micro-batch again.
        recompute_modules=[
            name
            for name in config.megatron.recompute_modules
            if name not in ("moe", "mla_up_proj")  # our own modules recompute these
        ],
    )


def _of_experts(
    traits: ModelTraits, hf_config: PretrainedConfig, config: EngineConfig, fuses_permutation: bool
) -> dict[str, Any]:
    in_fp32: dict[str, Any] = {}
    by_sigmoid = traits.family.scores_by_sigmoid
    if by_sigmoid or traits.choice_bias or traits.topk_method:
        limits = by_sigmoid or traits.topk_method == "group_limited_greedy"
        in_fp32 = {
            "moe_router_score_function": "sigmoid" if by_sigmoid else "softmax",
            "moe_router_dtype": "fp32",
            "moe_router_num_groups": getattr(hf_config, "n_group", 1) if limits else None,
            "moe_router_group_topk": getattr(hf_config, "topk_group", 1) if limits else None,
            "moe_router_topk_scaling_factor": getattr(hf_config, "routed_scaling_factor", 1.0),
        }
    normalizes = getattr(hf_config, "norm_topk_prob", True) and not traits.topk_method
    return in_fp32 | {
        "num_moe_experts": traits.sizes.experts,
        "moe_ffn_hidden_size": traits.sizes.expert_intermediate,
        "moe_shared_expert_intermediate_size": traits.shared_width or None,
        "moe_shared_expert_gate": traits.gates_shared,
        "moe_layer_freq": [int(layer.has_experts) for layer in traits.layers],
        "moe_router_topk": router_sizes(hf_config)[2],
        "moe_router_pre_softmax": not normalizes,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": config.megatron.moe_token_dispatcher_type,
        "moe_permute_fusion": fuses_permutation,
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": config.expert_tensor_parallel or config.tensor_parallel,
    }


def router_biases(stages: Iterable[nn.Module]) -> Iterator[tuple[int, Tensor]]:
    """Yield the number and the bias [experts] of each numbered router of this rank."""
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, PlainRouter) and module.number >= 0:
                yield module.number, module.get_buffer("expert_bias")


def pipeline_layout(layers: int, config: EngineConfig) -> list[list[str]] | None:
    """Return the layers of each stage; None for a single stage.

    By default the last stages get fewer, since the very last computes the output layer. Raises `UsageError` for a layout in
    `engine.megatron` that is not of this model.
    """
    stages = config.pipeline_parallel * config.virtual_stages
    if stages == 1:
        return None
    if config.megatron.pipeline_model_parallel_layout is not None:
        return _parsed_layout(config.megatron.pipeline_model_parallel_layout, layers, stages)
    each, over = divmod(layers, stages)
    counts = [each + (stage < over) for stage in range(stages)]
    layout = [["decoder"] * count for count in counts]
    return [["embedding", *layout[0]], *layout[1:-1], [*layout[-1], "loss"]]


def _parsed_layout(text: str, layers: int, stages: int) -> list[list[str]]:
    try:
        parsed = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError:
        parsed = []
    layout = [[kind.name for kind in stage] for stage in parsed]
    flat = list(chain(*layout))
    if len(layout) != stages or flat != ["embedding", *["decoder"] * layers, "loss"]:
        raise UsageError(
            "engine.megatron.pipeline_model_parallel_layout is no division of this model",
            have=f"{text}: {count_text(len(layout), 'stage')} with {count_text(flat.count('decoder'), 'layer')}",
            want=f"E, {layers} t, L in {stages} stages, which engine.pipeline_parallel × engine.virtual_stages are",
            do=f"write Et*{layers - stages + 1}{'|t' * (stages - 1)}L or the like, or remove the setting",
        )
    return layout


def require_dispatcher(config: EngineConfig) -> None:
    """Raise `UsageError` if the token dispatcher needs a package that is not installed."""
    if config.megatron.moe_token_dispatcher_type == "flex" and not fused_a2a.HAVE_DEEP_EP:
        raise UsageError(
            "engine.megatron.moe_token_dispatcher_type flex needs a package that cannot be imported",
            have="no deep_ep",
            want="deep_ep, on GPUs with NVLink or InfiniBand",
            do="install DeepEP, or set engine.megatron.moe_token_dispatcher_type=alltoall",
        )


def _layers(
    traits: ModelTraits,
    transformer: TransformerConfig,
    modules: LayerModules,
    mesh: MegatronMesh,
    vp_stage: int | None,
) -> TransformerBlockSubmodules:
    """Return the layers of a stage."""
    place = mesh.groups.pp.rank()
    first = get_transformer_layer_offset(transformer, vp_stage, place)
    count = get_num_layers_to_build(transformer, vp_stage, place)
    layers = [
        _layer(traits, layer, transformer, modules, mesh) for layer in range(first, first + count)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=modules.norm)


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


def _layer(
    traits: ModelTraits,
    layer: int,
    transformer: TransformerConfig,
    modules: LayerModules,
    mesh: MegatronMesh,
    *,
    is_numbered: bool = True,
) -> ModuleSpec:
    """Describe a layer. Unless it `is_numbered`, its router is none of those that `Routing` instructs."""
    own = traits.layers[layer]
    before, behind, before_mlp, behind_mlp = traits.block_norms
    mixture = own.has_experts
    router = sum(each.has_experts for each in traits.layers[:layer]) if is_numbered else -1

    def residual(norm: str) -> Any:
        if not norm and own.factor == 1:
            return get_bias_dropout_add
        how = {"config": transformer, "norm": modules.norm if norm else None, "factor": own.factor}
        return ModuleSpec(module=NormedResidual, params=how)

    fc1 = modules.column if before_mlp else modules.plain_column
    fc2 = modules.row
    if traits.mlp_bias:
        fc1 = biased(fc1)
        fc2 = biased(fc2)
    mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2))
    shared = MLPSubmodules(linear_fc1=modules.plain_column, linear_fc2=modules.row)
    routed = MoESubmodules(
        experts=STACKED_EXPERTS if traits.family.stacks_experts else modules.experts,
        router=partial(PlainRouter, has_bias=traits.router_bias, choice_bias=traits.choice_bias),
        shared_experts=ModuleSpec(module=SharedExpert, submodules=shared),
    )
    experts = ModuleSpec(module=modules.mixture, submodules=routed)
    # Only a norm before one matrix can be included in it.
    norm_before = modules.block_norm if traits.latent is None else modules.norm
    norm_before_mlp = modules.norm if mixture else modules.block_norm
    return ModuleSpec(
        module=RoutedLayer if mixture else TransformerLayer,
        params={"router": router} if mixture else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm_before if before else IdentityOp,
            self_attention=_attention(traits, layer, modules, mesh),
            self_attn_bda=residual(behind),
            pre_mlp_layernorm=norm_before_mlp if before_mlp else IdentityOp,
            mlp=experts if mixture else mlp,
            mlp_bda=residual(behind_mlp),
        ),
    )


def _attention(
    traits: ModelTraits, layer: int, modules: LayerModules, mesh: MegatronMesh
) -> ModuleSpec:
    own = traits.layers[layer]
    if own.has_state:
        how = {"modules": modules, "mixer": traits.mixer}
        return ModuleSpec(module=GatedDeltaNet, params=how)
    family = traits.family
    of_heads = family.query_norms == "head" and not family.norms_rotated
    norms = () if of_heads else _query_norms(traits, modules, mesh)
    core = partial(PackedCoreAttention, traits=own, family=family, norms=norms)
    params: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal}
    if traits.latent is None:
        plain = SelfAttentionSubmodules(
            linear_qkv=modules.column if traits.block_norms[0] else modules.plain_column,
            core_attention=core,
            linear_proj=biased(modules.row) if traits.out_bias else modules.row,
            q_layernorm=modules.norm if of_heads else IdentityOp,
            k_layernorm=modules.norm if of_heads else IdentityOp,
        )
        return ModuleSpec(module=SelfAttention, params=params, submodules=plain)
    latent = MLASelfAttentionSubmodules(
        linear_q_proj=modules.plain_column,
        linear_q_up_proj=modules.plain_column,
        linear_kv_up_proj=modules.plain_column,
        core_attention=partial(core, traits=replace(own, rotation=None)),
        linear_proj=biased(modules.row) if traits.out_bias else modules.row,
        q_layernorm=modules.norm,
        kv_layernorm=modules.norm,
    )
    params |= {"traits": traits.latent, "rotation": own.rotation}
    params["recomputes"] = modules.recomputes_latents
    return ModuleSpec(module=LatentAttention, params=params, submodules=latent)


def _query_norms(
    traits: ModelTraits, modules: LayerModules, mesh: MegatronMesh
) -> tuple[Callable[..., nn.Module], ...]:
    """Return what makes the norms of queries and keys that Megatron's layer does not have: of all heads, or after the rotation."""
    if traits.family.query_norms == "full":
        of_all = partial(NormOfAllHeads, group=mesh.groups.tp)
        return tuple(
            partial(of_all, heads=heads) for heads in (traits.sizes.heads, traits.sizes.key_heads)
        )
    return (modules.norm, modules.norm) if traits.family.query_norms == "head" else ()

"""Attention whose queries, keys and values come from latents, as DeepSeek-V2's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from burnish.engines.megatron.modules import Packing, turned, whole_linear
from burnish.engines.megatron.traits import LatentTraits


class LatentAttention(Attention):
    """Latent attention (arXiv 2405.04434, equations 9 to 19), with the parameter names of Megatron's `MLASelfAttention`.

    Megatron's own takes positions from where sequences begin, so it knows no shared prefixes. Tensor ranks divide the heads. The matrices
    that make the latents are whole on every rank.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        *,
        traits: LatentTraits,
        rotation: str,
        recomputes: bool,
        **options: Any,
    ) -> None:
        """`rotation` is the key of the rotary positions. `config.kv_channels` is the width of a head's values.

        `recomputes`: the backward pass computes all from the latents on again.
        """
        super().__init__(config, submodules, layer_number, attention_type="self", **options)
        self.recomputes = recomputes
        self.traits = traits
        self.rotation = rotation
        down = partial(whole_linear, config, bias=traits.bias)
        self.linear_kv_down_proj = down(traits.key_rank + traits.rotated)
        norms = {"config": config, "eps": traits.epsilon}
        self.kv_layernorm = build_module(
            submodules.kv_layernorm, hidden_size=traits.key_rank, **norms
        )
        of_keys = traits.unrotated + traits.values
        self.linear_kv_up_proj = self._column(
            submodules.linear_kv_up_proj, traits.key_rank, of_keys, "kv_up_proj"
        )
        of_queries = traits.unrotated + traits.rotated
        if traits.query_rank is None:
            self.linear_q_proj = self._column(
                submodules.linear_q_proj, config.hidden_size, of_queries, "q_proj"
            )
            return
        self.linear_q_down_proj = down(traits.query_rank)
        self.q_layernorm = build_module(
            submodules.q_layernorm, hidden_size=traits.query_rank, **norms
        )
        self.linear_q_up_proj = self._column(
            submodules.linear_q_up_proj, traits.query_rank, of_queries, "q_up_proj"
        )

    def _column(self, kind: Any, inputs: int, of_head: int, name: str) -> Any:
        return build_module(
            kind,
            inputs,
            self.config.num_attention_heads * of_head,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name=name,
            tp_group=self.pg_collection.tp,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Packing,
        **others: Any,
    ) -> Any:
        """Return the output [T, 1, H] and no bias."""
        latents = self._latents(hidden_states)
        recomputes = self.training and torch.is_grad_enabled()

        def attended(*latents: Tensor) -> Tensor:
            heads = self.get_query_key_value_tensors(latents, packed_seq_params)
            is_kept = self.recomputes or not (recomputes and self.checkpoint_core_attention)
            attend = self.core_attention if is_kept else self._checkpointed_attention_forward
            output: Tensor = attend(*heads, attention_mask, packed_seq_params=packed_seq_params)
            return output

        if recomputes and self.recomputes:
            return self.linear_proj(checkpoint(attended, False, *latents))
        return self.linear_proj(attended(*latents))

    def _latents(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the latents of queries, and of keys and values, of this rank's tokens; and the keys' part with positions of all tokens."""
        traits = self.traits
        latent, shared = torch.split(
            self.linear_kv_down_proj(hidden_states), [traits.key_rank, traits.rotated], dim=-1
        )
        # The heads of all tensor ranks share this part of the key, so its gradient is summed over them.
        if self.config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.pg_collection.tp)
        elif self.pg_collection.tp.size() > 1:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.pg_collection.tp)
        if traits.query_rank is not None:
            hidden_states = self.linear_q_down_proj(hidden_states)
        return hidden_states, latent, shared

    def get_query_key_value_tensors(
        self, latents: tuple[Tensor, ...], packing: Packing
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, all [T, 1, own heads, d]."""
        traits = self.traits
        rotation = packing.rotations[self.rotation]
        query, latent, shared = latents
        if traits.query_rank is None:
            query, _ = self.linear_q_proj(query)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(query))
        keys, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        key, value = self._of_heads(keys, traits.unrotated, traits.values)
        query, positioned = self._of_heads(query, traits.unrotated, traits.rotated)
        positioned = turned(positioned, rotation, neighbours=traits.neighbours)
        shared = turned(shared, rotation, neighbours=traits.neighbours).expand_as(positioned)
        query = torch.cat((query, positioned), dim=-1)
        key = torch.cat((key, shared), dim=-1)
        return query[:, None], key[:, None], value[:, None]

    def _of_heads(self, rows: Tensor, *widths: int) -> tuple[Tensor, ...]:
        """Cut rows [T, 1, own heads · d] into parts [T, own heads, width]."""
        return torch.split(rows.view(len(rows), -1, sum(widths)), list(widths), dim=-1)

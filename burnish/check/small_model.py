"""Shrink a model's configuration to small widths and few layers.

All that can make computations differ is kept: family, flags, scales, tied embeddings, biases, query heads per key head, and a
layer of every kind, with its window and experts.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig
from burnish.families import layers_with_experts
from burnish.models.meta_init import plain_model

# Least number of layers; layers of each kind, if there are few kinds; most layers of so many of each.
_LAYERS = 4
_ALIKE = 3
_MANY_LAYERS = 12
_HEAD_DIM = 16
_WIDE_HEAD_DIM = 24
_KEY_HEADS = 3
_WINDOW = 16
# From so many heads on, the hidden size has fewer features for each.
_MANY_HEADS = 12
# Bounds and epsilons that small random models reach.
_ROTARY = 8
_ATTENTION_SOFTCAP = 10.0
_LOGIT_SOFTCAP = 30.0
_EPSILON = 0.05
_TIME_STEP = 0.3
_EXPERTS = r"^(num|n|moe_num)_(local_|routed_)?experts$"
_WIDTHS = r"(intermediate_size|ffn_dim|ffn_hidden_size|feed_forward_size|n_inner)"
_AT_MOST = {
    _EXPERTS: 4,
    r"(per_tok|per_token|topk|top_k|moe_k)$": 2,
    r"^(n|num)_group$": 2,
    r"^topk_group$": 1,
    rf"(moe|shared|expert)\w*{_WIDTHS}": 32,
    _WIDTHS: 128,
    r"(sliding_window|attention_chunk_size|window_size)$": _WINDOW,
    r"^(qk_nope_head_dim|v_head_dim|kv_lora_rank)$": 16,
    r"^(qk_rope_head_dim|rotary_dim)$": _ROTARY,
    r"^q_lora_rank$": 24,
    r"^linear_(num_heads|head_dim)$": 16,
    r"^head_dim$": 2 * _HEAD_DIM,
    r"^(hidden_size_per_layer_input|router_hidden_size|laurel_rank)$": 16,
    r"^(max_position_embeddings|n_positions)$": 4096,
    r"^(mamba_)?chunk_size$": 32,
    r"^(linear_(key|value)_head_dim|mamba_head_dim|(ssm_)?state_size|mamba_d_state)$": 16,
}
"""Patterns of field names, and the most that such a field may be. The first match counts."""
_FIRST_LAYERS = (
    "first_k_dense_replace",
    "num_dense_layers",
    "max_window_layers",
    "moe_layer_start_index",
)
"""Fields that say how many layers at the beginning differ from those after them."""
_STATE_HEADS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups"),
    ("num_heads", "head_dim", "n_groups"),
)
"""Fields of Mamba layers: number of heads, their width, number of groups."""
_LAST_LAYERS = "num_kv_shared_layers"
"""The field that says how many layers at the end differ from earlier layers."""
_NUMBERING = ("_layers", "_idxs", "_layer_ids")
"""Endings of the names of fields that list layers by number."""
_PERIOD = re.compile(r"(interval|period|frequency|layer_step)$")


def shrink_model(
    hf_config: PretrainedConfig, engine: EngineConfig, vocabulary: int, layers: int = _LAYERS
) -> PretrainedConfig:
    """Return a copy with `vocabulary` tokens and narrow heads, as small as the ranks of a layout can share.

    If the whole model has as many, it has three key heads, three layers of each kind, `layers` in all and four experts, each a multiple of
    the ranks that divide it. Where the configuration has a `head_dim`, it differs from the hidden size of each head, unless the family's
    code wants them equal.
    """
    apart = _shrunken(hf_config, engine, vocabulary, layers, apart=True)
    if _has_equal_widths(apart) or not _has_equal_widths(hf_config) or _computes(apart):
        return apart
    return _shrunken(hf_config, engine, vocabulary, layers, apart=False)


def _has_equal_widths(hf_config: PretrainedConfig) -> bool:
    """Return whether all heads together are as wide as hidden states, or the configuration does not say."""
    text = hf_config.get_text_config()
    width = vars(text).get("head_dim")
    heads = getattr(text, "num_attention_heads", None)
    return not (width and heads) or width * heads == text.hidden_size


def _computes(hf_config: PretrainedConfig) -> bool:
    """Return whether the output layers of transformers' attention are as wide as all heads together."""
    with torch.device("meta"):
        model = plain_model(hf_config)
    text = hf_config.get_text_config()
    wide = text.num_attention_heads * text.head_dim
    outputs = [module for name, module in model.named_modules() if name.endswith(".o_proj")]
    return all(module.in_features == wide for module in outputs if isinstance(module, nn.Linear))


def _shrunken(
    hf_config: PretrainedConfig,
    engine: EngineConfig,
    vocabulary: int,
    layers: int,
    *,
    apart: bool,
) -> PretrainedConfig:
    config = copy.deepcopy(hf_config)
    text = config.get_text_config()
    tensor = math.lcm(engine.tensor_parallel, engine.expert_tensor_parallel or 1)
    by_layer = _cut_layers(text, layers, engine.pipeline_parallel * engine.virtual_stages)
    _narrow_heads(text, tensor, engine.sequence_parallel, apart=apart)
    _narrow_states(text)
    rotated, unrotated = (getattr(text, f"qk_{n}_head_dim", None) for n in ("rope", "nope"))
    if rotated and unrotated:
        text.head_dim = min(rotated, _ROTARY)
        text.qk_head_dim = text.head_dim + min(unrotated, _HEAD_DIM)
    for part in {id(part): part for part in (config, text)}.values():
        for name, value in list(vars(part).items()):
            if name.endswith("_token_id") and value is not None:
                setattr(part, name, None if name.startswith("eos") else 0)
            elif name.startswith("vocab_size") and value:
                setattr(part, name, vocabulary)
            elif (lower := _lowered(name, value, tensor, engine.expert_parallel)) != value:
                setattr(part, name, lower)
    if by_layer:
        text.per_layer_config = {
            layer: {n: _lowered(n, v, tensor, 1) for n, v in fields.items()}
            for layer, fields in by_layer.items()
        }
    return config


def _lowered(name: str, value: Any, tensor: int, expert: int) -> Any:
    """Return a field's value as `_AT_MOST` allows; choose soft caps and epsilons that matter."""
    if isinstance(value, int | float) and "softcap" in name:
        return min(value, _LOGIT_SOFTCAP if name.startswith("final") else _ATTENTION_SOFTCAP)
    if isinstance(value, float) and name.endswith(("_eps", "_epsilon")):
        return max(value, _EPSILON)
    if isinstance(value, float) and name == "time_step_min":
        return max(value, _TIME_STEP)
    pattern = next((each for each in _AT_MOST if re.search(each, name)), None)
    if pattern is None:
        return value
    parts = expert if pattern == _EXPERTS else tensor if _WIDTHS in pattern else 1
    most = -(-_AT_MOST[pattern] // parts) * parts
    if isinstance(value, list | tuple):
        return [min(each, most) if _is_size(each) else each for each in value]
    return min(value, most) if _is_size(value) else value


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _LayerFields(NamedTuple):
    """The fields of a configuration in which its layers differ, by name."""

    values: dict[str, list[Any]]
    """A value for each layer (`layer_types`)."""
    numbers: dict[str, list[int]]
    """The numbers of some layers (`mlp_only_layers`)."""
    starts: dict[str, int]
    """The layer from which on layers differ from those before it (`first_k_dense_replace`)."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], layers: int) -> _LayerFields:
        values: dict[str, list[Any]] = {}
        numbers: dict[str, list[int]] = {}
        for name, value in fields.items():
            if not isinstance(value, list | tuple) or not value:
                continue
            if name.endswith(_NUMBERING) and _is_numbering(value, layers):
                numbers[name] = list(value)
            elif len(value) == layers:
                values[name] = list(value)
        starts = {name: fields[name] for name in _FIRST_LAYERS if _is_size(fields.get(name))}
        if fields.get(_LAST_LAYERS):
            starts[_LAST_LAYERS] = layers - fields[_LAST_LAYERS]
        return cls(values, numbers, starts)

    def kind(self, layer: int) -> tuple[Any, ...]:
        """Return what these fields say of a layer."""
        return (
            *(repr(value[layer]) for value in self.values.values()),
            *(layer in numbers for numbers in self.numbers.values()),
            *(layer >= start for start in self.starts.values()),
        )

    def keep(self, text: PretrainedConfig, kept_layers: Sequence[int]) -> None:
        """Set the fields for a model that has only the `kept_layers`."""
        for name, value in self.values.items():
            setattr(text, name, [value[layer] for layer in kept_layers])
        for name, numbers in self.numbers.items():
            setattr(text, name, [new for new, layer in enumerate(kept_layers) if layer in numbers])
        for name, start in self.starts.items():
            before = sum(layer < start for layer in kept_layers)
            setattr(text, name, len(kept_layers) - before if name == _LAST_LAYERS else before)


def _cut_layers(text: PretrainedConfig, least: int, stages: int) -> dict[int, dict[str, Any]]:
    """Keep the first layers of every kind, `least` layers, and a multiple of the stages.

    Return the overrides of single layers, by their new number. They are removed from the configuration.
    """
    fields: dict[str, Any] = dict(vars(text))
    layers: int = getattr(text, "num_hidden_layers", None) or 0
    special = vars(text).pop("_heterogeneity_spec", None)
    overrides = special.per_layer_overrides if special else {}
    of_layers = _LayerFields.of(fields, layers)
    mixtures = set(layers_with_experts(fields))
    kinds: dict[Any, list[int]] = {}
    for layer in range(layers):
        kind = (of_layers.kind(layer), repr(overrides.get(layer)), layer in mixtures)
        kinds.setdefault(kind, []).append(layer)
    # Such as "every sixth layer differs": the code counts, and no list shows the kinds.
    if not of_layers.values:
        periods = [v for name, v in fields.items() if _PERIOD.search(name) and _is_size(v)]
        least = max([least, *periods])
    kept_layers = _kept_layers(list(kinds.values()), least, stages)
    if layers:
        text.num_hidden_layers = len(kept_layers)
    of_layers.keep(text, kept_layers)
    if "decoder_sparse_step" in fields:  # a period would count the kept layers
        text.mlp_only_layers = [
            new for new, layer in enumerate(kept_layers) if layer not in mixtures
        ]
        text.decoder_sparse_step = 1
    if _is_size(fields.get("moe_layer_end_index")):
        text.moe_layer_end_index = len(kept_layers) - 1
    return {new: overrides[layer] for new, layer in enumerate(kept_layers) if layer in overrides}


def _kept_layers(kinds: Sequence[Sequence[int]], least: int, stages: int) -> list[int]:
    """Return layers in order: the first of each kind, and the first others up to `least` and a multiple of the stages."""
    of_each = _ALIKE if _ALIKE * len(kinds) <= _MANY_LAYERS else _ALIKE - 1
    chosen = [layer for of_kind in kinds for layer in of_kind[:of_each]]
    others = sorted(layer for of_kind in kinds for layer in of_kind[of_each:])
    count = -(-max(least, len(chosen)) // stages) * stages
    return sorted([*chosen, *others[: max(0, count - len(chosen))]])


def _is_numbering(values: Sequence[Any], layers: int) -> bool:
    rising = all(map(_is_size, values)) and sorted(set(values)) == list(values)
    return rising and values[-1] < layers


def _narrow_heads(text: PretrainedConfig, tensor: int, sequence: int, *, apart: bool) -> None:
    """Make heads narrow, and as few as ranks can share. Set the hidden size to match."""
    heads: int = getattr(text, "num_attention_heads", None) or 0
    hidden: int = getattr(text, "hidden_size", None) or 0
    if not heads or not hidden:
        return
    own: int = getattr(text, "num_key_value_heads", None) or heads
    sharing = heads // own
    shares = tensor * sequence // math.gcd(sequence, sharing)
    key_heads = min(own, -(-_KEY_HEADS // shares) * shares)
    text.num_attention_heads = key_heads * sharing
    own_width = vars(text).get("head_dim")
    wide = own_width or hidden // heads
    head_dim = _WIDE_HEAD_DIM if wide > _HEAD_DIM else _HEAD_DIM
    of_each = head_dim
    if own_width:
        text.head_dim = head_dim
    if own_width and apart:
        is_narrow = head_dim == _HEAD_DIM or text.num_attention_heads >= _MANY_HEADS
        of_each = _HEAD_DIM // 2 if is_narrow else _HEAD_DIM
    small = key_heads * sharing * of_each
    for name, value in list(vars(text).items()):
        if re.search(r"(key_value|kv)_heads$", name) and _is_size(value):
            setattr(text, name, key_heads * sharing if value == heads else min(value, key_heads))
        elif value == hidden and _is_size(value) and not re.search("vocab|position", name):
            setattr(text, name, small)  # the hidden size once more
    text.hidden_size = small
    old = getattr(text, "qk_rope_head_dim", None)
    narrower = (_ROTARY, old) if old else (head_dim, wide)
    if getattr(text, "rope_parameters", None):
        text.rope_parameters = _shortened(text.rope_parameters, *narrower)


def _narrow_states(text: PretrainedConfig) -> None:
    """Make the heads of Mamba's layers 16 wide, as many as `expand` times the hidden size holds."""
    expand = getattr(text, "mamba_expand", None) or getattr(text, "expand", None)
    names = next((each for each in _STATE_HEADS if hasattr(text, each[0])), None)
    if not expand or names is None:
        return
    if not getattr(text, "num_attention_heads", None):
        text.hidden_size = 4 * _HEAD_DIM
    heads = int(expand * text.hidden_size) // _HEAD_DIM
    if getattr(text, "mamba_d_ssm", None):
        text.mamba_d_ssm = heads * _HEAD_DIM
    groups = math.gcd(getattr(text, names[2], None) or 1, heads)
    for name, value in zip(names, (heads, _HEAD_DIM, groups), strict=True):
        setattr(text, name, value)


def _shortened(rope: Mapping[str, Any], new: int, old: int) -> dict[str, Any]:
    """Cut lists of one factor per frequency (longrope)."""
    cut: dict[str, Any] = {}
    for key, value in rope.items():
        if isinstance(value, Mapping):
            cut[key] = _shortened(value, new, old)
        else:
            cut[key] = value[: len(value) * new // old] if isinstance(value, list) else value
    return cut

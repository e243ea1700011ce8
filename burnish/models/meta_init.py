"""Build a model on the meta device, and give it memory.

Models are `AutoModelForCausalLM`, or such a backbone with a value head, and not quantized.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import guard_torch_init_functions

from burnish.errors import IncompatibleError, refusing
from burnish.families import (
    EXPERT_COUNTS,
    SIZE_FIELDS,
    ModelSizes,
    family_of,
    layers_with_experts,
)
from burnish.models.flops import ModelFlops
from burnish.models.heads import has_value_head
from burnish.models.kernels.attention import IMPLEMENTATION
from burnish.models.kernels.fused import fuse
from burnish.models.names import is_matrix

_SENSES = re.compile("vision|audio|image|speech|video|vq")
"""Found in the names of sub-configurations for inputs other than text."""


def has_own_code(config: PretrainedConfig) -> bool:
    """Return whether the configuration's class comes from the model's directory."""
    return type(config).__module__.startswith("transformers_modules.")


def router_sizes(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return the numbers of known routers, experts per router, and experts per token; zeros without any."""
    text = config.get_text_config()
    experts = model_sizes(config).experts if family_of(text.model_type).has_router else 0
    if not experts:
        return 0, 0, 0
    chosen = getattr(text, "num_experts_per_tok", None) or text.moe_topk
    chosen = chosen if isinstance(chosen, int) else max(chosen)  # layers may have their own
    return len(layers_with_experts(vars(text))), experts, chosen


def build_on_meta(hf_config: PretrainedConfig) -> PreTrainedModel:
    """Return the model in fp32 on the meta device, with packed attention and without dropout or noise.

    Raises as `plain_model` does.
    """
    config = copy.deepcopy(hf_config)
    config.use_cache = False
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():  # some families read these at every call
            if isinstance(value, float) and ("drop" in name or name == "router_jitter_noise"):
                setattr(part, name, 0.0)
    with torch.device("meta"):
        model = plain_model(config)
    model.config._attn_implementation = IMPLEMENTATION  # read by every layer at every call
    fuse(model)
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        from burnish.models.kernels.mixers import pack_mixers

        pack_mixers(model)
    if any(hasattr(module, "is_transposed") for module in model.modules()):
        from burnish.models.kernels.expert_rows import use_unsorted_experts

        use_unsorted_experts(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def model_sizes(config: PretrainedConfig) -> ModelSizes:
    """Return the language model's sizes, under any field names."""
    text = config.get_text_config()
    fields = text.to_dict()
    for name in SIZE_FIELDS:
        with suppress(AttributeError, RuntimeError):  # layers differ in this size
            fields[name] = getattr(text, name)
    return ModelSizes.of(fields)


def rotary_limits(config: PretrainedConfig) -> dict[str, int]:
    """Return the most tokens of a sequence that leaves others in its pass unchanged, by a name for messages.

    A longer one changes the rotary frequencies of "longrope" and "dynamic". Other kinds have no such limit.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    limits: dict[str, int] = {}
    for parameters in (rope, *rope.values()):
        kind = parameters.get("rope_type") if isinstance(parameters, Mapping) else None
        if kind in ("dynamic", "longrope"):
            most = (
                parameters.get("original_max_position_embeddings") or text.max_position_embeddings
            )
            name = f"the original length of the model's rope_type {kind}"
            limits[name] = min(most, limits.get(name, most))
    return limits


def position_limit(config: PretrainedConfig) -> int | None:
    """Return the least of `rotary_limits`."""
    return min(rotary_limits(config).values(), default=None)


def length_limits(config: PretrainedConfig) -> dict[str, int]:
    """Return the most tokens of a generated sequence, by a name for messages."""
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = {"the model's max_position_embeddings": most} if most and most > 0 else {}
    return limits | rotary_limits(config)


def longest_sequence(config: PretrainedConfig) -> int | None:
    """Return the least of `length_limits`."""
    return min(length_limits(config).values(), default=None)


def kept_in_fp32(config: PretrainedConfig, names: Iterable[str]) -> frozenset[str]:
    """Return the weights that transformers always keeps in fp32, such as DeepSeek-V3's router biases."""
    kind = None if has_value_head(config) else MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    modules = getattr(kind, "_keep_in_fp32_modules_strict", None) or ()
    return frozenset(n for n in names if any(f".{module}." in f".{n}." for module in modules))


def other_inputs(config: PretrainedConfig) -> list[str]:
    """Return the names of the configurations of what reads images, video or audio."""
    return [n for n in config.sub_configs if _SENSES.search(n) and getattr(config, n, None)]


def plain_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return transformers' model in fp32, with a value head or an output layer, on torch's default device.

    Raises `IncompatibleError` if it reads more than text, and `UsageError` if transformers cannot build it.
    """
    if others := other_inputs(config):
        raise IncompatibleError(
            f"models of type {config.model_type} read more than text",
            have=", ".join(others),
            want="a causal language model",
            do="take the language model out: load the directory with transformers, save its language_model "
            "and its output layer as the family's text-only model, and set model.path to that",
        )
    with refusing(  # a wrong value may raise any error
        f"transformers cannot build a causal language model of type {config.model_type} with this configuration",
        want="values that belong together",
        do="correct config.json, or model.fresh",
    ):
        if has_value_head(config):
            from burnish.models.value_head import value_class

            kind = value_class(config)
            model: PreTrainedModel = kind._from_config(config, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=has_own_code(config)
            )
        return model


def materialize(root: nn.Module, device: torch.device, *, on_host: bool = False) -> None:
    """Allocate weights of a meta model (or a sharded one around it), compute its buffers, and keep ties. Weights may be `on_host`."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if (first_name := first.setdefault(id(parameter), name)) != name:
            ties[name] = first_name
    root.to_empty(device="cpu" if on_host else device)
    for module in root.modules() if on_host else ():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    for name, first_name in ties.items():
        owner, _, attribute = name.rpartition(".")
        setattr(root.get_submodule(owner), attribute, root.get_parameter(first_name))
    fill_buffers(next(m for m in root.modules() if isinstance(m, PreTrainedModel)), device)


@torch.no_grad()
def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds, on the CPU for all devices alike.

    Raises as `initialized` does.
    """
    for name, module, owner in owned_modules(model):
        own = [key for key, _ in module.named_buffers(recurse=False)]
        if keys := [key for key in own if key in module._non_persistent_buffers_set]:
            for key, value in initialized(name, module, owner, keys).items():
                setattr(module, key, value.to(device))


def owned_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module, PreTrainedModel]]:
    """Return every module, its name and the innermost `PreTrainedModel` around it."""
    modules: list[tuple[str, nn.Module, PreTrainedModel]] = []

    def walk(name: str, module: nn.Module, owner: PreTrainedModel) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        modules.append((name, module, owner))
        for key, child in module.named_children():
            walk(f"{name}.{key}" if name else key, child, owner)

    walk("", model, model)
    return modules


@torch.no_grad()
def initialized(
    name: str, module: nn.Module, owner: PreTrainedModel, keys: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers `keys` as `owner._init_weights` makes them, on the CPU.

    Draws come from torch's global generator. Raises `IncompatibleError` if one is left unset.
    """

    for holder, inner in _around(owner, module):
        around = _undefined(holder, module, keys)
        with guard_torch_init_functions():
            owner._init_weights(around)
        filled = around.get_submodule(inner)
        values = {key: getattr(filled, key).detach() for key in keys}
        missing = [k for k, v in values.items() if v.is_floating_point() and bool(v.isnan().any())]
        if not missing:
            return values
    raise IncompatibleError(
        f"{type(owner).__name__} does not say how {name}.{missing[0]} is initialized",
        want="a model whose _init_weights fills it",
        do="train a model of another family, or correct the model's own code; for a parameter, set model.path to a directory with weights",
    )


def _around(owner: PreTrainedModel, module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield `module` and those around it, which may initialize it, each with its name inside."""
    yield module, ""
    names = next(n for n, each in owner.named_modules() if each is module).split(".")
    for depth in range(len(names) - 1, -1, -1):
        yield owner.get_submodule(".".join(names[:depth])), ".".join(names[depth:])


def _undefined(around: nn.Module, module: nn.Module, keys: Collection[str]) -> nn.Module:
    """Copy modules to the meta device, except `keys` of `module`, which are NaN (integers 0) on the CPU."""

    def blank(key: str, like: torch.Tensor | None) -> torch.Tensor | None:
        if like is None:
            return None
        device = "cpu" if around is module and key in keys else "meta"
        value = torch.nan if like.is_floating_point() else 0
        tensor = torch.full(like.shape, value, dtype=like.dtype, device=device)
        return nn.Parameter(tensor, False) if isinstance(like, nn.Parameter) else tensor

    # copy.copy calls FSDP2's __new__, which builds a module anew.
    copied = object.__new__(type(around))
    copied.__dict__.update(vars(around))
    inside = around._modules.items()
    copied._modules = {n: child and _undefined(child, module, keys) for n, child in inside}
    copied._parameters = {key: blank(key, like) for key, like in around._parameters.items()}  # type: ignore[misc]
    copied._buffers = {key: blank(key, like) for key, like in around._buffers.items()}
    return copied


_EXPERT = re.compile(r"(^|\.)experts(\.|$)")


def count_flops(hf_config: PretrainedConfig) -> ModelFlops:
    """Count the operations of a model, built without memory."""
    model = build_on_meta(hf_config)
    text = hf_config.get_text_config()
    head = model.get_output_embeddings()
    attention: Counter[int | None] = Counter()
    for window, per_pair in _attention_costs(model, text):
        attention[window] += per_pair
    return ModelFlops(
        per_token=2.0 * sum(_active_weights(model, text)),
        attention=attention,
        head=2.0 * head.weight.numel() if isinstance(head, nn.Linear) else 0.0,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _active_weights(model: nn.Module, config: PretrainedConfig) -> Iterator[float]:
    chosen = getattr(config, "num_experts_per_tok", getattr(config, "moe_topk", None))
    if isinstance(chosen, list):  # one number per layer
        chosen = sum(chosen) / len(chosen)
    counts = [getattr(config, name, None) for name in EXPERT_COUNTS]
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for own, parameter in module.named_parameters(recurse=False):
            if not is_matrix(f"{name}.{own}", parameter.ndim):
                continue
            share = 1.0
            if chosen is not None and _EXPERT.search(name):
                fused = parameter.shape[0] if parameter.ndim == 3 else None
                share = chosen / (fused or next(filter(None, counts), 1))
            yield parameter.numel() * share


def _attention_costs(
    model: nn.Module, config: PretrainedConfig
) -> Iterator[tuple[int | None, int]]:
    """Yield each attention layer's window, and its operations per pair of query and key."""
    heads = model_sizes(config).heads
    attentions = [module for module in model.modules() if hasattr(module, "is_causal")]
    for position, module in enumerate(attentions):
        # Latent attention (DeepSeek's) has queries and values of different widths; GPT-NeoX says head_size.
        names = ("qk_head_dim", "head_dim", "head_size")
        widths = (getattr(module, name, None) for name in names)
        query = next((width for width in widths if width), config.hidden_size // max(heads, 1))
        value = getattr(module, "v_head_dim", None) or query
        window = window_of(module, config, getattr(module, "layer_idx", position))
        yield window, 2 * heads * (query + value)


def window_of(module: nn.Module, config: PretrainedConfig, index: int) -> int | None:
    """Return the window of layer `index`, which has this attention: its own, else (Mistral) the configuration's."""
    if getattr(module, "is_sliding", None) is False:  # EXAONE 4's other layers know the window too
        return None
    kinds = getattr(config, "layer_types", None)
    is_full = kinds and kinds[index] != "sliding_attention"
    of_config = None if is_full else getattr(config, "sliding_window", None)
    return getattr(module, "sliding_window", of_config)

"""Layers with state (Gated DeltaNet, arXiv 2412.06464; Mamba, arXiv 2312.00752; short convolutions) over packed sequences.

Their modules in transformers take whole sequences [n, L, H]. The keyword `packing` makes these from the row of tokens,
as for attention. transformers' own kernels compute the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.distributed.device import uncompiled
from burnish.errors import IncompatibleError
from burnish.models.kernels.attention import PackedAttention

# Names under which a layer with state takes a cache.
_CACHES = ("cache_params", "past_key_values")


def pack_mixers(model: PreTrainedModel) -> None:
    """Make layers with state take packed sequences. Parameters and classes keep their names."""
    for parent in list(model.modules()):
        for child in parent.children():
            if cache := _cache_of(child):
                kind = type(child)
                # As in FSDP2, the module remains an instance of its class, so that transformers initializes it.
                child.__class__ = type(kind.__name__, (_PackedMixer, kind), {"cache": cache})
                parent.register_forward_pre_hook(child.take, with_kwargs=True)
                norm = getattr(child, "norm", None)
                if isinstance(norm, nn.Module) and hasattr(norm, "norm_before_gate"):
                    kind = type(norm)
                    norm.__class__ = type(kind.__name__, (_TokenwiseNorm, kind), {})


def mixers(model: nn.Module) -> list[str]:
    """Return the names of layers with state, which `pack_mixers` has found."""
    return [name for name, module in model.named_modules() if isinstance(module, _PackedMixer)]


def _cache_of(module: nn.Module) -> str | None:
    """Return the keyword for the cache of a layer with a convolution over tokens, else None."""
    if not any(isinstance(child, nn.Conv1d) for child in module.children()):
        return None
    parameters = inspect.signature(module.forward).parameters
    return next(
        (name for name in _CACHES if name in parameters and parameters[name].default is None), None
    )


class _PackedMixer(nn.Module):
    """A layer with state over packed sequences: a base class before the layer's own."""

    cache: str
    """The keyword of its cache."""
    layer_idx: int
    _packing: PackedAttention | None = None

    @uncompiled
    def take(self, _: nn.Module, __: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Take `packing` from the parent's call, because the parent may not pass it on."""
        self._packing = options.get("packing")

    @uncompiled
    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Return outputs of hidden states, both [1, T, H]. Raises `IncompatibleError` without `packing`."""
        packing = self._packing
        self._packing = None
        if packing is None:
            raise IncompatibleError(
                f"{type(self).__name__} has state and is called without the keyword packing, so it does not know where sequences begin",
                want="layers whose model passes keyword arguments on, as most of transformers 5 do",
                do="train a model of another family",
            )
        options.pop("packing", None)
        mixer = super().forward

        def mixed(rows: Tensor, cache: Any) -> Tensor:
            with _bounded_steps(self, cache):
                output: Tensor = mixer(rows, **options | {self.cache: cache})
            return output

        return packing.mix(self.layer_idx, mixed, hidden_states)


class _TokenwiseNorm(nn.Module):
    """Falcon-H1's gated norm, which loses a dimension if each of several sequences has one token: a base class before its own."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Return normed states, in the shape of `hidden_states` and `gate` [n, L, H]."""
        rows, gates = (each.flatten(0, 1)[None] for each in (hidden_states, gate))
        output: Tensor = super().forward(rows, gates)
        return output.view(hidden_states.shape)


@contextmanager
def _bounded_steps(mixer: Any, cache: Any) -> Iterator[None]:
    """Bound Mamba 2's time steps Δ = softplus(d + bias) while `cache` continues sequences.

    transformers bounds Δ in a whole pass, and not where it decodes a token. d is the end of what `in_proj` returns.
    """
    limits = getattr(mixer, "time_step_limit", None) or (0.0, torch.inf)
    continues = cache is not None and cache.has_previous_state(mixer.layer_idx)
    if not continues or tuple(limits) == (0.0, torch.inf):
        yield
        return
    bias = mixer.dt_bias.float()
    bounds = torch.tensor(limits, device=bias.device)
    unbiased = bounds + torch.log(-torch.expm1(-bounds))  # softplus's inverse
    low, high = unbiased[:, None] - bias
    if (factors := getattr(mixer, "mup_vector", None)) is not None:  # Falcon-H1 multiplies d
        low, high = (each / factors.flatten()[-len(bias) :] for each in (low, high))

    def bound(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        steps = output[..., -len(bias) :]
        steps.copy_(steps.clamp(low, high))
        return output

    handle = mixer.in_proj.register_forward_hook(bound)
    try:
        yield
    finally:
        handle.remove()

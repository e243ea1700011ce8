"""Layers with state (Gated DeltaNet, arXiv 2412.06464; Mamba, arXiv 2312.00752; short convolutions) over packed sequences.

Their modules in transformers take whole sequences [n, L, H]. The keyword `packing` makes these from the row of tokens,
as for attention. transformers' own kernels compute the rest.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.distributed.device import uncompiled
from burnish.errors import IncompatibleError
from burnish.models.kernels.attention import Attends

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


def _cache_of(module: nn.Module) -> str | None:
    """Return the keyword for the cache of a layer with a convolution over tokens, else None."""
    if not any(isinstance(child, nn.Conv1d) for child in module.children()):
        return None
    taken = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in taken and taken[name].default is None), None)


class _PackedMixer(nn.Module):
    """A layer with state over packed sequences: a base class before the layer's own."""

    cache: str
    """The keyword of its cache."""
    layer_idx: int
    _packing: Attends | None = None

    @uncompiled
    def take(self, _: nn.Module, __: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Take `packing` from the parent's call, because the parent may not pass it on."""
        self._packing = options.get("packing")

    @uncompiled
    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Return outputs of hidden states, both [1, T, H]. Raises `IncompatibleError` without `packing`."""
        packing, self._packing = self._packing, None
        if packing is None:
            raise IncompatibleError(
                f"{type(self).__name__} has state and is called without the keyword packing, so it does not know where sequences begin",
                want="layers that get their keywords, as most of transformers 5 do",
                do="train a model of another family",
            )
        options.pop("packing", None)
        mixer = super().forward

        def mixed(rows: Tensor, cache: Any) -> Tensor:
            output: Tensor = mixer(rows, **options | {self.cache: cache})
            return output

        return packing.mix(self.layer_idx, mixed, hidden_states)

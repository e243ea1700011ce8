"""Compile decoder layers (torch.compile, doi 10.1145/3620665.3640366).

Equal layers share compiled code, for any length. Attention, collectives, FSDP2's gathers and experts stay eager.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib import import_module

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from burnish.distributed.device import uncompiled
from burnish.errors import refusing
from burnish.models.kernels.expert_rows import UNSORTED, unsorted_experts

# The name under which transformers finds our uncompiled function for experts.
_UNCOMPILED = "burnish_uncompiled"

ALL_EXPERTS_FUNCTIONS.register(_UNCOMPILED, uncompiled(unsorted_experts))


def compile_layers(model: PreTrainedModel, layers: Iterable[nn.Module]) -> None:
    """Have `layers` of `model` compiled at their first call. Raises `UsageError` without a C++ compiler."""
    _require_compiler()
    config = model.config.get_text_config()
    if config._experts_implementation == UNSORTED:
        config._experts_implementation = _UNCOMPILED
    # Routers may get hooks after their layer was compiled without. So compiled code must check for hooks.
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    for layer in layers:
        layer.compile(dynamic=True)


def _require_compiler() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about torch's own code
        import_module("torch._inductor.compile_fx")
    from torch._inductor.cpp_builder import get_cpp_compiler

    with refusing(
        "engine.compile needs a C++ compiler, and there is none",
        want="a C++ compiler",
        do="install g++, set CXX to one, or set engine.compile=false",
    ):
        get_cpp_compiler()

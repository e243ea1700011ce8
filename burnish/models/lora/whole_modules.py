"""Train modules whole beside an adapter, as PEFT's `modules_to_save` does.

PEFT's wrapper holds such a module twice: frozen, for the model without the adapter, and a copy that is trained.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from burnish.config.schema import LoraConfig
from burnish.errors import IncompatibleError, few
from burnish.models.meta_init import build_on_meta
from burnish.models.names import regions

_log = logging.getLogger(__name__)


def modules_trained_whole(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the modules that `modules_to_save` names: those whose names end so, and what is tied to them.

    Raises `IncompatibleError` if there are none, or if they are no single layers whose tensors a checkpoint holds as they are.
    """
    asked = tuple(config.modules_to_save)
    if not asked:
        return []
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = [each for each in asked if not any(name.endswith(each) for name in modules)]
    named = [name for name in modules if name.endswith(asked)]
    stored = {each.parameter for each in regions(model) if each.name == each.parameter}
    tables = _tables(model)
    stored |= {f"{name}.weight" for name in tables}
    others = [name for name in named if not _is_plain_layer(name, modules[name], stored)]
    if missing or others:
        problem = "what the model does not have" if missing else "what is no single layer"
        raise IncompatibleError(
            f"model.lora.modules_to_save names {problem}",
            have=few(missing or others),
            want=f"endings of the names of single layers, such as {' and '.join(tables)}",
            do="correct model.lora.modules_to_save",
        )
    if has_tied_head(model) and not {*tables}.isdisjoint(named):
        return [*tables, *(name for name in named if name not in tables)]
    return named


def has_tied_head(model: PreTrainedModel) -> bool:
    """Return whether the output layer is the table of embeddings."""
    head: Any = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def keeps_ties(model: PreTrainedModel, config: LoraConfig) -> bool:
    """Return whether PEFT has to tie the copies of both tables (its `ensure_weight_tying`)."""
    whole = modules_trained_whole(model, config)
    return has_tied_head(model) and not {*whole}.isdisjoint(_tables(model))


def warn_of_ties(config: LoraConfig, hf_config: PretrainedConfig) -> None:
    """Say that a table is trained which `modules_to_save` does not name."""
    asked = (*config.modules_to_save,)
    whole = modules_trained_whole(build_on_meta(hf_config), config)
    if unasked := [name for name in whole if not name.endswith(asked)]:
        _log.warning(
            "model.lora.modules_to_save trains %s too: the model has one table for its input and its output, and keeps it",
            few(unasked),
        )


def set_copies(model: nn.Module, *, on: bool) -> None:
    """Compute with the copies, or with the frozen modules."""
    from peft.utils.other import AuxiliaryTrainingWrapper

    for module in model.modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            # The subclass's own method sets requires_grad, which FSDP2 reads only once.
            AuxiliaryTrainingWrapper.enable_adapters(module, on)


def _tables(model: PreTrainedModel) -> list[str]:
    """Return the names of the table of embeddings and of the output layer."""
    own = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in own if module is not None]


def _is_plain_layer(name: str, module: nn.Module, stored: set[str]) -> bool:
    parameters = [f"{name}.{own}" for own, _ in module.named_parameters()]
    is_single = not any(True for _ in module.children())
    return is_single and bool(parameters) and stored.issuperset(parameters)

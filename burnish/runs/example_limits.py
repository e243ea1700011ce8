"""Say how long an example may be, by the configuration and by the model's positions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from burnish.data.tasks import RowDataset
from burnish.models.meta_init import build_on_meta, length_limits, rotary_limits

_OFFSET = 2
"""Most rows of a table of positions before that of position 0 (OPT, BioGPT)."""
_BUFFER = "embed_positions"
"""A table of sines (GPT-J, CodeGen)."""

_log = logging.getLogger(__name__)


def example_limit(settings: Mapping[str, int], hf_config: PretrainedConfig) -> tuple[int, str]:
    """Return the longest example, in tokens, and what limits it: one of the `settings` (`RunConfig.example_limits`), or the model."""
    limits = {**settings}
    limits |= rotary_limits(hf_config)
    if _has_position_table(hf_config):
        limits |= length_limits(hf_config)
    name = min(limits, key=limits.__getitem__)
    return limits[name], name


def tell_long_examples(hf_config: PretrainedConfig, dataset: RowDataset[Any], setting: str) -> None:
    """Warn of examples with more tokens than the model has positions. Rotary embeddings go on there, and are not trained."""
    most = min(length_limits(hf_config).values(), default=0)
    if not most:
        return
    count = str((dataset.lengths > most).sum())
    if dataset.rows.is_streamed and (dataset.limit or 0) > most:
        count = "perhaps some"
    if count != "0":
        told = "%s rows of %s have more tokens than the model's %d positions; data.max_length=%d leaves them out"
        _log.warning(told, count, setting, most, most)


def _has_position_table(config: PretrainedConfig) -> bool:
    """Return whether the model looks positions up in a table, which no sequence may leave."""
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if not most or getattr(text, "rope_parameters", None):
        return False
    model = build_on_meta(config)
    tables = {
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings()
    }
    tables |= {len(buffer) for name, buffer in model.named_buffers() if name.endswith(_BUFFER)}
    return not tables.isdisjoint(range(most, most + _OFFSET + 1))

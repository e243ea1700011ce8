"""Which head a model has."""

from __future__ import annotations

from transformers import PretrainedConfig

OF_SEQUENCES = "ForSequenceClassification"
"""Ending of the names of architectures with a head for whole sequences."""


def has_value_head(config: PretrainedConfig) -> bool:
    """Return whether the model has a head that classifies tokens or sequences."""
    return any(
        name.endswith(("ForTokenClassification", OF_SEQUENCES))
        for name in config.architectures or ()
    )

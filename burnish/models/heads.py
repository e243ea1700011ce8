"""Which head a model has."""

from __future__ import annotations

from transformers import PretrainedConfig

from burnish.errors import IncompatibleError

OF_SEQUENCES = "ForSequenceClassification"
"""Ending of the names of architectures with a head for whole sequences."""


def has_value_head(config: PretrainedConfig) -> bool:
    """Return whether the model has a head that classifies tokens or sequences."""
    return any(
        name.endswith(("ForTokenClassification", OF_SEQUENCES))
        for name in config.architectures or ()
    )


def require_language_model(path: str | None, hf_config: PretrainedConfig, do: str) -> None:
    """Raise `IncompatibleError`, with what to `do`, for a model that has a value head."""
    if has_value_head(hf_config):
        raise IncompatibleError(
            f"{path} has a value head and no vocabulary",
            have=", ".join(hf_config.architectures or ()),
            want="a causal language model",
            do=do,
        )

"""Frozen records: the nouns that every layer shares."""

from burnish.records.batches import Batch, MicroBatch, TokenOutputs
from burnish.records.samples import (
    Completion,
    Example,
    ExampleOutline,
    Experts,
    Floats,
    Mask,
    Prompt,
    Request,
    RewardCall,
    Rollout,
    StopReason,
    TokenIds,
)

__all__ = [
    "Batch",
    "Completion",
    "Example",
    "ExampleOutline",
    "Experts",
    "Floats",
    "Mask",
    "MicroBatch",
    "Prompt",
    "Request",
    "RewardCall",
    "Rollout",
    "StopReason",
    "TokenIds",
    "TokenOutputs",
]

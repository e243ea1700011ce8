"""Frozen records that every layer shares."""

from burnish.records.batches import Batch, MicroBatch, TokenOutputs, plan_on_device, to_device
from burnish.records.samples import (
    Completion,
    Example,
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
    "plan_on_device",
    "to_device",
]

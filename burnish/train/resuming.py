"""Read a run's state from a step's state.json, and fill the trained models once all of it fits."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from burnish.checkpoint.layout import MAIN
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manifest import ADAPTER_STATE
from burnish.checkpoint.steps import Committed
from burnish.engines.base import Part
from burnish.train.fingerprints import INPUTS, Inputs
from burnish.train.setup import Learner
from burnish.train.trainer_state import (
    CONFIG_DIGEST,
    WEIGHTS_VERSION,
    Position,
    position_of,
    require_same_adapter,
    weights_version,
)

_log = logging.getLogger(__name__)


def state_of(
    position: Position, main: Learner, inputs: Inputs, config_digest: str
) -> dict[str, Any]:
    """Return the content of state.json for a run at this position, whose own model is `main`."""
    adapter, critic = main.foundation.adapter, main.foundation.config.critic
    written = {} if adapter is None else {ADAPTER_STATE: adapter}
    return (
        asdict(position)
        | written
        | {
            INPUTS: inputs.as_state(),
            CONFIG_DIGEST: config_digest,
            WEIGHTS_VERSION: weights_version(position.step, critic.warmup_steps),
        }
    )


def take_up(
    step: Committed,
    source: CheckpointSource,
    learners: Mapping[str, Learner],
    inputs: Inputs,
    config_digest: str,
    *,
    may_be_fresh: bool,
) -> Position:
    """Fill the models, by role, from a step, and return its position. Collective.

    With `may_be_fresh` (`checkpoint.fresh_optimizer`) a model without optimizer state in the step begins with a fresh one. Raises before anything
    is filled if state, tokenizer, data, adapter or tensors do not fit.
    """
    main = learners[MAIN]
    position = position_of(step)
    require_same_adapter(step.state.get(ADAPTER_STATE), main.foundation.adapter, step.path)
    changed = inputs.changed_since(step.state.get(INPUTS), step.path)
    if step.state.get(CONFIG_DIGEST, config_digest) != config_digest:
        changed.append("the settings that decide the outcome, or which of them there are")
    if changed and main.engine.layout.is_main:
        _log.warning("since %s was saved there changed: %s", step.path, ", ".join(changed))
    sources = {role: source.of(role) for role in learners}
    counts = {role: position.counts(role) for role in learners}
    fresh = {r for r, theirs in sources.items() if may_be_fresh and not theirs.holds_training}
    for role, learner in learners.items():
        weights, training = (list(learner.engine.shards(p)) for p in (Part.WEIGHTS, Part.TRAINING))
        sources[role].require(weights, [] if role in fresh else training)
    for role, learner in learners.items():
        learner.engine.load(sources[role], Part.WEIGHTS)
        if role in fresh:
            _log.warning("%s has no optimizer state: a fresh one begins", step.path / role)
            continue
        learner.engine.load(sources[role], Part.TRAINING)
        learner.engine.steps, learner.engine.skipped_in_a_row = counts[role]
    return position

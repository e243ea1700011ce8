"""The trainer's state: how far a run is, its record in state.json, and how a run resumes from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError, with_config

from burnish.checkpoint.layout import MAIN
from burnish.checkpoint.load import CheckpointSource
from burnish.checkpoint.manifest import ADAPTER_STATE, IMPORTED, STATE
from burnish.checkpoint.steps import Committed
from burnish.engines.base import Engine, Part
from burnish.errors import IncompatibleError, table
from burnish.files.strict_json import clipped, shortened
from burnish.train.fingerprints import INPUTS, Inputs
from burnish.train.setup import Learner

CONFIG_DIGEST, WEIGHTS_VERSION = "config_digest", "weights_version"
"""Keys of state.json: the digest of the settings that decide the outcome (`burnish.config.resume`), and `weights_version`. Steps may lack them."""

Count = Annotated[int, Strict(), Field(ge=0)]
"""A number that only grows."""
Numbers = Mapping[str, Annotated[float, Strict()] | Annotated[str, Strict()]]
"""Numbers by name as JSON holds them: NaN and infinities are strings."""
Updates = Annotated[
    Mapping[Literal["optimizer_steps", "skipped_in_a_row"], Count], Field(min_length=2)
]
"""How many updates of a model were made, and how many were skipped since the last one."""

_log = logging.getLogger(__name__)


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is; all that resuming needs besides the tensors."""

    step: Count = 0
    """Steps finished."""
    cursor: Count | tuple[Count | Annotated[str, Strict()], ...] = 0
    """Samples taken from the data, over all epochs, and what else the loader must remember (`burnish.data.loader`)."""
    tokens: Count = 0
    optimizer_steps: Count = 0
    """Updates made; skipped ones not counted."""
    skipped_in_a_row: Count = 0
    """Updates skipped, for a gradient that was not finite, since the last one made."""
    measured: Numbers | None = None
    """Numbers of the validation after this step, by which the best steps are kept; None without a validation."""
    unlogged: Numbers | None = None
    """The last step's metrics as far as they are known; None once they are logged, which happens after the step's save."""
    unvalidated: Annotated[bool, Strict()] = False
    """Whether the last step's validation was interrupted and is still to be done."""
    measured_later: Mapping[str, Numbers] = field(default_factory=dict)
    """Numbers of earlier steps' validations, by step, that came after the step's save because a signal interrupted the step."""
    roles: Mapping[str, Updates] = field(default_factory=dict)
    """`optimizer_steps` and `skipped_in_a_row` of each trained model but the main one, by role."""
    kl_coef: Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)] | None = None
    """The weight of KL in the reward for the next step, where it adapts."""
    ahead: Count = 0
    """Batches drawn and not trained on (`burnish.train.ahead`)."""

    def counts(self, role: str) -> Updates:
        """Return the updates of a role's model. Raises `IncompatibleError` for an unknown role."""
        if role == MAIN:
            return {
                "optimizer_steps": self.optimizer_steps,
                "skipped_in_a_row": self.skipped_in_a_row,
            }
        if role not in self.roles:
            raise IncompatibleError(
                f"{STATE} says nothing of the {role}",
                have=", ".join(self.roles) or "no further model",
                want=f"how many updates of the {role} were made",
                do="resume with the version of Burnish that wrote it",
            )
        return self.roles[role]


_POSITION = TypeAdapter(Position)
# Fields that older checkpoints lack.
_WRITTEN_LATER = {"roles", "measured_later", "kl_coef", "ahead"}


def weights_version(steps: int, warmup_steps: int) -> int:
    """Return the last step in which the policy learned, after the critic's `warmup_steps`; or 0."""
    return steps if steps > warmup_steps else 0


def counts(engine: Engine) -> Updates:
    """Return a model's entry of `Position.roles`."""
    return {"optimizer_steps": engine.steps, "skipped_in_a_row": engine.skipped_in_a_row}


def state_of(
    position: Position, main: Learner, inputs: Inputs, config_digest: str
) -> dict[str, Any]:
    """Return the content of state.json at this position."""
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


def position_of(step: Committed) -> Position:
    """Return a step's position. Raises `IncompatibleError` for state that no trainer writes."""
    if IMPORTED in step.state:
        raise IncompatibleError(
            f"{step.path} was imported and has no training state to continue",
            have="weights alone",
            want="a step that training wrote",
            do=f"begin a run from it: model.path={step.path / 'model'}, and another name=NAME",
        )
    names = {field.name for field in fields(Position)}
    beside = {CONFIG_DIGEST, WEIGHTS_VERSION, INPUTS, ADAPTER_STATE}
    given = {name: value for name, value in step.state.items() if name not in beside}
    wrong = names - _WRITTEN_LATER - given.keys()
    wrong |= {CONFIG_DIGEST} if type(step.state.get(CONFIG_DIGEST, "")) is not str else set()
    version = step.state.get(WEIGHTS_VERSION, 0)
    wrong |= {WEIGHTS_VERSION} if type(version) is not int or version < 0 else set()
    position = Position()
    try:
        position = _POSITION.validate_python(given)
    except ValidationError as error:
        wrong |= {str((*e["loc"], "a name")[0]) for e in error.errors(include_url=False)}
    if wrong or position.step != step.step:
        shown = [f"{name} {shortened(step.state.get(name), 60)}" for name in sorted(wrong)]
        raise IncompatibleError(
            f"{step.path / STATE} was not written by this trainer",
            have=clipped(", ".join(shown) or f"step {position.step}"),
            want=", ".join(field.name for field in fields(Position)),
            do="resume with the version of Burnish that wrote it",
        )
    return position


def take_up(
    step: Committed,
    source: CheckpointSource,
    learners: Mapping[str, Learner],
    inputs: Inputs,
    config_digest: str,
    *,
    may_be_fresh: bool,
) -> Position:
    """Load the models, by role, from a step, and return its position. Collective.

    With `may_be_fresh` a model without optimizer state gets a fresh one. Raises, before loading anything, if state, tokenizer,
    data, adapter or tensors do not fit.
    """
    main = learners[MAIN]
    position = position_of(step)
    require_same_adapter(step.state.get(ADAPTER_STATE), main.foundation.adapter, step.path)
    changed = inputs.changed_since(step.state.get(INPUTS), step.path)
    if step.state.get(CONFIG_DIGEST, config_digest) != config_digest:
        changed.append("the settings that decide the outcome, or which of them there are")
    if changed and main.engine.layout.is_main:
        _log.warning("changed since %s was saved: %s", step.path, ", ".join(changed))
    sources = {role: source.of(role) for role in learners}
    made = {role: position.counts(role) for role in learners}
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
        learner.engine.steps = made[role]["optimizer_steps"]
        learner.engine.skipped_in_a_row = made[role]["skipped_in_a_row"]
    return position


def require_same_adapter(
    recorded: Mapping[str, Any] | None, wanted: Mapping[str, Any] | None, where: PurePath
) -> None:
    """Refuse a step with another adapter than the run's, or with one if the run has none.

    Raises `IncompatibleError`. The base model may have moved.
    """
    have, want = dict(recorded or {}), dict(wanted or {})
    keys = [key for key in {**want, **have} if key != "base" and have.get(key) != want.get(key)]
    if not keys:
        return
    shown = ["base", *keys] if "base_digest" in keys else keys
    rows = [("", "have", "want")]
    rows += [(key, str(have.get(key, "-")), str(want.get(key, "-"))) for key in shown]
    kinds = ["an adapter" if each else "a whole model" for each in (have, want)]
    held = "another adapter than" if have and want else "not what"
    raise IncompatibleError(
        "\n  ".join([f"{where} holds {held} this run trains", *table(rows)]),
        have=f"{kinds[0]} that differs in {', '.join(keys)}" if have and want else kinds[0],
        want=kinds[1],
        do="restore model.path and model.lora, or begin another run with name=NAME",
    )

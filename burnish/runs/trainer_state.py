"""The trainer's state: how far a run is, on which inputs, its record in state.json, and how a run resumes from it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import xxhash
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError, with_config
from transformers import PreTrainedTokenizerBase

from burnish.checkpoint.manifest import ADAPTER_STATE, IMPORTED, STATE
from burnish.checkpoint.steps import CommittedStep
from burnish.checkpoint.write_plan import MAIN
from burnish.config.algorithm import AlgorithmConfig
from burnish.config.schema import RewardFunctionConfig
from burnish.data.tasks import ItemSequence
from burnish.engines.base import Engine, Part
from burnish.errors import BurnishError, IncompatibleError, table
from burnish.extend import METHODS, REWARDS
from burnish.files.safetensors import model_digest
from burnish.files.strict_json import clipped, shortened
from burnish.functions import fingerprint
from burnish.runs.setup import Learner

if TYPE_CHECKING:
    from burnish.checkpoint.load import CheckpointSource

# Keys of state.json: the digest of the settings that decide the outcome (`burnish.config.resume`), and `weights_version`. Steps may
# lack these two. Then the fingerprints of the run's inputs.
_CONFIG_DIGEST = "config_digest"
_WEIGHTS_VERSION = "weights_version"
_INPUTS = "inputs"

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
class TrainerState:
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
    """Batches drawn and not trained on (`burnish.runs.pending_batches`)."""

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


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Digests of a run's inputs: data, tokenizer, model and formula by content, not by path."""

    vocabulary: str
    """Digest of every token with its id, and of the ids of bos, eos and pad."""
    tokenizer: str
    """Digest of the tokenizer's rules and chat template."""
    samples: int
    """Number of samples to train on; for streamed data, of bytes."""
    data: str
    """Digest of the samples' tokens and answers, in order; for streamed data, of the list of files."""
    formula: str = ""
    """Digest of the files of the functions that algorithm.advantage and algorithm.policy_loss name."""
    model: str = ""
    """Digest of the model that training started from; "" if its weights are not on this machine."""
    rewards: str = ""
    """Digest of the files of reward functions."""

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        data: ItemSequence[Any],
        model: str | None,
        algorithm: AlgorithmConfig | None = None,
        rewards: Iterable[RewardFunctionConfig] = (),
        *,
        method: str = "",
        functions: Sequence[str] = (),
    ) -> Fingerprints:
        """Fingerprint the inputs. `model` is a local directory, `method` the FILE.py:CLASS of a method of one's own.

        `functions` are those that the method's settings name.
        """
        special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
        vocabulary = [sorted(tokenizer.get_vocab().items()), special]
        rules = [_rules(tokenizer), tokenizer.chat_template]
        formula = "" if algorithm is None else _formula_digest(algorithm)
        if method:
            formula = _digest([formula, METHODS.fingerprint(method, "METHOD")])
        if functions:
            formula = _digest([formula, *(fingerprint(name, "method") for name in functions)])
        digests = _digest(vocabulary), _digest(rules), len(data), data.digest
        scores = [fingerprint(each.function, "reward.functions", REWARDS) for each in rewards]
        return cls(*digests, formula, _weights_digest(model), _digest(scores))

    def changed_since(self, recorded: Any, where: PurePath) -> list[str]:
        """Return the changed inputs that are allowed to change, worded for a warning.

        Raises `IncompatibleError` if vocabulary, formula or number of samples changed.
        """
        names = {field.name: type(getattr(self, field.name)) for field in fields(self)}
        if not isinstance(recorded, Mapping) or {k: type(v) for k, v in recorded.items()} != names:
            raise IncompatibleError(
                f"{where} does not say what it was trained on",
                want=f"the {_INPUTS} that this version of Burnish writes",
                do=f"begin another run with name=NAME model.path={where}/model",
            )
        before = Fingerprints(**recorded)
        if self.vocabulary != before.vocabulary:
            raise IncompatibleError(
                f"{where} was trained with another vocabulary",
                have="token ids that mean something else",
                want="the tokenizer that the run began with",
                do="restore model.tokenizer, or begin another run with name=NAME",
            )
        if self.samples != before.samples:
            raise IncompatibleError(
                f"{where} was trained on other data",
                have=f"{before.samples} samples, and a position among them (of streamed data, bytes)",
                want=f"{self.samples} samples, as data.train holds",
                do="restore data.train and the settings that leave samples out, or begin another run with name=NAME",
            )
        if self.formula != before.formula:
            raise IncompatibleError(
                f"{where} was trained with another formula",
                have="other content in the file of the method, or of a function of algorithm.advantage or algorithm.policy_loss",
                want="the file that the run began with",
                do="restore the file, or begin another run with name=NAME",
            )
        changed = []
        if self.tokenizer != before.tokenizer:
            changed.append("the tokenizer's rules or its chat template")
        if self.data != before.data:
            changed.append("the content of data.train")
        if self.model and before.model and self.model != before.model:
            changed.append("the model at model.path")
        if self.rewards != before.rewards:
            changed.append("the files of reward.functions")
        return changed


_STATE = TypeAdapter(TrainerState)
# Fields that older checkpoints lack.
_WRITTEN_LATER = {"roles", "measured_later", "kl_coef", "ahead"}


def weights_version(steps: int, warmup_steps: int) -> int:
    """Return the last step in which the policy learned, after the critic's `warmup_steps`; or 0."""
    return steps if steps > warmup_steps else 0


def counts(engine: Engine) -> Updates:
    """Return a model's entry of `TrainerState.roles`."""
    return {"optimizer_steps": engine.steps, "skipped_in_a_row": engine.skipped_in_a_row}


def state_json(
    state: TrainerState, learners: Mapping[str, Learner], fingerprints: Fingerprints, digest: str
) -> dict[str, Any]:
    """Return the content of state.json in this state; `digest` is that of the settings."""
    warmup = learners[MAIN].foundation.config.critic.warmup_steps
    adapters = {_adapter_key(role): each.foundation.adapter for role, each in learners.items()}
    written: dict[str, Any] = {_INPUTS: asdict(fingerprints), _CONFIG_DIGEST: digest}
    written[_WEIGHTS_VERSION] = weights_version(state.step, warmup)
    written |= {key: adapter for key, adapter in adapters.items() if adapter is not None}
    return asdict(state) | written


def _adapter_key(role: str) -> str:
    return PurePosixPath(role, ADAPTER_STATE).as_posix()


def read_state(step: CommittedStep) -> TrainerState:
    """Return a step's trainer state. Raises `IncompatibleError` for state that no trainer writes."""
    if IMPORTED in step.state:
        raise IncompatibleError(
            f"{step.path} was imported and has no training state to continue",
            have="weights alone",
            want="a step that training wrote",
            do=f"begin a run from it: model.path={step.path / 'model'}, and another name=NAME",
        )
    names = {field.name for field in fields(TrainerState)}
    beside = {_CONFIG_DIGEST, _WEIGHTS_VERSION, _INPUTS}
    beside |= {name for name in step.state if PurePath(name).name == ADAPTER_STATE}
    given = {name: value for name, value in step.state.items() if name not in beside}
    wrong = names - _WRITTEN_LATER - given.keys()
    wrong |= {_CONFIG_DIGEST} if type(step.state.get(_CONFIG_DIGEST, "")) is not str else set()
    version = step.state.get(_WEIGHTS_VERSION, 0)
    wrong |= {_WEIGHTS_VERSION} if type(version) is not int or version < 0 else set()
    state = TrainerState()
    try:
        state = _STATE.validate_python(given)
    except ValidationError as error:
        wrong |= {str((*e["loc"], "a name")[0]) for e in error.errors(include_url=False)}
    if wrong or state.step != step.step:
        shown = [f"{name} {shortened(step.state.get(name), 60)}" for name in sorted(wrong)]
        raise IncompatibleError(
            f"{step.path / STATE} was not written by this trainer",
            have=clipped(", ".join(shown) or f"step {state.step}"),
            want=", ".join(field.name for field in fields(TrainerState)),
            do="resume with the version of Burnish that wrote it",
        )
    return state


def restore(
    step: CommittedStep,
    source: CheckpointSource,
    learners: Mapping[str, Learner],
    fingerprints: Fingerprints,
    config_digest: str,
    *,
    may_be_fresh: bool,
) -> TrainerState:
    """Load the models, by role, from a step, and return its state. Collective.

    With `may_be_fresh` a model without optimizer state gets a fresh one. Raises, before loading anything, if state, tokenizer,
    data, adapter or tensors do not fit.
    """
    main = learners[MAIN]
    state = read_state(step)
    for role, learner in learners.items():
        recorded = step.state.get(_adapter_key(role))
        require_same_adapter(recorded, learner.foundation.adapter, step.path / role)
    changed = fingerprints.changed_since(step.state.get(_INPUTS), step.path)
    if step.state.get(_CONFIG_DIGEST, config_digest) != config_digest:
        changed.append("the settings that decide the outcome, or which of them there are")
    if changed and main.engine.layout.is_main:
        _log.warning("changed since %s was saved: %s", step.path, ", ".join(changed))
    sources = {role: source.of(role, each.foundation.names) for role, each in learners.items()}
    updates = {role: state.counts(role) for role in learners}
    fresh = {r for r, theirs in sources.items() if may_be_fresh and not theirs.holds_training}
    for role, learner in learners.items():
        weights, training = (list(learner.engine.shards(p)) for p in (Part.WEIGHTS, Part.TRAINING))
        composite = learner.foundation.composite
        rest = {} if composite is None else composite.rest
        sources[role].require(weights, [] if role in fresh else training, rest)
    for role, learner in learners.items():
        learner.engine.load(sources[role], Part.WEIGHTS)
        if role in fresh:
            _log.warning("%s has no optimizer state: a fresh one begins", step.path / role)
            continue
        learner.engine.load(sources[role], Part.TRAINING)
        learner.engine.steps = updates[role]["optimizer_steps"]
        learner.engine.skipped_in_a_row = updates[role]["skipped_in_a_row"]
    return state


def require_same_adapter(
    recorded: Mapping[str, Any] | None, wanted: Mapping[str, Any] | None, where: PurePath
) -> None:
    """Refuse a step with another adapter than the run's, or with one if the run has none.

    Raises `IncompatibleError`. The base model may have moved.
    """
    have = dict(recorded or {})
    want = dict(wanted or {})
    keys = [key for key in {**want, **have} if key != "base" and have.get(key) != want.get(key)]
    if not keys:
        return
    shown = ["base", *keys] if "base_digest" in keys else keys
    rows = [("", "have", "want")]
    rows += [(key, str(have.get(key, "-")), str(want.get(key, "-"))) for key in shown]
    kinds = ["an adapter" if each else "a whole model" for each in (have, want)]
    relation = "another adapter than" if have and want else "not what"
    raise IncompatibleError(
        "\n  ".join([f"{where} holds {relation} this run trains", *table(rows)]),
        have=f"{kinds[0]} that differs in {', '.join(keys)}" if have and want else kinds[0],
        want=kinds[1],
        do="restore model.path and model.lora (of a critic, critic.path and critic.lora_rank), or begin another run with name=NAME",
    )


def _formula_digest(algorithm: AlgorithmConfig) -> str:
    names = {
        "algorithm.advantage": algorithm.advantage.name,
        "algorithm.policy_loss": algorithm.policy_loss.name,
    }
    found = {s: fingerprint(name, s) for s, name in names.items() if ":" in name}
    return _digest(found) if found else ""


def _weights_digest(path: str | None) -> str:
    if path is None:
        return ""
    try:
        return model_digest(Path(path).expanduser())
    except (BurnishError, OSError):
        return ""


def _rules(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a fast tokenizer's rules, except padding and truncation, which calls change."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    rules = json.loads(backend.to_str())
    return {name: rule for name, rule in rules.items() if name not in ("padding", "truncation")}


def _digest(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())

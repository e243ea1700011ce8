"""Settings of the formula: `algorithm`, its advantages, policy losses and corrections.

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core.core_schema import CoreSchema

from burnish.config.section import FunctionName, Section

AdvantageName = Literal[
    "grpo",
    "dr_grpo",
    "grpo_batch_std",
    "rloo",
    "opo",
    "gpg",
    "pass_at_k",
    "turn_grpo",
    "gigpo",
    "gdpo",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gae",
]
"""The built-in advantages."""
PolicyLossName = Literal[
    "ppo", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"
]
"""The built-in policy losses."""
AggregationKind = Literal[
    "token_mean", "token_sum", "sequence_mean", "sequence_sum", "sequence_sum_fixed"
]
KLEstimator = Literal["k1", "k2", "k3"]


class DynamicSamplingConfig(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2)."""

    enabled: bool = False
    """Replace a group whose rewards are all equal by a group of another prompt."""
    part: str | None = None
    """Compare this part of the reward, by its name in the metrics `reward/parts/NAME`. Default: the whole reward, which can vary because a lesser function does."""
    max_refills: int = Field(4, ge=1)
    """Maximum number of further rounds of generation in one step. After them the step runs with the groups that it has."""


class OverlongConfig(Section):
    """DAPO's soft penalty for overlong completions (arXiv 2503.14476, equation 13)."""

    buffer: int = Field(0, ge=0)
    """Tokens before `rollout.max_response_length` over which the penalty grows linearly. 0: no penalty."""
    penalty: float = Field(1.0, ge=0)
    """Penalty at full length, subtracted from the reward."""


class KLConfig(Section):
    """Divergence from the frozen reference model, which is the one that training started from."""

    coef: float = Field(0.0, ge=0)
    """Weight of the term. 0: no reference model is kept."""
    estimator: KLEstimator = "k3"
    """Schulman's estimators (http://joschu.net/blog/kl-approx.html)."""
    place: Literal["loss", "reward"] = "loss"
    """loss: add it to the loss. reward: subtract it from the reward of each token."""
    target: float | None = Field(None, gt=0)
    """With place reward: adapt coef so that the mean KL per token stays near this (arXiv 1909.08593, section 2.2). Default: coef is fixed."""
    horizon: int = Field(10_000, ge=1)
    """With target: rollouts in which coef changes by its largest factor, about 1.2."""


Own = TypeVar("Own", bound=Section)


class PPOSettings(Section):
    """The own settings of the policy loss ppo."""

    dual_clip: float | None = Field(None, gt=1)
    """Bound of the ratio where the advantage is negative (arXiv 1912.09729). Default: none."""


class SAPOSettings(Section):
    """The own settings of the policy loss sapo."""

    temperature_pos: float = Field(1.0, gt=0)
    """How fast its gate closes where the advantage is positive."""
    temperature_neg: float = Field(1.05, gt=0)
    """How fast its gate closes where the advantage is negative."""


class CovarianceSettings(Section):
    """Which tokens clip_cov and kl_cov treat apart."""

    cov_ratio: float = Field(2e-4, gt=0, le=1)
    """Share of a mini-batch's tokens that are treated apart, chosen by the covariance of log-prob and advantage."""


class ClipCovSettings(CovarianceSettings, PPOSettings):
    """The own settings of the policy loss clip_cov."""

    cov_low: float = Field(1.0, ge=0)
    """Smallest covariance of a token that is left out."""
    cov_high: float = Field(5.0, gt=0)
    """Largest covariance of a token that is left out."""


class KLCovSettings(CovarianceSettings):
    """The own settings of the policy loss kl_cov."""

    cov_penalty: float = Field(1.0, ge=0)
    """Weight of |log ratio| at the tokens of largest covariance."""


class GAESettings(Section):
    """The own settings of the advantage gae."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later rewards, for each token."""
    lam: float = Field(1.0, ge=0, le=1)
    """λ of generalized advantage estimation (arXiv 1506.02438). 0 trusts the critic, 1 the rewards."""


class TurnGRPOSettings(Section):
    """The own settings of the advantage turn_grpo."""

    gamma: float = Field(1.0, ge=-1, le=1)
    """Discount of the rewards of later turns. -1 where the next turn is the other player's, who wins what this one loses."""


class GiGPOSettings(TurnGRPOSettings):
    """The own settings of the advantage gigpo."""

    weight: float = Field(1.0, ge=0)
    """Weight ω of the comparison of turns, beside that of whole conversations."""


class FormulaConfig(Section):
    """A formula's name and, beside it, the formula's own settings, with which the function is called.

    A name alone stands for a formula with its defaults. The settings of built-in formulas are checked here, and those of a user's
    function when it is imported.
    """

    model_config = ConfigDict(extra="allow")
    own_settings: ClassVar[Mapping[str, type[Section]]] = {}
    """The classes of settings of built-in formulas, by name; a built-in formula without one has no settings."""
    name: str
    """The formula's name."""

    @property
    def settings(self) -> dict[str, Any]:
        """The formula's own settings as plain values; of a user's function those that are set."""
        return dict(self.model_extra or {})

    def __str__(self) -> str:
        parts = [f"{key} {value}" for key, value in self.settings.items() if value is not None]
        return f"{self.name} ({', '.join(parts)})" if parts else self.name

    def settings_as(self, section: type[Own]) -> Own:
        """Return the formula's own settings as its class has them. Raises pydantic's `ValidationError`."""
        return section.model_validate(self.settings)

    @classmethod
    def formulas_with(cls, setting: str) -> list[str]:
        """Return the built-in formulas that have a setting."""
        return [name for name, own in cls.own_settings.items() if setting in own.model_fields]

    @model_validator(mode="before")
    @classmethod
    def _check_own_settings(cls, value: Any) -> Any:
        formula = {"name": value} if isinstance(value, str) else {} if value is None else value
        if not isinstance(formula, Mapping):
            return formula
        name = formula.get("name", cls.model_fields["name"].default)
        if not isinstance(name, str) or ":" in name:
            return formula
        own = {key: each for key, each in formula.items() if key != "name"}
        return {
            "name": name,
            **cls.own_settings.get(name, Section).model_validate(own).model_dump(),
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler, /
    ) -> JsonSchemaValue:
        """Describe a name alone, or a mapping with the settings of all built-in formulas."""
        schema = handler.resolve_ref_schema(handler(core))
        name = schema["properties"]["name"]
        for section in cls.own_settings.values():
            for key, field in section.model_json_schema()["properties"].items():
                text = field["description"]
                described = f"{', '.join(cls.formulas_with(key))}: {text[0].lower()}{text[1:]}"
                schema["properties"][key] = {**field, "description": described}
        alone = {
            key: value for key, value in name.items() if key in ("anyOf", "enum", "pattern", "type")
        }
        schema["anyOf"] = [alone, {"type": schema.pop("type")}]
        return schema


class AdvantageConfig(FormulaConfig):
    """How rewards become advantages: a name, or a mapping with the name and the formula's own settings."""

    own_settings = {"gae": GAESettings, "turn_grpo": TurnGRPOSettings, "gigpo": GiGPOSettings}
    name: AdvantageName | FunctionName = "grpo"
    """The built-in advantage, or your own function: file.py:function or module:function. gae: with the critic of PPO."""


class PolicyLossConfig(FormulaConfig):
    """The policy loss: a name, or a mapping with the name and the formula's own settings."""

    own_settings = {
        "ppo": PPOSettings,
        "sapo": SAPOSettings,
        "clip_cov": ClipCovSettings,
        "kl_cov": KLCovSettings,
    }
    name: PolicyLossName | FunctionName = "ppo"
    """The built-in policy loss, or your own function: file.py:function or module:function. gspo (arXiv 2507.18071) goes with aggregation sequence_mean, clip_low 3e-4 and clip_high 4e-4; cispo (arXiv 2506.13585) with token_mean and clip_low 1."""


FORMULAS: Mapping[str, type[FormulaConfig]] = {
    "algorithm.advantage": AdvantageConfig,
    "algorithm.policy_loss": PolicyLossConfig,
}
"""The settings for which a name alone may stand."""


class AlgorithmConfig(Section):
    """The formula: advantages, policy loss and corrections."""

    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """The policy loss."""
    clip_low: float = Field(0.2, ge=0)
    """Clip the ratio below 1 - clip_low. gmpo: clip the log-ratio below -clip_low. dppo: bound of the divergence where the advantage is negative."""
    clip_high: float = Field(0.2, ge=0)
    """Clip the ratio above 1 + clip_high. gmpo: clip the log-ratio above clip_high. dppo: bound of the divergence where the advantage is positive."""
    top_entropy: float | None = Field(None, gt=0, lt=1)
    """Train on this share of a mini-batch's tokens, those of highest entropy (arXiv 2506.01939 uses 0.2). Default: all tokens."""
    aggregation: AggregationKind = "token_mean"
    """token_mean: mean over all tokens. token_sum: sum over all tokens. sequence_mean: mean of each sequence's token mean. sequence_sum: mean of each sequence's token sum. sequence_sum_fixed: sum over tokens / max_response_length, mean over sequences (Dr. GRPO)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    old_logprobs: Literal["rollout", "recompute"] = "recompute"
    """Where the ratio's denominator comes from. recompute: a forward pass of the engine. rollout: the generator's raw log-probs."""
    mismatch_cap: float | None = Field(None, ge=1)
    """Truncated importance sampling (Yao et al. 2025): multiply each token's policy loss by the engine's probability before the update over the generator's, capped at this. Default: off."""
    mismatch_level: Literal["token", "sequence"] = "token"
    """With mismatch_cap: compare the probability of the token, or of the whole sequence."""
    mismatch_reject: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave tokens out of the policy loss if the engine's probability over the generator's is outside [mismatch_low, mismatch_high]. token: of each token (IcePop). sequence: of the whole sequence (MIS). geometric: the sequence's mean per token."""
    mismatch_low: float = Field(0.5, gt=0, le=1)
    """Lower bound of mismatch_reject."""
    mismatch_high: float = Field(5.0, ge=1)
    """Upper bound of mismatch_reject."""
    mask_truncated: bool = False
    """Do not train on completions that were cut at max_response_length. They still count in the advantages of their group."""
    router_replay: Literal["none", "recompute", "rollout"] = "none"
    """Mixtures of experts: which routing the update uses. none: that of the routers at that moment. recompute (R2, arXiv 2507.18071): that of the routers before the step's updates. rollout (R3, arXiv 2510.11370): the generator's."""
    kl: KLConfig = KLConfig()
    """Divergence from the reference model."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    """Replace groups without variance."""
    overlong: OverlongConfig = OverlongConfig()
    """Penalize overlong completions softly."""

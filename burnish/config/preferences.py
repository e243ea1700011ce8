"""Settings of the methods that learn from pairs of answers. They stand under `method` in a configuration."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from burnish.config.section import Section

SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"))
"""The usual columns of the scores of both answers."""


class PairSettings(Section):
    """Where pairs of answers stand."""

    chosen_column: str = "chosen"
    """The column of the answers that were preferred."""
    rejected_column: str = "rejected"
    """The column of the others."""
    completions_column: str = "completions"
    """The column of ranked lists: several answers to one prompt, beside a list of their scores or ranks. All pairs of them with different ones are trained on."""
    scores_column: str = "scores"
    """The column of a ranked list's scores. Higher is better."""
    ranks_column: str = "ranks"
    """The column of a ranked list's ranks, read without scores. 1 is best."""
    margin_column: str = "margin"
    """The column of the margin by which the chosen answer should win, read if rows have it (arXiv 2307.09288; as an offset of DPO, 2402.10571): sigmoid, hinge, robust and simpo, and burnish rm."""
    margin_per_score: float = Field(0.0, ge=0)
    """Take the margin from scores: this times by how much the chosen answer's is higher. Read are ranked lists, or score_chosen and score_rejected. 0: no."""
    label_column: str = "label"
    """The column that says of a single answer whether it is desirable: true or false, 1 or 0. Only kto reads it, beside a prompt and its completion."""

    @property
    def sides(self) -> tuple[str, str]:
        """The columns of the chosen and of the rejected answers."""
        return self.chosen_column, self.rejected_column

    @property
    def is_of_answers(self) -> bool:
        """Whether the loss is of single answers, not of pairs."""
        return False


class PairLossSettings(Section):
    """The loss of a pair of answers."""

    loss: dict[str, float] = {"sigmoid": 1.0}
    """Weights of the losses to add, by name: sigmoid (DPO), ipo, hinge, simpo, orpo, apo_zero, apo_down, robust, nll (the chosen answer's log-likelihood), or file.py:function. With burnish dpo, kto stands alone: it learns from single answers that are labelled as desirable or not, and takes pairs as two of them. A name alone counts 1."""
    beta: float = Field(0.1, gt=0)
    """How much a preference weighs against staying near the reference. SimPO's is 2 to 2.5."""
    length_normalized: bool = False
    """Divide each answer's log-ratio by its tokens, so that long answers weigh no more (arXiv 2405.14734). beta is 5 to 10 then."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """The share of pairs whose sides are taken to be mixed up: sigmoid and simpo (cDPO), robust."""
    simpo_gamma: float = Field(0.5, ge=0)
    """The margin that simpo wants."""

    @field_validator("loss", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {value: 1.0} if isinstance(value, str) else value


class OnlineSettings(PairLossSettings):
    """How a policy learns from pairs that it draws: `burnish online-dpo`."""

    reference: Literal["initial", "none"] = "initial"
    """The policy that the model stays near. initial: the model that training starts from; with a fresh adapter, the model without it. none: for losses that take none, such as simpo and orpo."""


class PreferenceSettings(PairLossSettings, PairSettings):
    """How a policy learns from pairs: `burnish dpo`."""

    desirable_weight: float = Field(1.0, gt=0)
    """The weight of desirable answers: kto. With many more of one kind, let weight times number be about equal, up to 1.33 times for the desirable ones."""
    undesirable_weight: float = Field(1.0, gt=0)
    """The weight of the others: kto."""
    reference: str = "initial"
    """The policy that the model stays near. initial: the model that training starts from; with a fresh adapter, the model without it. Or another model with the same vocabulary: a directory, a hub's id or a URL. none: for losses that take none, such as simpo and orpo. Its log-probs are computed once, before training."""

    @property
    def reference_path(self) -> str | None:
        """The place of a reference of one's own."""
        return None if self.reference in ("initial", "none") else self.reference

    @property
    def is_of_answers(self) -> bool:
        """See `PairSettings.is_of_answers`."""
        return "kto" in self.loss


class RewardSettings(PairSettings):
    """How a reward model learns from pairs: `burnish rm`."""

    center: float = Field(0.0, ge=0)
    """Weight of (r_chosen + r_rejected)², which keeps rewards around 0 (arXiv 2312.09244). 0.01 is usual."""
    step_separator: str | None = Field(None, min_length=1)
    """Learn a reward of each step of an answer, instead of pairs (arXiv 2305.20050): this text follows each step, and the reward is the value after it. A row has a prompt, a list of steps (`completions_column`) and a list of labels. The model is a token classifier then."""
    step_labels_column: str = "labels"
    """The column of the steps' labels: true or false, 1 or 0."""

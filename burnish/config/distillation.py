"""Settings of distillation: the teachers that a model learns from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from burnish.config.section import Section

START = "initial"
"""What stands for the model that training starts from, in place of a teacher's path."""


class TeacherConfig(Section):
    """One frozen model to learn from."""

    path: str
    """A directory, a hub's id or a URL of a language model with the student's vocabulary. initial: the model that training starts from; with a fresh adapter, the model without it."""
    url: str | None = Field(None, pattern=r"^https?://[!-~]+$")
    """RL, with tokens sampled: an endpoint that scores in place of weights here, such as http://localhost:8000/v1 of vLLM. `path` is its name for the model. Its key is the environment variable OPENAI_API_KEY, if that is set."""
    source: str | None = None
    """Teach the rows with this value in the column `data_source`. Default: all rows whose source no other teacher names."""
    prompt_column: str | None = None
    """RL: the column of the prompt that the teacher reads in place of the student's, such as one with a demonstration. It is text or messages, as `data.prompt_column`. A row whose prompt is too long for the teacher has none. Default: the student's prompt."""

    @property
    def is_start(self) -> bool:
        """Whether it is the model that training starts from."""
        return self.path == START and self.url is None

    def __str__(self) -> str:
        at = "" if self.url is None else f" at {self.url}"
        return self.path + at + (f" on {self.prompt_column}" if self.prompt_column else "")


class DistillConfig(Section):
    """Distillation: the student learns the distributions of frozen teachers."""

    teachers: list[TeacherConfig] = []
    """The teachers. Each row has one. Default: none, and no distillation."""
    tokens: Literal["sampled", "topk", "all"] = "sampled"
    """Which tokens of the vocabulary are compared at each place. sampled: the one that the student drew, only in RL; each token's advantage becomes A - weight · (log π - log π_teacher), whose gradient is that of the reverse KL. topk: the teacher's `k` most probable ones, and all others together. all: the whole vocabulary."""
    k: int = Field(64, ge=1)
    """With tokens topk: how many."""
    mix: float = Field(1.0, ge=0, le=1)
    """With tokens topk and all: β of the generalized Jensen-Shannon divergence (GKD, arXiv 2306.13649). 0: the forward KL, which covers all that the teacher does. 1: the reverse KL, which seeks what it does most."""
    weight: float = Field(1.0, gt=0)
    """RL: weight of the teacher beside the rewards. SFT: share of the divergence in the loss, at most 1; the rest is the negative log-likelihood."""

    def __str__(self) -> str:
        kinds = {"sampled": "sampled tokens", "topk": f"top {self.k} tokens", "all": "all tokens"}
        mix = "" if self.tokens == "sampled" else f", mix {self.mix:g}"
        names = ", ".join(map(str, self.teachers))
        return f"{names}, {kinds[self.tokens]}{mix}, weight {self.weight:g}"

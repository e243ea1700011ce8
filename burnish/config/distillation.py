"""Settings of distillation: the teachers that a model learns from."""

from __future__ import annotations

from pydantic import Field

from burnish.config.section import Section

START = "initial"
"""What stands for the model that training starts from, in place of a teacher's path."""


class TeacherConfig(Section):
    """One frozen model to learn from."""

    path: str
    """A directory, a hub's id or a URL of a language model with the student's vocabulary. initial: the model that training starts from; with a fresh adapter, the model without it."""
    source: str | None = None
    """Teach the rows with this value in the column `data_source`. Default: all rows whose source no other teacher names."""


class DistillConfig(Section):
    """Distillation: the student learns the distributions of frozen teachers."""

    teachers: list[TeacherConfig] = []
    """The teachers. Each row has one. Default: none, and no distillation."""
    weight: float = Field(1.0, gt=0)
    """Weight of the teacher beside the rewards' advantages: each token's advantage becomes A - weight · (log π - log π_teacher), whose gradient is that of the reverse KL on the student's own completions (arXiv 2306.13649). Without rewards it is all."""

    @property
    def paths(self) -> list[str]:
        """Where teachers lie that are not the trained model itself."""
        return [each.path for each in self.teachers if each.path != START]

    def __str__(self) -> str:
        return f"{', '.join(each.path for each in self.teachers)}, weight {self.weight:g}"

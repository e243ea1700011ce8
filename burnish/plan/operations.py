"""Floating-point operations that one device computes in each phase of a step.

Those of the model (`burnish.models.flops`), and what is computed beside them: layers that the backward pass runs
again, and the pass that counts where tokens go in mixtures that are evened out. Left out: how long they take
(`burnish.plan.timing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from burnish.config.schema import EngineConfig
from burnish.models.flops import Passed
from burnish.plan.shape import PlannedModel
from burnish.plan.share import PlannedLayout
from burnish.plan.workload import Workload

_RECOMPUTED = {"none": 0.0, "selective": 0.1, "full": 1.0}
"""Forward passes that are run again."""


class Operations:
    """What a step computes of a model, and of those that judge its completions; a critic counts as the policy's model."""

    def __init__(
        self,
        shape: PlannedModel,
        work: Workload,
        adapter: bool,
        judges: Sequence[PlannedModel] = (),
    ) -> None:
        """`adapter`: whether one is trained in the model's place, which spares the products that are the gradients of matrices."""
        self._shape, self._work, self._adapter, self._judges = shape, work, adapter, judges

    def phases(self, layout: PlannedLayout, engine: EngineConfig) -> dict[str, float]:
        """Of the device with most sequences, by phase; publishing and saving compute nothing."""
        found, forward = dict[str, float](), self.forward(layout)
        if self._work.slots:
            found["rollout"] = self._generating(layout) + self.judging(layout)
        if self._work.scores:
            found["log-probs"] = self.scorings * forward
        critic = self.passes(engine, critic=True) if self._work.critic else 0.0
        found["update"] = self._work.epochs * (self.passes(engine) + critic) * forward
        return found

    @property
    def scorings(self) -> int:
        """Forward passes between generating and learning."""
        return self._work.scorings + int(self._work.critic)

    def forward(self, layout: PlannedLayout) -> float:
        """Of one forward pass over its sequences."""
        return self._share(layout) * self._sequence

    def judging(self, layout: PlannedLayout) -> float:
        """Of the passes of reward models over its sequences."""
        return self._share(layout) * self._judged

    def passes(self, engine: EngineConfig, *, critic: bool = False) -> float:
        """What learning from its sequences costs, in forward passes."""
        learning = self._adapted if self._adapter and not critic else 3.0
        return learning + self.again(engine) + self.counting(engine, critic=critic)

    def again(self, engine: EngineConfig) -> float:
        """Forward passes that the backward pass runs again."""
        return _RECOMPUTED[engine.activation_checkpointing]

    def counting(self, engine: EngineConfig, *, critic: bool = False) -> int:
        """Forward passes that count what experts get, where they are evened out and that is not known."""
        known = self._work.replayed and not critic
        return int(engine.router_aux_loss > 0 and not known)

    def _share(self, layout: PlannedLayout) -> float:
        """Sequences of a device, as parts of those that several share."""
        sharing = layout.sequence * layout.tensor * layout.pipeline
        return -(-self._work.sequences // (layout.world // sharing)) / sharing

    def _generating(self, layout: PlannedLayout) -> float:
        """Of completions, and of prompts once for all their samples."""
        mine = -(-self._work.sequences // layout.world)
        prompts = -(-mine // self._work.samples)
        return mine * (self._sequence - self._prompt) + prompts * self._prompt

    @cached_property
    def _sequence(self) -> float:
        return self._shape.flops.forward([self._work.length])

    @cached_property
    def _prompt(self) -> float:
        return self._shape.flops.forward([self._work.prompt])

    @cached_property
    def _judged(self) -> float:
        return sum(judge.flops.forward([self._work.length]) for judge in self._judges)

    @cached_property
    def _adapted(self) -> float:
        """Forward passes that an adapter's update costs."""
        all_of_one = Passed.all_of([self._work.length])
        return self._shape.flops.training(all_of_one, frozen=True) / self._sequence

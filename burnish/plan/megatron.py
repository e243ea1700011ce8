"""Bytes that one process of the Megatron engine needs in each phase of a step, in closed form.

As `burnish.plan.memory`, which says what is the same for both engines: generating, publishing, saving. Each stage of
a pipeline has its own needs, for the first has the embedding and most micro-batches in flight, the last the output layer;
what is planned for is the fullest. Gradients are added up in a buffer of all parameters, in fp32, that is
always there; the optimizer's fp32 weights and moments are divided among data-parallel processes. A critic and reward
models are cut as the policy is. Left out: how unevenly tokens fall on experts, and buffers of the communication library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from burnish.config.schema import RunConfig
from burnish.plan.megatron_layer import LayerCut
from burnish.plan.megatron_model import MegatronModel, PerToken
from burnish.plan.memory import Needs, Parts
from burnish.plan.model import Model
from burnish.plan.pipelines import Stage
from burnish.plan.share import PlannedLayout
from burnish.plan.slots import WAVE
from burnish.plan.workload import Workload

_FP32 = 4
_MOMENTS = 2


class MegatronNeeds:
    """What the fullest process of a run needs, of a model, at a layout."""

    def __init__(
        self,
        model: MegatronModel,
        config: RunConfig,
        work: Workload,
        layout: PlannedLayout,
        judges: Sequence[MegatronModel] = (),
    ) -> None:
        """`judges` are the models of `reward.models`."""
        beside = [judge.shape.pipelines for judge in judges]
        fullest = model.shape.pipelines.fullest(
            layout.pipeline, config.engine.virtual_stages, beside
        )
        cut, self._cpu = LayerCut.of(config.engine), model.cpu
        self._stages = [
            _StageNeeds(model, config, work, layout, cut, stage, judges) for stage in fullest
        ]

    def phases(self, checkpointing: str) -> dict[str, Parts]:
        """The parts of the fullest moment of each phase on the stage that needs most in it."""
        update = self._fullest([stage.update(checkpointing) for stage in self._stages])
        return self._before | {"update": update} | self._after

    @cached_property
    def _before(self) -> dict[str, Parts]:
        return self._by_phase([stage.before for stage in self._stages])

    @cached_property
    def _after(self) -> dict[str, Parts]:
        return self._by_phase([stage.after for stage in self._stages])

    def _by_phase(self, phases: Sequence[dict[str, Parts]]) -> dict[str, Parts]:
        """Of the same phases on each stage."""
        return {name: self._fullest([each[name] for each in phases]) for name in phases[0]}

    def _fullest(self, parts: Sequence[Parts]) -> Parts:
        """Of one phase on each stage; between processes on CPUs with what is on the host."""
        if any(self._hosts):
            parts = [own | {"host": host} for own, host in zip(parts, self._hosts, strict=True)]
        return max(parts, key=_total)

    @cached_property
    def _hosts(self) -> list[float]:
        """Bytes of each stage that are away from its device, where that is no other memory; no activations, whatever the kind of checkpointing."""
        return [_total(stage.away("none")) if self._cpu else 0.0 for stage in self._stages]

    def host(self, checkpointing: str) -> Parts:
        """Bytes of host memory beside a device, of the stage that needs most; the same for all kinds, as no activations leave the device."""
        return self._host

    @cached_property
    def _host(self) -> Parts:
        return max((stage.host("none") for stage in self._stages), key=_total)

    @property
    def microbatches(self) -> int:
        """Micro-batches of an optimizer step."""
        return self._stages[0].microbatches


class _StageNeeds(Needs):
    """What one process of a pipeline stage needs."""

    _model: MegatronModel

    def __init__(
        self,
        model: MegatronModel,
        config: RunConfig,
        work: Workload,
        layout: PlannedLayout,
        cut: LayerCut,
        stage: Stage,
        judges: Sequence[MegatronModel] = (),
    ) -> None:
        self._stage, self._cut = stage, cut
        self._holding, self._ranks = model.holding(stage), cut.expert_parallel * cut.expert_tensor
        experts, others = self._holding.experts / self._ranks, self._holding.others
        self._held = experts + others
        """Elements of this process's parameters."""
        alike = layout.world / layout.pipeline / self._ranks
        self._stepped = experts / alike + others / layout.shards
        """Those that its optimizer steps: a part of what several processes have alike."""
        self._is_first, self._is_last = stage.number == 0, stage.number == layout.pipeline - 1
        super().__init__(model, config, work, layout, judges)

    def _companion(self, model: Model) -> Needs:
        """On the stage with this one's number."""
        assert isinstance(model, MegatronModel)
        stages = model.shape.pipelines.stages(
            self._layout.pipeline, self._config.engine.virtual_stages
        )
        stage = stages[self._stage.number]
        return _StageNeeds(model, self._config, self._work.alone, self._layout, self._cut, stage)

    def staging(self) -> float:
        """Bytes of host memory that a save in the background copies: fp32 weights and moments."""
        critic = self._critic.staging() if self._critic else 0.0
        own = _FP32 * self._stepped + self._moments
        return own * int(self._config.checkpoint.background) + critic

    @cached_property
    def _state(self) -> Parts:
        """Weights in the dtype of computing, the buffer of gradients, fp32 weights where that is another, moments that do not rest on the host."""
        held = self._held
        exact = 0 if self._model.bytes == _FP32 else 1
        return {
            "weights": self._model.bytes * held,
            "gradients": _FP32 * held,
            "optimizer": _FP32 * exact * self._stepped + self._moments - self._slots_away,
        }

    @property
    def _moments(self) -> float:
        """Bytes of the optimizer's moments between steps."""
        return self._slots.width * _MOMENTS * self._stepped

    @property
    def _slots_away(self) -> float:
        return self._moments if self._slots.offloaded else 0.0

    @property
    def _reference(self) -> float:
        """Bytes of the reference's weights, in the dtype of computing."""
        return self._frozen if self._work.reference else 0.0

    @property
    def _frozen(self) -> float:
        return self._model.bytes * self._held

    @property
    def _left(self) -> float:
        return 0.0

    @property
    def _buffer(self) -> float:
        """Bytes of the buffer that tokens of all tensor ranks are gathered into, which stays."""
        return self.tokens * self._model.hidden if self._cut.scattered else 0.0

    def _per_token(self, checkpointing: str) -> PerToken:
        """What layers hold of a token."""
        return self._model.per_token(self._cut, checkpointing)

    def _scoring(self) -> Parts:
        """A forward pass of which nothing is kept; the critic's where no other is made."""
        if self._critic and not self._work.scorings:
            return self._critic._scoring()
        held, scored = self._per_token("none"), self._scored * self._model.hidden
        return {
            "gathered": self._buffer,
            "activations": self.tokens * (held.inference + held.hidden) + scored,
            "logits": self._logits.forward if self._is_last else 0.0,
        }

    def _updates(self, checkpointing: str) -> Iterator[Parts]:
        """The moments of the policy's update, and of the critic's, each beside the other's buffer of gradients."""
        yield from self._update(checkpointing)
        if self._critic:
            own, critics = self._state["gradients"], self._critic._state["gradients"]
            for parts in self._critic._update(checkpointing):
                yield parts | {"gradients": parts["gradients"] - critics + own}

    def _update(self, checkpointing: str) -> Iterator[Parts]:
        """The moments of forward, backward and optimizer step that can be the fullest."""
        model, held, tokens = self._model, self._per_token(checkpointing), self.tokens
        waiting = model.waiting(held, self._stage, self.microbatches)
        tied = self._logits.gradient if model.shape.tied and self._layout.pipeline == 1 else 0.0
        if self._is_last:
            last = (tokens + 4 * self._scored) * model.hidden
            yield self._at(tokens * waiting + last, 0.0, self._logits_most)
        for kind in self._stage.counts:
            inner = waiting - held.kept[kind] + held.peaks[kind]
            yield self._at(tokens * inner, tied + model.bytes * self._made_at_once(kind))
        if self._is_first:
            again = waiting - held.of(self._stage.chunks[0]) + 2 * held.hidden
            yield self._at(tokens * again, tied + model.bytes * model.table)
        yield self._at(0.0, 0.0) | {"optimizer step": self._stepping}

    def _at(self, activations: float, gradients: float, logits: float = 0.0) -> Parts:
        """A moment; `gradients` are bytes of those that are not in the buffer yet."""
        return {
            "gradients": self._state["gradients"] + gradients,
            "gathered": self._buffer,
            "activations": activations,
            "logits": logits,
        }

    @cached_property
    def _stepping(self) -> float:
        """Bytes of temporaries of torch's AdamW: of one weight on CPUs, of all that are stepped together elsewhere; and moments that come from where they rest."""
        widest = max(self._holding.widest, self._holding.widest_of_experts / self._ranks)
        alone = min(widest, self._stepped)
        fp32 = _FP32 * _MOMENTS * self._stepped if self._slots.rests else 0.0
        wave = min(fp32, max(WAVE, _FP32 * _MOMENTS * alone))
        if self._model.cpu:
            return wave + 2.0 * _FP32 * alone
        return wave + (wave / _MOMENTS if wave else _FP32 * self._stepped)

    def _largest(self, kind: int) -> float:
        """Elements of this process's largest parameter in a layer, of which the experts' matrices are one."""
        return max(self._model.widest[kind], self._model.widest_of_experts[kind] / self._ranks)

    def _made_at_once(self, kind: int) -> float:
        """Elements of the largest gradient of a layer before it is added to the buffer: of experts on CPUs each one's by itself (`burnish.engines.megatron.experts`)."""
        if not self._model.cpu:
            return self._largest(kind)
        experts, ranks = self._model.kinds[kind].experts or 1, self._cut.expert_tensor
        of_one = self._model.widest_of_experts[kind] / experts / ranks
        return max(self._model.widest[kind], of_one)

    def _publishing(self) -> Parts:
        others = 1 - 1 / (self._layout.tensor * self._layout.pipeline * self._cut.expert_parallel)
        return self._sent(self._model.bytes * self._model.shape.elements * others)


def _total(parts: Parts) -> float:
    return sum(parts.values())

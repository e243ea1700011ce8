"""Bytes that one process needs in each phase of a step, in closed form.

A phase has a few moments, each a sum of named parts; its need is the moment that needs most. What is held,
and when, follows the engine (`burnish.engines.torch.torch_engine` on FSDP2), the generator (`burnish.rollout`) and the
checkpoints; `bench.planning` compares it with what runs measure. What leaves the device lies on the host, for which
there is a figure too; between processes on CPUs both are one memory, and every phase has it as its part `host`.
Prompts that several samples share are counted in full. Left out: the interpreter and its libraries, and what an
accelerator's driver takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from burnish.config.schema import RunConfig
from burnish.plan.generator_cache import cache_bytes
from burnish.plan.logits import Logits
from burnish.plan.model import Model
from burnish.plan.saving import buffers
from burnish.plan.shape import Layer
from burnish.plan.share import PlannedLayout, Share
from burnish.plan.slots import Slots
from burnish.plan.tape import Moment
from burnish.plan.workload import Workload

Parts = dict[str, float]
"""Bytes by what they are for."""

_MIB = 1 << 20
_FP32 = 4
_BF16 = 2
_WAVE = 64 * _MIB
"""Publishing sends at most so much at one time, and receives as much."""
_MERGED = 1 << 20
"""Elements of a weight that an adapter is merged into at one time."""
_PREFILL_TOKENS = 8192
"""Prompts that the generator reads at one time."""


class Needs:
    """What one process of a run needs, of a model, at a layout."""

    def __init__(
        self,
        model: Model,
        config: RunConfig,
        work: Workload,
        layout: PlannedLayout,
        judges: Sequence[Model] = (),
    ) -> None:
        """`judges` are the models of `reward.models`."""
        self._model, self._config, self._work, self._layout = model, config, work, layout
        engine, budget = config.engine, config.batch.tokens_per_device
        whole = -(-work.length // layout.sequence)
        share = -(-work.tokens // (work.updates * layout.token_ranks))
        self.tokens = min(budget, max(whole, share))
        """Of the fullest micro-batch on one process."""
        self.microbatches = max(1, -(-work.tokens // (budget * layout.token_ranks * work.updates)))
        """Of an optimizer step."""
        self._regathers = engine.reshard_after_forward and layout.shards > 1
        self._reduces_each = engine.reduce_each_microbatch and layout.shards > 1
        self._copies = int(model.cpu and layout.shards > 1)  # gloo has a collective's tensors twice
        self._trained = model.lora is None
        self._share = Share(model.shape, layout, model.lora)
        self._slots = Slots(self._share, config, model.lora)
        self._critic = self._companion(model.critic) if work.critic else None
        self._judges = [self._companion(judge) for judge in judges]

    def _companion(self, model: Model) -> Needs:
        """The needs of another model on the same process: of a critic, of one that judges."""
        return Needs(model, self._config, self._work.alone, self._layout)

    def phases(self, checkpointing: str) -> dict[str, Parts]:
        """The parts of the fullest moment of each phase, in the order of a step, with a kind of activation checkpointing."""
        found = self.before | {"update": self.update(checkpointing)} | self.after
        if self._model.cpu and (host := _total(self.away(checkpointing))):
            found = {phase: parts | {"host": host} for phase, parts in found.items()}
        return found

    @cached_property
    def before(self) -> dict[str, Parts]:
        """Phases before the update."""
        found = dict[str, Parts]()
        if self._work.slots:
            found["rollout"] = self._generating | max(self._rollouts(), key=_total)
        if self._work.scores:
            found["log-probs"] = self._resting | self._scoring()
        return found

    def update(self, checkpointing: str) -> Parts:
        """The update."""
        return self._resting | max(self._updates(checkpointing), key=_total)

    @cached_property
    def after(self) -> dict[str, Parts]:
        """Phases after the update."""
        found = {"publish": self._resting | self._publishing()} if self._work.slots else {}
        return found | {"save": self._resting | self._saving()}

    def host(self, checkpointing: str) -> Parts:
        """Bytes of host memory beside a device: what is away from it when that is most, and what a save in the background copies."""
        staging = self.staging()
        return self.away(checkpointing) | ({"saving": staging} if staging else {})

    def staging(self) -> float:
        """Bytes of host memory that a save in the background copies the state to."""
        if not self._config.checkpoint.background:
            return 0.0
        critic = self._critic.staging() if self._critic else 0.0
        return _FP32 * self._slots.held + self._slots.bytes + critic

    def away(self, checkpointing: str) -> Parts:
        """What is in `burnish.distributed.host_memory`, which keeps the memory that it once took."""
        engine, critic = self._config.engine, self._critic
        parts: Parts = {}
        parts["optimizer"] = self._slots_away + (critic._slots_away if critic else 0.0)
        in_turn: Parts = {}
        if engine.activation_offload:
            in_turn["activations"] = max(
                each._waiting(checkpointing) for each in (self, critic) if each
            )
        if engine.park and self._work.slots:
            in_turn["parked"] = self._parked
        if in_turn:
            largest = max(in_turn, key=in_turn.__getitem__)
            parts[largest] = in_turn[largest]
        return {name: size for name, size in parts.items() if size}

    @property
    def _slots_away(self) -> float:
        """Bytes of the optimizer's state that rest on the host."""
        return self._slots.bytes if self._slots.offloaded else 0.0

    def _waiting(self, checkpointing: str) -> float:
        """Bytes that layers keep for the backward pass, but for the last of them, which keeps its own on the device."""
        kept = self._kept(checkpointing)
        return self._all(kept) - min(kept)

    @property
    def _parked(self) -> float:
        """Bytes that leave the device while completions are generated."""
        return _total(self._state) + self._reference + self._resting.get("critic", 0.0)

    @property
    def _reference(self) -> float:
        """Bytes of the weights of a reference, in the dtype of computing; it is the policy itself where a fresh adapter is trained."""
        lora = self._model.lora
        if not self._work.reference or (lora is not None and lora.path is None):
            return 0.0
        adapter = 0 if lora is None else _FP32 * self._slots.held
        return float(self._model.bytes * self._share.all + adapter)

    @cached_property
    def _state(self) -> Parts:
        """Weights, and the optimizer where it is not on the host: always there, or parked."""
        frozen = 0 if self._trained else self._model.bytes * self._share.all
        parts = {"weights": _FP32 * float(self._slots.held) + frozen}
        return parts if self._slots.offloaded else parts | {"optimizer": self._slots.bytes}

    @cached_property
    def _resting(self) -> Parts:
        """What is there between phases: the state, a frozen reference, a critic, the generator's weights, reward models."""
        parts = dict(self._state)
        if reference := self._reference:
            parts["reference"] = reference + self._left
        if self._critic:
            parts["critic"] = _total(self._critic._state)
        if self._work.slots:
            held = self._model.shape.elements + self._ordered + self._adapter_beside
            parts["generator"] = float(self._model.bytes * held)
        if self._judges:
            parts["reward models"] = sum(judge._frozen for judge in self._judges)
        return parts

    @property
    def _frozen(self) -> float:
        """Bytes of a model that is only asked."""
        return self._model.bytes * self._share.all + self._left

    @property
    def _left(self) -> float:
        """Bytes that a forward pass leaves gathered."""
        left = self._share.root if self._regathers else self._share.gathered
        return float(self._model.bytes * left)

    @property
    def _generating(self) -> Parts:
        """What is there while completions are generated and judged."""
        if not self._config.engine.park:
            return self._resting
        staying = ("generator", "reward models")
        return {name: size for name, size in self._resting.items() if name in staying}

    def _rollouts(self) -> Iterator[Parts]:
        """Generating, then what each reward model needs, whose root is there already."""
        yield self._generation()
        for judge in self._judges:
            parts = judge._scoring()
            yield parts | {"gathered": parts["gathered"] - judge._left}

    @property
    def _ordered(self) -> int:
        """Elements of the matrices that a generator on a CPU holds a second time in bf16 (`burnish.rollout.builtin.forward`)."""
        shape, cpu = self._model.shape, self._model.cpu and self._model.bytes == _BF16
        if not cpu or not shape.family.has_llama_layers or shape.family.has_router:
            return 0
        layers = sum(w.elements * n for layer, n in shape.layers for w in layer.weights if w.linear)
        return layers + shape.vocabulary * shape.hidden

    def _generation(self) -> Parts:
        """Keys, values and logits while all slots are at their longest."""
        model, work = self._model, self._work
        mine = -(-work.sequences // self._layout.world)
        slots, token = min(work.slots, mine), model.cache_per_token
        prompts = -(-mine // work.samples) * work.prompt
        read = min(_PREFILL_TOKENS, prompts)
        reading = read * (token + model.inference)
        reading += min(read, prompts - read) * token  # those read before, not all of them started
        wide = 3 * _FP32 + (0 if not work.nucleus else 2 * _FP32 if model.cpu else 4 * _FP32)
        drawing = slots * model.shape.vocabulary * wide
        return {
            "kv cache": cache_bytes(model, work, slots, mine),
            "activations": reading,
            "logits": float(drawing),
        }

    def _scoring(self) -> Parts:
        """The fullest moment of a forward pass of which nothing is kept; the critic's comes first and leaves its root gathered."""
        if self._critic and not self._work.scorings:
            return self._critic._scoring()
        return max(self._scorings(), key=_total)

    def _scorings(self) -> Iterator[Parts]:
        """A layer runs, then the output layer; or parameters are gathered, and nothing is computed."""
        model, width, state = self._model, self._model.bytes, self.tokens * self._model.hidden
        root = self._share.root + (self._critic._share.root if self._critic else 0)
        gathered = float(width * (root + self._layers_there))
        yield {"gathered": gathered, "activations": self.tokens * model.inference + state}
        chosen = self._scored * model.hidden
        logits = self._logits.forward
        yield {"gathered": gathered, "activations": state + chosen, "logits": logits}
        for beside in self._gatherings():
            yield {"gathered": float(width * (root + beside)), "activations": state}

    def _gatherings(self) -> Iterator[int]:
        """Elements beside the root's while parameters are gathered: what came is there until the next has come, and is copied out."""
        if self._layout.shards == 1:
            return
        layer = self._share.largest_gathered
        yield self._share.root + (1 + self._copies) * layer  # as the first layer comes
        yield self._layers_there + self._copies * layer

    def _updates(self, checkpointing: str) -> Iterator[Parts]:
        """The moments of the policy's update, and of the critic's, during which the policy's root is left as the scoring left it."""
        yield from self._update(checkpointing)
        if self._critic:
            left = float(self._model.bytes * self._share.root) if self._work.scorings else 0.0
            for parts in self._critic._update(checkpointing):
                yield parts | {"gathered": parts["gathered"] + left}

    def _update(self, checkpointing: str) -> Iterator[Parts]:
        """The moments of forward, backward and optimizer step that can be the fullest."""
        kept = self._kept(checkpointing)
        share, earlier = self._share, self._earlier
        for beside in self._gatherings():
            yield self._moment(gathered=share.root + beside, gradients=earlier)
        last = self.tokens * self._model.hidden + 4 * self._scored * self._model.hidden
        yield self._moment(
            gathered=share.root + self._layers_left,
            activations=self._ended(kept) + last,
            logits=self._logits_most,
            gradients=earlier,
        )
        for (layer, _, passes), own in zip(self._model.layers, kept, strict=True):
            others_keep = self._beside(own, kept)
            for moment in passes.backward:
                yield from self._backward(layer, moment, earlier, others_keep, min(kept))
        waiting = earlier if self._reduces_each else 0.0
        others = max(self._others, waiting)
        yield from self._reducing_root(max(_FP32 * share.trained_layers, waiting))
        yield self._moment(
            gathered=share.root,
            gradients=self._logits.gradient + others,
            reducing=share.largest_trained,
        )
        reduced = _FP32 * float(share.trained_all)
        yield self._moment(gathered=0, gradients=reduced + _FP32 * share.largest_weight)
        for parts in self._slots.steps():
            yield self._moment(gathered=0, gradients=reduced) | parts

    def _reducing_root(self, layers: float) -> Iterator[Parts]:
        """The end of the backward pass, beside so many bytes of the layers' gradients: what is sent is filled, then sent."""
        root, kept = self._share.trained_root, 0.0
        if self._layout.shards > 1:
            whole = (_FP32 + self._model.bytes) * root
            yield self._moment(gathered=0, gradients=layers + whole)
            # FSDP2 has the last gradient of a group until the group is reduced.
            kept = 0.0 if self._share.shape.tied else self._logits.gradient
        yield self._moment(gathered=0, gradients=layers + kept, reducing=root)

    def _backward(
        self, layer: Layer, moment: Moment, earlier: float, beside: float, least: float
    ) -> Iterator[Parts]:
        """A layer's moment where it runs backward first, last, and second or last but one; `earlier` are bytes of gradients of micro-batches before, `beside` what other layers keep, `least` what one of them keeps at least."""
        share = self._share
        inner = self.tokens * moment.tokens
        own = earlier + self._model.bytes * moment.weights + self._logits.gradient
        yield self._moment(  # everything else is still kept
            gathered=share.root + self._layers_there,
            activations=beside + inner,
            gradients=own,
        )
        reduced = 0.0 if earlier else self._others
        at_last = _FP32 * share.largest_trained
        gathered = share.root + (2 if self._regathers else 1) * share.largest_gathered
        yield self._moment(  # all other gradients are there
            gathered=gathered, activations=inner, gradients=own + reduced + at_last
        )
        if self._model.shape.depth > 1:
            one = _FP32 * share.trained(layer)
            if self._config.engine.activation_offload:  # as many layers beside it as ever
                others, before = beside, max(0.0, reduced - one)
            else:
                others, before = max(0.0, beside - least), min(reduced, one)
            yield self._moment(
                gathered=gathered, activations=others + inner, gradients=own + before + at_last
            )

    def _kept(self, checkpointing: str) -> list[float]:
        """Bytes that a layer of each kind keeps for the backward pass, of a micro-batch."""
        return [
            self.tokens * self._model.kept(passes, checkpointing)
            for _, _, passes in self._model.layers
        ]

    def _all(self, kept: Sequence[float]) -> float:
        """The same of all layers."""
        return sum(own * n for own, (_, n, _) in zip(kept, self._model.layers, strict=True))

    def _ended(self, kept: Sequence[float]) -> float:
        """Bytes that layers keep on the device when the last of them has run."""
        return max(kept) if self._config.engine.activation_offload else self._all(kept)

    def _beside(self, own: float, kept: Sequence[float]) -> float:
        """Bytes that other layers keep on the device while one that keeps its own, the first to do so, runs backward."""
        if self._config.engine.activation_offload:
            return max(kept) if self._model.shape.depth > 1 else 0.0
        return self._all(kept) - own

    @property
    def _layers_there(self) -> int:
        """Elements of gathered layers while one runs: its own, and those of the next, which come meanwhile."""
        return 2 * self._layers_left if self._regathers else self._layers_left

    @property
    def _layers_left(self) -> int:
        """The same between forward and backward pass: FSDP2 has what it received last until it receives more."""
        return self._share.largest_gathered if self._regathers else self._share.gathered_layers

    @property
    def _earlier(self) -> float:
        """Bytes of the gradients of earlier micro-batches, which are whole where they wait to be reduced."""
        if self.microbatches == 1:
            return 0.0
        shards = 1 if self._reduces_each else self._layout.shards
        return _FP32 * float(self._share.trained_all * shards)

    @property
    def _others(self) -> float:
        """Bytes of the gradients of all layers but one."""
        share = self._share
        return _FP32 * float(share.trained_layers - share.trained(share.largest_layer))

    def _moment(
        self,
        *,
        gathered: float,
        gradients: float,
        activations: float = 0.0,
        logits: float = 0.0,
        reducing: float = 0.0,
    ) -> Parts:
        """One moment of the update; `gathered` and `reducing` count elements, the others bytes."""
        # FSDP2 reduces from an fp32 copy, into the gradient; alone it divides into a third one.
        shards = self._layout.shards
        copies = 3 if shards == 1 else 1 + self._copies + 1 / shards
        return {
            "gathered": float(self._model.bytes * gathered),
            "gradients": float(gradients + _FP32 * reducing * copies),
            "activations": activations,
            "logits": logits,
        }

    def _publishing(self) -> Parts:
        """What is under way to the generators of other processes and to this one: the model, or an adapter; where that is merged in, it and a block of what it is merged into."""
        others = 1 - 1 / (self._layout.shards * self._layout.tensor)
        if self._adapter_beside:
            return self._sent(self._model.bytes * self._adapter_beside * others)
        passing = self._model.bytes * self._model.shape.elements * others
        widest = max(w.elements for w in self._share.largest_layer.weights)
        merging = _FP32 * (self._adapter + 2 * min(_MERGED, widest))
        parts = self._sent(passing)
        return parts if self._trained else parts | {"merging": float(merging)}

    def _sent(self, size: float) -> Parts:
        """So many bytes on their way to other processes, wave by wave."""
        return {"buffers": 2 * min(_WAVE, size)} if size else {}

    def _saving(self) -> Parts:
        """Blocks on their way to the disk; on a CPU also what is copied for a save in the background."""
        elements = self._model.shape.elements if self._trained else self._adapter
        elements += self._critic._model.shape.elements if self._critic else 0
        parts: Parts = {"buffers": buffers(elements, self._layout)}
        if self._model.cpu and (staging := self.staging()):
            parts["staging"] = staging
        return parts

    @cached_property
    def _scored(self) -> float:
        """Predictions of a micro-batch."""
        return self.tokens * self._work.trained / self._work.length

    @cached_property
    def _logits(self) -> Logits:
        rows = self._config.engine.logprob_rows(self._model.shape.vocabulary)
        return Logits(self._model, self._scored, rows)

    @cached_property
    def _logits_most(self) -> float:
        """Bytes of them in an update."""
        return max(self._logits.forward, self._logits.backward)

    @property
    def _adapter(self) -> int:
        """Elements of the adapter."""
        return self._model.shape.adapter(self._model.lora)

    @property
    def _adapter_beside(self) -> int:
        """Those of it that the generator holds beside the model, and is sent after each step."""
        return self._model.shape.beside(self._model.lora)


def _total(parts: Parts) -> float:
    return sum(parts.values())

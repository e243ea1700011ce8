"""Bytes that one process needs in each phase of a step, in closed form.

A phase has a few moments, each a sum of named parts; its need is the moment that needs most. What is held,
and when, follows the engine (`burnish.engines.torch_engine` on FSDP2), the generator (`burnish.rollout`) and the
checkpoints; `bench.planning` compares it with what runs measure. Prompts that several samples share are
counted in full. Left out: the interpreter and its libraries, and what an accelerator's driver takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from burnish.config.schema import EngineConfig, RunConfig
from burnish.planning.activations import Arithmetic, layer_passes
from burnish.planning.shape import Layer, ModelShape, Weight
from burnish.planning.tape import Passes
from burnish.planning.workload import Workload

Parts = dict[str, float]
"""Bytes by what they are for."""

_MIB = 1 << 20
_FP32 = 4
_BF16 = 2
_SLOTS = 2
"""Numbers that AdamW keeps per weight; Muon keeps one of each matrix of the layers."""
_WAVE = 64 * _MIB
"""Publishing sends at most so much at one time, and receives as much."""
_SAVING = 3 * 32 * _MIB
"""Saving has 32 MiB of blocks in memory, and between several processes sends and receives as much."""
_MERGED = 1 << 20
"""Elements of a weight that an adapter is merged into at one time."""
_PREFILL_TOKENS = 8192
"""Prompts that the generator reads at one time."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the processes of a run are arranged."""

    replicas: int
    """Copies of the model."""
    shards: int
    """Processes that one copy is cut among."""
    sequence: int = 1
    """Processes that share the tokens of a micro-batch."""
    tensor: int = 1
    """Processes that share the matrices of each layer."""

    @classmethod
    def of(cls, engine: EngineConfig, processes: int) -> Layout:
        """So many processes, as the settings arrange them."""
        shards = processes // (engine.replicas * engine.tensor_parallel)
        return cls(engine.replicas, shards, engine.sequence_parallel, engine.tensor_parallel)

    @property
    def world(self) -> int:
        """All processes."""
        return self.replicas * self.shards * self.tensor

    @property
    def token_ranks(self) -> int:
        """Processes among which the tokens of a step are divided."""
        return self.world // self.tensor


class Model:
    """A model's layers and what they hold of a token, for one arithmetic; made once, then asked for every layout."""

    def __init__(self, shape: ModelShape, arithmetic: Arithmetic) -> None:
        self.shape = shape
        self._arithmetic = arithmetic
        self.lora = arithmetic.lora
        self.bytes = arithmetic.bytes
        self.cpu = arithmetic.cpu
        self.tensor = arithmetic.tensor
        self.layers: list[tuple[Layer, int, Passes]] = [
            (layer, count, layer_passes(shape.family, layer, arithmetic))
            for layer, count in shape.layers
        ]
        self.hidden = float(shape.hidden * arithmetic.bytes)

    @cached_property
    def critic(self) -> Model:
        """The same with a value head, of which all is trained."""
        shape = replace(self.shape, scores_values=True)
        return Model(shape, replace(self._arithmetic, lora=None))

    def kept(self, passes: Passes, checkpointing: str) -> float:
        """Bytes of a token that a layer keeps for its backward pass."""
        if checkpointing == "full":
            return self.hidden / self.tensor
        return passes.products if checkpointing == "selective" else passes.kept


class Needs:
    """What one process of a run needs, of a model, at a layout."""

    def __init__(self, model: Model, config: RunConfig, work: Workload, layout: Layout) -> None:
        self._model, self._config, self._work, self._layout = model, config, work, layout
        engine = config.engine
        self._checkpointing = engine.activation_checkpointing
        self._regathers = engine.reshard_after_forward and layout.shards > 1
        self._trained = model.lora is None
        alone = replace(work, critic=False, reference=False, slots=0)
        self._critic = Needs(model.critic, config, alone, layout) if work.critic else None

    def phases(self) -> dict[str, Parts]:
        """The parts of the fullest moment of each phase, in the order of a step."""
        work, found = self._work, dict[str, Parts]()
        if work.slots:
            found["rollout"] = self._resting | self._generation()
        if work.scores:
            found["log-probs"] = self._resting | self._scoring()
        found["update"] = self._resting | max(self._updates(), key=lambda p: sum(p.values()))
        if work.slots:
            found["publish"] = self._resting | self._publishing()
        found["save"] = self._resting | self._saving()
        return found

    def staging(self) -> float:
        """Bytes of host memory that a save in the background copies the state to."""
        if not self._config.checkpoint.background:
            return 0.0
        frozen = 0.0 if self._trained else float(self._model.bytes * self._held_all)
        critic = self._critic.staging() if self._critic else 0.0
        return sum(self._state.values()) - frozen + critic

    @property
    def tokens(self) -> int:
        """Tokens of the fullest micro-batch on one process."""
        whole = -(-self._work.length // self._layout.sequence)
        share = -(-self._work.tokens // (self._work.updates * self._layout.token_ranks))
        return min(self._config.batch.tokens_per_device, max(whole, share))

    @property
    def microbatches(self) -> int:
        """Micro-batches of an optimizer step."""
        each = self._config.batch.tokens_per_device * self._layout.token_ranks * self._work.updates
        return max(1, -(-self._work.tokens // each))

    @cached_property
    def _state(self) -> Parts:
        """Weights and optimizer, always there."""
        held = float(self._held_all)
        if self._trained:
            numbers = _SLOTS * held - (self._matrices if self._config.optim.kind == "muon" else 0)
            return {"weights": _FP32 * held, "optimizer": _FP32 * numbers}
        adapter = self._adapter / self._layout.shards
        weights = self._model.bytes * held + _FP32 * adapter
        return {"weights": weights, "optimizer": _SLOTS * _FP32 * adapter}

    @cached_property
    def _resting(self) -> Parts:
        """What is there between phases: the state, a frozen reference, a critic, the generator's weights."""
        parts = dict(self._state)
        if self._work.reference and self._trained:
            left = self._root if self._regathers else self._all
            parts["reference"] = parts["weights"] + self._model.bytes * left
        if self._critic:
            parts["critic"] = sum(self._critic._state.values())
        if self._work.slots:
            held = self._model.shape.elements + self._ordered
            parts["generator"] = float(self._model.bytes * held)
        return parts

    @property
    def _ordered(self) -> int:
        """Elements of the matrices that a generator on a CPU holds a second time in bf16 (`burnish.rollout.products`)."""
        shape, cpu = self._model.shape, self._model.cpu and self._model.bytes == _BF16
        if not cpu or not shape.family.fused or shape.family.experts:
            return 0
        layers = sum(w.elements * n for layer, n in shape.layers for w in layer.weights if w.linear)
        return layers + shape.vocabulary * shape.hidden

    def _generation(self) -> Parts:
        """Keys, values and logits while all slots are at their longest."""
        model, work = self._model, self._work
        mine = -(-work.sequences // self._layout.world)
        slots = min(work.slots, mine)
        token = sum(2.0 * layer.key * model.bytes * n for layer, n, _ in model.layers)
        read = min(_PREFILL_TOKENS, -(-mine // work.samples) * work.prompt)
        reading = read * (token + max(passes.inference for _, _, passes in model.layers))
        wide = 3 * _FP32 + (0 if not work.nucleus else 2 * _FP32 if model.cpu else 4 * _FP32)
        drawing = slots * model.shape.vocabulary * wide
        return {
            "kv cache": slots * work.length * token * (1 + 1 / (2 * model.shape.depth)),
            "activations": reading,
            "logits": float(drawing),
        }

    def _scoring(self) -> Parts:
        """A forward pass of which nothing is kept; the critic's comes first and leaves its root gathered."""
        model, tokens, scored = self._model, self.tokens, self._scored
        if self._critic and not self._work.scorings:
            return self._critic._scoring()
        gathered = self._root + (self._critic._root if self._critic else 0)
        gathered += (
            3 * self._whole(self._largest.weights) if self._regathers else self._gathered_layers
        )
        inference = max(passes.inference for _, _, passes in model.layers)
        return {
            "gathered": float(model.bytes * gathered),
            "activations": tokens * (inference + model.hidden) + scored * model.hidden,
            "logits": self._logits_forward,
        }

    def _updates(self) -> Iterator[Parts]:
        """The moments of the policy's update, and of the critic's, during which the policy's root is left as the scoring left it."""
        yield from self._update()
        if self._critic:
            left = float(self._model.bytes * self._root) if self._work.scorings else 0.0
            for parts in self._critic._update():
                yield parts | {"gathered": parts["gathered"] + left}

    def _update(self) -> Iterator[Parts]:
        """The moments of forward, backward and optimizer step that can be the fullest."""
        model, trained = self._model, int(self._trained)
        tokens, scored = self.tokens, self._scored
        size = self._whole(self._largest.weights)
        everything = 2 * size if self._regathers else self._gathered_layers
        kept = {layer: model.kept(p, self._checkpointing) for layer, _, p in model.layers}
        activations = tokens * sum(kept[layer] * n for layer, n, _ in model.layers)
        earlier = _FP32 * self._all * trained if self.microbatches > 1 else 0.0
        head = self._vocabulary * model.shape.hidden * trained
        last = tokens * model.hidden + scored * model.hidden

        yield self._moment(
            gathered=self._root + everything,
            activations=activations + last + 3 * scored * model.hidden,
            logits=max(self._logits_forward, self._logits_backward),
            gradients=earlier,
        )
        others = _FP32 * trained * (self._held_layers - self._held(self._largest.weights))
        for layer, _, passes in model.layers:
            for moment in passes.backward:
                inner = tokens * moment.tokens
                own = model.bytes * moment.weights * trained
                yield self._moment(  # the layer that runs backward first: everything else is still kept
                    gathered=self._root + everything,
                    activations=activations - tokens * kept[layer] + inner,
                    gradients=earlier + own + model.bytes * head,
                )
                reduced = 0.0 if earlier else others
                yield self._moment(  # the one that runs last: all other gradients are there
                    gathered=self._root + (2 if self._regathers else 1) * size,
                    activations=inner,
                    gradients=earlier + own + model.bytes * head + reduced + _FP32 * size * trained,
                )
        yield self._moment(
            gathered=0, gradients=_FP32 * trained * self._held_layers, reducing=self._root
        )
        yield self._moment(
            gathered=self._root, gradients=model.bytes * head + others, reducing=size
        )
        weights = [*model.shape.root, *(w for layer, _, _ in model.layers for w in layer.weights)]
        largest = max(self._held([weight]) for weight in weights)
        yield self._moment(gathered=0, gradients=_FP32 * trained * (self._held_all + largest))
        if trained and self._config.optim.kind == "muon":
            yield self._moment(gathered=0, gradients=_FP32 * self._held_all) | self._muon()

    def _muon(self) -> Parts:
        """Directions of all matrices in bf16, the whole ones that this process makes orthogonal, what is on its way to it."""
        whole = sum(
            weight.elements * n
            for layer, n, _ in self._model.layers
            for weight in layer.weights
            if weight.columns > 1
        )
        passing = _BF16 * self._matrices if self._layout.world > 1 else 0
        parts = _BF16 * (self._matrices + whole / self._layout.world)
        return {"muon": parts + 2 * min(_WAVE, passing)}

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
        if self._trained:
            # FSDP2 reduces from an fp32 copy, into the gradient; alone it divides into a third one.
            copies = 3 if self._layout.shards == 1 else 1 + 1 / self._layout.shards
            gradients += _FP32 * reducing * copies
        else:
            gradients += _FP32 * self._adapter
        return {
            "gathered": float(self._model.bytes * gathered),
            "gradients": float(gradients),
            "activations": activations,
            "logits": logits,
        }

    def _publishing(self) -> Parts:
        """What is under way to the generators of other processes and to this one; an adapter and a block of what it is merged into."""
        others = 1 - 1 / (self._layout.shards * self._layout.tensor)
        passing = self._model.bytes * self._model.shape.elements * others
        widest = max(w.elements for w in self._largest.weights)
        merging = _FP32 * (self._adapter + 2 * min(_MERGED, widest))
        parts = {"buffers": 2 * min(_WAVE, passing)} if passing else {}
        return parts if self._trained else parts | {"merging": float(merging)}

    def _saving(self) -> Parts:
        """Blocks on their way to the disk; on a CPU also what is copied for a save in the background."""
        parts: Parts = {"buffers": float(_SAVING)}
        if self._model.cpu and (staging := self.staging()):
            parts["staging"] = staging
        return parts

    @cached_property
    def _scored(self) -> float:
        """Predictions of a micro-batch."""
        return self.tokens * self._work.trained / self._work.length

    @property
    def _chunk(self) -> float:
        """Logits of one chunk, elements."""
        return min(self._config.engine.logprob_chunk, self._scored) * self._vocabulary

    @property
    def _vocabulary(self) -> float:
        """Words whose logits this process computes."""
        return self._model.shape.outputs / self._layout.tensor

    @property
    def _logits_forward(self) -> float:
        """A chunk of logits beside the one before it, and its fp32 passes."""
        several = self._scored > self._config.engine.logprob_chunk
        exact = 0 if self._model.cpu else (3 if several else 2) * _FP32
        return self._chunk * (self._model.bytes * (2 if several else 1) + exact)

    @property
    def _logits_backward(self) -> float:
        """The same, and the gradient of the output layer that is added up in fp32."""
        several = self._scored > self._config.engine.logprob_chunk
        head = self._vocabulary * self._model.shape.hidden * int(self._trained)
        width = self._model.bytes
        if not several:
            exact = 0 if self._model.cpu else 2 * _FP32
            return self._chunk * (width + exact) + width * head
        exact = 0 if self._model.cpu else 2 * _FP32
        summing = self._chunk * (width + exact) + (_FP32 + width) * head
        return max(summing, self._chunk * 2 * width + _FP32 * head)

    @cached_property
    def _largest(self) -> Layer:
        return max((layer for layer, _, _ in self._model.layers), key=lambda each: each.elements)

    @cached_property
    def _adapter(self) -> int:
        """Elements of the adapter."""
        lora = self._model.lora
        return sum(layer.adapter(lora) * n for layer, n, _ in self._model.layers) if lora else 0

    def _held(self, weights: Iterable[Weight]) -> int:
        """Elements of these on the process that holds most."""
        return sum(weight.held(self._layout.shards, self._layout.tensor) for weight in weights)

    def _whole(self, weights: Iterable[Weight]) -> int:
        """Elements of these when gathered, rows filled up to a multiple of the shards."""
        return self._held(weights) * self._layout.shards

    @cached_property
    def _held_layers(self) -> int:
        return sum(self._held(layer.weights) * n for layer, n, _ in self._model.layers)

    @cached_property
    def _held_all(self) -> int:
        return self._held_layers + self._held(self._model.shape.root)

    @cached_property
    def _root(self) -> int:
        return self._whole(self._model.shape.root)

    @cached_property
    def _all(self) -> int:
        return self._held_all * self._layout.shards

    @property
    def _matrices(self) -> int:
        """Elements of which Muon keeps one number instead of AdamW's two."""
        return sum(
            self._held(weight for weight in layer.weights if weight.columns > 1) * n
            for layer, n, _ in self._model.layers
        )

    @property
    def _gathered_layers(self) -> int:
        """Elements of all layers, gathered."""
        return self._held_layers * self._layout.shards

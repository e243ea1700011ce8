"""Compute the bytes that one process needs in each phase of a step, in closed form.

A phase needs as much as its fullest moment, a sum of named parts. On CPUs, parts that leave the device stay in memory, as `host`.
Left out: interpreter, libraries, drivers, uneven experts, and what gloo's threads free late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from burnish.config.out_of_memory_hints import HEADS
from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.families import LayerShape
from burnish.plan.devices import Devices
from burnish.plan.model import (
    FP32,
    PlannedBeside,
    PlannedModel,
    TokenBytes,
    Weight,
    Workload,
    held,
    product_bytes,
    shards_of,
    token_bytes,
)
from burnish.plan.saving import save_buffers

Parts = dict[str, float]
"""Bytes by purpose."""

_MIB = 1 << 20
_BF16 = 2
_PUBLISH_WAVE = 64 * _MIB
_MUON_WAVE = 64 * _MIB
_OPTIMIZER_WAVE = 256 * _MIB
# Least rows of the embeddings that a rank holds where rows are fetched.
_FEWEST_ROWS = 8
# Rows of the output layer whose gradient is summed at one time.
_SUMMED_ROWS = 2048
# Tensors in fp32 of a chunk's size while distributions are compared, in a chunk of as many times fewer rows.
_COMPARED_COPIES = 4
# Bytes of logits that a CPU converts to fp32 at one time.
_CPU_LOGITS = 2 * _MIB
# Elements of a weight that an adapter is merged into at one time.
_MERGED = 1 << 20
_PREFILL_TOKENS = 8192


class Needs:
    """Bytes of one process of the torch engine (FSDP2)."""

    def __init__(
        self,
        model: PlannedModel,
        work: Workload,
        devices: Devices,
        engine: EngineConfig,
        optim: OptimConfig,
        *,
        beside: Sequence[PlannedBeside] = (),
    ) -> None:
        """Take the trained model and the frozen ones beside it."""
        self._model = model
        self._work = work
        self._devices = devices
        self._engine = engine
        self._optim = optim
        self._tensor = engine.tensor_parallel
        self._shards = shards_of(engine, devices.count)
        self._experts_shared_by = 1 if engine.kind == "megatron" else engine.expert_parallel
        self._world = devices.count
        self._cpu = devices.cpu
        self._width = product_bytes(engine)
        budget = work.budget
        ranks = engine.replicas * self._shards
        longest = -(-work.length // engine.sequence_parallel)
        self._tokens = min(budget, max(longest, -(-work.tokens // (work.updates * ranks))))
        self.microbatches = max(1, -(-work.tokens // (budget * ranks * work.updates)))
        """Micro-batches of an optimizer step."""
        self._scored = self._tokens * work.trained / work.length
        self._hidden = float(model.shape.hidden * self._width)
        self._regathers = engine.reshard_after_forward and self._shards > 1
        self._critic = None
        if work.has_critic:
            targets = model.lora.targets if model.lora else []
            lora = LoraConfig(rank=work.critic_rank, targets=targets) if work.critic_rank else None
            critic = PlannedModel(model.shape, lora, scores_values=True)
            self._critic = self._needs_of(critic)
        self._beside = [(each.said, self._needs_of(each.model)) for each in beside]

    def _needs_of(self, model: PlannedModel) -> Needs:
        return type(self)(model, self._work.alone, self._devices, self._engine, self._optim)

    def phases(self, checkpointing: str) -> dict[str, Parts]:
        """Return the parts of each phase's fullest moment, in a step's order."""
        update = self._during_update | max(self._updates(checkpointing), key=total_of)
        by_phase = self._before | {"update": update} | self._after
        if self._cpu and (host := total_of(self._on_host(checkpointing))):
            by_phase = {phase: parts | {"host": host} for phase, parts in by_phase.items()}
        return by_phase

    def host(self, checkpointing: str) -> Parts:
        """Return the bytes of host memory, given accelerators."""
        staging = self._staging
        return self._on_host(checkpointing) | ({"saving": staging} if staging else {})

    @cached_property
    def _before(self) -> dict[str, Parts]:
        by_phase = dict[str, Parts]()
        first = [(said, needs) for said, needs in self._beside if said.phase == "start"]
        if first:
            moments = [
                {said.role: needs._of_frozen} | parts
                for said, needs in first
                for parts in needs._scorings()
            ]
            by_phase["start"] = max(moments, key=total_of)
        if self._work.slots:
            by_phase["rollout"] = self._while_generating | max(self._rollouts(), key=total_of)
        scorers = [self if self._work.scorings else self._critic, *self._frozen_in("log-probs")]
        scored = [parts for scorer in scorers if scorer for parts in scorer._scorings()]
        if scored:
            by_phase["log-probs"] = self._during_update | max(scored, key=total_of)
        return by_phase

    def _frozen_in(self, phase: str) -> list[Needs]:
        """Return the frozen models that compute in a phase."""
        return [needs for said, needs in self._beside if said.phase == phase]

    @cached_property
    def _after(self) -> dict[str, Parts]:
        save = {"save": self._lasting | self._saving()}
        return {"publish": self._lasting | self._publishing()} | save if self._work.slots else save

    # Weights, in elements of this process.

    @cached_property
    def _frozen(self) -> float:
        root = held(self._model.root, self._shards, self._tensor)
        return root + self._sum(self._held(self._model.stored(self._width)))

    @cached_property
    def _trained(self) -> float:
        if self._model.lora is None:
            return self._frozen
        root = held(self._model.trained_root, self._shards, self._tensor)
        return root + self._sum(self._held(self._model.trained))

    @cached_property
    def _stepped(self) -> float:
        return self._trained * self._model.unfrozen

    @cached_property
    def _stepped_gathered(self) -> float:
        layers = self._sum(self._when_gathered(self._model.trained))
        sharded = self._fetched_table * (1 - 1 / self._shards)
        return (layers + self._trained_root - sharded) * self._model.unfrozen

    @cached_property
    def _matrices(self) -> float:
        matrices = self._sum(self._held(self._model.trained, matrices=True))
        return matrices * self._model.unfrozen

    def _held(
        self, weights: Mapping[LayerShape, Sequence[Weight]], *, matrices: bool = False
    ) -> dict[LayerShape, int]:
        return {
            kind: held((w for w in each if w.columns > matrices), self._shards, self._tensor)
            for kind, each in weights.items()
        }

    def _when_gathered(
        self, weights: Mapping[LayerShape, Sequence[Weight]]
    ) -> dict[LayerShape, float]:
        """Return the elements that a rank has while a layer is gathered. Of experts these are those of its own."""
        return {
            kind: self._shards
            * sum(w.held(self._shards, self._tensor) / self._sharers(w) for w in each)
            for kind, each in weights.items()
        }

    def _sharers(self, weight: Weight) -> int:
        return self._experts_shared_by if weight.experts else 1

    def _undivided(self, weights: Iterable[Weight]) -> float:
        """Return the elements of gathered weights, without padding."""
        return sum(weight.held(1, self._tensor) / self._sharers(weight) for weight in weights)

    @property
    def _counts(self) -> Counter[LayerShape]:
        return self._model.shape.counts

    def _sum(self, by_kind: Mapping[LayerShape, float]) -> float:
        return sum(by_kind[kind] * n for kind, n in self._counts.items())

    @cached_property
    def _layers(self) -> dict[LayerShape, float]:
        own = self._when_gathered(self._model.stored(self._width))
        adapter = self._when_gathered(self._model.trained) if self._model.lora else {}
        return {kind: own[kind] + adapter.get(kind, 0) for kind in own}

    @cached_property
    def _root(self) -> float:
        """Elements outside the layers that stay gathered in a pass."""
        root = held(self._model.root, self._shards, self._tensor) * self._shards
        beside = self._trained_root if self._model.lora else 0
        return root + beside - self._apart - self._head

    @cached_property
    def _apart(self) -> float:
        """Elements of the embeddings, if they are not gathered with the root."""
        if not self._model.scores_values and not self._head:
            return 0
        return self._model.root[0].held(self._shards, self._tensor) * self._shards

    @cached_property
    def _fetches(self) -> bool:
        """Whether ranks fetch rows of the embeddings (`burnish.engines.torch.embedding_rows`)."""
        lora = self._model.lora
        if not self._apart or self._shards == 1 or self._tensor > 1:
            return False
        if self._engine.parameter_offload or (lora and self._model.trained_root):
            return False
        return self._model.shape.vocabulary >= _FEWEST_ROWS * self._shards

    @property
    def _embeddings(self) -> float:
        """Elements of the embeddings, if they are gathered alone."""
        return 0.0 if self._fetches else self._apart

    @property
    def _rows(self) -> float:
        """Elements of the rows of the embeddings that a rank fetches: at most one row for each token."""
        shape = self._model.shape
        return min(self._tokens, shape.vocabulary) * shape.hidden * self._fetches

    @property
    def _fetched_table(self) -> float:
        """Elements of the embeddings, if ranks fetch their rows and train them. A rank's gradient has its own rows."""
        return self._apart * (self._fetches and self._model.lora is None)

    @cached_property
    def _head(self) -> float:
        """Elements of the output layer, if it is gathered alone."""
        model = self._model
        if model.shape.tied or model.scores_values or (model.lora and model.trains_head):
            return 0
        return model.root[-1].held(self._shards, self._tensor) * self._shards

    @cached_property
    def _trained_root(self) -> float:
        return held(self._model.trained_root, self._shards, self._tensor) * self._shards

    # Memory that is held between phases, in bytes.

    @cached_property
    def _state(self) -> Parts:
        frozen = self._width * self._frozen if self._model.lora else 0.0
        if self._engine.parameter_offload:
            return {}
        parts = {"weights": FP32 * self._trained + frozen}
        return parts if self._engine.optimizer_offload else parts | {"optimizer": self._slots}

    @property
    def _of_frozen(self) -> float:
        """Bytes of the weights of an engine that does not train."""
        return 0.0 if self._engine.parameter_offload else self._width * self._frozen

    @cached_property
    def _slots(self) -> float:
        """The optimizer's state: Muon keeps one number per matrix element, AdamW two."""
        width = _BF16 if self._optim.moments == "bf16" else FP32
        single = self._matrices if self._optim.kind == "muon" else 0.0
        return 2 * width * self._stepped - FP32 * single

    @cached_property
    def _lasting(self) -> Parts:
        parts = dict(self._state)
        if reference := self._reference:
            parts["reference"] = reference + self._left_gathered
        if self._critic:
            parts["critic"] = total_of(self._critic._state)
        if self._work.slots:
            model = self._model
            copies = model.elements + self._ordered + model.published_adapter
            parts["generator"] = self._width * copies / self._work.generator_ranks
        if self._work.compares == "all":
            own = [self] if self._work.start_teaches else []
            shapes = [each._model.shape for each in (*own, *self._frozen_in("log-probs"))]
            kept = sum(shape.vocabulary * shape.hidden for shape in shapes)
            parts[HEADS] = self._width * kept / self._tensor
        for said, needs in self._beside:
            if said.phase != "start":
                size = needs._of_frozen + needs._left_gathered
                parts[said.role] = parts.get(said.role, 0.0) + size
        return parts

    @property
    def _reference(self) -> float:
        """A frozen copy; a fresh adapter's reference is the model under it."""
        lora = self._model.lora
        if not self._work.has_reference or (lora is not None and lora.path is None):
            return 0.0
        return self._of_frozen + (FP32 * self._trained if lora else 0.0)

    @property
    def _left_gathered(self) -> float:
        layers = 0.0 if self._regathers else self._sum(self._layers)
        return self._width * (self._root + self._head + layers)

    @property
    def _during_update(self) -> Parts:
        """Memory held during an update, without a generator that gets all weights anew."""
        if self._cpu or self._model.published_adapter or self._work.generates_beside:
            return self._lasting
        return {name: size for name, size in self._lasting.items() if name != "generator"}

    @property
    def _while_generating(self) -> Parts:
        if not self._engine.offload_during_rollout:
            return self._lasting
        judges = (said.role for said, _ in self._beside if said.phase == "rollout")
        kept = {"generator", *judges}
        return {name: size for name, size in self._lasting.items() if name in kept}

    @property
    def _ordered(self) -> int:
        """Elements of matrices that a generator on a CPU holds twice (`FusedLinear.refresh`)."""
        family = self._model.shape.family
        if not self._cpu or self._width != _BF16:
            return 0
        if not family.has_llama_layers or family.has_router:
            return 0
        layers = sum(
            sum(w.elements for w in weights if w.linear) * self._counts[kind]
            for kind, weights in self._model.layers.items()
        )
        return layers + self._model.shape.vocabulary * self._model.shape.hidden

    # Memory of the host.

    def _on_host(self, checkpointing: str) -> Parts:
        """Return optimizer state, and the largest part that takes turns in the arena."""
        engines = [self, self._critic] if self._critic else [self]
        is_offloaded = self._engine.optimizer_offload or self._engine.parameter_offload
        offloaded = sum(each._slots for each in engines) if is_offloaded else 0.0
        in_turn: Parts = {}
        if self._engine.activation_offload:
            in_turn["activations"] = max(each._offloaded(checkpointing) for each in engines)
        if self._engine.offload_during_rollout and self._work.slots:
            critic = self._lasting.get("critic", 0.0)
            in_turn["offloaded"] = total_of(self._state) + self._reference + critic
        parts = {"optimizer": offloaded}
        if self._engine.parameter_offload:  # with gradients, and a frozen copy
            parts["weights"] = sum(2 * FP32 * each._stepped for each in engines)
            if self._reference or self._work.has_reference:
                parts["weights"] += self._width * self._frozen
        if in_turn:
            largest = max(in_turn, key=in_turn.__getitem__)
            parts[largest] = in_turn[largest]
        return {name: size for name, size in parts.items() if size}

    def _offloaded(self, checkpointing: str) -> float:
        by_kind = self._saved(checkpointing)
        return self._sum(by_kind) - min(by_kind.values())

    @property
    def _staging(self) -> float:
        if not self._work.saves_in_background:
            return 0.0
        critic = self._critic._staging if self._critic else 0.0
        return FP32 * self._stepped + self._slots + critic

    # Phases before and after the update.

    @cached_property
    def slots(self) -> int:
        """Sequences generated at once."""
        work = self._work
        slots = work.slots
        room = self._devices.usable - total_of(self._while_generating)
        while work.fits_slots and slots > 1 and total_of(self._generating(slots)) > room:
            slots //= 2
        return slots

    def _rollouts(self) -> Iterator[Parts]:
        yield self._generating(self.slots)
        for judge in self._frozen_in("rollout"):
            for parts in judge._scorings():
                yield parts | {"gathered": max(0.0, parts["gathered"] - judge._left_gathered)}

    def _generating(self, slots: int) -> Parts:
        model = self._model
        work = self._work
        sequences = -(-work.sequences // self._world)
        slots = min(slots, sequences)
        token = 2.0 * self._width * model.shape.key * model.shape.depth
        prompts = -(-sequences // work.samples) * work.prompt
        if work.takes_turns:  # a conversation's turns before are a prompt of its own
            prompts = sequences * work.length
        read = min(_PREFILL_TOKENS, prompts)
        forward = max(each.forward for each in self._tokens_of.values())
        sorting = 0 if not work.is_nucleus else 2 if self._cpu else 4
        cached = slots * work.length * token
        if self._devices.shared_cache:
            shared = min(-(-sequences // work.samples), -(-(slots - 1) // work.samples) + 1, slots)
            begun = slots * work.length if work.takes_turns else shared * work.prompt
            cached = (slots * work.trained + begun) * token * FP32 / self._width
        if work.takes_turns:
            cached += slots * work.length * token
        return {
            "kv cache": cached,
            "activations": read * forward + min(2 * read, prompts) * token,
            "logits": float(slots * model.shape.vocabulary * (3 + sorting) * FP32),
        }

    def _scorings(self) -> Iterator[Parts]:
        state = self._tokens * self._hidden
        root = self._root + (self._critic._root if self._critic else 0)
        gathered = float(self._width * (root + self._running))
        at_head = gathered + self._width * self._head
        forward = max(each.forward for each in self._tokens_of.values())
        yield {"gathered": gathered, "activations": self._tokens * forward}
        chosen = self._scored * self._hidden
        yield {"gathered": at_head, "activations": state + chosen, "logits": self._logits[0]}
        if self._shards > 1:
            coming = self._coming + (self._critic._root if self._critic else 0)
            yield {"gathered": float(self._width * coming), "activations": state}

    @property
    def _holders(self) -> int:
        """Processes that divide the weights of a layer's matrices."""
        return self._shards * self._tensor

    @property
    def _sent(self) -> int:
        """Elements of the weights that some processes lack."""
        return self._model.elements if self._holders > 1 else 0

    def _publishing(self) -> Parts:
        """Return a wave of whole tensors (`burnish.boxes.gather`), and what is beside it at one time.

        While they are exchanged, these are a process's own message and gloo's copy; then, tensors that are copied out of the wave.
        Before, an adapter is merged into the message, one tensor after the other.
        """
        model = self._model
        elements = model.published_adapter or self._sent
        wave = min(_PUBLISH_WAVE, self._width * elements) if self._sent else 0.0
        beside = (1 + self._cpu / self._world) * wave
        if not model.lora or model.published_adapter:
            return {"buffers": wave + beside} if wave else {}
        widest = max(w.elements for weights in model.layers.values() for w in weights)
        factors = model.adapter - sum(weight.elements for weight in model.trained_root)
        merged = 2 * FP32 * min(_MERGED, widest) + self._width * widest / self._holders
        return {"merging": FP32 * factors, "buffers": wave + max(beside, merged)}

    def _saving(self) -> Parts:
        models = [self._model, self._critic._model] if self._critic else [self._model]
        size = save_buffers(models, self._world, self._engine.replicas, self._tensor)
        staging = self._staging if self._cpu else 0.0
        return {"buffers": size} | ({"staging": staging} if staging else {})

    # The update.

    @cached_property
    def _tokens_of(self) -> dict[LayerShape, TokenBytes]:
        return {
            kind: token_bytes(self._model, kind, self._engine, self._width, cpu=self._cpu)
            for kind in self._counts
        }

    def _saved(self, checkpointing: str) -> dict[LayerShape, float]:
        kinds = self._tokens_of.items()
        return {kind: self._tokens * getattr(token, checkpointing) for kind, token in kinds}

    @property
    def _running(self) -> float:
        """Elements of gathered layers while the next one comes."""
        layers = 2 * max(self._layers.values()) if self._regathers else self._sum(self._layers)
        return layers + self._dequantized

    @cached_property
    def _dequantized(self) -> float:
        """Elements of the widest weight that a product dequantizes."""
        if not self._model.is_quantized:
            return 0.0
        return max(w.elements for each in self._model.layers.values() for w in each if w.linear)

    @property
    def _coming(self) -> float:
        """Elements of gathered parameters while more come; gloo holds received ones twice."""
        layer = max(self._layers.values())
        copies = 1 + self._cpu
        before = self._embeddings or self._root  # what these came in is there until the next come
        layers = max(before + copies * layer, self._running + (copies - 1) * layer)
        return self._root + max(layers, 2 * self._embeddings, 2 * self._rows, 2 * self._head)

    @cached_property
    def _logits(self) -> tuple[float, float]:
        """Bytes of a chunk of logits in both passes."""
        shape = self._model.shape
        engine = self._engine
        words = self._model.outputs / engine.tensor_parallel
        rows = engine.logprob_rows(shape.vocabulary)
        chunk = min(rows, self._scored) * words
        sm80 = self._devices.kind.is_sm80_or_newer  # kernels for sm80 overwrite the logits
        exact = 0.0 if sm80 else 2 * FP32 * chunk
        exact = min(exact, 2 * _CPU_LOGITS) if self._cpu else exact
        forward = self._width * chunk + exact
        head = words * shape.hidden * self._model.trains_head
        if self._scored <= rows:
            return forward, self._width * chunk + max(exact, self._width * head)
        product = self._width * head * min(1.0, _SUMMED_ROWS / words)
        if sm80 and self._width != FP32:
            product = 0.0  # the matrix product adds its result to the sum
        summed = self._width * chunk + max(exact, product)
        converted = self._width * head if self._width != FP32 else 0.0
        return forward, FP32 * head + max(summed, converted)

    @property
    def _trained_head(self) -> float:
        """Elements of the output layer, if its gradients are reduced alone."""
        return self._head * self._model.trains_head

    @property
    def _compared(self) -> float:
        """Bytes of the second pass over the output layer: fp32 copies of a smaller chunk, and its gradient beside the first pass's."""
        if not self._work.compares:
            return 0.0
        words = self._model.outputs / self._tensor
        rows = max(1, self._engine.logprob_rows(self._model.shape.vocabulary) // _COMPARED_COPIES)
        copies = _COMPARED_COPIES * FP32 * min(rows, self._scored) * words
        head = words * self._model.shape.hidden * self._model.trains_head
        own = FP32 * head + (self._width * head if self._width != FP32 else 0.0)
        # The backward pass of the comparison comes first. Its gradient waits for that of the log-probs.
        return max(copies + own, self._head_gradient + self._logits[1])

    @property
    def _head_gradient(self) -> float:
        """Bytes of the output layer's gradient: unreduced, or reduced beside what it was exchanged in."""
        if self._head:
            return FP32 * self._trained_head * (1 + 1 / self._shards)
        words = self._model.outputs / self._engine.tensor_parallel
        return self._width * words * self._model.shape.hidden * self._model.trains_head

    def _updates(self, checkpointing: str) -> Iterator[Parts]:
        yield from self._update(checkpointing)
        if self._critic:
            root = self._root + self._head
            still_gathered = self._width * root if self._work.scorings else 0.0
            for parts in self._critic._update(checkpointing):
                yield parts | {"gathered": parts["gathered"] + still_gathered}

    def _update(self, checkpointing: str) -> Iterator[Parts]:
        saved = self._saved(checkpointing)
        shards = self._shards
        root = self._root
        offloads = self._engine.activation_offload
        trained = self._held(self._model.trained)
        reduces = self._engine.reduce_each_microbatch or shards == 1
        # fp32 gradients of earlier micro-batches, which are unsharded until they are reduced.
        kept = self._stepped if reduces else self._stepped_gathered
        earlier = FP32 * kept * (self.microbatches > 1)
        reduced = 0.0 if earlier else FP32 * (self._sum(trained) - max(trained.values()))
        whole = max(self._when_gathered(self._model.trained).values())
        layer = max(self._layers.values())
        depth = self._model.shape.depth
        between = layer if self._regathers else self._sum(self._layers)
        if shards > 1:
            yield self._moment(self._coming, gradients=earlier)
        ended = max(saved.values()) if offloads else self._sum(saved)
        last = self._tokens * self._hidden + 4 * self._scored * self._hidden
        at_head = root + self._head + between
        logits = max(*self._logits, self._compared)
        yield self._moment(at_head, activations=ended + last, logits=logits, gradients=earlier)
        for kind, token in self._tokens_of.items():
            others = (
                max(saved.values()) * (depth > 1) if offloads else self._sum(saved) - saved[kind]
            )
            weights = self._model.trained[kind]
            mlp = self._width * self._undivided(w for w in weights if w.is_mlp)
            every = self._width * self._undivided(weights)
            for peak, new_gradient in (
                (token.mlp_backward, mlp),
                (token.attention_backward, every),
            ):
                inner = self._tokens * peak
                own = earlier + new_gradient + self._head_gradient
                yield self._moment(root + self._running, activations=others + inner, gradients=own)
                gathered = root + (2 if self._regathers else 1) * layer
                # The next gradients come when what the output layer's were exchanged in has gone.
                own += reduced + FP32 * whole - FP32 * self._trained_head
                yield self._moment(gathered, activations=inner, gradients=own)
        yield from self._reducing(FP32 * self._sum(trained), max(reduced, earlier * reduces), whole)
        gradients = FP32 * self._stepped
        yield self._moment(0, gradients=gradients) | self._stepping

    def _reducing(self, layers: float, others: float, whole: float) -> Iterator[Parts]:
        """Yield the moments at the backward pass's end: FSDP2 reduces the last gradients in fp32."""
        shards = self._shards
        head = FP32 * self._trained_head / shards
        root = self._trained_root - self._trained_head - self._fetched_table
        # A lone process makes a third copy by dividing.
        copies = 3.0 if shards == 1 else 1 + self._cpu + 1 / shards
        own = FP32 * whole * copies
        of_root = 0.0 if self._head else self._head_gradient
        yield self._moment(self._root, gradients=head + of_root + others + own)
        layers += head + FP32 * self._fetched_table / shards
        yield self._moment(0, gradients=layers + FP32 * root * copies)
        state = self._tokens * self._hidden
        yield self._moment(2 * self._rows, gradients=layers, activations=state)
        if shards > 1:
            yield self._moment(0, gradients=layers + (FP32 + self._width) * root)

    @cached_property
    def _stepping(self) -> Parts:
        optim = self._optim
        parts = Parts()
        is_muon = optim.kind == "muon"
        slots = 2 * FP32 * (self._stepped - (self._matrices if is_muon else 0))
        if self._engine.optimizer_offload or optim.moments == "bf16":
            parts["optimizer step"] = min(slots, max(_OPTIMIZER_WAVE, 2 * FP32 * self._widest))
        if is_muon and not self._model.lora:
            # Updates in bf16, the whole matrices that this process orthogonalizes, and tensors in transfer.
            world = self._world
            whole = self._model.matrices
            passing = _BF16 * self._matrices if world > 1 else 0
            parts["muon"] = _BF16 * (self._matrices + whole / world) + 2 * min(_MUON_WAVE, passing)
        return parts

    @cached_property
    def _widest(self) -> float:
        weights = [w for each in self._model.trained.values() for w in each]
        weights += self._model.trained_root
        return max(w.held(self._shards, self._tensor) for w in weights)

    def _moment(
        self, gathered: float, gradients: float, activations: float = 0.0, logits: float = 0.0
    ) -> Parts:
        """Name parts: `gathered` counts elements, the others bytes."""
        return {
            "gathered": float(self._width * gathered),
            "gradients": float(gradients),
            "activations": activations,
            "logits": logits,
        }


def total_of(parts: Parts) -> float:
    """Return the bytes of all parts."""
    return sum(parts.values())

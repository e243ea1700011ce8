"""Compute the bytes of one process of the Megatron engine: state in closed form, activations by one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain, islice

from burnish.families import LayerShape, ModelShape
from burnish.plan.memory import Needs, Parts, total_of
from burnish.plan.model import CHUNK, FP32, Weight, held

# Numbers of a token in a layer, in multiples of: the hidden state, queries, keys, the projection to
# queries, keys and values, the MLP's inner width, and hidden states that are sent to experts.
_ACTIVATIONS = {
    # Kept for the backward pass, by `engine.activation_checkpointing`.
    "none": (4, 3, 2, 1, 5, 1),
    "selective": (4, 3, 1, 1, 5, 1),
    "full": (1, 0, 0, 0, 0, 0),
    # Most at one time beside it.
    "backward": (1, 0, 0, 0, 2, 2),
}
_MLP_INPUTS = {
    "gate_proj", "up_proj", "gate_up_proj", "experts.gate_up_proj", "shared_expert_gate", "wg",
}  # fmt: skip
_BEHIND_MLP = {"down_proj", "experts.down_proj"}
_BEHIND = _BEHIND_MLP | {"o_proj", "out_proj"}
# More of the inner width that is kept where experts have biases and bounds.
_OF_STACKED = 4


class MegatronNeeds(Needs):
    """Bytes of one process of the Megatron engine.

    A lasting fp32 buffer collects gradients. Data-parallel processes divide fp32 weights and moments. The process stands for the
    fullest of a pipeline: with the most parameters in its layers, and one table of the vocabulary. The first stage has most micro-batches in
    flight, and the last the logits.
    """

    @cached_property
    def _stage(self) -> Counter[LayerShape]:
        """The layers of the stage with most parameters."""
        engine = self._engine
        stages = engine.pipeline_parallel
        layers = iter(self._model.shape.layers)
        each, over = divmod(self._model.shape.depth, stages * engine.virtual_stages)
        chunks = [
            [*islice(layers, each + (number < over))]
            for number in range(stages * engine.virtual_stages)
        ]
        of_kinds = {
            kind: sum(map(self._elements, weights)) for kind, weights in self._model.layers.items()
        }
        of_stages = (Counter(chain(*chunks[stage::stages])) for stage in range(stages))
        return max(of_stages, key=lambda stage: sum(of_kinds[k] * n for k, n in stage.items()))

    def _sum(self, by_kind: Mapping[LayerShape, float]) -> float:
        return sum(by_kind[kind] * n for kind, n in self._stage.items())

    def _elements(self, weight: Weight) -> float:
        if not weight.experts:
            return weight.held(1, self._tensor)
        within = self._engine.expert_sharing // self._engine.expert_parallel
        return weight.elements / self._engine.expert_parallel / (within if weight.shared else 1)

    def _own(self, *, trained: bool, matrices: bool = False) -> tuple[float, float]:
        """Return the elements of experts and of all else in this process, or of the trained ones or matrices among them."""
        model = self._model
        by_kind = model.trained if trained else model.layers

        def count(*, experts: bool) -> float:
            return self._sum(
                {
                    kind: sum(
                        self._elements(w)
                        for w in weights
                        if (w.experts > 0) == experts and w.columns > matrices
                    )
                    for kind, weights in by_kind.items()
                }
            )

        root = model.trained_root if trained else model.root
        if matrices:
            root = ()
        elif self._engine.pipeline_parallel > 1:
            root = root[:1]  # the output layer is at the other end
        return count(experts=True), count(experts=False) + held(root, 1, self._tensor)

    @cached_property
    def _frozen(self) -> float:
        return sum(self._own(trained=False))

    @cached_property
    def _trained(self) -> float:
        return sum(self._own(trained=True))

    @cached_property
    def _stepped(self) -> float:
        return self._divided(*self._own(trained=True))

    @cached_property
    def _matrices(self) -> float:
        return self._divided(*self._own(trained=True, matrices=True))

    def _divided(self, experts: float, others: float) -> float:
        """Return what data-parallel processes each step of these elements."""
        engine = self._engine
        copies = self._world / engine.pipeline_parallel / engine.expert_sharing
        return experts / copies + others / self._shards

    @cached_property
    def _state(self) -> Parts:
        adapter = FP32 * self._trained if self._model.lora else 0.0  # which is its own exact copy
        exact = FP32 * self._stepped if self._width != FP32 and not adapter else 0.0
        slots = 0.0 if self._engine.optimizer_offload else self._slots
        return {
            "weights": self._width * self._frozen + adapter,
            "gradients": FP32 * self._trained,
            "optimizer": exact + slots,
        }

    @property
    def _holders(self) -> int:
        return self._tensor * self._engine.pipeline_parallel

    @property
    def _sent(self) -> int:
        experts = self._model.of_experts if self._engine.expert_sharing > 1 else 0
        return super()._sent or experts

    def _publishing(self) -> Parts:
        parts = super()._publishing()
        # Before, data-parallel processes exchange the weights that each has stepped. gloo has a copy of all.
        stepped = 0.0 if self._model.lora or self._shards == 1 else self._trained
        return max(parts, {"buffers": self._cpu * self._width * stepped}, key=total_of)

    # FSDP gathers weights, Megatron does not.

    @property
    def _root(self) -> float:
        return 0.0

    @property
    def _layers(self) -> dict[LayerShape, float]:
        return dict.fromkeys(self._counts, 0.0)

    @property
    def _gathered(self) -> float:
        """Bytes of the tokens that tensor ranks divide between layers."""
        scattered = self._engine.megatron_sequence_parallel and self._tensor > 1
        return self._tokens * self._hidden if scattered else 0.0

    @cached_property
    def _widest(self) -> float:
        layers = self._model.trained.values()
        return max(map(self._elements, chain(self._model.trained_root, *layers)))

    def _activations(self, row: str) -> dict[LayerShape, float]:
        """Return a micro-batch's bytes in each kind of layer, by a row of the table."""
        return {kind: self._tokens * self._in_layer(kind, row) for kind in self._model.shape.counts}

    def _in_layer(self, kind: LayerShape, row: str) -> float:
        """Return a token's bytes."""
        shape = self._model.shape
        tensor = self._tensor
        divided = tensor if self._engine.megatron_sequence_parallel else 1
        of_hidden, *of_heads, of_inner, of_sent = _ACTIVATIONS[row]
        is_kept = row in ("none", "selective")
        if is_kept and self._model.lora:  # frozen linear layers do not keep their inputs
            linear = {weight.linear for weight in self._model.layers[kind]} - {""}
            trained = {name for name in linear if self._model.trains(name)}
            inputs = linear - _BEHIND
            of_hidden -= (not trained & (inputs - _MLP_INPUTS)) + (not trained & _MLP_INPUTS)
            of_inner -= not trained & _BEHIND_MLP
        widths = _of_heads(shape, kind, tensor)
        numbers = sum(n * width for n, width in zip(of_heads, widths, strict=True))
        numbers += of_hidden * shape.hidden / divided
        if not kind.experts:
            return self._width * (numbers + of_inner * kind.intermediate / tensor)
        chosen = kind.experts_per_token
        within = self._engine.expert_tensor_parallel or tensor
        if is_kept and shape.family.scores_by_sigmoid:
            numbers += (FP32 / self._width - 1) * 2 * shape.hidden / divided
        inner = of_inner + (_OF_STACKED if is_kept and shape.family.stacks_experts else 0)
        numbers += inner * chosen * kind.intermediate / divided
        numbers += of_sent * chosen * shape.hidden * within / divided
        shared = sum(w[0] for name, w in kind.parameters if name.endswith("up_proj.weight"))
        return self._width * (numbers + of_inner * shared / tensor)

    def _states(self, kind: LayerShape) -> float:
        """Return a micro-batch's bytes of Gated DeltaNet, by transformers' code in torch; ranks that share tokens have all."""
        sizes = dict(kind.parameters)
        if "linear_attn.A_log" not in sizes:
            return 0.0
        (heads,) = sizes["linear_attn.A_log"]
        (width,) = sizes["linear_attn.norm.weight"]
        numbers = 5 * CHUNK + 18 * width + 3 * width**2 / CHUNK
        tokens = self._tokens * self._engine.sequence_parallel
        return FP32 * tokens * numbers * heads / self._tensor

    def _update(self, checkpointing: str) -> Iterator[Parts]:
        first, last = self._in_flight()
        by_kind = self._activations(checkpointing)
        states = {k: self._states(k) for k in by_kind}
        if checkpointing == "none":
            by_kind = {kind: size + states[kind] for kind, size in by_kind.items()}
        saved = self._sum(by_kind)
        working = max(self._activations("backward").values())
        if checkpointing == "full":  # the backward pass computes one layer again
            again = self._activations("none")
            working += max(again[kind] + states[kind] for kind in again)
        elif checkpointing == "selective":
            working += max(max(states[kind] - by_kind[kind], 0.0) for kind in by_kind)
        head = (self._tokens + 4 * self._scored) * self._hidden
        gathered = {"gathered": self._gathered}
        yield gathered | {
            "activations": first * saved + working,
            # A weight's gradient, until it is added to the buffer.
            "new gradient": self._width * self._widest,
        }
        yield gathered | {
            "activations": last * saved + head,
            "logits": max(self._logits),
        }
        yield gathered | self._stepping

    def _in_flight(self) -> tuple[float, float]:
        """Return the micro-batches in flight on the first stage and on the last.

        Virtual stages take turns, so more are in flight (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2).
        """
        stages = self._engine.pipeline_parallel
        virtual = self._engine.virtual_stages
        first = stages + (stages - 1) / virtual if virtual > 1 else stages
        last = 1 + (virtual - 1) * (stages - 1) / virtual
        return min(first, self.microbatches), min(last, self.microbatches)

    @property
    def _stepping(self) -> Parts:
        # torch's AdamW has temporaries as large as a moment of all weights that it steps at once.
        parts = super()._stepping
        wave = parts.get("optimizer step")
        by_adam = self._stepped - (self._matrices if self._optim.kind == "muon" else 0.0)
        return parts | {"optimizer step": 1.5 * wave if wave else FP32 * by_adam}


def _of_heads(shape: ModelShape, kind: LayerShape, tensor: int) -> tuple[float, float, float]:
    """Return the widths of queries, of keys, and of the projection to all of them, on a tensor rank.

    With latents, the projection includes them, and the keys are as wide as the queries. Gated DeltaNet has a projection alone.
    """
    matrices = {
        name.split(".")[1]: sizes
        for name, sizes in kind.parameters
        if name.startswith(("self_attn.", "linear_attn.")) and len(sizes) == 2
    }
    rows = {name: sizes[0] for name, sizes in matrices.items()}
    output = matrices.pop("o_proj", matrices.pop("out_proj", (0, 0)))[1]
    if "kv_b_proj" in rows:
        query = rows["q_b_proj"] if "q_b_proj" in rows else rows["q_proj"]
        latents = rows["kv_a_proj_with_mqa"] + rows.get("q_a_proj", 0)
        return query / tensor, 0.0, (rows["kv_b_proj"] + output) / tensor + 2 * latents
    projection = float(sum(rows[name] for name in matrices))
    if "k_proj" not in rows and "qkv_proj" not in rows:
        return 0.0, 0.0, projection / tensor
    # Ranks that outnumber key heads gather the whole projection.
    splits = tensor if tensor <= shape.key_heads else 1
    return shape.query / tensor, shape.key / min(tensor, shape.key_heads), projection / splits

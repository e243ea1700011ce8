"""Compute the bytes of one process of the Megatron engine: state in closed form, activations by one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain

from burnish.families import LayerShape
from burnish.plan.memory import Needs, Parts
from burnish.plan.model import FP32, Weight, held

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


class MegatronNeeds(Needs):
    """Bytes of one process of the Megatron engine.

    A lasting fp32 buffer collects gradients. Data-parallel processes divide fp32 weights and moments. The process stands for the
    fullest of a pipeline: with the most layers, which are taken to be alike, and one table of the vocabulary. The first stage has
    most micro-batches in flight, and the last the logits.
    """

    def _sum(self, by_kind: Mapping[LayerShape, float]) -> float:
        depth = self._model.shape.depth
        most = -(-depth // self._engine.pipeline_parallel)
        return super()._sum(by_kind) * most / depth

    def _elements(self, weight: Weight) -> float:
        if weight.experts:
            return weight.elements / self._engine.expert_sharing
        return weight.held(1, self._tensor)

    @cached_property
    def _experts(self) -> float:
        """Elements of experts."""
        return self._sum(
            {
                kind: sum(self._elements(weight) for weight in weights if weight.experts)
                for kind, weights in self._model.layers.items()
            }
        )

    @cached_property
    def _frozen(self) -> float:
        root = self._model.root
        if self._engine.pipeline_parallel > 1:
            root = root[:1]  # the output layer is at the other end
        layers = {
            kind: sum(map(self._elements, weights)) for kind, weights in self._model.layers.items()
        }
        return held(root, 1, self._tensor) + self._sum(layers)

    @property
    def _stepped(self) -> float:
        return self._divided(self._frozen)

    @cached_property
    def _matrices(self) -> float:
        layers = {
            kind: sum(self._elements(weight) for weight in weights if weight.columns > 1)
            for kind, weights in self._model.layers.items()
        }
        return self._divided(self._sum(layers))

    def _divided(self, elements: float) -> float:
        """Return what data-parallel processes each step of elements that include all experts."""
        engine = self._engine
        copies = self._world / engine.pipeline_parallel / engine.expert_sharing
        return self._experts / copies + (elements - self._experts) / self._shards

    @cached_property
    def _state(self) -> Parts:
        exact = FP32 * self._stepped if self._width != FP32 else 0.0
        slots = 0.0 if self._engine.optimizer_offload else self._slots
        return {
            "weights": self._width * self._frozen,
            "gradients": FP32 * self._frozen,
            "optimizer": exact + slots,
        }

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
        layers = self._model.layers.values()
        return max(map(self._elements, chain(self._model.root, *layers)))

    def _activations(self, row: str) -> dict[LayerShape, float]:
        """Return a micro-batch's bytes in each kind of layer, by a row of the table."""
        shape = self._model.shape
        engine = self._engine
        tensor = self._tensor
        divided = tensor if engine.megatron_sequence_parallel else 1
        sent = (engine.expert_tensor_parallel or tensor) / divided
        # Ranks that outnumber key heads gather the whole projection.
        splits = tensor if tensor <= shape.key_heads else 1
        by_kind = {}
        for kind in shape.counts:
            chosen = kind.experts_per_token if kind.experts else 0
            inner = chosen * kind.intermediate / divided if chosen else kind.intermediate / tensor
            widths = (
                shape.hidden / divided,
                shape.query / tensor,
                shape.key / min(tensor, shape.key_heads),
                (shape.query + 2 * shape.key) / splits,
                inner,
                chosen * shape.hidden * sent,
            )
            numbers = sum(n * width for n, width in zip(_ACTIVATIONS[row], widths, strict=True))
            by_kind[kind] = self._tokens * self._width * numbers
        return by_kind

    def _update(self, checkpointing: str) -> Iterator[Parts]:
        first, last = self._in_flight()
        saved = self._sum(self._activations(checkpointing))
        working = max(self._activations("backward").values())
        if checkpointing == "full":  # the backward pass computes one layer again
            working += max(self._activations("none").values())
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

"""What one decoder layer of the Megatron engine holds of a token while it runs forward and backward.

Written as `burnish.plan.activations` writes those of the torch engine, whose attention it shares: Megatron's
linear layers, its gated MLP, its token dispatcher, and our norm, rotation, core attention and experts between them. Tokens are
taken to be spread evenly over experts. Left out: TransformerEngine's fused layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from burnish.config.schema import EngineConfig
from burnish.families import Family
from burnish.plan.activations import Arithmetic, LayerWriter
from burnish.plan.shape import Layer
from burnish.plan.tape import Passes

_FP32 = 4
_INDEX = 8


@dataclass(frozen=True, slots=True)
class LayerCut:
    """How ranks share what is computed of a layer, beside `Arithmetic`."""

    scattered: bool
    """Whether tensor ranks have different tokens between matrices."""
    expert_parallel: int
    """Ranks that share the experts of a layer."""
    expert_tensor: int
    """Ranks that share the matrices of an expert."""

    @classmethod
    def of(cls, engine: EngineConfig) -> LayerCut:
        """As the settings say."""
        tensor = engine.tensor_parallel
        scattered = engine.megatron_sequence_parallel and tensor > 1
        within = engine.expert_tensor_parallel or tensor
        return cls(scattered, engine.expert_parallel, within)


def megatron_passes(
    family: Family, layer: Layer, arithmetic: Arithmetic, cut: LayerCut, *, attends_again: bool
) -> Passes:
    """The bytes per token of one layer; `attends_again`: attention is computed again in the backward pass."""
    return _MegatronWriter(family, layer, arithmetic, cut, attends_again).written()


class _MegatronWriter(LayerWriter):
    """Writes a layer's operations on a tape."""

    def __init__(
        self,
        family: Family,
        layer: Layer,
        arithmetic: Arithmetic,
        cut: LayerCut,
        attends_again: bool,
    ) -> None:
        super().__init__(family, layer, arithmetic)
        self._cut, self._attends_again = cut, attends_again
        self._hidden = self._whole / (arithmetic.tensor if cut.scattered else 1)

    def _gathered(self, source: str) -> str:
        """The linear layers gather tokens themselves, into a buffer that stays, and again in the backward pass."""
        return source

    def _wide(self, source: str, name: str, size: float) -> None:
        """A linear layer that begins a block; its gradient is that of all tensor ranks' tokens until it is added up."""
        scratch = self._whole if self._cut.scattered else 0.0
        self._tape.add([source], {name: size}, [source], scratch_backward=scratch, product=True)

    def _summed(self, source: str, name: str, elements: int) -> None:
        """The product that ends a block, and its sum over tensor ranks."""
        if not self._cut.scattered:
            self._tape.add([source], {name: self._hidden}, [source], product=True)
            return
        self._tape.add([source], {f"{name}/part": self._whole}, [source], product=True)
        self._tape.add([f"{name}/part"], {name: self._hidden})

    def _projected(self, source: str) -> float:
        """Queries, keys and values in one tensor; what of it are keys that this rank needs."""
        layer, mixed = self._layer, self._query + 2 * self._key
        if layer.key_heads >= self._tensor:
            self._wide(source, "mixed", mixed)
            return self._key
        # Ranks compute parts of heads, and take whole ones from each other.
        whole = mixed * self._tensor
        self._wide(source, "part", mixed)
        self._tape.add(["part"], {"mixed": whole}, scratch=whole, scratch_backward=whole)
        return self._key * self._tensor / layer.key_heads

    def _attention(self, source: str) -> None:
        layer, key = self._layer, self._projected(source)
        self._tape.add(["mixed"], {"query": self._query})
        normed = self._family.query_norms == "head"
        given = ("query", "mixed", "mixed")
        if normed:
            sums = _FP32 / self._tensor
            made = {"query/n": self._query, "query/r": sums * layer.heads}
            self._tape.add(["query"], made, ["query", "query/r"])
            made = {"key/n": key, "key/r": sums * layer.key_heads}
            self._tape.add(["mixed"], made, ["mixed", "key/r"])
            given = ("query/n", "key/n", "mixed")
        if self._attends_again:
            inside = 2 * (self._query + 2 * key) + self._query
            scratch = 2 * inside * (_FP32 / self._bytes if self._cpu else 1)
            made = {"taken": self._query}
            self._tape.add(given, made, sorted(set(given)), scratch_backward=scratch, product=True)
            self._summed("taken", "o", 0)
            return
        self._tape.add([given[0]], {"query/t": self._query})
        self._tape.add([given[1]], {"key/t": key})
        self._summed(self._attend(("query/t", "key/t", "mixed")), "o", 0)

    def _gated(self, source: str, size: float) -> str:
        """SwiGLU of a product twice as wide; Megatron adds an offset of 0 to one half."""
        self._tape.add([source], {"acted": size}, [source])
        self._tape.add([source], {"linear": size})
        self._tape.add(["acted", "linear"], {"inner": size}, ["acted", "linear"])
        return "inner"

    def _mlp(self, source: str) -> None:
        size = self._layer.intermediate * self._bytes / self._tensor
        self._wide(source, "fc1", 2 * size)
        self._summed(self._gated("fc1", size), "d", 0)

    def _experts(self, source: str) -> None:
        """Every token once for each expert that it goes to: sent, sorted, computed, and all of it back."""
        layer, cut, tape = self._layer, self._cut, self._tape
        mine = layer.chosen * self._hidden  # what this rank sends, and what it has on average
        rows = mine * cut.expert_tensor
        inner = rows / layer.hidden * layer.intermediate / cut.expert_tensor
        logits = layer.experts * self._hidden / layer.hidden
        tape.add([source], {"logits": logits}, [source])
        counts = logits / self._bytes
        tape.add(["logits"], {"probs": logits, "map": counts * (1 + _FP32)}, ["probs", "map"])
        tape.add([source], {"sent": mine, "index": mine / layer.hidden / self._bytes * _INDEX})
        there = self._passed("sent", "arrived", mine, cut.expert_parallel)
        there = self._passed(there, "gathered", rows, cut.expert_tensor)
        several = layer.experts > cut.expert_parallel
        if several:
            there = self._passed(there, "sorted", rows, 2)
        tape.add([there], {"fc1": 2 * inner}, [there], product=True)
        tape.add(["fc1"], {"acted": inner}, ["fc1"])
        tape.add(["acted", "fc1"], {"inner": inner}, ["acted", "fc1"])
        tape.add(["inner", "probs"], {"scaled": inner}, ["inner", "probs"])
        tape.add(["scaled"], {"out": rows}, ["scaled"], product=True)
        back = "out"
        if several:
            back = self._passed("out", "joined", rows, 2)
            back = self._passed(back, "unsorted", rows, 2)
        back = self._passed(back, "summed", mine, cut.expert_tensor)
        back = self._passed(back, "returned", mine, cut.expert_parallel)
        tape.add([back, "index"], {"d": self._hidden}, ["index"])

    def _passed(self, source: str, name: str, size: float, ranks: int) -> str:
        """A copy that is kept by nobody, where there is anybody to pass it to."""
        if ranks == 1:
            return source
        self._tape.add([source], {name: size})
        return name

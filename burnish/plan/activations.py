"""What one decoder layer holds of a token while it runs forward and backward.

Each layer is written down once, as the operations that the engine runs (`burnish.models.kernels.fused`,
`burnish.models.kernels.attention`, transformers' own modules), on a tape that says what that holds
(`burnish.plan.tape`). Left out: how many tokens there are (`burnish.plan.memory`).
"""

from __future__ import annotations

from dataclasses import dataclass

from burnish.config.schema import LoraConfig
from burnish.families import Family
from burnish.plan.shape import Layer, adapts
from burnish.plan.tape import Passes, Tape

_FP32 = 4
_INDEX = 8
_LINEAR = {name: f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up")} | {
    "d": "down_proj",
    "o/part": "o_proj",
    "d/part": "down_proj",
}
"""The linear layers that make tensors of these names."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What the engine computes in, and where."""

    bytes: int
    """Of an element of what matrix products take and give."""
    cpu: bool
    """Whether the portable attention path runs."""
    sequence: int = 1
    """Processes that share the tokens of a micro-batch, and inside attention the heads instead."""
    tensor: int = 1
    """Processes that share the matrices of a layer, and between its blocks the tokens."""
    lora: LoraConfig | None = None
    """The adapter that is trained; None: the model is."""
    exact_cache: bool = False
    """Whether completions share their prompts in fp32 while they are generated, as on CPUs without matrix units."""


def layer_passes(family: Family, layer: Layer, arithmetic: Arithmetic) -> Passes:
    """The bytes per token of one layer's operations."""
    return LayerWriter(family, layer, arithmetic).written()


class LayerWriter:
    """Writes a layer's operations on a tape, as the torch engine runs them."""

    def __init__(self, family: Family, layer: Layer, arithmetic: Arithmetic) -> None:
        self._tape, self._family, self._layer = Tape(), family, layer
        self._bytes, self._cpu = arithmetic.bytes, arithmetic.cpu
        self._sequence = arithmetic.sequence
        self._tensor = arithmetic.tensor
        self._lora = arithmetic.lora
        self._whole = float(layer.hidden * arithmetic.bytes)
        self._hidden = self._whole / arithmetic.tensor  # between blocks
        self._query = layer.query * arithmetic.bytes / arithmetic.tensor
        self._key = layer.key * arithmetic.bytes / arithmetic.tensor

    def written(self) -> Passes:
        """Attention and MLP, each added to the hidden state."""
        family = self._family
        doubly = len(family.norms) == 4
        source = self._norm("x", "n1", self._hidden) if family.norms_first else "x"
        self._attention(self._gathered(source))
        attended = self._norm("o", "on", self._hidden) if doubly or not family.norms_first else "o"
        self._tape.add(["x", attended], {"x1": self._hidden})
        source = self._norm("x1", "n2", self._hidden) if family.norms_first else "x1"
        if self._layer.experts:
            self._experts(self._gathered(source))
        else:
            self._mlp(self._gathered(source))
        given = self._norm("d", "dn", self._hidden) if doubly or not family.norms_first else "d"
        self._tape.add(["x1", given], {"x2": self._hidden})
        return self._tape.run({"x": self._hidden})

    def _gathered(self, source: str) -> str:
        """The tokens of all tensor ranks, as a block begins."""
        if self._tensor == 1:
            return source
        self._tape.add([source], {f"{source}/all": self._whole})
        return f"{source}/all"

    def _summed(self, source: str, name: str, elements: int) -> None:
        """The product that ends a block; of the sum over tensor ranks each keeps its own tokens."""
        if self._tensor == 1:
            self._linear(source, name, self._hidden, elements)
            return
        self._linear(source, f"{name}/part", self._whole, elements)
        self._tape.add([f"{name}/part"], {name: self._hidden})

    def _norm(self, source: str, name: str, size: float) -> str:
        """An RMSNorm; the fused one keeps its input, transformers' what it computes in fp32 as well, the last of it for the gradient of its weight."""
        if self._family.has_llama_layers:
            self._tape.add([source], {name: size, f"{name}/r": _FP32}, [source, f"{name}/r"])
            return name
        wide = size * _FP32 / self._bytes
        exact = source
        if self._bytes != _FP32:
            exact = f"{name}/exact"
            self._tape.add([source], {exact: wide})
        self._tape.add(
            [exact], {f"{name}/normed": wide}, [exact], scratch=wide, scratch_backward=2 * wide
        )
        keeps = [f"{name}/normed"] if self._lora is None else []
        self._tape.add([f"{name}/normed"], {f"{name}/wide": wide}, keeps)
        if self._bytes == _FP32:
            return f"{name}/wide"
        self._tape.add([f"{name}/wide"], {name: size})
        return name

    def _linear(self, source: str, name: str, size: float, elements: int) -> None:
        target = _LINEAR.get(name, "")
        if not adapts(self._lora, target):
            self._product(source, name, size, elements // self._tensor)
            return
        a, b = self._factors(target)
        base, narrow, wide, scaled = (f"{name}/{each}" for each in ("base", "a", "b", "s"))
        rank = self._rank
        self._tape.add([source], {base: size}, product=True)
        self._tape.add([source], {narrow: rank}, [source], weight=a, product=True)
        self._tape.add([narrow], {wide: size}, [narrow], weight=b, product=True)
        self._tape.add([wide], {scaled: size})
        self._tape.add([base, scaled], {name: size})

    def _product(self, source: str, name: str, size: float, elements: int) -> None:
        """A product with a weight of so many elements; beside an adapter that has no gradient, and needs nothing kept."""
        trained = self._lora is None
        keeps, weight = ([source], elements) if trained else ([], 0)
        self._tape.add([source], {name: size}, keeps, weight=weight, product=True)

    def _factors(self, target: str) -> tuple[int, int]:
        """Elements that a process has of A and B of the adapter beside a weight, gathered."""
        assert self._lora is not None
        (weight,) = (w for w in self._layer.weights if w.linear == target)
        a, b = weight.factors(self._lora.rank)
        return a.held(1, self._tensor), b.held(1, self._tensor)

    @property
    def _rank(self) -> float:
        """Bytes of a token between A and B."""
        return float(self._lora.rank * self._bytes) if self._lora else 0.0

    def _grouped(self, source: str, name: str, size: float, elements: int, target: str) -> None:
        """A product of each token with those experts that it goes to; see `burnish.models.lora.experts`."""
        if not adapts(self._lora, target):
            self._product(source, name, size, elements)
            return
        base, narrow, wide = (f"{name}/{each}" for each in ("base", "a", "b"))
        rank = self._layer.chosen * -(-self._rank // (8 * self._bytes)) * 8 * self._bytes
        a, b = self._factors(target)
        self._tape.add([source], {base: size}, product=True)
        self._tape.add([source], {narrow: rank}, [source], weight=a, product=True)
        self._tape.add([narrow], {wide: size}, [narrow], weight=b, product=True)
        self._tape.add([base, wide], {name: size})

    def _attention(self, source: str) -> None:
        layer = self._layer
        rotated = []
        for name, size, heads in (
            ("q", self._query, layer.heads),
            ("k", self._key, layer.key_heads),
        ):
            self._linear(source, name, size, layer.hidden * int(size * self._tensor / self._bytes))
            rotated.append(self._rotated(name, size, heads / self._tensor))
        self._linear(source, "v", self._key, layer.hidden * layer.key)
        taken = self._attend((rotated[0], rotated[1], "v"))
        self._summed(taken, "o", layer.query * layer.hidden)

    def _rotated(self, name: str, size: float, heads: float) -> str:
        turned = f"{name}/turned"
        if not self._family.has_llama_layers:
            normed = name
            if self._family.query_norms != "none":
                normed = self._norm(name, f"{name}/n", size)
            self._tape.add([normed], {turned: size}, scratch=2 * size, scratch_backward=2 * size)
            return turned
        inverse = {f"{name}/r": _FP32 * heads}
        if name == "q":  # sine, and cosine where it has to be converted, made once a layer
            width = self._layer.query / self._layer.heads
            inverse["angles"] = _FP32 * width * (1 if self._bytes == _FP32 else 2)
        keeps = [*inverse, name] if self._family.query_norms == "head" else [*inverse]
        self._tape.add([name], {turned: size} | inverse, keeps)
        return turned

    def _attend(self, given: tuple[str, str, str]) -> str:
        """Attention over queries, keys and values; the name of its output."""
        parts, sizes = self._exchanged(given)
        sums = _FP32 * self._layer.heads / self._tensor
        if not self._cpu:
            keeps = [*parts, "out", "lse"]
            self._tape.add(parts, {"out": self._query, "lse": sums}, keeps, product=True)
            return self._returned("out")
        ordered = {f"{p}/ordered": s for p, s in zip(parts, sizes, strict=True)}
        self._tape.add(parts, ordered)
        if self._bytes == _FP32:
            made = {"out": self._query, "lse": sums}
            self._tape.add(tuple(ordered), made, [*ordered, *made], product=True)
        else:  # fp32 of queries, keys and values; backward also of the gradients that come in and go out
            exact = sum(ordered.values()) * _FP32 / self._bytes
            self._tape.add(
                tuple(ordered),
                {"out": self._query},
                [*ordered],
                scratch=exact,
                scratch_backward=2 * exact,
                product=True,
            )
        self._tape.add(["out"], {"joined": self._query})
        self._tape.add(["joined"], {"taken": self._query}, scratch=self._query)
        return self._returned("taken")

    def _exchanged(self, parts: tuple[str, str, str]) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Ulysses: all tokens of some heads for some tokens of all heads; key heads are repeated where they are too few."""
        ranks = self._sequence
        repeated = max(1.0, ranks * self._tensor / self._layer.key_heads)
        sizes = (self._query, self._key * repeated, self._key * repeated)
        if ranks == 1:
            return parts, sizes
        made = {f"{name}/heads": size for name, size in zip(parts, sizes, strict=True)}
        self._tape.add(parts, made, scratch=sum(sizes), scratch_backward=sum(sizes))
        return tuple(made), sizes

    def _returned(self, name: str) -> str:
        """And back."""
        if self._sequence == 1:
            return name
        self._tape.add([name], {"home": self._query}, scratch=self._query)
        return "home"

    def _mlp(self, source: str) -> None:
        layer, size = self._layer, self._layer.intermediate * self._bytes / self._tensor
        elements = layer.hidden * layer.intermediate
        self._linear(source, "gate", size, elements)
        self._tape.add(["gate"], {"acted": size}, ["gate"])
        self._linear(source, "up", size, elements)
        self._tape.add(["acted", "up"], {"inner": size}, ["acted", "up"])
        self._summed("inner", "d", elements)

    def _experts(self, source: str) -> None:
        """transformers' grouped products: every token once for each expert that it goes to."""
        layer, tape, chosen = self._layer, self._tape, self._layer.chosen
        inner = chosen * layer.intermediate * self._bytes / self._tensor
        outer = chosen * self._whole
        elements = layer.experts * layer.hidden * layer.intermediate // self._tensor
        self._linear(
            source, "logits", float(layer.experts * self._bytes), layer.experts * layer.hidden
        )
        tape.add(
            ["logits"],
            {"probs": float(_FP32 * layer.experts), "choice": float(4 * _INDEX * chosen)},
            ["probs", "choice"],
        )
        tape.add([source], {"sent": outer})
        self._grouped("sent", "gate_up", 2 * inner, 2 * elements, "experts.gate_up_proj")
        tape.add(["gate_up"], {"acted": inner}, ["gate_up"])
        tape.add(["acted", "gate_up"], {"inner": inner}, ["acted", "gate_up"])
        self._grouped("inner", "got", outer, elements, "experts.down_proj")
        tape.add(["got"], {"weighted": outer}, ["got"])
        tape.add(["weighted"], {"sorted": outer})
        ends = "d" if self._tensor == 1 else "d/part"
        tape.add(["sorted"], {ends: self._whole})
        if self._tensor > 1:
            tape.add([ends], {"d": self._hidden})

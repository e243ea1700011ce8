"""Count parameters, sequences, and bytes of a token in each layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple, Self

from burnish.config.algorithm import AlgorithmConfig
from burnish.config.distillation import DistillConfig
from burnish.config.frozen_models import FrozenModel
from burnish.config.schema import (
    AUTO_TOKENS,
    MOST_SLOTS,
    BatchConfig,
    DataConfig,
    EngineConfig,
    LoraConfig,
    RolloutConfig,
)
from burnish.families import Family, LayerShape, ModelShape
from burnish.models.flops import ModelFlops
from burnish.models.lora.adapter_config import NF4_BLOCK, are_parameters, require_targets

FP32 = 4
"""Bytes of an fp32 number."""
ASSUMED_PROMPT = 512
"""Tokens of a prompt, if `data.max_prompt_length` is not given."""
NF4_BYTES = NF4_BLOCK // 2 + FP32
"""Bytes of a block of weights in 4 bits."""
CHUNK = 64
"""Tokens of which Gated DeltaNet computes the products at one time."""
_BF16 = 2
_MLP = ("gate_proj", "up_proj", "down_proj")
# Suffixes of linear layers whose columns tensor parallelism divides.
_CUT_BY_COLUMNS = ("o_proj", "down_proj", "out_proj")
# Linear layers that every tensor rank holds, and other parameters of heads, which tensor ranks divide.
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "shared_expert_gate", "wg")
_CUT_BY_HEADS = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.conv1d.weight", "sinks")


def product_bytes(engine: EngineConfig) -> int:
    """Return a number's bytes in matrix products."""
    return FP32 if engine.precision == "fp32" else _BF16


def shards_of(engine: EngineConfig, processes: int) -> int:
    """Return how many processes divide one copy by FSDP, or Megatron's data-parallel processes."""
    return processes // (engine.replicas * engine.tensor_parallel * engine.pipeline_parallel)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter. FSDP2 cuts it along its first dim."""

    rows: int
    """Size of the first dim."""
    columns: int = 1
    """Elements of a row."""
    linear: str = ""
    """The layer's name in `model.lora.targets`; empty for norms and tables."""
    shared: bool = False
    """Whether tensor parallelism divides it."""
    experts: int = 0
    """The number of experts whose matrices it holds; 0 if it belongs to no experts."""
    width: int = 0
    """Size of the last dim."""

    @property
    def elements(self) -> int:
        """All elements."""
        return self.rows * self.columns

    @property
    def is_mlp(self) -> bool:
        """Whether it belongs to an MLP or to experts."""
        return self.experts > 0 or self.linear in _MLP

    @property
    def is_cut_by_columns(self) -> bool:
        """Whether tensor parallelism divides columns of it, not rows."""
        return self.linear.endswith(_CUT_BY_COLUMNS)

    def held(self, shards: int, tensor: int) -> int:
        """Return the fullest rank's elements, with rows cut as torch.chunk cuts them."""
        return -(-self.rows // shards) * self.columns // (tensor if self.shared else 1)

    def in_nf4(self, width: int) -> Weight:
        """Return a linear layer's weight in 4 bits, as numbers of `width` bytes. Others stay as they are."""
        if not self.linear or self.experts or not self.width or self.columns % NF4_BLOCK:
            return self
        return replace(self, columns=self.columns // NF4_BLOCK * NF4_BYTES // width)

    def factors(self, rank: int) -> tuple[Weight, Weight]:
        """Return A and B of a LoRA of this `rank`. Tensor parallelism divides one."""
        inner = rank * (self.experts or 1)
        by_columns = self.is_cut_by_columns
        rows = self.elements // ((self.experts or 1) * self.width)
        a = Weight(inner, self.width, self.linear, self.shared and by_columns, self.experts)
        return a, Weight(rows, inner, self.linear, self.shared and not by_columns, self.experts)


def held(weights: Iterable[Weight], shards: int, tensor: int) -> int:
    """Return the fullest rank's elements of all `weights`."""
    return sum(weight.held(shards, tensor) for weight in weights)


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A causal language model, or one that scores values."""

    shape: ModelShape
    """Sizes and parameters, from its config.json."""
    lora: LoraConfig | None = None
    """The adapter that is trained in its place."""
    scores_values: bool = False
    """Whether a value head replaces the output layer."""
    train: Sequence[str] = ()
    """`model.train`."""

    @cached_property
    def layers(self) -> dict[LayerShape, tuple[Weight, ...]]:
        """Parameters of each kind of layer."""
        weight = partial(_weight, self.shape.family)
        return {each: tuple(map(weight, each.parameters)) for each in self.shape.counts}

    @cached_property
    def cut(self) -> set[int]:
        """Sizes that every Megatron-Core divides among tensor ranks, without those of experts."""
        cut = [w for each in self.layers.values() for w in each if w.shared and not w.experts]
        sizes = {w.width if w.is_cut_by_columns else w.rows for w in cut}
        # 0.16 cannot divide gates, which come with the queries, among ranks that share a key head.
        is_gated = any(w.linear == "q_proj" and w.rows == 2 * self.shape.query for w in cut)
        return sizes | {self.shape.key_heads} if is_gated else sizes

    @property
    def is_quantized(self) -> bool:
        """Whether the frozen linear layers are held in 4 bits."""
        return self.lora is not None and self.lora.quantize_base != "none"

    def stored(self, width: int) -> dict[LayerShape, tuple[Weight, ...]]:
        """Return `layers` as they are held, in numbers of `width` bytes."""
        if not self.is_quantized:
            return self.layers
        return {kind: tuple(w.in_nf4(width) for w in each) for kind, each in self.layers.items()}

    @cached_property
    def trained(self) -> dict[LayerShape, tuple[Weight, ...]]:
        """Trained parameters by kind of layer."""
        if self.lora is None:
            return self.layers
        return {kind: tuple(self._beside(kind, self.lora)) for kind in self.layers}

    @cached_property
    def unfrozen(self) -> float:
        """The share of the parameters that `train` leaves trained."""
        if not self.train:
            return 1.0
        from burnish.models.freezing import matching  # a plan of whole models needs no torch

        sizes = {name: math.prod(shape) for name, shape in self.shape.parameters}
        for number, layer in enumerate(self.shape.layers):
            sizes |= {f"model.layers.{number}.{n}": math.prod(s) for n, s in layer.parameters}
        others = {"lm_head.weight": "model.embed_tokens.weight"} if self.shape.tied else {}
        chosen = matching([*sizes, *others], self.train)
        return sum(sizes[n] for n in {others.get(n, n) for n in chosen}) / sum(sizes.values())

    def _beside(self, kind: LayerShape, lora: LoraConfig) -> Iterator[Weight]:
        for (name, _), weight in zip(kind.parameters, self.layers[kind], strict=True):
            if _is_in(lora.modules_to_save, name):
                yield weight
            elif self.adapts(weight.linear):
                yield from weight.factors(lora.rank)
                if lora.dora:
                    yield Weight(weight.rows)

    @cached_property
    def trained_root(self) -> tuple[Weight, ...]:
        """Trained parameters outside the layers."""
        if self.lora is None:
            return self.root
        whole = self.lora.modules_to_save
        if self.trains_head and self.shape.tied:
            whole = [*whole, "embed_tokens"]
        named = zip(self.shape.parameters, self.root, strict=True)
        return tuple(weight for (name, _), weight in named if _is_in(whole, name))

    @property
    def trains_head(self) -> bool:
        """Whether the output layer gets gradients."""
        if self.lora is None:
            return True
        names = ("lm_head", "model.embed_tokens") if self.shape.tied else ("lm_head",)
        return any(_is_in(self.lora.modules_to_save, f"{name}.weight") for name in names)

    def adapts(self, linear: str) -> bool:
        """Return whether the adapter covers layers of this name."""
        if self.lora is None or not linear:
            return False
        if targets := self.lora.targets or self.shape.adaptable:
            return linear in targets
        # PEFT takes the MLPs of a mixture for experts.
        return not are_parameters(linear) and not (self.shape.experts and linear in _MLP)

    def trains(self, linear: str) -> bool:
        """Return whether layers of this name, or their adapter, get gradients."""
        return self.lora is None or self.adapts(linear)

    @cached_property
    def root(self) -> tuple[Weight, ...]:
        """Parameters outside the layers."""
        table = Weight(self.shape.vocabulary, self.shape.hidden, shared=True)
        norm = Weight(self.shape.hidden)
        return (table, norm) if self.shape.tied or self.scores_values else (table, norm, table)

    @property
    def outputs(self) -> int:
        """Numbers per token: logits, or one value."""
        return 1 if self.scores_values else self.shape.vocabulary

    @cached_property
    def elements(self) -> int:
        """Elements of all parameters."""
        return self.total(self.layers) + sum(weight.elements for weight in self.root)

    def total(self, weights: dict[LayerShape, tuple[Weight, ...]]) -> int:
        """Return the elements in all layers."""
        return sum(
            sum(w.elements for w in weights[kind]) * n for kind, n in self.shape.counts.items()
        )

    @cached_property
    def matrices(self) -> int:
        """Elements of the layers' matrices."""
        layers = self.layers.items()
        return self.total({kind: tuple(w for w in each if w.columns > 1) for kind, each in layers})

    @cached_property
    def of_experts(self) -> int:
        """Elements of experts."""
        layers = self.layers.items()
        return self.total({kind: tuple(w for w in each if w.experts) for kind, each in layers})

    @cached_property
    def adapter(self) -> int:
        """Elements of the adapter and of what is trained whole beside it, or 0."""
        if self.lora is None:
            return 0
        return self.total(self.trained) + sum(weight.elements for weight in self.trained_root)

    def require_targets(self) -> None:
        """Raise `IncompatibleError` if the adapter's layers are missing."""
        if self.lora is not None:
            names = {weight.linear for weights in self.layers.values() for weight in weights}
            require_targets(self.lora.targets, sorted(names - {""}))

    @property
    def published_adapter(self) -> int:
        """Elements of an unmerged adapter, or 0."""
        return self.adapter if self.lora is not None and self.lora.publish == "adapter" else 0

    @cached_property
    def flops(self) -> ModelFlops:
        """Operations of a forward pass."""
        head = self.outputs * self.shape.hidden
        active = head + sum(
            _active(kind, self.layers[kind]) * n for kind, n in self.shape.counts.items()
        )
        attention: Counter[int | None] = Counter()
        for layer in self.shape.layers:
            attention[layer.window] += 4 * self.shape.query
        return ModelFlops(2.0 * active, attention, 2.0 * head)


def _is_in(modules: Iterable[str], parameter: str) -> bool:
    """Return whether a parameter is in a module that `model.lora.modules_to_save` names."""
    return parameter.rpartition(".")[0].endswith((*modules,))


def _weight(family: Family, parameter: tuple[str, tuple[int, ...]]) -> Weight:
    name, sizes = parameter
    module, _, kind = name.rpartition(".")
    linear = module.rpartition(".")[2]
    if linear == "experts":
        experts, *others = sizes
        named = f"experts.{kind}" if len(others) == 2 else ""
        return Weight(experts, math.prod(others), named, True, experts, others[-1])
    if "_proj" not in linear and linear not in _WHOLE:
        of_heads = family.query_norms == "full" and linear in family.query_norm_names
        is_cut = of_heads or name.endswith(_CUT_BY_HEADS)
        return Weight(sizes[0], math.prod(sizes[1:]), shared=is_cut)
    is_cut = linear not in _WHOLE
    if kind == "bias":
        return Weight(sizes[0], shared=is_cut and linear not in _CUT_BY_COLUMNS)
    return Weight(sizes[0], sizes[1], linear, is_cut, 0, sizes[1])


def _active(layer: LayerShape, weights: Iterable[Weight]) -> int:
    matrices = [weight for weight in weights if weight.columns > 1]
    experts = sum(weight.elements for weight in matrices if weight.experts)
    others = sum(weight.elements for weight in matrices if not weight.experts)
    return others + experts * layer.experts_per_token // max(layer.experts, 1)


class PlannedBeside(NamedTuple):
    """A frozen model beside the trained one."""

    said: FrozenModel
    """What the method says of it."""
    model: PlannedModel

    @classmethod
    def of(cls, said: FrozenModel, shape: ModelShape) -> Self:
        """Make it from the sizes of its config.json."""
        return cls(said, PlannedModel(shape, scores_values=said.gives == "scores"))


class TokenBytes(NamedTuple):
    """Bytes of a token in a layer, by checkpointing."""

    none: float
    """Kept for the backward pass."""
    selective: float
    """Kept when elementwise operations are recomputed."""
    full: float
    """Kept when the whole layer is recomputed."""
    forward: float
    """Most at one time while nothing is kept."""
    mlp_backward: float
    """Most while the backward pass is in the MLP."""
    attention_backward: float
    """Most while the backward pass is in attention."""


def token_bytes(
    model: PlannedModel, layer: LayerShape, engine: EngineConfig, width: int, *, cpu: bool
) -> TokenBytes:
    """Return a token's bytes in a layer, with `width` bytes per number of a product."""
    part = _hidden(model, engine, width)
    attention, mlp = _of_torch(model, layer, engine, width, cpu)
    saved = attention.saved + mlp.saved
    return TokenBytes(
        saved,
        attention.products + mlp.products,
        part,
        2 * part + max(attention.forward, mlp.forward),
        saved + part + mlp.backward,
        attention.saved + part + attention.backward,
    )


class _Block(NamedTuple):
    saved: float
    products: float
    """Kept with selective checkpointing."""
    forward: float
    """Most in the forward pass, if nothing is kept."""
    backward: float
    """Most in the backward pass, in addition to the kept bytes."""


def _hidden(model: PlannedModel, engine: EngineConfig, width: int) -> float:
    """Return a token's bytes of the hidden state between blocks, where tensor ranks divide tokens."""
    return model.shape.hidden * width / engine.tensor_parallel


def _heads(shape: ModelShape, engine: EngineConfig, width: int) -> tuple[float, float]:
    """Return a token's bytes of queries and of keys on a rank; ranks repeat key heads if there are too few."""
    tensor = engine.tensor_parallel
    sequence = engine.sequence_parallel
    key = shape.key * width * max(1 / tensor, sequence / shape.key_heads)
    return shape.query * width / tensor, key


def _of_torch(
    model: PlannedModel, layer: LayerShape, engine: EngineConfig, width: int, cpu: bool
) -> tuple[_Block, _Block]:
    family = model.shape.family
    trains = model.trains
    exact = FP32 / width
    tensor = engine.tensor_parallel
    part = _hidden(model, engine, width)
    whole = part * tensor
    query, key = _heads(model.shape, engine, width)
    rank = (model.lora.rank if model.lora else 0) * width
    heads = query + 2 * key
    drops = model.lora is not None and model.lora.dropout > 0
    copies = cpu or engine.sequence_parallel > 1
    fused = family.has_llama_layers
    # A fused norm keeps its input; transformers' keeps fp32 copies, for its weight's gradient too.
    normed = 1.0 if fused else exact * (2 if model.lora is None else 1)
    norms = len(family.norms) / 2 * normed * part
    norm_work = 0.0 if fused else 3 * exact * part

    def inputs(source: float, *names: str) -> float:
        """Return bytes of linear layers' inputs, and of their adapters' narrow outputs."""
        saved = source if any(map(trains, names)) else 0.0
        if drops:  # each adapter keeps what it sees of the inputs, and a byte for each
            saved = (source + source / width) * sum(map(model.adapts, names))
        return saved + rank * sum(map(model.adapts, names))

    def outputs(*linears: tuple[str, float]) -> float:
        return sum(size + (size + rank) * model.adapts(name) for name, size in linears)

    attention = _Block(
        saved=norms
        + inputs(whole, "q_proj", "k_proj", "v_proj")
        + (query + key) * normed * (family.query_norms != "none")
        + heads
        + (0 if cpu and width != FP32 else query)
        + inputs(query if copies or drops else 0.0, "o_proj"),
        products=part
        + outputs(("q_proj", query), ("k_proj", key), ("v_proj", key))
        + query
        + outputs(("o_proj", whole)),
        forward=max(whole + heads * (3 if copies else 1) + query, norm_work),
        backward=max(heads * (2 * exact if cpu else 1) + query, norm_work),
    )
    if not layer.experts:
        inner = layer.intermediate * width / tensor
        mlp = _Block(
            saved=norms
            + inputs(whole, "gate_proj", "up_proj")
            + 3 * inner
            + inputs(inner, "down_proj"),
            products=outputs(("gate_proj", inner), ("up_proj", inner), ("down_proj", whole)),
            forward=max(3 * inner, whole + 2 * inner, norm_work),
            backward=max(2 * inner, norm_work),
        )
        return attention, mlp
    gate_up = "experts.gate_up_proj"
    down = "experts.down_proj"
    sent = layer.experts_per_token * whole
    exchanged = sent if engine.expert_parallel > 1 else 0.0  # while others' rows arrive
    inner = layer.experts_per_token * layer.intermediate * width / tensor
    rank *= layer.experts_per_token
    router = (FP32 + width) * layer.experts
    mlp = _Block(
        saved=norms
        + (whole if model.lora is None else 0)
        + router
        + inputs(sent, gate_up)
        + 3 * inner
        + inputs(inner, down)
        + sent,
        products=router + outputs((gate_up, 2 * inner), (down, sent)),
        forward=exchanged + max(sent + 2 * inner, 3 * inner, 2 * sent),
        backward=exchanged + max(2 * sent, 2 * inner),
    )
    return attention, mlp


@dataclass(frozen=True, slots=True)
class Workload:
    """The sequences of a step, each as long as allowed."""

    budget: int
    """Most tokens of a micro-batch on each device."""
    sequences: int
    """Sequences over all devices."""
    prompt: int
    """Tokens of a prompt; 0 in supervised fine-tuning."""
    trained: int
    """Tokens of each sequence that are trained on."""
    updates: int = 1
    """Optimizer steps in one epoch."""
    epochs: int = 1
    """Passes of training over the sequences."""
    scorings: int = 0
    """Forward passes of policy and reference before the updates."""
    has_reference: bool = False
    """Whether a frozen reference scores the sequences."""
    has_critic: bool = False
    """Whether a second model learns values."""
    critic_rank: int = 0
    """The rank of the adapter that this model trains; 0: it is trained whole."""
    compares: Literal["", "uniform", "topk", "all"] = ""
    """What an update compares each trained token's whole distribution with, in a second pass of the output layer: nothing, all words alike (label smoothing), or teachers' (`distill.tokens`)."""
    start_teaches: bool = False
    """Whether the reference is a teacher."""
    slots: int = 0
    """Most sequences that a device generates at one time; 0: none are generated."""
    generates_beside: bool = False
    """Whether completions are generated on the same device during updates."""
    generator_ranks: int = 1
    """Devices that share a generator's weights."""
    fits_slots: bool = False
    """Whether `slots` is halved until memory has room for the sequences."""
    is_nucleus: bool = False
    """Whether sampling sorts the vocabulary."""
    samples: int = 1
    """Sequences of each prompt."""
    takes_turns: bool = False
    """Whether sequences are conversations, which the generator keeps between their turns."""
    is_replayed: bool = False
    """Whether the updates know the experts of each token."""
    saves_in_background: bool = False
    """Whether a save begins with a copy of the state in host memory."""

    @classmethod
    def of_examples(cls, batch: BatchConfig, data: DataConfig) -> Self:
        """Return the work of fine-tuning."""
        longest = AUTO_TOKENS if batch.is_auto else batch.tokens
        return cls(batch.tokens, batch.examples, 0, data.max_length or longest)

    @classmethod
    def of_completions(
        cls,
        batch: BatchConfig,
        data: DataConfig,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
    ) -> Self:
        """Return the work of reinforcement learning."""
        several = batch.minibatches * batch.epochs > 1
        replay = algorithm.router_replay
        recomputes = several and "recompute" in (algorithm.old_logprobs, replay)
        slots = MOST_SLOTS if rollout.slots == "auto" else rollout.slots
        compared = 0 if algorithm.kl.coef == 0 else 2 if algorithm.kl.place == "reward" else 1
        return cls(
            budget=batch.tokens,
            sequences=batch.prompts * rollout.n,
            prompt=data.max_prompt_length or ASSUMED_PROMPT,
            trained=rollout.max_response_length,
            updates=batch.minibatches,
            epochs=batch.epochs,
            scorings=int(recomputes) + compared,
            has_reference=compared > 0,
            has_critic=algorithm.advantage.name == "gae",
            slots=slots if rollout.place != "servers" else 0,
            generates_beside=rollout.place == "child" and rollout.ahead > 0,
            generator_ranks=rollout.tensor_parallel,
            fits_slots=rollout.slots == "auto",
            is_nucleus=rollout.top_p < 1,
            samples=rollout.n,
            takes_turns=rollout.environment.target is not None,
            is_replayed=replay == "rollout" or (replay == "recompute" and several),
        )

    def within(self, positions: int | None) -> Self:
        """Return the work with sequences of at most as many tokens as the model has positions."""
        if positions is None or self.length <= positions:
            return self
        trained = min(self.trained, positions)
        return replace(self, trained=trained, prompt=positions - trained)

    def of_rows(self, tokens: int) -> Self:
        """Return the work with rows of so many tokens: whole sequences, or prompts of completions as long as allowed."""
        if self.prompt:
            return replace(self, prompt=tokens)
        return replace(self, trained=tokens)

    @property
    def alone(self) -> Self:
        """The work of a critic or reward model."""
        return replace(self, has_critic=False, has_reference=False, slots=0, compares="")

    def with_critic(self, rank: int) -> Self:
        """Return the work with this `critic.lora_rank`."""
        return replace(self, critic_rank=rank)

    def taught(self, distill: DistillConfig) -> Self:
        """Return the work with teachers. One that is the start is the reference."""
        starts = sum(each.is_start for each in distill.teachers)
        compares = self.compares
        if distill.teachers and distill.tokens != "sampled":
            compares = distill.tokens
        return replace(
            self,
            compares=compares,
            scorings=self.scorings + starts,
            has_reference=self.has_reference or starts > 0,
            start_teaches=starts > 0,
        )

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.trained

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.length

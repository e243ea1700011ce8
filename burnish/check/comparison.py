"""Compare what Burnish computes with plain transformers, which runs sequences one by one."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from burnish.algorithms.aggregation import aggregation
from burnish.boxes.shards import Shard
from burnish.check.plain_model import Difference, difference, plain_outputs
from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.data.batching import make_batch
from burnish.distributed.collectives import gather_objects
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine, LossFn, Part, compute_dtype
from burnish.engines.expert_load import biases_of
from burnish.engines.torch.parallelize import keep_activations
from burnish.errors import BurnishError
from burnish.families import family_of
from burnish.models.heads import has_value_head
from burnish.models.lora.adapter import Adapter
from burnish.models.meta_init import (
    build_on_meta,
    count_flops,
    materialize,
    plain_model,
    router_sizes,
)
from burnish.models.names import Region, is_matrix, model_shards, regions
from burnish.models.scorer import Scorer, ScoringPlan
from burnish.records import Batch, Example, MicroBatch, TokenOutputs
from burnish.records.columns import TrainingArrays, columns_of
from burnish.records.seeds import derive_seed
from burnish.tracking.stats import Stats

TOLERANCE = 1e-4
"""Most relative difference (2-norm) by another order of fp32 sums."""
_LR = 1e-3
_TEMPERATURE = 0.8
_SEED = 5
"""Of the step, of the outputs, and of the weights."""
_OF_ENTROPY = 0.3
_OF_COLUMNS = 0.01
"""How much entropies count in the loss, and the per-token columns of a batch."""
_LEAST = 1e-2
"""Least norm that a gradient's error is divided by, relative to all gradients' norm: some gradients are 0 but for rounding."""
_LEAST_LOSS = 0.1
"""Least loss that its error is divided by: values of both signs may cancel out."""
_SPREAD = 0.2
"""Standard deviation of random biases, and of a norm's weights around 1."""
_ENTROPIES = "entropies"
_BALANCE = "load-balancing loss"
_COPIES = "copies"
_OF_PARAMETERS = ("gradient of ", "weight ")

COLUMNS = tuple(name for name, kind in columns_of(TrainingArrays).items() if kind.dims == 1)
"""The per-token columns of a batch that `weighted_output` reads."""

Tensors = Mapping[str, Tensor]
"""By name; whole tensors on the CPU."""


@dataclass(frozen=True, slots=True)
class Material:
    """A small model with settings and sequences."""

    hf_config: PretrainedConfig
    examples: Sequence[Example]
    engine: EngineConfig
    """The layout, in fp32."""
    lora: LoraConfig | None
    optim: OptimConfig = field(default_factory=OptimConfig)
    """AdamW's settings."""

    @property
    def outputs(self) -> str:
        """The kind of the model's outputs."""
        return "values" if has_value_head(self.hf_config) else "log-probs"

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(example.token_ids) for example in self.examples)

    def batch(self, layout: Layout, budget: int) -> Batch:
        """Return the sequences in micro-batches of at most `budget` tokens."""
        flops = count_flops(self.hf_config)
        return make_batch(self.examples, layout, budget, flops, _TEMPERATURE)


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The results of one batch."""

    logprobs: Tensors
    """Log-probs, or a critic's values, by sequence."""
    balance: float
    """The unweighted load-balancing loss of experts, or 0."""
    loss: float
    """The loss, including the weighted `balance`."""
    norm: float
    """2-norm of all gradients before clipping."""
    gradients: Tensors
    """By canonical name; clipped if they come from an engine."""
    weights: Tensors
    """From an engine after the optimizer step, else before it, but with updated biases of routers."""
    copies: Sequence[Difference] = ()
    """Distances between the copies of a tensor on several ranks."""
    entropies: Tensors = field(default_factory=dict)
    """Entropies by sequence; none of a critic."""
    modules: Mapping[str, Tensors] = field(default_factory=dict)
    """Recorded outputs of modules, in the order in which modules finished; each by sequence."""


class RandomWeights:
    """A `ShardSource` of random values, large enough to show any mistake."""

    def fill(self, shards: Iterable[Shard]) -> None:
        """See `ShardSource.fill`. Integer tensors count up."""
        for shard in shards:
            name = shard.spec.name
            shape = shard.spec.shape
            generator = torch.Generator().manual_seed(derive_seed(_SEED, "check", name))
            drawn = torch.randn(shape, generator=generator)
            if not shard.tensor.is_floating_point():
                drawn = torch.arange(drawn.numel()).view(shape)
            elif is_matrix(name, len(shape)):
                drawn = drawn / math.sqrt(shape[-1])
            else:
                drawn = _SPREAD * drawn + (0.0 if name.endswith("bias") else 1.0)
            shard.tensor.detach().copy_(drawn[shard.box.slices])


def compared(engine: Engine, material: Material) -> list[Difference]:
    """Compare an engine's step with plain transformers; return the worst rank's differences. Collective."""
    weights = RandomWeights()
    engine.load(weights, Part.FROZEN)
    engine.load(weights, Part.WEIGHTS)
    longest = max(len(example.token_ids) for example in material.examples)
    budget = max(longest, material.tokens // (2 * engine.layout.data_size))
    batch = material.batch(engine.layout, budget)
    outcome = step_of_engine(engine, batch, weighted_output, material.optim)
    differences = compare(outcome, plain_step(material), material)
    ranks = zip(*gather_objects(differences, engine.layout), strict=True)
    return [max(each, key=lambda d: math.inf if math.isnan(d.error) else d.error) for each in ranks]


def weighted_output(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
    """Return a loss in which each output and each entropy counts, and each of `COLUMNS` that the batch has."""
    values = outputs.values
    if not len(values):
        values = outputs.logprobs + _OF_ENTROPY * outputs.entropy
    weights = torch.ones_like(values)
    for number, name in enumerate(COLUMNS, start=1):
        column: Tensor | None = getattr(micro, name)
        if column is not None:
            weights = weights + number * _OF_COLUMNS * column
    return aggregation("token_mean", micro, 1)(-weights * values.float()), Stats()


def step_of_engine(engine: Engine, batch: Batch, loss: LossFn, optim: OptimConfig) -> BatchOutcome:
    """Run one step at the engine's layout and join the ranks' pieces. Collective.

    Gradients come from AdamW's first moment, which is the clipped gradient times 1 - β₁.
    """
    outputs = engine.forward(batch)
    values_by_sequence: dict[str, Tensor] = {}
    entropies: dict[str, Tensor] = {}
    for micro, numbers, output in zip(batch.microbatches, batch.examples, outputs, strict=True):
        values_by_sequence |= _by_sequence(micro, numbers, _values_of(output))
        entropies |= _entropies(micro, numbers, output)
    stats = engine.forward_backward(batch, loss).values_by_name()
    norm = engine.optim_step(_LR).values_by_name()["grad_norm"]
    moments, moments_apart = _whole(engine, Part.TRAINING)
    weights, weights_apart = _whole(engine, Part.WEIGHTS)
    gradients = {
        name.removeprefix("exp_avg/"): moment / (1 - optim.betas[0])
        for name, moment in moments.items()
        if name.startswith("exp_avg/")
    }
    gathered = gather_objects((values_by_sequence, entropies), engine.layout)
    return BatchOutcome(
        {name: value for part, _ in gathered for name, value in part.items()},
        stats.get("moe/aux_loss", 0.0),
        stats["loss"],
        norm,
        gradients,
        weights,
        [*moments_apart, *weights_apart],
        {name: value for _, part in gathered for name, value in part.items()},
    )


def _values_of(outputs: TokenOutputs) -> Tensor:
    values = outputs.values if len(outputs.values) else outputs.logprobs
    return values.detach().cpu()


def _by_sequence(micro: MicroBatch, numbers: Sequence[int], values: Tensor) -> dict[str, Tensor]:
    parts = torch.split(values, micro.cu_seqlens.diff().tolist())
    return {f"sequence {n}": part for n, part in zip(numbers, parts, strict=True) if n >= 0}


def _entropies(
    micro: MicroBatch, numbers: Sequence[int], outputs: TokenOutputs
) -> dict[str, Tensor]:
    """Return entropies by sequence; none of a critic."""
    if len(outputs.values):
        return {}
    return _by_sequence(micro, numbers, outputs.entropy.detach().cpu())


def _whole(engine: Engine, part: Part) -> tuple[dict[str, Tensor], list[Difference]]:
    """Return a part's tensors, and distances between ranks' copies. Collective."""
    pieces = [(s.spec, s.box, s.tensor.detach().float().cpu()) for s in engine.shards(part)]
    built: dict[str, tuple[Tensor, Tensor]] = {}
    copies: dict[str, Difference] = {}
    for rank_pieces in gather_objects(pieces, engine.layout):
        for spec, box, tensor in rank_pieces:
            empty = torch.full(spec.shape, torch.nan), torch.zeros(spec.shape, dtype=torch.bool)
            whole, known = (each[box.slices] for each in built.setdefault(spec.name, empty))
            if known.any():
                what = f"{_COPIES} of {spec.name}"
                apart = difference(what, tensor[known], whole[known])
                if not apart.error <= copies.setdefault(what, apart).error:
                    copies[what] = apart
            whole.copy_(tensor)
            known.fill_(True)
    return {name: whole for name, (whole, _) in built.items()}, list(copies.values())


def plain_step(material: Material, dtype: torch.dtype = torch.float32) -> BatchOutcome:
    """Compute the loss by transformers (and PEFT), sequence by sequence, with weights in `dtype`."""
    model = eager_model(material)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    parts = regions(model)
    if material.lora:
        parts = Adapter(model, material.lora).weights
        RandomWeights().fill(model_shards(model, parts=parts))
    batch = material.batch(Layout(), material.tokens)
    (micro,), (order,) = batch.microbatches, batch.examples
    weight = material.engine.router_aux_loss
    rate = material.engine.router_bias_update_rate
    routed = _routed(model) if weight or rate else []
    with recording(model) as calls:
        outputs = [plain_outputs(model, material.examples[n], micro.temperature) for n in order]
    joined = TokenOutputs(
        *(torch.cat([getattr(each, f.name) for each in outputs]) for f in fields(TokenOutputs))
    )
    value, _ = weighted_output(joined, micro)
    balance = torch.zeros(())
    if weight:
        balance = _balance(model, routed)
    value = value + weight * balance
    value.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(gradients.values())
    for router, bias in biases_of(model) if rate else ():
        chosen = torch.cat([each for _, each in routed[router]])
        load = torch.bincount(chosen.flatten(), minlength=len(bias)).float()
        bias += rate * (load.mean() - load).sign()
    return BatchOutcome(
        _by_sequence(micro, order, _values_of(joined)),
        float(balance.detach()),
        float(value.detach()),
        float(norm),
        _named(model_shards(model, gradients, parts=parts)),
        _named(model_shards(model, parts=parts)),
        entropies=_entropies(micro, order, joined),
        modules={
            name: {f"sequence {n}": each for n, each in zip(order, recorded, strict=True)}
            for name, recorded in calls.items()
            if len(recorded) == len(order)
        },
    )


def _named(shards: Iterable[Shard]) -> dict[str, Tensor]:
    return {shard.spec.name: shard.tensor for shard in shards}


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record modules' outputs by name: a tensor [T, ...] per call, on the CPU."""
    calls: dict[str, list[Tensor]] = {}

    def note(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensor = next(iter(output.values())) if isinstance(output, dict) else output
            tensor = tensor[0] if isinstance(tensor, tuple | list) else tensor
            if isinstance(tensor, Tensor):
                tensor = tensor[0] if tensor.dim() > 2 and len(tensor) == 1 else tensor
                calls.setdefault(name, []).append(tensor.detach().cpu())

        return hook

    handles = [m.register_forward_hook(note(name)) for name, m in model.named_modules() if name]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def eager_model(material: Material) -> PreTrainedModel:
    """Return transformers' eager model on the CPU, with random weights."""
    config = copy.deepcopy(material.hf_config)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = plain_model(config).eval()
    RandomWeights().fill(model_shards(model))
    return model


def _routed(model: PreTrainedModel) -> list[list[tuple[Tensor, Tensor]]]:
    """Return a list per router that collects logits [T, E] and experts [T, k] of each forward pass."""
    by_router: list[list[tuple[Tensor, Tensor]]] = []
    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".mlp.router")):
            calls: list[tuple[Tensor, Tensor]] = []
            module.register_forward_hook(
                lambda _, __, output, collected=calls: collected.append((output[0], output[2]))
            )
            by_router.append(calls)
    return by_router


def _balance(model: PreTrainedModel, routed: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
    """Return the load-balancing loss of all tokens (arXiv 2101.03961, equations 4 to 6), of what routers chose."""
    _, experts, _ = router_sizes(model.config)
    family = family_of(model.config.get_text_config().model_type)
    logits = torch.cat([each for calls in routed for each, _ in calls])
    scores = logits.sigmoid() if family.scores_by_sigmoid else logits.softmax(dim=-1)
    choices = torch.cat([each for calls in routed for _, each in calls]).flatten()
    load = torch.bincount(choices, minlength=experts).float() / len(scores)
    return experts * torch.dot(load, (scores / scores.sum(-1, keepdim=True)).mean(0))


def packed_model(
    material: Material, device: torch.device
) -> tuple[PreTrainedModel, tuple[Region, ...]]:
    """Return Burnish's model with random weights, and its trained tensors."""
    model = build_on_meta(material.hf_config)
    adapter = None if material.lora is None else Adapter(model, material.lora)
    fixed = () if adapter is None else adapter.base
    trained = regions(model) if adapter is None else adapter.weights
    materialize(model, device)
    RandomWeights().fill(model_shards(model, parts=(*fixed, *trained)))
    return model, trained


def packed_step(material: Material, budget: int, device: torch.device) -> BatchOutcome:
    """Run packed micro-batches of at most `budget` tokens, forward and backward, in the compute dtype."""
    model, parts = packed_model(material, device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(compute_dtype(material.engine))
    keep_activations(model, material.engine)
    scorer = Scorer(model).train()
    batch = material.batch(Layout(), budget)
    outputs: dict[str, Tensor] = {}
    entropies: dict[str, Tensor] = {}
    modules: dict[str, dict[str, Tensor]] = {}
    total = 0.0
    for micro, numbers in zip(batch.microbatches, batch.examples, strict=True):
        plan = ScoringPlan.of(micro.input_ids, micro.cu_seqlens, micro.loss_mask, device)
        with recording(model) as calls:
            scored = scorer(plan, micro.temperature)
        value, _ = weighted_output(scored, micro.to(device))
        value.backward()  # type: ignore[no-untyped-call]
        total += float(value.detach())
        outputs |= _by_sequence(micro, numbers, _values_of(scored))
        entropies |= _entropies(micro, numbers, scored)
        rows = torch.from_numpy(plan.tree.rows)
        for name, (output, *_) in calls.items():
            if len(output) == len(plan.positions):
                modules.setdefault(name, {}).update(_by_sequence(micro, numbers, output[rows]))
    gradients = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(gradients.values())
    by_name = _named(model_shards(model, gradients, parts=parts))
    return BatchOutcome(
        outputs, 0.0, total, float(norm), by_name, {}, entropies=entropies, modules=modules
    )


def compare(outcome: BatchOutcome, plain: BatchOutcome, material: Material) -> list[Difference]:
    """Compare every tensor, in the order of computation.

    Gradients are compared before clipping, which spreads mistakes. Weights are compared with AdamW's first step from the
    engine's own clipped gradients, because the sign of a gradient near 0 decides a whole step.
    """
    clip = material.engine.max_grad_norm
    optim = material.optim
    clipped_by = min(1.0, clip / (outcome.norm + 1e-6)) if math.isfinite(outcome.norm) else 1.0
    numbers = [
        ("loss", outcome.loss, plain.loss, _LEAST_LOSS),
        ("gradient norm", outcome.norm, plain.norm, 0.0),
    ]
    if plain.balance:
        numbers.insert(0, (_BALANCE, outcome.balance, plain.balance, 0.0))
    differences = [
        difference(f"{material.outputs} of {name}", outcome.logprobs.get(name), right)
        for name, right in plain.logprobs.items()
    ]
    differences += [
        difference(
            f"{_ENTROPIES} of {name}",
            outcome.entropies.get(name),
            right,
            float(plain.logprobs[name].norm()),  # those of sure predictions are nearly 0
        )
        for name, right in plain.entropies.items()
    ]
    differences += [
        difference(what, torch.tensor(value), torch.tensor(right), least)
        for what, value, right, least in numbers
    ]
    for name, right in plain.gradients.items():
        gradient = outcome.gradients.get(name)
        unclipped = None if gradient is None else gradient / clipped_by
        least = _LEAST * plain.norm
        differences.append(difference(f"gradient of {name}", unclipped, right, least))
    for name, weight in plain.weights.items():
        gradient = outcome.gradients.get(name, torch.zeros(()))
        decay = optim.weight_decay if is_matrix(name, weight.ndim) else 0.0
        expected = weight - _LR * (decay * weight + gradient / (gradient.abs() + optim.eps))
        differences.append(difference(f"weight {name}", outcome.weights.get(name), expected))
    return [*differences, *outcome.copies]


def report(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield a line about each kind's largest difference."""
    kinds = ("log-probs", "values", _ENTROPIES, _BALANCE, "loss", "gradient", "weight", _COPIES)
    for kind in kinds:
        of_kind = [each for each in differences if each.what.startswith(kind)]
        if of_kind:
            worst = max(of_kind, key=lambda difference: difference.error)
            yield f"{kind:9}  {worst.error:.1e} apart at most ({worst.what})"


def require_equal(differences: Sequence[Difference], layout: Layout) -> None:
    """Raise `BurnishError` naming the first difference and the first of a parameter."""
    wrong = [each for each in differences if not each.error <= TOLERANCE]
    if wrong:
        first = wrong[0]
        of_parameters = [d for d in wrong if d.what.startswith(_OF_PARAMETERS)]
        named = of_parameters[0] if of_parameters else first
        differs = f"{first.what} differs"
        apart = f"a relative difference of {first.error:.1e}"
        if named is not first:
            differs += f", and of the parameters first the {named.what}"
            apart = f"relative differences of {first.error:.1e} and {named.error:.1e}"
        error = BurnishError(
            f"{layout.world} processes do not compute what one plain process does: {differs}",
            have=f"{apart}; {len(wrong)} of {len(differences)} tensors differ",
            want=f"at most {TOLERANCE:.0e} in fp32",
            do="do not train at this layout; report it with this configuration",
        )
        error.printed_by_main = True
        raise error

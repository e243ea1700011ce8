"""`burnish check`: compare one step of a shrunken model at the user's layout with plain PyTorch in one process.

The user's data, loss, optimizer settings and layout run on a small model of the same family (fp32, fresh weights). Beside it
transformers and plain PyTorch run the same sequences one by one. The check compares, in the order in which a mistake shows:
log-probs, the load-balancing loss, loss, the gradients' norm, every gradient before clipping, every weight after the step, and
copies of a tensor on several ranks. PPO's critic follows the policy. Left out: the generator, Muon (AdamW steps), speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from burnish.algorithms.loss import policy_loss_fn, sft_loss, value_loss_fn
from burnish.boxes.shards import Shard
from burnish.check.shrinking import shrunk
from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig, RunConfig
from burnish.data.batching import make_batch
from burnish.distributed.collectives import gather_objects
from burnish.distributed.layout import Layout
from burnish.distributed.processes import launch
from burnish.engines.base import Engine, LossFn, Part
from burnish.engines.factory import make_engine, settings_beside
from burnish.errors import BurnishError
from burnish.models.loading import FreshSource
from burnish.models.lora.adapter import Adapter
from burnish.models.meta_init import count_flops, plain_model
from burnish.models.names import is_matrix, model_shards, regions
from burnish.models.value_head import has_value_head
from burnish.records import Batch, Example, MicroBatch, TokenOutputs
from burnish.records.seeds import derive_seed
from burnish.train.critic import critic_foundation
from burnish.train.localize import local_inputs
from burnish.train.setup import Foundation, example_dataset, lay_foundation, prompt_dataset

SEQUENCES, LONGEST, LR = 12, 64, 1e-3
"""Number of sequences, their most tokens, and the step's learning rate."""
TOLERANCE = 3e-5
"""Relative difference (2-norm) that another order of fp32 sums may make; 1e-5 was seen."""
_ADAPTER_SCALE = 0.1
_BALANCE, _COPIES = "load-balancing loss", "copies"
_OF_PARAMETERS = ("gradient of ", "weight ")

Tensors = Mapping[str, Tensor]
"""By name; whole tensors on the CPU."""


@dataclass(frozen=True, slots=True)
class Material:
    """A small model, and the settings and sequences that it is checked with."""

    hf_config: PretrainedConfig
    """The model."""
    examples: Sequence[Example]
    """The sequences."""
    loss: LossFn
    """Their loss."""
    engine: EngineConfig
    """The layout, in fp32."""
    optim: OptimConfig
    """AdamW's settings."""
    lora: LoraConfig | None
    """The adapter that is trained in the model's place."""
    seed: int
    """Seed of the weights."""
    temperature: float
    """Temperature of log-probs."""

    @property
    def outputs(self) -> str:
        """What a model computes for each token."""
        return "values" if has_value_head(self.hf_config) else "log-probs"

    def batch(self, layout: Layout, budget: int) -> Batch:
        """Return the sequences in micro-batches of at most so many tokens."""
        flops = count_flops(self.hf_config)
        return make_batch(self.examples, layout, budget, flops, self.temperature)


@dataclass(frozen=True, slots=True)
class Difference:
    """The distance of a tensor from the plain one, or from its copy on another rank."""

    what: str
    """As "gradient of model.norm.weight"."""
    error: float
    """2-norm of the difference over that of the plain tensor or copy."""


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The results of one batch."""

    logprobs: Tensors
    """Log-probs, or a critic's values, by sequence."""
    balance: float
    """The unweighted load-balancing loss of experts, or 0."""
    loss: float
    """The loss, that of experts included."""
    norm: float
    """2-norm of all gradients before clipping."""
    gradients: Tensors
    """By canonical name; at the layout after clipping."""
    weights: Tensors
    """Before the optimizer step in the plain process, after it at the layout."""
    copies: Sequence[Difference] = ()
    """Distances between the copies of a tensor on several ranks."""


def check_layout(config: RunConfig) -> None:
    """Compare and print the distances. Raises `BurnishError` naming the first tensor that differs."""

    def run(layout: Layout, device: torch.device) -> None:
        _check(lay_foundation(local_inputs(config, layout)[1]), layout, device)

    launch(run, config.distributed)


def _check(foundation: Foundation, layout: Layout, device: torch.device) -> None:
    config = foundation.config
    _check_model(material(foundation), layout, device)
    if config.reward.given and config.algorithm.advantage == "gae":
        if layout.is_main:
            print("the critic:")
        _check_model(critic_material(foundation), layout, device)
    if layout.is_main:
        print(f"{layout.world} processes compute what one plain process does")


def _check_model(given: Material, layout: Layout, device: torch.device) -> None:
    engine = make_engine(
        given.hf_config, given.engine, given.optim, layout=layout, device=device, lora=given.lora
    )
    differences = compared(engine, given)
    engine.close()
    if layout.is_main:
        for kind in (given.outputs, _BALANCE, "loss", "gradient", "weight", _COPIES):
            alike = [each for each in differences if each.what.startswith(kind)]
            if alike:
                worst = max(alike, key=lambda difference: difference.error)
                print(f"{kind:9}  {worst.error:.1e} apart at most ({worst.what})")
    require_equal(differences, layout)


class RandomAdapter:
    """A `ShardSource` of small random values: with a fresh adapter half of the gradients would be 0."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def fill(self, shards: Iterable[Shard]) -> None:
        """See `ShardSource.fill`."""
        for shard in shards:
            seed = derive_seed(self._seed, "check adapter", shard.spec.name)
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(shard.spec.shape, generator=generator) * _ADAPTER_SCALE
            shard.tensor.detach().copy_(drawn[shard.box.slices])


def compared(engine: Engine, given: Material) -> list[Difference]:
    """Compare one step of an engine, from fresh weights, with plain PyTorch, at the worst rank. Collective."""
    weights = FreshSource(given.hf_config, given.seed)
    engine.load(weights, Part.FROZEN)
    engine.load(RandomAdapter(given.seed) if given.lora else weights, Part.WEIGHTS)
    tokens = sum(len(example.token_ids) for example in given.examples)
    budget = max(LONGEST, tokens // (2 * engine.layout.data_size))
    batch = given.batch(engine.layout, budget)
    found = step_of_engine(engine, batch, given.loss, given.optim)
    mine = compare(found, plain_step(given, tokens), given)
    ranks = zip(*gather_objects(mine, engine.layout), strict=True)
    return [max(each, key=lambda d: math.inf if math.isnan(d.error) else d.error) for each in ranks]


def material(foundation: Foundation) -> Material:
    """Take the first sequences of the data, cut short, the run's loss, and a small model of the family.

    With rewards the prompts get random completions and advantages. Supervised fine-tuning has temperature 1.
    """
    config = foundation.config
    given = Material(
        shrunk(foundation.hf_config, config.engine),
        [],
        sft_loss,
        config.engine.model_copy(update={"precision": "fp32"}),
        config.optim.model_copy(update={"kind": "adamw"}),
        config.model.adapter,
        config.seed,
        temperature=1.0,
    )
    if not config.reward.given:
        rows = example_dataset(foundation, config.data.train, "data.train")
        return replace(given, examples=[_cut(rows[i]) for i in range(min(SEQUENCES, len(rows)))])
    return replace(
        given,
        examples=_random_examples(foundation, given.hf_config),
        loss=policy_loss_fn(config.algorithm, LONGEST),
        temperature=config.rollout.temperature,
    )


def critic_material(foundation: Foundation) -> Material:
    """Return the same for the critic, which is trained without an adapter."""
    config, given = foundation.config, material(foundation)
    hf_config = shrunk(critic_foundation(foundation).hf_config, config.engine)
    return replace(
        given,
        hf_config=hf_config,
        examples=_random_examples(foundation, hf_config),
        loss=value_loss_fn(config.algorithm.aggregation, config.critic.clip, LONGEST),
        engine=settings_beside(hf_config, given.engine),
        lora=None,
    )


def _random_examples(foundation: Foundation, hf_config: PretrainedConfig) -> list[Example]:
    """Return random completions of the first prompts."""
    config = foundation.config
    prompts = prompt_dataset(foundation, config.data.train, "data.train")
    samples = min(config.rollout.n, 4)
    numbers = range(min(SEQUENCES // samples, len(prompts)))
    vocabulary = hf_config.get_text_config().vocab_size
    return [
        _random_example(prompts[i].token_ids, vocabulary, derive_seed(config.seed, "check", i, s))
        for i in numbers
        for s in range(samples)
    ]


def _cut(example: Example) -> Example:
    """Return at most `LONGEST` tokens of an example, around the first trained one."""
    start = max(0, int(example.loss_mask.argmax()) - LONGEST // 2)
    window = slice(start, start + LONGEST)
    mask = example.loss_mask[window].copy()
    mask[0] = False
    return Example(example.token_ids[window], mask)


def _random_example(prompt: Any, vocabulary: int, seed: int) -> Example:
    rng = np.random.default_rng(seed)
    prompt = prompt[-LONGEST // 2 :]
    completion = rng.integers(0, vocabulary, int(rng.integers(4, LONGEST // 2)))
    mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
    values = rng.normal(size=(5, len(mask))).astype(np.float32) * mask
    return Example(
        np.concatenate([prompt, completion]),
        mask,
        advantages=values[0],
        ref_logprobs=values[1] - 3,
        returns=values[2],
        old_values=values[3],
        sampled_logprobs=values[4] - 3,
    )


def step_of_engine(engine: Engine, batch: Batch, loss: LossFn, optim: OptimConfig) -> BatchOutcome:
    """Run one step at the engine's layout and put its pieces together. Collective.

    After one step AdamW's first moment is the clipped gradient times 1 - β₁.
    """
    outputs = engine.forward(batch)
    mine: dict[str, Tensor] = {}
    for micro, numbers, output in zip(batch.microbatches, batch.examples, outputs, strict=True):
        said = output.values if len(output.values) else output.logprobs
        mine |= _by_sequence(micro, numbers, said.cpu())
    stats = engine.forward_backward(batch, loss).values_by_name()
    norm = engine.optim_step(LR).values_by_name()["grad_norm"]
    moments, moments_apart = _whole(engine, Part.TRAINING)
    weights, weights_apart = _whole(engine, Part.WEIGHTS)
    gradients = {
        name.removeprefix("exp_avg/"): moment / (1 - optim.betas[0])
        for name, moment in moments.items()
        if name.startswith("exp_avg/")
    }
    logprobs = {k: v for part in gather_objects(mine, engine.layout) for k, v in part.items()}
    return BatchOutcome(
        logprobs,
        stats.get("moe/aux_loss", 0.0),
        stats["loss"],
        norm,
        gradients,
        weights,
        [*moments_apart, *weights_apart],
    )


def _by_sequence(micro: MicroBatch, numbers: Sequence[int], values: Tensor) -> dict[str, Tensor]:
    parts = torch.split(values, micro.cu_seqlens.diff().tolist())
    return {f"sequence {n}": part for n, part in zip(numbers, parts, strict=True) if n >= 0}


def _whole(engine: Engine, part: Part) -> tuple[dict[str, Tensor], list[Difference]]:
    """Return the tensors of a part, and the distances between copies on several ranks. Collective."""
    pieces = [(s.spec, s.box, s.tensor.detach().float().cpu()) for s in engine.shards(part)]
    built: dict[str, tuple[Tensor, Tensor]] = {}
    copies: dict[str, Difference] = {}
    for held in gather_objects(pieces, engine.layout):
        for spec, box, tensor in held:
            empty = torch.full(spec.shape, torch.nan), torch.zeros(spec.shape, dtype=torch.bool)
            whole, known = (each[box.slices] for each in built.setdefault(spec.name, empty))
            if known.any():
                what = f"{_COPIES} of {spec.name}"
                apart = _difference(what, tensor[known], whole[known])
                if not apart.error <= copies.setdefault(what, apart).error:
                    copies[what] = apart
            whole.copy_(tensor)
            known.fill_(True)
    return {name: whole for name, (whole, _) in built.items()}, list(copies.values())


def plain_step(given: Material, tokens: int) -> BatchOutcome:
    """Compute the loss of all `tokens` by transformers (and PEFT), one sequence at a time."""
    model = plain_model(given.hf_config).eval()
    FreshSource(given.hf_config, given.seed).fill(model_shards(model))
    parts = regions(model)
    if given.lora:
        parts = Adapter(model, given.lora).weights
        RandomAdapter(given.seed).fill(model_shards(model, parts=parts))
    batch = given.batch(Layout(), tokens)
    (micro,), (order,) = batch.microbatches, batch.examples
    weight = given.engine.router_aux_loss
    routed = _router_logits(model) if weight else []
    outputs = [_plain_outputs(model, given.examples[number], micro.temperature) for number in order]
    joined = TokenOutputs(
        *(torch.cat([getattr(each, f.name) for each in outputs]) for f in fields(TokenOutputs))
    )
    value, _ = given.loss(joined, micro)
    balance = _balance(model.config, routed) if weight else torch.zeros(())
    value = value + weight * balance
    value.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(gradients.values())
    return BatchOutcome(
        _by_sequence(micro, order, torch.cat([joined.logprobs, joined.values]).detach()),
        float(balance.detach()),
        float(value.detach()),
        float(norm),
        {shard.spec.name: shard.tensor for shard in model_shards(model, gradients, parts=parts)},
        {shard.spec.name: shard.tensor for shard in model_shards(model, parts=parts)},
    )


def _router_logits(model: PreTrainedModel) -> list[list[Tensor]]:
    """Return, by router, the logits [T, E] of every sequence to come."""
    found: list[list[Tensor]] = []
    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            logits: list[Tensor] = []
            module.register_forward_hook(lambda _, __, output, mine=logits: mine.append(output[0]))
            found.append(logits)
    return found


def _balance(hf_config: PretrainedConfig, routed: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return transformers' own load-balancing loss of all tokens and routers."""
    text, of_routers = hf_config.get_text_config(), tuple(torch.cat(list(each)) for each in routed)
    found: Tensor = load_balancing_loss_func(of_routers, text.num_experts, text.num_experts_per_tok)
    return found


def _plain_outputs(model: PreTrainedModel, example: Example, temperature: float) -> TokenOutputs:
    """Return log-probs and entropies [T] of one sequence, or values; 0 where it is not trained on."""
    ids, mask = torch.from_numpy(example.token_ids), torch.from_numpy(example.loss_mask)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    zero = logits.new_zeros(1)
    if has_value_head(model.config):
        return TokenOutputs(values=torch.cat((zero, logits[:, 0])).where(mask, 0.0))
    scores = (logits / temperature).log_softmax(-1)
    chosen = scores.gather(1, ids[1:, None])[:, 0]
    entropy = -(scores.exp() * scores).sum(-1)
    return TokenOutputs(
        logprobs=torch.cat((zero, chosen)).where(mask, 0.0),
        entropy=torch.cat((zero, entropy)).where(mask, 0.0),
    )


def compare(found: BatchOutcome, wanted: BatchOutcome, given: Material) -> list[Difference]:
    """Compare every tensor, in the order in which a mistake would show.

    Gradients are compared before clipping, which would spread a mistake to all. Weights are compared with AdamW's first step from
    the layout's own clipped gradients, since the sign of a gradient near 0 decides a whole step.
    """
    clip, optim = given.engine.max_grad_norm, given.optim
    clipped_by = min(1.0, clip / (found.norm + 1e-6)) if math.isfinite(found.norm) else 1.0
    numbers = [("loss", found.loss, wanted.loss), ("gradient norm", found.norm, wanted.norm)]
    if wanted.balance:
        numbers.insert(0, (_BALANCE, found.balance, wanted.balance))
    differences = [
        _difference(f"{given.outputs} of {name}", found.logprobs.get(name), right)
        for name, right in wanted.logprobs.items()
    ]
    differences += [
        _difference(what, torch.tensor(mine), torch.tensor(right)) for what, mine, right in numbers
    ]
    for name, right in wanted.gradients.items():
        gradient = found.gradients.get(name)
        unclipped = None if gradient is None else gradient / clipped_by
        differences.append(_difference(f"gradient of {name}", unclipped, right))
    for name, weight in wanted.weights.items():
        gradient = found.gradients.get(name, torch.zeros(()))
        decay = optim.weight_decay if is_matrix(name, weight.ndim) else 0.0
        expected = weight - LR * (decay * weight + gradient / (gradient.abs() + optim.eps))
        differences.append(_difference(f"weight {name}", found.weights.get(name), expected))
    return [*differences, *found.copies]


def _difference(what: str, mine: Tensor | None, wanted: Tensor) -> Difference:
    if mine is None or mine.shape != wanted.shape:
        return Difference(what, math.inf)
    norm = float(wanted.double().norm())
    error = float((mine.double() - wanted.double()).norm())
    return Difference(what, error / norm if norm else error)


def require_equal(differences: Sequence[Difference], layout: Layout) -> None:
    """Raise `BurnishError` naming the first difference, the first of a parameter, and their number."""
    wrong = [each for each in differences if not each.error <= TOLERANCE]
    if wrong:
        first, of_parameters = wrong[0], [d for d in wrong if d.what.startswith(_OF_PARAMETERS)]
        named = of_parameters[0] if of_parameters else first
        differs, apart = f"{first.what} differs", f"a relative difference of {first.error:.1e}"
        if named is not first:
            differs += f", and of the parameters first the {named.what}"
            apart = f"relative differences of {first.error:.1e} and {named.error:.1e}"
        raise BurnishError(
            f"{layout.world} processes do not compute what one plain process does: {differs}",
            have=f"{apart}; {len(wrong)} of {len(differences)} tensors differ",
            want=f"at most {TOLERANCE:.0e} in fp32",
            do="do not train at this layout; report it with this configuration",
        )

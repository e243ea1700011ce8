"""Compare a small model of the same kind with plain transformers.

A training step on packed micro-batches, with windows and common beginnings, is compared with transformers' eager model on each
sequence alone: log-probs, entropies, gradients and new weights. So are greedy and sampled completions. A run in bf16 is compared in
bf16 too, and a lone process trains with FSDP. Processes that share a model compare one step at their layout.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from burnish.check.comparison import (
    COLUMNS,
    TOLERANCE,
    BatchOutcome,
    Material,
    RandomWeights,
    compare,
    compared,
    eager_model,
    packed_step,
    plain_step,
    recording,
    require_equal,
    step_of_engine,
    weighted_output,
)
from burnish.check.generation import (
    drawn,
    logits_of,
    made_generator,
    of_completion,
)
from burnish.check.plain_model import Difference, difference
from burnish.check.precision import of_rounding, require_attention
from burnish.check.proof_key import GREEDY, PLAIN
from burnish.check.small_model import shrink_model
from burnish.config.schema import EngineConfig, LoraConfig
from burnish.distributed.layout import Layout
from burnish.distributed.processes import process_group
from burnish.distributed.rank_place import RankPlace
from burnish.engines.base import Engine, Part
from burnish.engines.factory import make_engine
from burnish.errors import IncompatibleError, UsageError, refusing
from burnish.models.kernels.mixers import mixers
from burnish.models.meta_init import build_on_meta, longest_sequence, plain_model
from burnish.records import Example, Request, TokenIds
from burnish.rollout.base import Sampling

# The small model's vocabulary; tokens of a prompt, of the longest sequence, of a micro-batch; the seed of tokens.
_VOCABULARY = 64
_PROMPT = 20
_LONGEST = 300
_BUDGET = 310
_SEED = 5
# The longest sequence of layers with state, whose plain code takes time with its square.
_LONGEST_OF_STATES = 140
# A long prompt whose completion passes a multiple of 128 positions.
_MIDDLE = 118
_ADAPTED = " with an adapter of model.lora.targets"
_BEHIND = "the output layer, or the backward pass"
# Most parameters of a model that counts as small.
_MOST_PARAMETERS = 50_000_000
Modules = Mapping[str, Mapping[str, Tensor]]
"""Outputs of modules, in the order in which modules finished; each by sequence."""


def prove_family(
    hf_config: PretrainedConfig,
    device: torch.device,
    *,
    lora: LoraConfig | None,
    samplings: Sequence[Sampling],
    engine: EngineConfig,
) -> float:
    """Prove a small model on this rank, with the activation checkpointing and precision of `engine`, and completions of `samplings`.

    Return the largest difference. Raises `IncompatibleError`, naming the first module that differs.
    """
    checkpointing = engine.activation_checkpointing
    with _computing(hf_config.get_text_config().model_type, lora):
        settings = EngineConfig(activation_checkpointing=checkpointing).model_copy(update=PLAIN)
        material = small_material(hf_config, settings, lora)
        plain = plain_step(material)
        differences = _of_packing(material, plain, device)
        if samplings:
            differences += _of_generation(material, samplings, device)
        require_attention(hf_config, material.hf_config, device, torch.float32)
        if engine.precision == "bf16":
            require_attention(hf_config, material.hf_config, device, torch.bfloat16)
            _require_rounding(material, plain, device)
    return max(each.error for each in differences)


def prove_step(
    engine: Engine,
    hf_config: PretrainedConfig,
    config: EngineConfig,
    lora: LoraConfig | None,
    device: torch.device,
) -> float:
    """Prove one step at the layout of `engine`, in its groups. Return the largest difference. Collective. Raises as `prove_family` does."""
    settings = config.model_copy(update=PLAIN)
    differences = compare_layout(hf_config, settings, lora, engine.layout, device, beside=engine)
    require_equal(differences, engine.layout)
    return max(each.error for each in differences)


def compare_layout(
    hf_config: PretrainedConfig,
    config: EngineConfig,
    lora: LoraConfig | None,
    layout: Layout,
    device: torch.device,
    beside: Engine | None = None,
) -> list[Difference]:
    """Compare a step of a small model at a layout, in fp32, with plain transformers. Collective.

    `beside` is an engine at this layout whose groups are used. Raises `IncompatibleError` if the model cannot be computed.
    """
    # A layout of stages is one of the whole model.
    megatron = config.megatron.model_copy(update={"pipeline_model_parallel_layout": None})
    config = config.model_copy(update={"megatron": megatron})
    with _computing(hf_config.get_text_config().model_type, lora):
        material = small_material(hf_config, config, lora)
        material = replace(material, examples=_with_columns(material.examples))
        engine = _small_engine(material, layout, device, beside)
        differences = compared(engine, material)
        engine.close()
    return differences


def _computing(kind: str, lora: LoraConfig | None) -> AbstractContextManager[None]:
    adapted = "" if lora is None else _ADAPTED
    return refusing(
        f"Burnish fails to compute a small model of type {kind}{adapted}",
        IncompatibleError,
        want="a causal language model whose layers take packed sequences and use transformers' attention interface",
        do=_remedy(lora),
    )


def _remedy(lora: LoraConfig | None) -> str:
    other = "train a model of another family, or report this with its config.json"
    layers = "name other layers in model.lora.targets, such as q_proj and down_proj"
    return other if lora is None else f"{layers}, or {other}"


def small_material(
    hf_config: PretrainedConfig, engine: EngineConfig, lora: LoraConfig | None
) -> Material:
    """Return a small model with sequences. Raises `IncompatibleError` if it is not small."""
    with torch.device("meta"):
        model = build_on_meta(hf_config)  # raises its own error if the model cannot be built
        try:
            config = shrink_model(hf_config, engine, _VOCABULARY)
            parameters = plain_model(config).num_parameters()
        except UsageError as error:  # the family allows other sizes than the small model's
            raise _unchecked(hf_config, error.have, "a small one that can be built") from error
    if parameters > _MOST_PARAMETERS:
        size = f"a small one of {parameters:,} parameters"
        raise _unchecked(hf_config, size, f"at most {_MOST_PARAMETERS:,}")
    if lora is not None:
        # Larger random adapters would saturate attention and Jamba's time steps, which magnifies rounding.
        most = 0.25 * (math.sqrt(lora.rank) if lora.rslora else lora.rank)
        # Dropout draws otherwise in plain PEFT.
        lora = lora.model_copy(
            update={"alpha": min(lora.scale_alpha, most), "dropout": 0.0, "quantize_base": "none"}
        )
    examples = _examples(config, _LONGEST_OF_STATES if mixers(model) else _LONGEST)
    return Material(config, examples, engine, lora)


def _unchecked(hf_config: PretrainedConfig, have: object, want: str) -> IncompatibleError:
    kind = hf_config.get_text_config().model_type
    return IncompatibleError(
        f"models of type {kind} cannot be checked before they are trained",
        have=have,
        want=want,
        do="train a model of another family, or report this with its config.json",
    )


def _examples(hf_config: PretrainedConfig, longest: int) -> list[Example]:
    """Return samples of one prompt, one beginning another, and unrelated sequences, the last of `longest` tokens."""
    rng = np.random.default_rng(_SEED)
    text = hf_config.get_text_config()
    most = min(longest_sequence(hf_config) or longest, longest)

    def draw(count: int) -> TokenIds:
        return rng.integers(0, text.vocab_size, count)

    prompt = draw(_PROMPT)
    sample = draw(24)
    samples = [np.concatenate([prompt, completion]) for completion in (draw(9), sample, sample[:5])]
    alone = [draw(count) for count in (2, 37, 5, 18, longest)]
    firsts = [_PROMPT] * len(samples) + [1] * len(alone)
    examples = []
    for token_ids, first in zip(samples + alone, firsts, strict=True):
        token_ids = token_ids[:most]
        mask = np.arange(len(token_ids)) >= min(first, most - 1)
        examples.append(Example(token_ids, mask))
    return examples


def _with_columns(examples: Sequence[Example]) -> list[Example]:
    """Add random per-token columns, which ranks have to give to the right tokens."""
    rng = np.random.default_rng(_SEED)
    filled = []
    for example in examples:
        drawn = rng.normal(size=(len(COLUMNS), len(example.loss_mask))).astype(np.float32)
        columns = dict(zip(COLUMNS, drawn * example.loss_mask, strict=True))
        filled.append(replace(example, **columns))
    return filled


def _of_packing(material: Material, plain: BatchOutcome, device: torch.device) -> list[Difference]:
    outcome = _step(material, device)
    plain = plain if outcome.weights else replace(plain, weights={})
    differences = compare(outcome, plain, material)
    wrong = [each for each in differences if not each.error <= TOLERANCE]
    if wrong:
        modules = outcome.modules or packed_step(material, _BUDGET, device).modules
        first = _first_module(modules, plain.modules) or _BEHIND
        raise _refusal(material, wrong[0], first, "packed with others")
    return differences


def _step(material: Material, device: torch.device) -> BatchOutcome:
    """Return a step of the engine, as a lone process trains; of one rank among several, of the model without FSDP."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        return packed_step(material, _BUDGET, device)
    alone = (
        nullcontext(Layout())
        if dist.is_initialized()
        else process_group(device, 60.0, RankPlace(Layout()))
    )
    with alone as layout, warnings.catch_warnings():
        # OPT's layers return views. The comparison shows whether that matters.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        engine = _small_engine(material, layout, device)
        weights = RandomWeights()
        engine.load(weights, Part.FROZEN)
        engine.load(weights, Part.WEIGHTS)
        outcome = step_of_engine(
            engine, material.batch(layout, _BUDGET), weighted_output, material.optim
        )
        engine.close()
        return outcome


def _small_engine(
    material: Material, layout: Layout, device: torch.device, beside: Engine | None = None
) -> Engine:
    return make_engine(
        material.hf_config,
        material.engine,
        material.optim,
        layout=layout,
        device=device,
        lora=material.lora,
        beside=beside,
    )


def _of_generation(
    material: Material, samplings: Sequence[Sampling], device: torch.device
) -> list[Difference]:
    """Compare log-probs of drawn tokens, and the tokens with their random numbers."""
    model = eager_model(material)
    generator, _ = made_generator(material, device, torch.float32)
    differences = []
    for sampling in samplings:
        for prompt, key, sample, completion in drawn(
            generator, _prompts(material, sampling), sampling
        ):
            logits = logits_of(model, prompt, completion)
            of_this = of_completion(logits, completion, sampling, key, sample)
            for wrong in of_this:
                if not wrong.error <= TOLERANCE:
                    first = _first_module(*_decoded(material, device, prompt))
                    raise _refusal(
                        material,
                        wrong,
                        first or "the cache of keys and values, or sampling",
                        "generated",
                    )
            differences += of_this
    return differences


def _prompts(material: Material, sampling: Sampling) -> list[TokenIds]:
    """Return short prompts and a long one. Greedy completions end at the longest sequence, others pass 128 positions."""
    longest = material.examples[-1].token_ids
    room = len(longest) - sampling.max_tokens
    if room <= 0:
        return []
    short = [example.token_ids[: min(_PROMPT, room)] for example in material.examples[2:-1]]
    if sampling.temperature == 0:
        return [*short, longest[:room]]
    return [*short[:2], longest[: min(_MIDDLE, room)]]


def _require_rounding(material: Material, exact: BatchOutcome, device: torch.device) -> None:
    """Compare a step in bf16. Raises `IncompatibleError`."""
    engine = material.engine.model_copy(update={"precision": "bf16"})
    outcome = _step(replace(material, engine=engine), device)
    plain = plain_step(material, torch.bfloat16)
    for wrong, bound in of_rounding(outcome, plain, exact):
        if not wrong.error <= bound:
            kind = material.hf_config.get_text_config().model_type
            raise IncompatibleError(
                f"models of type {kind} are computed wrongly in bf16",
                have=f"{wrong.what}: a relative difference of {wrong.error:.1e} to fp32",
                want=f"at most {bound:.1e}, as transformers in bf16",
                do="set engine.precision=fp32, and report this with config.json",
            )


def _refusal(material: Material, wrong: Difference, module: str, how: str) -> IncompatibleError:
    kind = material.hf_config.get_text_config().model_type
    recomputed = material.engine.activation_checkpointing
    do = _remedy(material.lora)
    adapted = "" if material.lora is None else _ADAPTED
    if recomputed != "none":
        how += f" with engine.activation_checkpointing={recomputed}"
        do = f"set engine.activation_checkpointing=none, or {do}"
    return IncompatibleError(
        f"models of type {kind}{adapted} are computed wrongly when they are {how}: the first to differ is {module}",
        have=f"{wrong.what}: a relative difference of {wrong.error:.1e}",
        want=f"what transformers computes of each sequence alone, to {TOLERANCE:.0e} in fp32",
        do=do,
    )


def _decoded(material: Material, device: torch.device, prompt: TokenIds) -> list[Modules]:
    """Return modules' outputs for a greedy completion: token by token, and in one pass."""
    model = eager_model(material)
    generator, module = made_generator(material, device, torch.float32)
    with recording(module) as calls:
        ((completion,),) = generator.generate([Request(0, prompt)], GREEDY)
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids[:-1]]))[None]
    with torch.no_grad(), recording(model) as plain:
        model(input_ids=ids, use_cache=False)
    alike = {n: c for n, c in calls.items() if len({each.shape[1:] for each in c}) == 1}
    whole = {n: {"": c[0]} for n, c in plain.items() if len(c) == 1}
    return [{n: {"": torch.cat(each)} for n, each in alike.items()}, whole]


def _first_module(modules: Modules, plain: Modules) -> str | None:
    for name, right in plain.items():
        outputs = modules.get(name, {})
        if any(
            tensor.is_floating_point()
            and key in outputs
            and outputs[key].shape == tensor.shape
            and not difference(name, outputs[key], tensor).error <= TOLERANCE
            for key, tensor in right.items()
        ):
            return name
    return None

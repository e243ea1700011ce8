"""Refuse a run unless a small model of the same kind computes what plain transformers compute.

Log-probs and gradients of packed micro-batches, with windows and common beginnings, are compared with transformers' eager model on
each sequence alone, and so are greedy completions. Processes that share a model also compare one training step. Of bf16, only
attention is compared, with fp32. A file in the cache records a passed proof (`burnish.check.proof_key`).
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from burnish.algorithms.aggregation import aggregation
from burnish.boxes.shards import Publication
from burnish.check.comparison import (
    LONGEST,
    Difference,
    Material,
    compare,
    compared,
    difference,
    eager_model,
    packed_model,
    packed_step,
    plain_step,
    recording,
    require_equal,
)
from burnish.check.proof_key import proof_place
from burnish.check.shrinking import shrunk
from burnish.config.schema import EngineConfig, LoraConfig, OptimConfig
from burnish.distributed.collectives import gather_objects
from burnish.distributed.device import device_name
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine
from burnish.engines.factory import make_engine
from burnish.errors import IncompatibleError, refusing
from burnish.models.kernels.attention import PackedLayout, Softmax
from burnish.models.meta_init import build_on_meta, longest_sequence, model_sizes, plain_model
from burnish.models.names import model_shards
from burnish.records import Completion, Example, MicroBatch, Request, TokenIds, TokenOutputs
from burnish.rollout.base import Sampling
from burnish.rollout.builtin.forward import InferenceModel
from burnish.rollout.builtin.generator import BuiltinGenerator
from burnish.tracking.rundir import write_atomically
from burnish.tracking.stats import Stats

# The small model's vocabulary; tokens of a prompt, of a completion, of a micro-batch; the seed of weights and tokens.
_VOCABULARY, _PROMPT, _NEW, _BUDGET, _SEED = 64, 20, 8, 110, 5
_TEMPERATURE, _TOLERANCE = 0.8, 1e-4
_ADAPTED = " with an adapter of model.lora.targets"
# Most relative difference between bf16 and fp32.
_ROUNDING = 0.03
_BEHIND = "the output layer, or the backward pass"
# Most parameters of a model that counts as small.
_MOST_PARAMETERS = 50_000_000
_PLAIN = {
    "precision": "fp32",
    "max_grad_norm": 1e30,
    "compile": False,
    "optimizer_offload": False,
    "activation_offload": False,
    "park": False,
    "router_aux_loss": 0.0,
    "logprob_chunk": None,
}
"""Settings of the engine that a proof overrides."""

Modules = Mapping[str, Mapping[str, Tensor]]
"""Outputs of modules, in the order in which modules finished; each by sequence."""

_log = logging.getLogger("burnish")


def prove(
    hf_config: PretrainedConfig,
    device: torch.device,
    *,
    lora: LoraConfig | None = None,
    generates: bool = False,
    engine: EngineConfig | None = None,
    layout: Layout | None = None,
) -> None:
    """Prove a small model on this rank, with the activation checkpointing of `engine`.

    Raises `IncompatibleError`, naming the first module that differs.
    """
    kind, layout = hf_config.get_text_config().model_type, layout or Layout()
    kept = engine.activation_checkpointing if engine and engine.kind == "torch" else "none"
    adapter = lora and lora.model_dump(mode="json")
    place = proof_place(hf_config, device, [generates, adapter, kept, engine and engine.precision])
    if place.is_file():
        return
    if layout.is_main:
        _log.info("checking a small %s against transformers", kind)
    begun = perf_counter()
    with _computing(kind, lora):
        given = _material(hf_config, EngineConfig(activation_checkpointing=kept), lora)
        differences = _of_packing(given, device)
        if generates and lora is None:
            differences += _of_generation(given, device)
        if engine and engine.precision == "bf16":
            _require_attention(hf_config, device)
    if layout.is_main:
        worst = max(each.error for each in differences)
        how = "packed, alone and generated" if generates else "packed and alone"
        seconds = perf_counter() - begun
        _log.info(
            "checked: a small %s is the same %s, to %.0e, in %.1f s", kind, how, worst, seconds
        )
    _keep(place, layout)


def prove_layout(
    engine: Engine,
    hf_config: PretrainedConfig,
    config: EngineConfig,
    lora: LoraConfig | None,
    device: torch.device,
) -> None:
    """Prove one step at the layout of `engine`, in its groups. Collective. Raises as `prove` does."""
    layout = engine.layout
    own = config.model_copy(update=_PLAIN).model_dump(mode="json")
    place = proof_place(
        hf_config, device, [own, layout.world, lora and lora.model_dump(mode="json")]
    )
    if all(gather_objects(place.is_file(), layout)):
        return
    begun = perf_counter()
    with _computing(hf_config.get_text_config().model_type, lora):
        given = _material(hf_config, config, lora)
        small = make_engine(
            given.hf_config,
            given.engine,
            given.optim,
            layout=layout,
            device=device,
            lora=given.lora,
            beside=engine,
        )
        differences = compared(small, given)
        small.close()
    require_equal(differences, layout, _TOLERANCE)
    if layout.is_main:
        worst, seconds = max(each.error for each in differences), perf_counter() - begun
        said = "checked: %d processes are the same as one, to %.0e, in %.1f s"
        _log.info(said, layout.world, worst, seconds)
    _keep(place, layout)


def _computing(kind: str, lora: LoraConfig | None) -> AbstractContextManager[None]:
    adapted = "" if lora is None else _ADAPTED
    return refusing(
        f"a small model of type {kind}{adapted} ends with an error when Burnish computes it",
        IncompatibleError,
        want="a causal language model whose layers take packed sequences and use transformers' attention interface",
        do=_remedy(lora),
    )


def _remedy(lora: LoraConfig | None) -> str:
    other = "train a model of another family, or report this with its config.json"
    layers = "name other layers in model.lora.targets, such as q_proj and down_proj"
    return other if lora is None else f"{layers}, or {other}"


def _material(
    hf_config: PretrainedConfig, engine: EngineConfig, lora: LoraConfig | None
) -> Material:
    """Return a small model with sequences. Raises `IncompatibleError` if it is not small."""
    engine = engine.model_copy(update=_PLAIN)
    with torch.device("meta"):
        build_on_meta(hf_config)  # raises its own error if the model cannot be built
        config = shrunk(hf_config, engine, _VOCABULARY)
        parameters = plain_model(config).num_parameters()
    if parameters > _MOST_PARAMETERS:
        raise IncompatibleError(
            f"models of type {config.model_type} cannot be checked before they are trained",
            have=f"a small one of {parameters:,} parameters",
            want=f"at most {_MOST_PARAMETERS:,}",
            do="train a model of another family, or report this with its config.json",
        )
    if lora is not None:
        # Larger random adapters would saturate attention and Jamba's time steps, which magnifies rounding.
        most = 0.5 * (math.sqrt(lora.rank) if lora.rslora else lora.rank)
        lora = lora.model_copy(update={"alpha": min(lora.alpha, most)})
    examples = _examples(config)
    return Material(
        config, examples, _mean_output, engine, OptimConfig(), lora, _SEED, _TEMPERATURE
    )


def _examples(hf_config: PretrainedConfig) -> list[Example]:
    """Return samples of one prompt, one beginning another, and unrelated sequences."""
    rng, text = np.random.default_rng(_SEED), hf_config.get_text_config()
    most = min(longest_sequence(hf_config) or LONGEST, LONGEST)

    def draw(count: int) -> TokenIds:
        return rng.integers(0, text.vocab_size, count)

    prompt, longest = draw(_PROMPT), draw(24)
    samples = [np.concatenate([prompt, each]) for each in (draw(9), longest, longest[:5])]
    alone = [draw(count) for count in (2, 37, 5, 18)]
    firsts = [_PROMPT] * len(samples) + [1] * len(alone)
    cut = [
        (ids[:most], min(first, most - 1))
        for ids, first in zip(samples + alone, firsts, strict=True)
    ]
    return [Example(ids, np.arange(len(ids)) >= first) for ids, first in cut]


def _mean_output(outputs: TokenOutputs, micro: MicroBatch) -> tuple[Tensor, Stats]:
    said = outputs.values if len(outputs.values) else outputs.logprobs
    return aggregation("token_mean", micro, 1)(-said.float()), Stats()


def _of_packing(given: Material, device: torch.device) -> list[Difference]:
    wanted, found = plain_step(given), packed_step(given, _BUDGET, device)
    differences = compare(found, replace(wanted, weights={}), given)
    wrong = [each for each in differences if not each.error <= _TOLERANCE]
    if wrong:
        first = _first_module(found.modules, wanted.modules) or _BEHIND
        raise _refusal(given, wrong[0], first, "packed with others")
    return differences


def _of_generation(given: Material, device: torch.device) -> list[Difference]:
    """Compare log-probs of greedy tokens, and check that each token is the likeliest."""
    model = eager_model(given)
    room = min(_PROMPT, (longest_sequence(given.hf_config) or sys.maxsize) - _NEW)
    prompts = [example.token_ids[:room] for example in given.examples[2:] if room > 0]
    generator, _ = _generator(given, device)
    requests = [Request(key, prompt, 2 if key == 0 else 1) for key, prompt in enumerate(prompts)]
    completions = generator.generate(requests, Sampling(_NEW, temperature=0.0))
    differences = []
    for prompt, (completion, *_) in zip(prompts, completions, strict=True):
        found = _of_completion(model, prompt, completion)
        if not found.error <= _TOLERANCE:
            first = _first_module(*_decoded(given, device, prompt))
            raise _refusal(given, found, first or "the cache of keys and values", "generated")
        differences.append(found)
    return differences


def _require_attention(hf_config: PretrainedConfig, device: torch.device) -> None:
    """Compare attention in bf16, which has kernels of its own, with fp32. Raises `IncompatibleError`."""
    sizes, text = model_sizes(hf_config), hf_config.get_text_config()
    if not (sizes.head_dim and sizes.key_heads) or getattr(text, "qk_rope_head_dim", None):
        return  # latent attention, whose queries and values differ in width, has no kernel
    heads = (sizes.heads // sizes.key_heads * 2, 2, 2)
    names = [name for name, _ in build_on_meta(hf_config).named_parameters()]
    softcap = getattr(text, "attn_logit_softcapping", None)
    sinks = [(heads[0],)] if any(name.endswith(".sinks") for name in names) else []
    layout = PackedLayout.of((5, 64, 1, 130), device)
    shapes = [(1, each, 200, sizes.head_dim) for each in heads] + sinks
    for window in {None, 60 if getattr(text, "sliding_window", None) else None}:
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            draws = torch.Generator().manual_seed(_SEED)
            drawn = (torch.randn(shape, generator=draws).bfloat16() for shape in shapes)
            parts = [each.to(device, dtype).requires_grad_() for each in drawn]
            how = Softmax(sizes.head_dim**-0.5, window, softcap, *parts[3:])
            output = layout.attend(0, (parts[0], parts[1], parts[2]), how)
            upstream = torch.randn(output.shape, generator=draws).bfloat16()
            gradients = torch.autograd.grad(output, parts, upstream.to(device, dtype))
            found.append([output.detach(), *gradients])
        of = ("output", *(f"gradient of {each}" for each in ("queries", "keys", "values", "sinks")))
        for what, mine, right in zip(of, *found, strict=False):
            wrong = difference(what, mine, right)
            if not wrong.error <= _ROUNDING:
                raise IncompatibleError(
                    f"attention in bf16 is computed wrongly on {device_name(device)}",
                    have=f"{what}: a relative difference of {wrong.error:.1e}",
                    want=f"the same in fp32, to {_ROUNDING:.0e}",
                    do="set engine.precision=fp32, and report this with the versions of torch and of the driver",
                )


def _of_completion(model: Any, prompt: TokenIds, completion: Completion) -> Difference:
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids]))
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, ids[len(prompt) :, None])[:, 0]
    mine = torch.cat([torch.from_numpy(completion.logprobs), chosen])
    right = torch.cat([chosen, logprobs.amax(-1)])
    return difference("log-probs of a completion", mine, right, 1.0)


def _generator(given: Material, device: torch.device) -> tuple[BuiltinGenerator, nn.Module]:
    model = InferenceModel(given.hf_config, device=device, dtype=torch.float32)
    generator = BuiltinGenerator(model, layout=Layout(), slots=3, eos_token_ids=())
    source, _ = packed_model(replace(given, lora=None), device)
    generator.load_weights(Publication(model_shards(source)), version=0)
    return generator, model.module


def _refusal(given: Material, wrong: Difference, module: str, how: str) -> IncompatibleError:
    kind = given.hf_config.get_text_config().model_type
    recomputed = given.engine.activation_checkpointing
    do, adapted = _remedy(given.lora), "" if given.lora is None else _ADAPTED
    if recomputed != "none":
        how += f" with engine.activation_checkpointing={recomputed}"
        do = f"set engine.activation_checkpointing=none, or {do}"
    return IncompatibleError(
        f"models of type {kind}{adapted} are computed wrongly when they are {how}: the first to differ is {module}",
        have=f"{wrong.what}: a relative difference of {wrong.error:.1e}",
        want=f"what transformers computes of each sequence alone, to {_TOLERANCE:.0e} in fp32",
        do=do,
    )


def _decoded(given: Material, device: torch.device, prompt: TokenIds) -> list[Modules]:
    """Return modules' outputs for a greedy completion: token by token, and in one pass."""
    model, (generator, module) = eager_model(given), _generator(given, device)
    with recording(module) as calls:
        ((completion,),) = generator.generate([Request(0, prompt)], Sampling(_NEW, temperature=0.0))
    ids = torch.from_numpy(np.concatenate([prompt, completion.token_ids[:-1]]))[None]
    with torch.no_grad(), recording(model) as plain:
        model(input_ids=ids, use_cache=False)
    alike = {n: c for n, c in calls.items() if len({each.shape[1:] for each in c}) == 1}
    whole = {n: {"": c[0]} for n, c in plain.items() if len(c) == 1}
    return [{n: {"": torch.cat(each)} for n, each in alike.items()}, whole]


def _first_module(found: Modules, wanted: Modules) -> str | None:
    for name, right in wanted.items():
        mine = found.get(name, {})
        if any(
            each.is_floating_point()
            and key in mine
            and mine[key].shape == each.shape
            and not difference(name, mine[key], each).error <= _TOLERANCE
            for key, each in right.items()
        ):
            return name
    return None


def _keep(place: Path, layout: Layout) -> None:
    if layout.local_rank == 0:
        with suppress(OSError):  # the next run proves it again
            write_atomically(place, b"passed\n")

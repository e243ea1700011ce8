"""Refuse a run unless a small model of the same kind computes what plain transformers compute.

`burnish.check.family_proof` compares. A file in the cache records a passed proof, so a later run compares nothing.
"""

from __future__ import annotations

import logging
from time import perf_counter

import torch
from transformers import PretrainedConfig

from burnish.check.proof_key import PLAIN, keep_proof, proof_place, samplings_of
from burnish.config.schema import EngineConfig, LoraConfig
from burnish.distributed.collectives import gather_objects
from burnish.distributed.layout import Layout
from burnish.engines.base import Engine
from burnish.errors import BurnishError, IncompatibleError
from burnish.extend import ENGINES
from burnish.rollout.base import Sampling

_log = logging.getLogger("burnish")


def prove(
    hf_config: PretrainedConfig,
    device: torch.device,
    *,
    lora: LoraConfig | None = None,
    generates: bool = False,
    sampling: Sampling | None = None,
    engine: EngineConfig | None = None,
    layout: Layout | None = None,
) -> None:
    """Prove a small model on this rank, with the activation checkpointing and precision of `engine`, and the run's `sampling`.

    Raises `IncompatibleError`, naming the first module that differs.
    """
    kind = hf_config.get_text_config().model_type
    layout = layout or Layout()
    checkpointing = engine.activation_checkpointing if engine and engine.kind == "torch" else "none"
    precision = engine.precision if engine else "fp32"
    adapter = lora and lora.model_dump(mode="json")
    samplings = samplings_of(sampling) if generates and lora is None else []
    covered = [generates, adapter, checkpointing, precision, [repr(each) for each in samplings]]
    place = proof_place(hf_config, device, covered)
    if place.is_file():
        return
    if layout.is_main:
        _log.info("checking a small %s against transformers", kind)
    begun = perf_counter()
    from burnish.check.family_proof import prove_family

    proved = EngineConfig(activation_checkpointing=checkpointing, precision=precision)
    worst = prove_family(hf_config, device, lora=lora, samplings=samplings, engine=proved)
    if layout.is_main:
        how = "packed, alone and generated" if generates else "packed and alone"
        seconds = perf_counter() - begun
        _log.info(
            "checked: a small %s is the same %s, to %.0e, in %.1f s", kind, how, worst, seconds
        )
    keep_proof(place, layout)


def prove_layout(
    engine: Engine,
    hf_config: PretrainedConfig,
    config: EngineConfig,
    lora: LoraConfig | None,
    device: torch.device,
) -> None:
    """Prove one step at the layout of `engine`, in its groups. Collective. Raises as `prove` does."""
    layout = engine.layout
    own = config.model_copy(update=PLAIN).model_dump(mode="json")
    covered = [own, layout.world, lora and lora.model_dump(mode="json")]
    covered.append(ENGINES.fingerprint(config.kind, "engine.kind"))
    place = proof_place(hf_config, device, covered)
    if all(gather_objects(place.is_file(), layout)):
        return
    begun = perf_counter()
    from burnish.check.family_proof import prove_step

    try:
        worst = prove_step(engine, hf_config, config, lora, device)
    except BurnishError as error:
        if config.kind in ENGINES.builtins:
            raise
        refusal = IncompatibleError(
            f"engine.kind: {config.kind} does not compute what plain transformers computes",
            have=f"{error.problem}: {error.have}",
            want="the loss, gradients and weights of a step of a small model",
            do="correct the engine; tests/contracts/engine.py has the same comparison as a test",
        )
        refusal.printed_by_main = error.printed_by_main
        raise refusal from error
    if layout.is_main:
        seconds = perf_counter() - begun
        message = "checked: %d processes are the same as one, to %.0e, in %.1f s"
        _log.info(message, layout.world, worst, seconds)
    keep_proof(place, layout)

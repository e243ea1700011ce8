"""The ways in which the Megatron engine can divide a model among devices.

As `burnish.engines.megatron.megatron_compatibility` and `burnish.config.check_engine` would let it. Processes that share
matrices or tokens are of one machine; stages of a pipeline need not be. Left out: which of them fit, and how quick they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from burnish.config.schema import EngineConfig
from burnish.plan.devices import PER_MACHINE
from burnish.plan.shape import Layer, PlannedModel

_VIRTUAL = (1, 2, 4)
"""Virtual stages that are tried."""


def degrees(shape: PlannedModel, engine: EngineConfig, devices: int) -> Iterator[dict[str, int]]:
    """Settings of `engine` by name, for so many devices."""
    machine = _divisors(min(PER_MACHINE, devices))
    for tensor, sequence in product(machine, machine):
        rest, over = divmod(devices, tensor * sequence)
        whole = not engine.megatron_sequence_parallel and any(
            layer.experts for layer, _ in shape.layers
        )
        if over or tensor * sequence > PER_MACHINE or (whole and tensor > 1):
            continue
        if not all(_divides(tensor, sequence, layer) for layer, _ in shape.layers):
            continue
        for pipeline, virtual in product(_divisors(rest), _VIRTUAL):
            if pipeline * virtual > shape.depth or (virtual > 1 and pipeline == 1):
                continue
            for experts in _of_experts(shape, tensor, devices // pipeline):
                yield {
                    "tensor_parallel": tensor,
                    "sequence_parallel": sequence,
                    "pipeline_parallel": pipeline,
                    "virtual_stages": virtual,
                    **experts,
                }


def divides_trained(shape: PlannedModel, engine: EngineConfig) -> bool:
    """Whether the model that is trained can be cut as the settings say."""
    tensor, among = engine.tensor_parallel, engine.expert_parallel
    within = engine.expert_tensor_parallel
    mixtures = [layer for layer, _ in shape.layers if layer.experts]
    if not mixtures:
        return divides_beside(shape, engine) and among == 1 and within in (None, 1)
    experts = all(
        layer.experts % among == 0 and layer.intermediate % (within or tensor) == 0
        for layer in mixtures
    )
    whole = tensor > 1 and not engine.megatron_sequence_parallel
    return divides_beside(shape, engine) and experts and not whole


def divides_beside(shape: PlannedModel, engine: EngineConfig) -> bool:
    """Whether a model beside the policy can be cut as the settings say; of experts that is not asked."""
    tensor, sequence = engine.tensor_parallel, engine.sequence_parallel
    stages = engine.pipeline_parallel * engine.virtual_stages
    return stages <= shape.depth and all(
        _divides(tensor, sequence, layer) for layer, _ in shape.layers
    )


def _of_experts(shape: PlannedModel, tensor: int, stage: int) -> Iterator[dict[str, int]]:
    """How the experts of a layer may be divided among the processes of a stage."""
    mixtures = [layer for layer, _ in shape.layers if layer.experts]
    if not mixtures:
        yield {}
        return
    layer = mixtures[0]
    for within, among in product(sorted({1, tensor}), _divisors(layer.experts)):
        if layer.intermediate % within == 0 and stage % (within * among) == 0:
            yield {"expert_parallel": among, "expert_tensor_parallel": within}


def _divides(tensor: int, sequence: int, layer: Layer) -> bool:
    """Whether heads and columns of a layer can be shared by so many."""
    keys = layer.key_heads % tensor == 0 or tensor % layer.key_heads == 0
    heads = layer.heads % (tensor * sequence) == 0 and (layer.query + 2 * layer.key) % tensor == 0
    return keys and heads and (layer.experts > 0 or layer.intermediate % tensor == 0)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]

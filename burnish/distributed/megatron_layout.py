"""What Megatron cannot divide among processes (`burnish.distributed.layout`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from burnish.errors import UsageError

if TYPE_CHECKING:
    from burnish.config.schema import EngineConfig
    from burnish.families import ModelSizes


def indivisible_by_megatron(
    sizes: ModelSizes, engine: EngineConfig, division: Callable[..., Iterator[UsageError]]
) -> Iterator[UsageError]:
    """Yield an error for every setting that cannot divide a model. `division` yields one if a degree does not divide a size."""
    name = "engine.tensor_parallel"
    tensor = engine.tensor_parallel
    yield from division(name, tensor, sizes.heads, "attention heads")
    # A norm of all key heads together needs each of them on one rank alone.
    apart = sizes.family.query_norms != "full"
    yield from division(name, tensor, sizes.key_heads, "key heads", or_multiple=apart)
    fused = (sizes.heads + 2 * sizes.key_heads) * sizes.head_dim
    yield from division(name, tensor, fused, "rows of queries, keys and values")
    yield from division(name, tensor, sizes.intermediate, "intermediate columns")
    if -(-sizes.vocabulary // tensor) * (tensor - 1) >= sizes.vocabulary > 0:
        yield UsageError(
            "the vocabulary is too small for so many tensor ranks: one of them would hold padding only",
            have=f"{name}: {tensor}, {sizes.vocabulary} tokens",
            want="a token for every rank",
            do=f"lower {name}",
        )
    if engine.pipeline_parallel * engine.virtual_stages > sizes.depth > 0:
        yield UsageError(
            "the pipeline has more stages than the model has layers",
            have=f"engine.pipeline_parallel: {engine.pipeline_parallel}, engine.virtual_stages: {engine.virtual_stages}, {sizes.depth} layers",
            want=f"at most {sizes.depth} stages",
            do="lower engine.virtual_stages, or engine.pipeline_parallel",
        )
    if sizes.experts:
        yield from _matrices_of_experts(sizes, engine, division)


def _matrices_of_experts(
    sizes: ModelSizes, engine: EngineConfig, division: Callable[..., Iterator[UsageError]]
) -> Iterator[UsageError]:
    tensor = engine.tensor_parallel
    name = "engine.expert_tensor_parallel"
    within = engine.expert_tensor_parallel or tensor
    yield from division(name, within, sizes.expert_intermediate, "columns of an expert")
    if tensor > 1 and not engine.megatron_sequence_parallel:
        yield UsageError(
            "Megatron trains experts beside tensor parallelism only with its sequence parallelism",
            have=f"engine.tensor_parallel: {tensor}, engine.megatron_sequence_parallel: false",
            want="engine.megatron_sequence_parallel: true",
            do="set engine.megatron_sequence_parallel=true, or engine.tensor_parallel=1",
        )

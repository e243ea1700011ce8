"""Check which engine has which setting, and that the degrees of parallelism divide the processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from burnish.config.problems import Problem, either
from burnish.config.schema import EngineConfig, RunConfig

_TORCH_ONLY = (
    "replicas",
    "reshard_after_forward",
    "reduce_each_microbatch",
    "activation_offload",
    "compile",
)
_MEGATRON_ONLY = (
    "megatron_sequence_parallel",
    "pipeline_parallel",
    "virtual_stages",
    "expert_parallel",
    "expert_tensor_parallel",
    "layers",
)


def of_engine(config: RunConfig, world: int) -> Iterator[Problem]:
    """What keeps the engine from running on so many processes."""
    yield from of_kind(config)
    yield from of_degrees(config, world)


def of_kind(config: RunConfig) -> Iterator[Problem]:
    """What the engine does not have, on however many processes."""
    engine = config.engine
    given = engine.model_dump(exclude_defaults=True)
    if engine.kind == "megatron":
        yield from _foreign(given, _TORCH_ONLY, "megatron", "torch")
        yield from _beyond_megatron(config)
    else:
        yield from _foreign(given, _MEGATRON_ONLY, "torch", "megatron")
    if engine.virtual_stages > 1 and engine.pipeline_parallel == 1:
        yield Problem(
            "engine.virtual_stages are those of a pipeline, and there is none",
            have=f"engine.virtual_stages: {engine.virtual_stages}, engine.pipeline_parallel: 1",
            want="engine.pipeline_parallel 2 or more",
            do="set engine.pipeline_parallel, or remove engine.virtual_stages",
        )


def _foreign(
    given: Mapping[str, Any], others: tuple[str, ...], kind: str, other: str
) -> Iterator[Problem]:
    for name in others:
        if name in given:
            yield Problem(
                f"engine.{name} is a setting of the {other} engine",
                have=f"engine.{name}: {_written(given[name])}, engine.kind: {kind}",
                want=f"engine.kind {other}, or the default",
                do=f"remove engine.{name}, or set engine.kind={other}",
            )


def _beyond_megatron(config: RunConfig) -> Iterator[Problem]:
    """What is done by the torch engine alone, or not in this precision."""
    precision = config.engine.precision
    if config.engine.layers == "transformer_engine" and precision != "bf16":
        yield Problem(
            "TransformerEngine multiplies fp32 matrices in tf32",
            have=f"engine.layers: transformer_engine, engine.precision: {precision}",
            want="engine.precision bf16",
            do="set engine.precision=bf16, or engine.layers=torch",
        )
    asked = {
        f"optim.kind: {config.optim.kind}": config.optim.kind != "adamw",
        "model.lora": config.model.adapter is not None,
    }
    for what in (name for name, is_asked in asked.items() if is_asked):
        yield Problem(
            f"the megatron engine does not have {what}",
            have=f"{what}, engine.kind: megatron",
            want="engine.kind torch, or a run without it",
            do=f"set engine.kind=torch, or change {what.partition(':')[0]}",
        )


def of_degrees(config: RunConfig, world: int) -> Iterator[Problem]:
    """Which degrees of parallelism do not divide so many processes."""
    engine, sharing, replicas = config.engine, config.engine.sharing, config.engine.replicas
    if world % sharing:
        yield Problem(
            "the processes cannot be divided into groups that share a micro-batch",
            have=f"{_degrees(engine)}, {world} processes",
            want="a number of processes that their product divides",
            do=f"make the product {near(sharing, world)}, or start {sharing} processes or a multiple: torchrun --nproc-per-node {sharing} -m burnish ...",
        )
    elif world // sharing % replicas:
        yield Problem(
            "the copies of the model do not divide the processes",
            have=f"engine.replicas: {replicas}, {world} processes"
            + (f" in groups of {sharing}" if sharing > 1 else ""),
            want="a whole number of processes for each copy",
            do=f"set engine.replicas={near(replicas, world // sharing)}, or start another number of processes",
        )
    elif world // engine.pipeline_parallel % engine.expert_sharing:
        tensor = engine.expert_tensor_parallel or engine.tensor_parallel
        stage = world // engine.pipeline_parallel
        yield Problem(
            "the experts cannot be divided among the processes of a pipeline stage",
            have=f"engine.expert_parallel: {engine.expert_parallel} × {tensor} processes for each expert's matrices, {stage} processes",
            want="a product that divides them",
            do=f"make the product {near(engine.expert_sharing, stage)}; engine.expert_tensor_parallel=1 leaves experts whole",
        )


def _degrees(engine: EngineConfig) -> str:
    names = ["sequence_parallel", "tensor_parallel"]
    names += ["pipeline_parallel"] if engine.pipeline_parallel > 1 else []
    return ", ".join(f"engine.{name}: {getattr(engine, name)}" for name in names)


def _written(value: Any) -> str:
    """As it stands in a configuration file."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def near(number: int, total: int) -> str:
    """The divisors of `total` next to `number`."""
    divisors = [each for each in range(1, total + 1) if total % each == 0]
    return either(sorted(sorted(divisors, key=lambda each: abs(each - number))[:2]))

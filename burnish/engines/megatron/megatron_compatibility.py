"""Whether Megatron can cut a model as the settings say, before any of it exists.

What no model is needed for is checked with the other settings (`burnish.config.check`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PretrainedConfig

from burnish.config.schema import EngineConfig
from burnish.engines.megatron.families import Architecture
from burnish.errors import UsageError
from burnish.models.routing import require_routers


@dataclass(frozen=True, slots=True)
class _Division:
    """A setting, and what of the model it has to divide; with `repeats` it may be a multiple instead, and ranks have the same."""

    setting: str
    ranks: int
    count: int
    what: str
    repeats: bool = False

    def problem(self) -> UsageError | None:
        """What is wrong, if anything."""
        if self.count % self.ranks == 0 or (self.repeats and self.ranks % self.count == 0):
            return None
        fitting = [str(each) for each in range(1, self.count + 1) if self.count % each == 0]
        shown = fitting if len(fitting) <= 8 else [*fitting[:4], "...", *fitting[-4:]]
        return UsageError(
            f"{self.setting} does not divide the model's {self.what}",
            have=f"{self.setting}: {self.ranks}, {self.count} {self.what}",
            want=f"as many {self.what} on every process",
            do=f"set {self.setting} to one of {', '.join(shown)}"
            + (f", or to a multiple of {self.count}" if self.repeats else ""),
        )


def require_fitting(hf_config: PretrainedConfig, config: EngineConfig) -> None:
    """Raise `UsageError` for a family that is not known, for degrees that do not fit the model, and for a loss of routers where there are none."""
    shape = Architecture.of(hf_config)
    if config.router_aux_loss:
        require_routers(hf_config, "engine.router_aux_loss")
    for division in _divisions(shape, config):
        if problem := division.problem():
            raise problem
    _require_layers(shape, config)
    _require_experts(shape, config)
    _require_vocabulary(shape, config)


def _divisions(shape: Architecture, config: EngineConfig) -> Iterator[_Division]:
    tensor, name = config.tensor_parallel, "engine.tensor_parallel"
    yield _Division(name, tensor, shape.heads, "attention heads")
    yield _Division(name, tensor, shape.key_heads, "key heads", repeats=True)
    fused = (shape.heads + 2 * shape.key_heads) * shape.head_dim
    yield _Division(name, tensor, fused, "rows of queries, keys and values")
    yield _Division(name, tensor, shape.width, "intermediate columns")
    each = f"attention heads on each of {tensor} tensor ranks" if tensor > 1 else "attention heads"
    sequence = config.sequence_parallel
    yield _Division("engine.sequence_parallel", sequence, shape.heads // tensor, each)
    if shape.experts is not None:
        name, of_expert = "engine.expert_tensor_parallel", config.expert_tensor_parallel or tensor
        yield _Division(
            "engine.expert_parallel", config.expert_parallel, shape.experts.count, "experts"
        )
        yield _Division(name, of_expert, shape.experts.width, "columns of an expert")


def _require_layers(shape: Architecture, config: EngineConfig) -> None:
    stages = config.pipeline_parallel * config.virtual_stages
    if stages > shape.layers:
        raise UsageError(
            "the pipeline has more stages than the model has layers",
            have=f"engine.pipeline_parallel: {config.pipeline_parallel}, engine.virtual_stages: {config.virtual_stages}, {shape.layers} layers",
            want=f"at most {shape.layers} stages",
            do="lower engine.virtual_stages, or engine.pipeline_parallel",
        )


def _require_experts(shape: Architecture, config: EngineConfig) -> None:
    degrees = ("expert_parallel", "expert_tensor_parallel")
    given = [f"engine.{name}" for name in degrees if (getattr(config, name) or 1) > 1]
    if shape.experts is None and given:
        raise UsageError(
            f"{' and '.join(given)}: for mixtures of experts only",
            have="a dense model",
            want="no division of experts",
            do=f"remove {' and '.join(given)}",
        )
    if shape.experts and config.tensor_parallel > 1 and not config.megatron_sequence_parallel:
        raise UsageError(
            "a mixture of experts needs Megatron's sequence parallelism beside tensor parallelism",
            have=f"engine.tensor_parallel: {config.tensor_parallel}, engine.megatron_sequence_parallel: false",
            want="true, for Megatron does not train it otherwise",
            do="set engine.megatron_sequence_parallel=true, or engine.tensor_parallel=1",
        )


def _require_vocabulary(shape: Architecture, config: EngineConfig) -> None:
    """Every tensor rank has to have a token: rows are dealt out in equal runs, of which the last ones may be padding."""
    ranks = config.tensor_parallel
    rows = -(-shape.vocabulary // ranks)
    if rows * (ranks - 1) >= shape.vocabulary:
        raise UsageError(
            "the vocabulary is too small for so many tensor ranks",
            have=f"engine.tensor_parallel: {ranks}, {shape.vocabulary} tokens",
            want="a token for every rank",
            do="lower engine.tensor_parallel",
        )
